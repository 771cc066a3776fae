"""Where experts live: placements of experts, or of copies of them, on expert-parallel ranks.

A placement that evens out the ranks' loads drops nothing; it is what a capacity policy must be
compared with. Source: longest-processing-time-first list scheduling (Graham 1969); giving the most
loaded experts more copies, and placing copies by load, is what EPLB (deepseek-ai/EPLB) does. Ours:
its grouping of ranks into nodes is left out.

Two ways to count a load under a placement: :func:`rank_loads` shares it out evenly in fractions,
for loads of a calibration; :func:`counted_rank_loads` in whole assignments, for what a pass did.

Placing runs once per model, on the host; it loops over experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """Which expert sits in which slot, and on which rank that slot is.

    Attributes:
        expert_of_slot: ``[S]`` int64; S = E without replicas, E + r with r of them.
        rank_of_slot: ``[S]`` int64; every rank has S / R slots.
        experts: E.
        ranks: R.
    """

    expert_of_slot: Tensor
    rank_of_slot: Tensor
    experts: int
    ranks: int

    @property
    def copies(self) -> Tensor:
        """``[E]`` int64, slots of each expert."""
        return torch.bincount(self.expert_of_slot, minlength=self.experts)

    @property
    def replicas(self) -> int:
        """r, slots on top of one per expert."""
        return len(self.expert_of_slot) - self.experts

    @property
    def rank_of_expert(self) -> Tensor:
        """``[E]`` int64, as :class:`mm_capacity.routing.Routing` wants it.

        Raises:
            ValueError: an expert has more than one copy, so that it is on no single rank.
        """
        if self.replicas:
            raise ValueError(
                f"rank_of_expert needs a placement without replicas, got {self.replicas} replicas"
            )
        return torch.empty_like(self.rank_of_slot).scatter_(
            0, self.expert_of_slot, self.rank_of_slot
        )


def contiguous(experts: int, ranks: int) -> Placement:
    """Expert e on rank e * R // E, in order of ids.

    Raises:
        ValueError: R does not divide E.
    """
    _check_divides(experts, ranks, experts)
    slots = torch.arange(experts)
    return Placement(slots, slots * ranks // experts, experts, ranks)


def longest_processing_time(load: Tensor | Sequence[float], ranks: int) -> Placement:
    """Heaviest expert first, each to the least loaded rank that still has a free slot.

    Equal loads: the lower expert id comes first; equal ranks: the lower rank takes it.

    Args:
        load: ``[E]`` calibrated load of each expert of one layer.
        ranks: R.

    Raises:
        ValueError: R does not divide E, or a load is negative or not finite.
    """
    return with_replicas(load, ranks, 0)


def with_replicas(load: Tensor | Sequence[float], ranks: int, replicas: int) -> Placement:
    """As :func:`longest_processing_time`, after giving the busiest experts more copies.

    One after another, each replica goes to the expert with the greatest load per copy (equal: the
    lower id). Copies share the load evenly. Two copies of one expert share a rank only when no
    other rank has a free slot.

    Args:
        load: ``[E]`` calibrated load of each expert of one layer.
        ranks: R.
        replicas: r, copies on top of one per expert.

    Raises:
        ValueError: R does not divide E + r, r is negative, or a load is negative or not finite.
    """
    loads = torch.as_tensor(load, dtype=torch.float64)
    if loads.dim() != 1 or not len(loads):
        raise ValueError(f"load must have shape [E], got {list(loads.shape)}")
    if not bool((torch.isfinite(loads) & (loads >= 0)).all()):
        raise ValueError(f"load must be finite and at least 0, got {loads.tolist()}")
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 0:
        raise ValueError(f"replicas must be an integer of at least 0, got {replicas!r}")
    weight = loads.tolist()
    experts = len(weight)
    _check_divides(experts + replicas, ranks, experts)
    copies = [1] * experts
    for _ in range(replicas):
        busiest = max(range(experts), key=lambda e: (weight[e] / copies[e], -e))
        copies[busiest] += 1
    pieces = [(weight[e] / copies[e], e) for e in range(experts) for _ in range(copies[e])]
    pieces.sort(key=lambda piece: (-piece[0], piece[1]))
    slots = (experts + replicas) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    total = [0.0] * ranks
    for piece, expert in pieces:
        free = [r for r in range(ranks) if len(held[r]) < slots]
        apart = [r for r in free if expert not in held[r]]
        rank = min(apart or free, key=lambda r: (total[r], r))
        held[rank].append(expert)
        total[rank] += piece
    return Placement(
        torch.tensor([expert for members in held for expert in sorted(members)]),
        torch.arange(experts + replicas) // slots,
        experts,
        ranks,
    )


def placements_of(
    policy: Any, experts: Sequence[int], ranks: int, given: Sequence[Placement] | None = None
) -> list[Placement]:
    """Where the experts of a model live: as given, else as the policy says, else contiguously.

    Args:
        policy: one with a method ``placements`` (:mod:`mm_capacity.policies.placed`) says so.
        experts: E of each MoE layer.
        ranks: R.
        given: one placement for each MoE layer.

    Raises:
        ValueError: there are two of them, they do not fit the model, or experts have copies and
            the policy needs each expert on one rank.
    """
    own = getattr(policy, "placements", None)
    if given is None and own is None:
        return [contiguous(count, ranks) for count in experts]
    if given is not None and own is not None:
        raise ValueError(f"placement is given twice: policy {policy.name!r} has its own")
    placements = own(experts, ranks) if own is not None else list(given or [])
    wanted = [(count, ranks) for count in experts]
    if [(p.experts, p.ranks) for p in placements] != wanted:
        raise ValueError(
            "placement must have (experts, ranks) of every MoE layer, "
            f"{wanted}, got {[(p.experts, p.ranks) for p in placements]}"
        )
    replicas = max(p.replicas for p in placements)
    if replicas and getattr(policy, "needs_expert_ranks", True):
        raise ValueError(
            f"policy {policy.name!r} with these options needs every expert on one rank, but the "
            f"placement has {replicas} replicas: take a placement without them"
        )
    return placements


def rank_loads(load: Tensor, placement: Placement) -> Tensor:
    """Load of each rank when copies share an expert's load evenly.

    Args:
        load: ``[..., E]`` load of each expert.
        placement: of these E experts.

    Returns:
        ``[..., R]`` float64.

    Raises:
        ValueError: the placement is of another number of experts.
    """
    if load.shape[-1] != placement.experts:
        raise ValueError(f"load must have E={placement.experts} columns, got {load.shape[-1]}")
    share = load.to(torch.float64) / placement.copies
    out = share.new_zeros(*load.shape[:-1], placement.ranks)
    return out.index_add_(-1, placement.rank_of_slot, share[..., placement.expert_of_slot])


def counted_rank_loads(load: Tensor, placement: Placement) -> Tensor:
    """Assignments of each rank when the copies of an expert share its assignments evenly.

    Whole assignments: of n over c copies each gets n // c, and the first n mod c copies, in order
    of slots (so those on the lower ranks), one more. A measure of what even sharing comes to: no
    assignment is told which copy it goes to.

    Args:
        load: ``[..., E]`` int64, assignments of each expert in one step.
        placement: of these E experts.

    Returns:
        ``[..., R]`` int64.

    Raises:
        ValueError: the placement is of another number of experts.
    """
    if load.shape[-1] != placement.experts:
        raise ValueError(f"load must have E={placement.experts} columns, got {load.shape[-1]}")
    expert, copies = placement.expert_of_slot, placement.copies[placement.expert_of_slot]
    earlier = (expert.unsqueeze(1) == expert.unsqueeze(0)).tril(-1).sum(dim=1)
    of_slot = load[..., expert]
    share = of_slot // copies + (earlier < of_slot % copies)
    out = share.new_zeros(*load.shape[:-1], placement.ranks)
    return out.index_add_(-1, placement.rank_of_slot, share)


def straggler_factor(loads: Tensor) -> Tensor:
    """Greatest over mean load along the last dimension; 1 where there is no load at all."""
    loads = loads.to(torch.float64)
    mean = loads.mean(dim=-1)
    return torch.where(mean == 0, 1.0, loads.amax(dim=-1) / torch.where(mean == 0, 1.0, mean))


def _check_divides(slots: int, ranks: int, experts: int) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be an integer of at least 1, got {ranks!r}")
    if slots % ranks:
        more = "" if slots == experts else f" plus replicas={slots - experts}"
        raise ValueError(f"ranks must divide experts={experts}{more}, got ranks={ranks}")
