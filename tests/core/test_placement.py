"""Placements of experts on ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mm_capacity.placement import (
    contiguous,
    counted_rank_loads,
    longest_processing_time,
    rank_loads,
    straggler_factor,
    with_replicas,
)


def test_contiguous():
    assert contiguous(8, 4).rank_of_expert.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_longest_processing_time_by_hand():
    # 9 -> rank 0, 7 -> 1, 6 -> 1 (7 < 9), then rank 1 is full: 5 -> 0? No: rank 0 has 9, one slot.
    placement = longest_processing_time([9.0, 7.0, 6.0, 5.0], 2)
    assert placement.rank_of_expert.tolist() == [0, 1, 1, 0]
    assert rank_loads(torch.tensor([9.0, 7, 6, 5]), placement).tolist() == [14, 13]


def test_equal_loads_go_by_id():
    assert longest_processing_time([1.0] * 6, 3).rank_of_expert.tolist() == [0, 1, 2, 0, 1, 2]


def test_replicas_by_hand():
    # Expert 0 is twice as busy as all others together: both replicas go to it.
    placement = with_replicas([12.0, 2.0, 2.0, 2.0], 3, 2)
    assert placement.copies.tolist() == [3, 1, 1, 1]
    # Its copies are apart, one per rank.
    for rank in range(3):
        held = placement.expert_of_slot[placement.rank_of_slot == rank].tolist()
        assert held.count(0) == 1 and len(held) == 2
    assert rank_loads(torch.tensor([12.0, 2, 2, 2]), placement).tolist() == [6, 6, 6]
    with pytest.raises(ValueError, match="without replicas, got 2 replicas"):
        _ = placement.rank_of_expert


@pytest.mark.parametrize("seed", range(20))
def test_placements_are_complete_and_not_worse_than_the_bound(seed: int):
    rng = np.random.default_rng(seed)
    ranks, per_rank = int(rng.integers(2, 4)), 2
    load = torch.tensor(rng.exponential(size=ranks * per_rank))
    placement = longest_processing_time(load, ranks)
    assert placement.rank_of_expert.bincount().tolist() == [per_rank] * ranks
    loads = rank_loads(load, placement)
    assert loads.sum().item() == pytest.approx(load.sum().item())
    # Against the best of all placements: two per rank, so list scheduling is optimal or close.
    best = min(
        max(load[torch.tensor(order)].view(ranks, per_rank).sum(dim=1).tolist())
        for order in itertools.permutations(range(ranks * per_rank))
    )
    assert best <= loads.max().item() + 1e-12 and loads.max().item() <= best * (4 / 3)


def test_rank_loads_of_many_layers():
    load = torch.tensor([[3, 1, 0, 0], [0, 0, 0, 0]])
    loads = rank_loads(load, contiguous(4, 2))
    assert loads.tolist() == [[4, 0], [0, 0]]
    assert straggler_factor(loads).tolist() == [2, 1]


def test_bad_input():
    with pytest.raises(ValueError, match="ranks must divide experts=8, got ranks=3"):
        contiguous(8, 3)
    with pytest.raises(ValueError, match="ranks .*0"):
        contiguous(8, 0)
    with pytest.raises(ValueError, match="divide experts=4 plus replicas=1, got ranks=2"):
        with_replicas([1.0] * 4, 2, 1)
    with pytest.raises(ValueError, match="replicas .*-1"):
        with_replicas([1.0] * 4, 2, -1)
    with pytest.raises(ValueError, match="load must be finite"):
        longest_processing_time([1.0, float("nan")], 2)
    with pytest.raises(ValueError, match="columns, got 3"):
        rank_loads(torch.ones(3), contiguous(4, 2))


def test_counted_loads_by_hand():
    # Copies of expert 0 on ranks 0, 1, 2 and of expert 1 on one rank; 7 over 3 copies: 3 2 2.
    placement = with_replicas([12.0, 2.0, 2.0, 2.0], 3, 2)
    rest = [placement.rank_of_slot[placement.expert_of_slot == e].item() for e in (1, 2, 3)]
    loads = counted_rank_loads(torch.tensor([7, 1, 1, 1]), placement).tolist()
    want = [3, 2, 2]
    for rank in rest:
        want[rank] += 1
    assert loads == want
    assert counted_rank_loads(torch.tensor([0, 0, 0, 0]), placement).tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="columns, got 3"):
        counted_rank_loads(torch.ones(3, dtype=torch.int64), placement)


@pytest.mark.parametrize("seed", range(20))
def test_counted_loads_are_the_even_share_but_for_the_remainder(seed: int):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 5))
    experts = ranks * int(rng.integers(1, 4))
    calibrated = torch.tensor(rng.exponential(size=experts))
    placement = with_replicas(calibrated, ranks, ranks * int(rng.integers(0, 3)))
    counts = torch.tensor(rng.integers(0, 50, size=(3, experts)))
    counted = counted_rank_loads(counts, placement)
    assert counted.dtype == torch.int64
    assert (counted.sum(dim=-1) == counts.sum(dim=-1)).all()  # nothing is lost or made up
    even = rank_loads(counts, placement)
    slots = len(placement.expert_of_slot) // ranks
    assert ((counted - even).abs() < slots).all()
    if placement.replicas == 0:
        assert torch.equal(counted, even.long())
        by_hand = torch.zeros(3, ranks, dtype=torch.int64)
        by_hand.index_add_(1, placement.rank_of_expert, counts)
        assert torch.equal(counted, by_hand)
