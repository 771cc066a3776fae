"""MACS' arithmetic: what a token weighs, what an expert may hold, and the calibration of both.

Source: arXiv 2605.05225 (MACS), entropy-weighted load and dynamic modality-adaptive capacity. The
paper adds a small number to the deviation that z divides by; here z is 0 where it is tiny.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mm_capacity.capacity import count_by_window
from mm_capacity.routing import Routing

# Loads are integers, multiples of 1 / LOAD_UNIT of a text token.
LOAD_UNIT = 2**16
_FLAT = 1e-6


def entropy(hidden: Tensor) -> Tensor:
    """Shannon entropy, in nats, of the softmax over each token's hidden features.

    Args:
        hidden: ``[T, D]``.

    Returns:
        ``[T]`` float64 (computed in float32, or float64 if ``hidden`` is).
    """
    log_p = hidden.to(torch.promote_types(hidden.dtype, torch.float32)).log_softmax(dim=1)
    return -(log_p.exp() * log_p).sum(dim=1).to(torch.float64)


def token_load(routing: Routing, window: Tensor, windows: int, delta: float) -> Tensor:
    """Load of each token: 1 for text, sigmoid(-delta * z(H)) for image and video tokens.

    z standardises the entropy H over the image tokens of the window (by the standard deviation of
    the population; where that is below 1e-6, z is 0).

    Args:
        routing: with ``hidden`` filled in.
        window: ``[T]`` int64.
        windows: number of windows.
        delta: steepness.

    Returns:
        ``[T]`` int64 in units of 1 / LOAD_UNIT, rounded to the nearest.

    Raises:
        ValueError: the routing has no hidden states.
    """
    if routing.hidden is None:
        raise ValueError("hidden must be given to policy 'macs', got None")
    visual = routing.visual
    bits = torch.where(visual, entropy(routing.hidden), 0.0)
    count = count_by_window(visual, window, windows).clamp(min=1)

    def mean(values: Tensor) -> Tensor:
        total = torch.zeros(windows, dtype=torch.float64, device=values.device)
        return total.index_add_(0, window, torch.where(visual, values, 0.0)) / count

    centred = bits - mean(bits)[window]
    spread = mean(centred * centred).sqrt()[window]
    z = torch.where(spread < _FLAT, 0.0, centred / torch.where(spread < _FLAT, 1.0, spread))
    load = torch.where(visual, torch.sigmoid(-delta * z), 1.0)
    return (load * LOAD_UNIT).round().to(torch.int64)


def capacity_units(
    capacity: Tensor,
    load: Tensor,
    routing: Routing,
    window: Tensor,
    modality_of_expert: Tensor | None,
    rho: float,
) -> Tensor:
    """C_j = C * (1 + rho * m_j * (R_v - 1/2)) of each window and expert, never below 0.

    R_v is the image tokens' share of the load of the window's valid tokens (1/2 in a window that
    has none, so that it changes nothing).

    Args:
        capacity: ``[windows]`` int64, C.
        load: ``[T]`` int64 from :func:`token_load`.
        routing: the routing.
        window: ``[T]`` int64.
        modality_of_expert: ``[E]`` m_j: +1 visual, -1 text, 0 shared; None: all 0.
        rho: strength.

    Returns:
        ``[windows, E]`` int64 in units of 1 / LOAD_UNIT, rounded down.
    """
    windows = capacity.shape[0]
    flat = (capacity * LOAD_UNIT).unsqueeze(1).expand(windows, routing.experts)
    if modality_of_expert is None:
        return flat
    total = count_by_window(torch.where(routing.valid, load, 0), window, windows)
    visual = count_by_window(torch.where(routing.visual, load, 0), window, windows)
    share = torch.where(total > 0, visual.double() / total.clamp(min=1).double(), 0.5)
    factor = 1.0 + rho * modality_of_expert.double() * (share.unsqueeze(1) - 0.5)
    return (flat.double() * factor).floor().clamp(min=0).to(torch.int64)


def modality_of_experts(visual: Tensor, text: Tensor, margin: float = 0.25) -> Tensor:
    """m_j from a calibration pass: +1 visual, -1 text, 0 shared.

    An expert is visual when its share of all image assignments exceeds its share of all text
    assignments by more than the factor 1 + margin, and textual in the reverse case.

    Args:
        visual: ``[..., E]`` image assignments of each expert, per layer.
        text: ``[..., E]`` text assignments of each expert.
        margin: at least 0. Ours; the paper says by how often they are activated, not from when on.

    Returns:
        ``[..., E]`` int64.
    """
    visual_share = visual.double() / visual.double().sum(dim=-1, keepdim=True).clamp(min=1)
    text_share = text.double() / text.double().sum(dim=-1, keepdim=True).clamp(min=1)
    is_visual = visual_share > text_share * (1 + margin)
    is_text = text_share > visual_share * (1 + margin)
    return is_visual.long() - is_text.long()


def neighbours(vectors: Tensor) -> Tensor:
    """The other experts by falling cosine similarity; equal similarity: the lower id first.

    Args:
        vectors: ``[E, D]`` one vector per expert (for instance its row of the router's weight, or
            its mean output on a calibration set). Ours; the paper gives no rule.

    Returns:
        ``[E, E - 1]`` int64.
    """
    unit = torch.nn.functional.normalize(vectors.double(), dim=1)
    similarity = unit @ unit.T
    similarity.fill_diagonal_(torch.inf)
    return similarity.argsort(dim=1, descending=True, stable=True)[:, 1:]
