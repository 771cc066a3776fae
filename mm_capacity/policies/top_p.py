"""Top-p: a token uses its heaviest experts until their weights add up to a share p.

Source: arXiv 2403.07652 (Harder Tasks Need More Experts), "dynamic routing mechanism": experts in
order of falling probability until the sum reaches p. There models are trained to route so, over
the probabilities of all experts. Ours: applied to a router trained with top-K, over the weights of
its K picks; the heaviest pick always stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mm_capacity.policies.base import Policy, apply_keep, flag, number
from mm_capacity.routing import Decision, Routing


@dataclass(frozen=True, kw_only=True)
class TopP(Policy):
    """Keeps a slot when the heavier ones hold less than p of the token's weight.

    Equal weights: the lower expert id counts as heavier. Negative weights count as 0.

    Attributes:
        p: share of a token's weight, in [0, 1]; 0 keeps the heaviest slot only.
        renormalize: scale a token's surviving weights to their sum before.
    """

    name: ClassVar[str] = "top-p"
    needs_expert_ranks: ClassVar[bool] = False
    knob: ClassVar[str | None] = "p"
    knob_range: ClassVar[tuple[float, float]] = (0.0, 1.0)

    p: float = 0.8
    renormalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        number("p", self.p, 0, 1)
        flag("renormalize", self.renormalize)

    def decide(self, routing: Routing) -> Decision:
        routing.check()
        by_id = routing.expert.argsort(dim=1)
        by_weight = routing.weights.gather(1, by_id).argsort(dim=1, descending=True, stable=True)
        order = by_id.gather(1, by_weight)
        weights = routing.weights.gather(1, order).to(torch.float64).clamp(min=0)
        through = weights.cumsum(dim=1)
        before = torch.cat((torch.zeros_like(through[:, :1]), through[:, :-1]), dim=1)
        stays = before < self.p * through[:, -1:]
        stays[:, 0] = True
        keep = torch.empty_like(stays).scatter_(1, order, stays)
        expert, kept_weights = apply_keep(
            routing, routing.expert, routing.weights, keep, renormalize=self.renormalize
        )
        return Decision(expert, kept_weights, torch.zeros_like(routing.sequence), 1)
