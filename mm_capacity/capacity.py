"""How many assignments may stay: windows, counted tokens and C, in integer arithmetic only.

A floating-point product such as 1.1 * 10 lands a hair above or below the integer it means, and a
ceiling turns that hair into a whole assignment. So gamma is read as the decimal fraction that it
prints as, and everything after that is exact.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from numbers import Real

import torch
from torch import Tensor

from mm_capacity.routing import Routing

WINDOWS = ("batch", "sequence", "rank")
ROUNDINGS = ("ceil", "floor")
SCOPES = ("expert", "device")

MAX_GAMMA = 1e6
_MAX_DENOMINATOR = 10**9


def read_gamma(gamma: float) -> Fraction:
    """The fraction that a capacity factor means.

    Args:
        gamma: capacity factor; 1.1 means 11/10, not the binary number next to it. Fractions with
            a denominator above 10^9 are replaced by the nearest one below.

    Raises:
        ValueError: gamma is not a finite number in (0, 10^6].
    """
    if isinstance(gamma, bool) or not isinstance(gamma, Real):
        raise ValueError(f"gamma must be a number greater than 0, got {gamma!r}")
    if not math.isfinite(gamma) or not 0 < gamma <= MAX_GAMMA:
        raise ValueError(
            f"gamma must be a finite number greater than 0 and at most {MAX_GAMMA:g}, "
            f"got {gamma!r} (policy 'none' is the way to have no cap)"
        )
    return _fraction(float(gamma))


@lru_cache(maxsize=1024)
def _fraction(gamma: float) -> Fraction:
    return Fraction(repr(gamma)).limit_denominator(_MAX_DENOMINATOR)


def capacity_of(
    tokens: Tensor,
    *,
    gamma: float,
    top_k: int,
    experts: int,
    local_experts: int = 1,
    rounding: str = "ceil",
) -> Tensor:
    """C of each window.

    Args:
        tokens: ``[windows]`` int64, T_w: tokens that count in each window.
        gamma: capacity factor.
        top_k: K.
        experts: E.
        local_experts: experts that share the cap: 1 for scope ``expert``, E / R for ``device``.
        rounding: ``"ceil"`` (then C is at least 1) or ``"floor"``.

    Returns:
        ``[windows]`` int64 on the device of ``tokens``.

    Raises:
        ValueError: an argument is out of range.

    Source: arXiv 2503.05066, section 4 (C = gamma * N_mean, N_mean = K T / E) and Algorithm 1
    (floor); the ceiling and the minimum of 1 follow that paper's published code.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be between 1 and experts={experts}, got top_k={top_k}")
    read_gamma(gamma)
    whole, rest, parts = _per_token(float(gamma), top_k, experts, local_experts)
    capacity = tokens * rest if rest != 1 else tokens
    if rounding == "ceil":
        capacity = capacity + (parts - 1)
    capacity = torch.div(capacity, parts, rounding_mode="floor")
    if whole:
        capacity = capacity + tokens * whole
    return capacity.clamp(min=1) if rounding == "ceil" else capacity


@lru_cache(maxsize=1024)
def _per_token(gamma: float, top_k: int, experts: int, local_experts: int) -> tuple[int, int, int]:
    """C per token, gamma K local / E, as ``whole + rest / parts``.

    Whole and broken part apart keep the product with T inside int64 up to 10^9 * E * T = 2^63.
    """
    exact = _fraction(gamma) * top_k * local_experts / experts
    whole, rest = divmod(exact.numerator, exact.denominator)
    return whole, rest, exact.denominator


def window_of(routing: Routing, window: str) -> tuple[Tensor, int]:
    """The capacity window of each token.

    Args:
        routing: the layer's routing.
        window: ``"batch"`` (the whole forward pass), ``"sequence"`` (a batch row) or ``"rank"``
            (the tokens that one rank holds).

    Returns:
        ``[T]`` int64 window ids, and the number of windows.

    Raises:
        ValueError: unknown window.
    """
    if window == "batch":
        return torch.zeros_like(routing.sequence), 1
    if window == "sequence":
        return routing.sequence, routing.sequences
    if window == "rank":
        return routing.rank_of_token, routing.ranks
    raise ValueError(f"window must be one of {', '.join(WINDOWS)}, got {window!r}")


def count_by_window(counts: Tensor, window: Tensor, windows: int) -> Tensor:
    """Sums ``counts`` ``[T]`` (bool or int) over windows into ``[windows]`` int64."""
    if windows == 1:
        return counts.sum(dtype=torch.int64).reshape(1)
    total = torch.zeros(windows, dtype=torch.int64, device=counts.device)
    return total.scatter_add_(0, window, counts.to(torch.int64))


def tokens_in_windows(
    routing: Routing, window: Tensor, windows: int, *, count_padding: bool = False
) -> Tensor:
    """T_w of each window.

    Args:
        routing: the layer's routing.
        window: ``[T]`` int64 window ids.
        windows: number of windows.
        count_padding: count padded positions too, as the code of arXiv 2503.05066 does.

    Returns:
        ``[windows]`` int64.
    """
    valid = routing.valid
    return count_by_window(torch.ones_like(valid) if count_padding else valid, window, windows)
