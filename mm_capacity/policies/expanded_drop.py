"""Expanded Drop: tokens may also use experts they did not pick, so that spare capacity is used.

Source: arXiv 2503.05066, section 4 and Algorithm 2 in appendix E (a token's candidates are the
router's top-K plus the experts on its own rank); ``at_most_top_k``: the ablation in appendix D,
which finds no need for it; ``expand-global`` (candidates are the router's top-(K * rounds)) is what
that paper's MolmoE code does. Algorithm 2 weighs an added expert by its softmax score. Ours: that
score times the scale the router applied to this token, which is the same where there is none.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from mm_capacity.policies.base import flag, integer, one_of
from mm_capacity.policies.candidates import (
    Candidates,
    compact,
    local_experts,
    next_best_experts,
    strongest_per_token,
    with_added,
)
from mm_capacity.policies.token_drop import TokenDrop
from mm_capacity.routing import Routing

OVERFLOWS = ("expand", "expand-global")


@dataclass(frozen=True, kw_only=True)
class ExpandedDrop(TokenDrop):
    """Widens every token's candidates, then caps as Token Drop does.

    Attributes:
        overflow: ``expand`` adds the experts on the token's own rank, ``expand-global`` the
            router's next best up to its top-(K * rounds).
        originals_first: the router's picks outrank all additions, which then only fill spare room;
            off, as in the paper, an addition may displace a pick.
        rounds: of ``expand-global``; at least 1 (1 adds nothing).
        at_most_top_k: after the cap, a token keeps at most K experts, its best ones.
        inside_groups: additions stay inside the groups that a group-limited router chose for the
            token; off, they may be any experts.
    """

    name: ClassVar[str] = "expanded-drop"

    overflow: str = "expand"
    originals_first: bool = False
    rounds: int = 2
    at_most_top_k: bool = False
    inside_groups: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("overflow", self.overflow, OVERFLOWS)
        flag("originals_first", self.originals_first)
        flag("at_most_top_k", self.at_most_top_k)
        flag("inside_groups", self.inside_groups)
        integer("rounds", self.rounds, 1)

    @property
    def needs_expert_ranks(self) -> bool:  # type: ignore[override]
        """With scope ``device``, or to know the experts on a token's rank."""
        return self.scope == "device" or self.overflow == "expand"

    def candidates(self, routing: Routing) -> Candidates:
        if not self.inside_groups:
            routing = replace(routing, allowed=None)
        if self.overflow == "expand":
            self._warn_if_expert_choice(routing)
            added = local_experts(routing)
        else:
            added = next_best_experts(routing, routing.top_k * (self.rounds - 1))
        return with_added(routing, added, originals_first=self.originals_first)

    def finish(
        self, routing: Routing, candidates: Candidates, keep: Tensor
    ) -> tuple[Candidates, Tensor]:
        if not self.at_most_top_k:
            return candidates, keep
        keep = strongest_per_token(candidates, keep, routing.experts, routing.top_k)
        candidates = compact(candidates, keep, routing.experts, routing.top_k)
        return candidates, candidates.expert != routing.experts

    def _warn_if_expert_choice(self, routing: Routing) -> None:
        # Once per policy, not once per layer and step; the mark is no field, so not in the record.
        if routing.ranks > 1 or self.__dict__.get("_warned"):
            return
        object.__setattr__(self, "_warned", True)
        warnings.warn(
            "expanded-drop with overflow='expand' and every expert on one rank makes every expert "
            "a candidate of every token: this is expert-choice routing. Set more ranks, or "
            "overflow='expand-global', for what the method is meant to be.",
            stacklevel=4,
        )
