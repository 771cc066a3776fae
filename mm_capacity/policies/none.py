"""No capacity: every assignment stays; the baseline that every other policy is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mm_capacity.policies.base import Policy
from mm_capacity.routing import Decision, Routing, unchanged


@dataclass(frozen=True, kw_only=True)
class NoCapacity(Policy):
    """Returns the router's tensors themselves, so that the model stays bit-identical."""

    name: ClassVar[str] = "none"
    needs_expert_ranks: ClassVar[bool] = False

    def decide(self, routing: Routing) -> Decision:
        routing.check()
        return unchanged(routing)
