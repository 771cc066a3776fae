"""MACS: image tokens weigh less, capacity follows the modality mix, overflow moves to a neighbour.

Source: arXiv 2605.05225 (MACS): entropy-weighted load, modality-adaptive capacity, local rerouting.
Public: the formulas, and that experts are called visual or textual by how often a calibration set
activates them. Not public: code, delta, rho, the calibration set, the bound of that call, how
similar experts are found, and who overflows. All of these are parameters or choices of ours:

- an expert keeps the longest run of its assignments, best score first, whose load fits C_j;
- overflow asks, in up to ``hops`` rounds, the next most similar expert of the same rank; an asked
  expert takes the best that fit the room it has left; what no expert takes is dropped;
- similarity is the calibration's, or without one the token's own: its best unpicked experts;
- a moved assignment's weight is that of an added expert: score times the router's scale;
- loads are whole multiples of 2^-16, so that no order of summation changes a decision;
- padding weighs as much as text, comes last and never moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mm_capacity import capacity as cap
from mm_capacity.enforce import keep_within
from mm_capacity.policies.base import (
    Policy,
    apply_keep,
    flag,
    integer,
    layer_value,
    number,
    one_of,
    read_calibration,
)
from mm_capacity.policies.candidates import added_weights, best_of_ranks
from mm_capacity.policies.macs_load import capacity_units, token_load
from mm_capacity.routing import Decision, Routing
from mm_capacity.sort_keys import SortKey, float_keys


@dataclass(frozen=True, kw_only=True)
class MACS(Policy):
    """Caps the load of each expert, where an image token's load falls with its entropy.

    Attributes:
        gamma: capacity factor of C = gamma * K * T_w / E. The cap is on load, not on a count, so
            at the same gamma more assignments stay than under ``token-drop``.
        delta: steepness of the image tokens' load. Our default.
        rho: how far capacity follows the visual share; in [0, 2]. Our default.
        hops: most experts an overflowing assignment asks; 0 drops it at once. Our default.
        calibration: path of a JSON file, or its content: ``{"modality": [per MoE layer [E numbers
            +1, 0 or -1]], "neighbours": [per MoE layer [per expert [other experts, most similar
            first]]]}``; either entry may be missing. None: every expert is shared, and the token's
            own scores say which expert is most similar.
        window: ``batch``, ``sequence`` or ``rank``.
        rounding: ``ceil`` or ``floor``, of C.
        renormalize: scale a token's surviving weights to their sum before.
    """

    name: ClassVar[str] = "macs"
    needs_hidden: ClassVar[bool] = True
    knob: ClassVar[str | None] = "gamma"
    knob_range: ClassVar[tuple[float, float]] = (0.01, 16.0)

    gamma: float = 1.0
    delta: float = 1.0
    rho: float = 0.5
    hops: int = 2
    calibration: str | dict | None = None
    window: str = "batch"
    rounding: str = "ceil"
    renormalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        cap.read_gamma(self.gamma)
        number("delta", self.delta, 0)
        number("rho", self.rho, 0, 2)
        integer("hops", self.hops, 0)
        one_of("window", self.window, cap.WINDOWS)
        one_of("rounding", self.rounding, cap.ROUNDINGS)
        flag("renormalize", self.renormalize)
        table: dict[str, Any] = {}
        if self.calibration is not None:
            table = read_calibration("calibration", self.calibration)
            if not {"modality", "neighbours"} & table.keys():
                raise ValueError(
                    "calibration must hold 'modality' or 'neighbours', got "
                    f"{sorted(map(str, table))}"
                )
        object.__setattr__(self, "_table", table)
        # Tensors of the calibration by layer and device, so that they are checked and sent once.
        object.__setattr__(self, "_tensors", {})

    @property
    def needs_expert_ranks(self) -> bool:  # type: ignore[override]
        """To find the experts of the same rank that overflow may move to."""
        return self.hops > 0

    def decide(self, routing: Routing) -> Decision:
        routing.check()
        experts = routing.experts
        window, windows = cap.window_of(routing, self.window)
        load = token_load(routing, window, windows, self.delta)
        capacity = cap.capacity_of(
            cap.tokens_in_windows(routing, window, windows),
            gamma=self.gamma,
            top_k=routing.top_k,
            experts=experts,
            rounding=self.rounding,
        )
        kind = self._calibrated("modality", routing, _kinds)
        room = capacity_units(capacity, load, routing, window, kind, self.rho).reshape(-1)
        expert, kept = routing.expert, torch.zeros_like(routing.expert, dtype=torch.bool)
        target, asks = expert, torch.ones_like(kept)
        scores = routing.scores.gather(1, expert)
        neighbour = self._neighbours(routing) if self.hops else None
        # Experts that a token must not move to: its picks, later also where it has moved. The last
        # column takes the entries that are not meant.
        taken = torch.zeros_like(routing.scores, dtype=torch.bool)
        taken = torch.nn.functional.pad(taken, (0, 1)).scatter_(1, expert, True)
        if routing.allowed is not None:
            taken[:, :experts] |= ~routing.allowed
        for hop in range(self.hops + 1):
            if hop > 0:
                assert neighbour is not None
                target = neighbour(hop - 1)
                asks = ~kept & (target != experts) & routing.valid.unsqueeze(1)
                asks = asks & ~taken.gather(1, target)
                asks = asks & ~_outranked(target, asks, scores, routing.expert)
            group = torch.where(asks, window.unsqueeze(1) * experts + target, len(room))
            loads = load.unsqueeze(1).expand_as(group)
            accepted = keep_within(group, room, loads, _keys(routing, scores))
            used = torch.zeros(len(room) + 1, dtype=torch.int64, device=room.device)
            used.scatter_add_(0, group.reshape(-1), (loads * accepted).reshape(-1))
            room = room - used[:-1]
            expert = torch.where(accepted, target, expert)
            kept = kept | accepted
            taken.scatter_(1, torch.where(accepted, target, experts), True)
        weights = torch.where(
            expert == routing.expert, routing.weights, added_weights(routing, expert)
        )
        expert, weights = apply_keep(routing, expert, weights, kept, renormalize=self.renormalize)
        return Decision(expert, weights, window, windows)

    def _calibrated(
        self, key: str, routing: Routing, make: Callable[[Any, int], Tensor]
    ) -> Tensor | None:
        """One entry of the calibration for this layer, or None without it."""
        rows = layer_value(self.__dict__["_table"], key, routing, None)
        if rows is None:
            return None
        tensors, device = self.__dict__["_tensors"], routing.expert.device
        place = (key, routing.layer, routing.experts, device)
        if place not in tensors:
            tensors[place] = make(rows, routing.experts).to(device)
        return tensors[place]

    def _neighbours(self, routing: Routing) -> Callable[[int], Tensor]:
        """A function from hop to ``[T, K]``, the expert that each assignment asks in that hop.

        NO_EXPERT where the picked expert's rank has no further expert.
        """
        experts, per_rank = routing.experts, routing.experts // routing.ranks
        rank = routing.rank_of_expert
        nobody = torch.full_like(routing.expert, experts)
        table = self._calibrated("neighbours", routing, _neighbour_table)
        if table is not None:
            local = torch.cat([rank, rank.new_full((1,), -1)])[table] == rank.unsqueeze(1)
            table = torch.where(local, table, experts)
            table = table.gather(1, (~local).to(torch.uint8).argsort(dim=1, stable=True))
            return lambda hop: (
                table[:, hop][routing.expert] if hop < min(table.shape[1], per_rank - 1) else nobody
            )
        best = best_of_ranks(routing, min(self.hops, per_rank))
        own_rank = rank[routing.expert]
        return lambda hop: best[:, :, hop].gather(1, own_rank) if hop < per_rank else nobody


def _keys(routing: Routing, scores: Tensor) -> list[SortKey]:
    """Valid tokens first, then the greater score of the pick, then the earlier token."""
    tokens = routing.tokens
    index = torch.arange(tokens, device=scores.device).unsqueeze(1)
    padding = (~routing.valid).to(torch.int64).unsqueeze(1)
    bits = max(tokens - 1, 0).bit_length()
    return [SortKey(padding, 1), *float_keys(scores), SortKey(index, bits)]


def _outranked(target: Tensor, asks: Tensor, scores: Tensor, picked: Tensor) -> Tensor:
    """Where another assignment of the same token asks the same expert with better right.

    Better: the greater score of the pick, then the picked expert's lower id.
    """
    same = (target.unsqueeze(2) == target.unsqueeze(1)) & asks.unsqueeze(1)
    mine, other = scores.unsqueeze(2), scores.unsqueeze(1)
    better = (other > mine) | ((other == mine) & (picked.unsqueeze(1) < picked.unsqueeze(2)))
    return (same & better).any(dim=2)


def _kinds(kinds: list[int], experts: int) -> Tensor:
    """``[E]`` m_j of one layer."""
    if len(kinds) != experts or not set(kinds) <= {-1, 0, 1}:
        raise ValueError(
            f"calibration 'modality' must hold -1, 0 or 1 for each of experts={experts}, "
            f"got {kinds}"
        )
    return torch.tensor(kinds)


def _neighbour_table(rows: list[list[int]], experts: int) -> Tensor:
    """``[E, P]`` int64, rows filled up with NO_EXPERT."""
    fits = len(rows) == experts and all(
        len(set(row)) == len(row) and all(0 <= e < experts and e != own for e in row)
        for own, row in enumerate(rows)
    )
    if not fits:
        raise ValueError(
            f"calibration 'neighbours' must list, for each of experts={experts}, distinct ids of "
            f"other experts, got {len(rows)} rows: {rows}"
        )
    width = max(map(len, rows))
    filled = [[*row, *[experts] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int64).reshape(experts, width)
