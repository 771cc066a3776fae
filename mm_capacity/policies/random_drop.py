"""Random drop with the budget of another policy: the control that every method must beat.

Source: a control of this project. Two budgets are equal when as many assignments stay; ``match``
says over what they are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from mm_capacity import policies
from mm_capacity.capacity import count_by_window
from mm_capacity.enforce import keep_first
from mm_capacity.policies.base import Policy, apply_keep, flag, integer, number, one_of
from mm_capacity.routing import Decision, Routing, unchanged
from mm_capacity.sort_keys import SortKey, hash_key, positions_in_window

MATCHES = ("window", "modality", "expert")


@dataclass(frozen=True, kw_only=True)
class RandomDrop(Policy):
    """Keeps as many assignments as another policy, but any.

    Padding is not part of the budget and is dropped. Where the other policy adds assignments, no
    more can stay than the router picked.

    Attributes:
        like: name of the policy whose budget is matched.
        arguments: that policy's arguments.
        keep_frac: share of the assignments to keep in each window, rounded down; in place of
            ``like``. Only with ``match="window"``.
        match: ``window`` (as many in each window), ``modality`` (as many of text and of image
            tokens in each window) or ``expert`` (as many of each expert in each window, so that
            the loads are equal too).
        renormalize: scale a token's surviving weights to their sum before.
        seed: of the random choice.
    """

    name: ClassVar[str] = "random-drop"
    knob: ClassVar[str | None] = "keep_frac"
    knob_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    like: str = "token-drop"
    arguments: dict[str, Any] = field(default_factory=dict)
    keep_frac: float | None = None
    match: str = "window"
    renormalize: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("match", self.match, MATCHES)
        flag("renormalize", self.renormalize)
        integer("seed", self.seed, 0, 2**63 - 1)
        if not isinstance(self.arguments, Mapping):
            raise ValueError(f"arguments must be a dictionary, got {self.arguments!r}")
        if self.like == self.name:
            raise ValueError(f"like must name another policy, got {self.like!r}")
        if self.keep_frac is not None:
            number("keep_frac", self.keep_frac, 0, 1)
            if self.match != "window":
                raise ValueError(f"match must be 'window' with keep_frac, got {self.match!r}")
        other = policies.make_policy(self.like, **self.arguments)
        object.__setattr__(self, "_other", None if self.keep_frac is not None else other)

    @property
    def needs_hidden(self) -> bool:  # type: ignore[override]
        """As the other policy needs."""
        other = self.__dict__["_other"]
        return other is not None and other.needs_hidden

    @property
    def needs_expert_ranks(self) -> bool:  # type: ignore[override]
        """As the other policy needs."""
        other = self.__dict__["_other"]
        return other is not None and other.needs_expert_ranks

    def decide(self, routing: Routing) -> Decision:
        routing.check()
        other = self.__dict__["_other"]
        decision = unchanged(routing) if other is None else other.decide(routing)
        window, windows = decision.window, decision.windows
        group, groups = self._groups(routing, routing.expert, window, windows)
        if other is None:
            total = count_by_window(routing.valid, window, windows) * routing.top_k
            assert self.keep_frac is not None
            share = Fraction(repr(float(self.keep_frac))).limit_denominator(10**9)
            budget = torch.div(total * share.numerator, share.denominator, rounding_mode="floor")
        else:
            kept_group, _ = self._groups(routing, decision.expert, window, windows)
            counted = (decision.expert != routing.experts) & routing.valid.unsqueeze(1)
            budget = torch.zeros(groups + 1, dtype=torch.int64, device=window.device)
            budget.scatter_add_(0, kept_group.reshape(-1), counted.reshape(-1).to(torch.int64))
            budget = budget[:groups]
        position = positions_in_window(
            routing.valid, window if windows > 1 else None, windows
        ).unsqueeze(1)
        tokens = routing.tokens
        keep = keep_first(
            group,
            budget,
            [
                SortKey(hash_key(self.seed, routing.layer, position, routing.expert), 32),
                SortKey(
                    torch.arange(tokens, device=window.device).unsqueeze(1),
                    max(tokens - 1, 0).bit_length(),
                ),
                SortKey(routing.expert, routing.experts.bit_length()),
            ],
        )
        expert, weights = apply_keep(
            routing, routing.expert, routing.weights, keep, renormalize=self.renormalize
        )
        return Decision(expert, weights, window, windows)

    def _groups(
        self, routing: Routing, expert: Tensor, window: Tensor, windows: int
    ) -> tuple[Tensor, int]:
        """Group of each assignment ``[T, K']``, and how many groups; padding gets one beyond."""
        base = window.unsqueeze(1)
        if self.match == "window":
            group, groups = base.expand_as(expert), windows
        elif self.match == "modality":
            visual = routing.visual.unsqueeze(1).to(torch.int64)
            group, groups = (base * 2 + visual).expand_as(expert), windows * 2
        else:
            group, groups = base * routing.experts + expert, windows * routing.experts
        out = (expert == routing.experts) | ~routing.valid.unsqueeze(1)
        return torch.where(out, groups, group), groups
