"""Rank-tail drop: the most loaded rank sheds its lightest image assignments until it fits.

Source: a rule of this project, not of a paper: while some rank holds more than gamma times the mean
rank load, take from the currently most loaded rank the image assignment with the least weight.
Ranks do not share assignments, so doing all at once gives the same result as one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mm_capacity import capacity as cap
from mm_capacity.enforce import keep_assignments
from mm_capacity.policies.base import Policy, apply_keep, flag, one_of
from mm_capacity.routing import Decision, Routing


@dataclass(frozen=True, kw_only=True)
class RankTail(Policy):
    """Caps ranks, dropping by router weight, image tokens first.

    Attributes:
        gamma: capacity factor of a rank, C = gamma * K * T_w / R.
        only_image: never drop a text assignment; a rank whose text alone exceeds C then stays
            above it, and the decision states no capacity.
        window: ``batch``, ``sequence`` or ``rank``.
        rounding: ``ceil`` or ``floor``.
        count_padding: count padded positions in T_w.
        renormalize: scale a token's surviving weights to their sum before.
    """

    name: ClassVar[str] = "rank-tail"
    knob: ClassVar[str | None] = "gamma"
    knob_range: ClassVar[tuple[float, float]] = (0.01, 16.0)

    gamma: float = 1.0
    only_image: bool = False
    window: str = "batch"
    rounding: str = "ceil"
    count_padding: bool = False
    renormalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        cap.read_gamma(self.gamma)
        one_of("window", self.window, cap.WINDOWS)
        one_of("rounding", self.rounding, cap.ROUNDINGS)
        for name in ("only_image", "count_padding", "renormalize"):
            flag(name, getattr(self, name))

    def decide(self, routing: Routing) -> Decision:
        routing.check()
        window, windows = cap.window_of(routing, self.window)
        capacity = cap.capacity_of(
            cap.tokens_in_windows(routing, window, windows, count_padding=self.count_padding),
            gamma=self.gamma,
            top_k=routing.top_k,
            experts=routing.experts,
            local_experts=routing.experts // routing.ranks,
            rounding=self.rounding,
        )
        keep = keep_assignments(
            routing.expert,
            routing.weights,
            capacity,
            experts=routing.experts,
            tags=routing.modality,
            window=window,
            scope="device",
            rank_of_expert=routing.rank_of_expert,
            ranks=routing.ranks,
            modality="image-first",
            validate=routing.validate,
        )
        if self.only_image:
            keep = keep | (routing.valid & ~routing.visual).unsqueeze(1)
        expert, weights = apply_keep(
            routing, routing.expert, routing.weights, keep, renormalize=self.renormalize
        )
        stated = None if self.only_image else capacity
        return Decision(expert, weights, window, windows, stated, "device")
