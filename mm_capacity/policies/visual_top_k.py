"""Visual top-k: image tokens use fewer experts than the router picked, from some layer on.

Source: arXiv 2511.17885 (FastMMoE), "expert activation reduction for visual tokens"; its second
part, pruning tokens by routing similarity, removes tokens from the sequence and is no expert
capacity policy. No public code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mm_capacity.enforce import keep_first
from mm_capacity.policies.base import Policy, apply_keep, flag, integer
from mm_capacity.routing import Decision, Routing
from mm_capacity.sort_keys import SortKey, float_keys


@dataclass(frozen=True, kw_only=True)
class VisualTopK(Policy):
    """Image and video tokens keep their ``keep`` heaviest slots; equal weights: the lower id.

    Attributes:
        keep: K', experts that an image token keeps.
        first_layer: first MoE layer (0-based) that the rule applies to.
        renormalize: scale a token's surviving weights to their sum before.
    """

    name: ClassVar[str] = "visual-top-k"
    needs_expert_ranks: ClassVar[bool] = False
    knob: ClassVar[str | None] = "keep"
    knob_range: ClassVar[tuple[float, float]] = (0, 64)

    keep: int = 2
    first_layer: int = 0
    renormalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("keep", self.keep, 0)
        integer("first_layer", self.first_layer, 0)
        flag("renormalize", self.renormalize)

    def decide(self, routing: Routing) -> Decision:
        routing.check()
        tokens = routing.tokens
        if routing.layer < self.first_layer or self.keep >= routing.top_k:
            keep = torch.ones_like(routing.expert, dtype=torch.bool)
        else:
            token = torch.arange(tokens, device=routing.expert.device).unsqueeze(1)
            heaviest = keep_first(
                token.expand_as(routing.expert),
                torch.full((tokens,), self.keep, device=token.device),
                [
                    *float_keys(routing.weights),
                    SortKey(routing.expert, routing.experts.bit_length()),
                ],
            )
            keep = heaviest | ~routing.visual.unsqueeze(1)
        expert, weights = apply_keep(
            routing, routing.expert, routing.weights, keep, renormalize=self.renormalize
        )
        return Decision(expert, weights, torch.zeros_like(routing.sequence), 1)
