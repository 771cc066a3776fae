"""Expert Drop: skip the experts that receive the fewest assignments.

Source: arXiv 2503.05066, section 5.2, Expert Drop: each forward pass skips 1 expert of 8, or the
tenth with the lowest load. Not public: code. Ours: the loads are those of the window at hand,
which is the forward pass with window ``batch``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch

from mm_capacity import capacity as cap
from mm_capacity.policies.base import Policy, apply_keep, flag, integer, number, one_of
from mm_capacity.routing import Decision, Routing


@dataclass(frozen=True, kw_only=True)
class ExpertDrop(Policy):
    """Drops all assignments of each window's least loaded experts.

    Loads count valid tokens only. Of equally loaded experts the lower id stays.

    Attributes:
        fraction: share of the experts to skip; of E experts floor(fraction * E), at least 1.
        count: number of experts to skip, in place of ``fraction``.
        window: tokens that loads are counted over: ``batch``, ``sequence`` or ``rank``.
        renormalize: scale a token's surviving weights to their sum before.
    """

    name: ClassVar[str] = "expert-drop"
    needs_expert_ranks: ClassVar[bool] = False

    fraction: float = 0.125
    count: int | None = None
    window: str = "batch"
    renormalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        number("fraction", self.fraction, 0, 1)
        if self.count is not None:
            integer("count", self.count, 1)
        one_of("window", self.window, cap.WINDOWS)
        flag("renormalize", self.renormalize)

    def skipped(self, experts: int) -> int:
        """How many of E experts are skipped.

        Raises:
            ValueError: none would be left.
        """
        if self.count is None:
            skipped = max(1, int(Fraction(repr(float(self.fraction))) * experts))
        else:
            skipped = self.count
        if skipped >= experts:
            name = "fraction" if self.count is None else "count"
            raise ValueError(
                f"{name} must leave at least one of experts={experts}, got "
                f"{self.fraction if self.count is None else self.count}"
            )
        return skipped

    def decide(self, routing: Routing) -> Decision:
        routing.check()
        experts = routing.experts
        skipped = self.skipped(experts)
        window, windows = cap.window_of(routing, self.window)
        group = window.unsqueeze(1) * experts + routing.expert
        counted = routing.valid.unsqueeze(1).expand_as(group).to(torch.int64)
        load = torch.zeros(windows * experts, dtype=torch.int64, device=group.device)
        load.scatter_add_(0, group.reshape(-1), counted.reshape(-1))
        # Load first, then the higher id: all keys of a window differ.
        order = torch.arange(experts - 1, -1, -1, device=group.device)
        key = load.view(windows, experts) * experts + order
        bound = key.kthvalue(skipped, dim=1, keepdim=True).values
        keep = (key > bound).reshape(-1)[group]
        expert, weights = apply_keep(
            routing, routing.expert, routing.weights, keep, renormalize=self.renormalize
        )
        return Decision(expert, weights, window, windows)
