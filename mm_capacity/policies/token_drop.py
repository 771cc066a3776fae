"""Token Drop: each expert keeps its C greatest assignments, the rest is dropped.

Source: arXiv 2503.05066 (Capacity-Aware Inference), section 4 and Algorithm 1 (appendix E);
image-first: its experiments on multimodal models. Public: the method, and code for OLMoE, Mixtral
and MolmoE. Differences from that code, each with an option that restores it: padding is not counted
(``count_padding``), and modality is a key of its own where the code subtracts 1 from a score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mm_capacity import capacity as cap
from mm_capacity.enforce import ORDERS, keep_assignments
from mm_capacity.policies.base import Policy, apply_keep, flag, integer, one_of
from mm_capacity.policies.candidates import Candidates, originals
from mm_capacity.routing import Decision, Routing
from mm_capacity.sort_keys import MODALITIES


@dataclass(frozen=True, kw_only=True)
class TokenDrop(Policy):
    """Caps the count of assignments of each expert, or of each rank, in each window.

    Attributes:
        gamma: capacity factor, C = gamma * K * T_w / E.
        modality: ``uniform``, ``image-first`` (image tokens are dropped first) or ``text-first``.
        order: who stays among equals in modality: ``score``, ``order`` (earlier tokens),
            ``reverse`` or ``random``.
        scope: ``expert``, or ``device``: the experts of a rank share E/R times the cap.
        window: tokens that a cap is computed over: ``batch``, ``sequence`` or ``rank``.
        rounding: ``ceil`` (at least 1) or ``floor``.
        count_padding: count padded positions in T_w.
        renormalize: scale a token's surviving weights to their sum before.
        seed: of order ``random``.
    """

    name: ClassVar[str] = "token-drop"
    knob: ClassVar[str | None] = "gamma"
    knob_range: ClassVar[tuple[float, float]] = (0.01, 16.0)

    gamma: float = 1.0
    modality: str = "uniform"
    order: str = "score"
    scope: str = "expert"
    window: str = "batch"
    rounding: str = "ceil"
    count_padding: bool = False
    renormalize: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        cap.read_gamma(self.gamma)
        one_of("modality", self.modality, MODALITIES)
        one_of("order", self.order, ORDERS)
        one_of("scope", self.scope, cap.SCOPES)
        one_of("window", self.window, cap.WINDOWS)
        one_of("rounding", self.rounding, cap.ROUNDINGS)
        flag("count_padding", self.count_padding)
        flag("renormalize", self.renormalize)
        integer("seed", self.seed, 0, 2**63 - 1)

    @property
    def needs_expert_ranks(self) -> bool:  # type: ignore[override]
        """With scope ``device``."""
        return self.scope == "device"

    def candidates(self, routing: Routing) -> Candidates:
        """The assignments that compete; here the router's own."""
        return originals(routing)

    def finish(
        self, routing: Routing, candidates: Candidates, keep: Tensor
    ) -> tuple[Candidates, Tensor]:
        """A last step after the cap, for subclasses; it may only drop more."""
        return candidates, keep

    def decide(self, routing: Routing) -> Decision:
        routing.check()
        window, windows = cap.window_of(routing, self.window)
        capacity = cap.capacity_of(
            cap.tokens_in_windows(routing, window, windows, count_padding=self.count_padding),
            gamma=self.gamma,
            top_k=routing.top_k,
            experts=routing.experts,
            local_experts=routing.experts // routing.ranks if self.scope == "device" else 1,
            rounding=self.rounding,
        )
        candidates = self.candidates(routing)
        keep = keep_assignments(
            candidates.expert,
            candidates.scores,
            capacity,
            experts=routing.experts,
            tags=routing.modality,
            window=window,
            scope=self.scope,
            rank_of_expert=routing.rank_of_expert,
            ranks=routing.ranks,
            modality=self.modality,
            order=self.order,
            original=candidates.original,
            seed=self.seed,
            layer=routing.layer,
            validate=routing.validate,
        )
        candidates, keep = self.finish(routing, candidates, keep)
        expert, weights = apply_keep(
            routing, candidates.expert, candidates.weights, keep, renormalize=self.renormalize
        )
        return Decision(expert, weights, window, windows, capacity, self.scope)
