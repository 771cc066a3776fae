"""What every policy shares: the contract, and the checks of its parameters."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from mm_capacity.routing import Decision, Routing

PHASES = ("prefill", "all")

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """A policy decides, layer by layer, which assignments stay.

    Fields hold plain values only, so that ``dataclasses.asdict`` and ``repr`` are the record of a
    run.

    Attributes:
        name: registry name.
        needs_hidden: whether ``routing.hidden`` must be filled in.
        needs_expert_ranks: whether it reads ``routing.rank_of_expert``; such a policy cannot run
            where experts have copies on several ranks. True unless a policy says otherwise.
        knob: the field that sets how hard the policy acts, or None; comparisons at equal load
            search over it.
        knob_range: smallest and greatest useful value of the knob.
        knob_raises_load: whether a greater knob means more load (gamma) or less (a threshold).
        phase: ``"prefill"`` (decode steps pass through untouched) or ``"all"``.
    """

    name: ClassVar[str]
    needs_hidden: ClassVar[bool] = False
    needs_expert_ranks: ClassVar[bool] = True
    knob: ClassVar[str | None] = None
    knob_range: ClassVar[tuple[float, float]] = (0.0, 0.0)
    knob_raises_load: ClassVar[bool] = True

    phase: str = "prefill"

    def __post_init__(self) -> None:
        one_of("phase", self.phase, PHASES)

    @abstractmethod
    def decide(self, routing: Routing) -> Decision:
        """Decides on one layer.

        Raises:
            ValueError: the routing does not fit, see :meth:`Routing.check`.
        """


def apply_keep(
    routing: Routing,
    expert: Tensor,
    weights: Tensor,
    keep: Tensor,
    *,
    renormalize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Puts NO_EXPERT and weight 0 where an assignment goes.

    Args:
        routing: the router's choice, for E and the weights before.
        expert: ``[T, K']`` int64 candidates.
        weights: ``[T, K']`` their weights.
        keep: ``[T, K']`` bool.
        renormalize: scale each token's survivors to the sum of its weights before. A token whose
            survivors sum to 0 (also: that has none) is left alone.

    Returns:
        ``expert`` and ``weights`` after the decision.
    """
    # Sums and masks, not torch.where: on the CPU that branches, and a mask that no one can predict
    # makes it two to six times slower.
    kept_expert = torch.add(expert, ~keep, alpha=routing.experts).clamp_(max=routing.experts)
    bits = _INTEGERS[weights.element_size()]
    kept_weights = keep.to(bits).neg_().bitwise_and_(weights.view(bits)).view(weights.dtype)
    if renormalize:
        # Sums in double: an untouched token then gets a factor of exactly 1.
        before = routing.weights.sum(dim=1, keepdim=True, dtype=torch.float64)
        after = kept_weights.sum(dim=1, keepdim=True, dtype=torch.float64)
        factor = torch.where(after == 0, 1.0, before / torch.where(after == 0, 1.0, after))
        kept_weights = (kept_weights * factor).to(weights.dtype)
    return kept_expert, kept_weights


def one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Raises ValueError unless ``value`` is one of ``known``."""
    known = tuple(known)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def flag(name: str, value: object) -> None:
    """Raises ValueError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def number(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> None:
    """Raises ValueError unless ``value`` is a finite number in ``[low, high]``."""
    ok = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or not low <= float(value) <= high:  # type: ignore[arg-type]
        raise ValueError(f"{name} must be a number{_between(low, high)}, got {value!r}")


def integer(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> None:
    """Raises ValueError unless ``value`` is an integer in ``[low, high]``."""
    ok = isinstance(value, Integral) and not isinstance(value, bool)
    if not ok or not low <= int(value) <= high:  # type: ignore[call-overload]
        raise ValueError(f"{name} must be an integer{_between(low, high)}, got {value!r}")


def _between(low: float, high: float) -> str:
    if high == math.inf:
        return "" if low == -math.inf else f" of at least {low:g}"
    return f" between {low:g} and {high:g}"


def read_calibration(name: str, value: str | dict[str, Any], *keys: str) -> dict[str, Any]:
    """A calibration table: the dictionary itself, or the JSON file it names.

    Args:
        name: argument name, for messages.
        value: dictionary, or path of a JSON file.
        *keys: entries that must be there, each a list with one item per MoE layer.

    Raises:
        ValueError: the file is missing, is no JSON, holds no object, or lacks an entry.
    """
    table: Any = value
    shown = type(value).__name__ if isinstance(value, (dict, list)) else value
    if isinstance(value, str):
        try:
            table = json.loads(Path(value).expanduser().read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name}: cannot read {value!r}: {error}") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"{name}: {value!r} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(
            f"{name} must be a dictionary or a JSON file that holds one, got {shown!r}"
        )
    for key in keys:
        if not isinstance(table.get(key), list) or not table[key]:
            raise ValueError(
                f"{name} must have a list {key!r}, one item per MoE layer, got {shown!r}"
            )
    return table


def read_layer_numbers(name: str, value: str | dict[str, Any], key: str) -> dict[str, Any]:
    """A calibration table whose entry ``key`` is a list of numbers of at least 0.

    Raises:
        ValueError: as :func:`read_calibration`, or an item is no such number.
    """
    table = read_calibration(name, value, key)
    for layer, item in enumerate(table[key]):
        number(f"{name} {key}[{layer}]", item, 0)
    return table


def layer_value(table: dict[str, Any], key: str, routing: Routing, default: Any) -> Any:
    """The entry of one layer in a calibration table, or ``default`` without that table.

    Raises:
        ValueError: the table was made for another number of layers.
    """
    if key not in table:
        return default
    if len(table[key]) != routing.layers:
        raise ValueError(
            f"calibration {key!r} must have one item for each of layers={routing.layers}, "
            f"got {len(table[key])}"
        )
    return table[key][routing.layer]
