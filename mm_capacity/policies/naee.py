"""NAEE's ratio rule: skip a slot whose weight is small beside the token's greatest one.

Source: arXiv 2402.14800 (Not All Experts are Equal), section on dynamic expert skipping: with
K = 2, the second expert is skipped when w_2 < beta * w_1, beta being each layer's median of
w_2 / w_1 on a calibration set. Ours: the same comparison for every slot when K > 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mm_capacity.policies.base import (
    Policy,
    apply_keep,
    flag,
    layer_value,
    number,
    read_layer_numbers,
)
from mm_capacity.routing import Decision, Routing


@dataclass(frozen=True, kw_only=True)
class NAEE(Policy):
    """Skips slot i when its weight is less than beta times the token's greatest weight.

    Attributes:
        beta: ratio, in [0, 1]; 0 skips nothing of a positive router.
        calibration: path of a JSON file, or its content: ``{"beta": [one number per MoE layer]}``;
            a layer's threshold is then ``beta * table["beta"][layer]``.
        renormalize: scale a token's surviving weights to their sum before.
    """

    name: ClassVar[str] = "naee"
    needs_expert_ranks: ClassVar[bool] = False
    knob: ClassVar[str | None] = "beta"
    knob_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    knob_raises_load: ClassVar[bool] = False

    beta: float = 0.5
    calibration: str | dict | None = None
    renormalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        number("beta", self.beta, 0, 1)
        flag("renormalize", self.renormalize)
        table = {}
        if self.calibration is not None:
            table = read_layer_numbers("calibration", self.calibration, "beta")
        object.__setattr__(self, "_table", table)

    def decide(self, routing: Routing) -> Decision:
        routing.check()
        beta = self.beta * layer_value(self.__dict__["_table"], "beta", routing, 1.0)
        weights = routing.weights.to(torch.float64)
        top = weights.max(dim=1, keepdim=True).values
        # A slot as heavy as the top one stays, whatever the sign of the weights.
        keep = (weights >= beta * top) | (weights == top)
        expert, kept_weights = apply_keep(
            routing, routing.expert, routing.weights, keep, renormalize=self.renormalize
        )
        return Decision(expert, kept_weights, torch.zeros_like(routing.sequence), 1)


def median_ratio(weights: Tensor) -> float:
    """A layer's beta from calibration weights: the median over tokens of second over first weight.

    Args:
        weights: ``[T, K]`` router weights of one layer, K at least 2.

    Raises:
        ValueError: K is 1, or no token has a positive greatest weight.

    Source: arXiv 2402.14800, section on dynamic expert skipping.
    """
    if weights.dim() != 2 or weights.shape[1] < 2:
        raise ValueError(f"weights must be [T, K] with K >= 2, got {list(weights.shape)}")
    best = weights.to(torch.float64).topk(2, dim=1).values
    best = best[best[:, 0] > 0]
    if not len(best):
        raise ValueError("weights must hold a token with a positive weight, got none")
    return float((best[:, 1] / best[:, 0]).quantile(0.5))
