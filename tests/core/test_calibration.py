"""The calibration arithmetic of MACS, MoDES and NAEE."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from mm_capacity.policies.macs_load import (
    LOAD_UNIT,
    capacity_units,
    entropy,
    modality_of_experts,
    neighbours,
    token_load,
)
from mm_capacity.policies.modes import mean_kl, share_of_token
from mm_capacity.policies.modes_search import frontier, search_thresholds, skip_fraction_of
from mm_capacity.policies.naee import median_ratio
from tests.core.cases import routing_of


def test_entropy():
    hidden = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]])
    assert entropy(hidden).tolist() == pytest.approx([math.log(4), 0], abs=1e-6)


def test_token_load_by_hand():
    # Entropies of the three image tokens: log 2, 0 and (equal to the first) log 2.
    routing = routing_of(0, batch=1, length=4, experts=2, top_k=1, ranks=1)
    routing = dataclasses.replace(
        routing,
        modality=torch.tensor([0, 1, 2, 1], dtype=torch.uint8),
        hidden=torch.tensor([[9.0, 1.0], [3.0, 3.0], [0.0, 200.0], [5.0, 5.0]]),
    )
    window = torch.zeros(4, dtype=torch.int64)
    high, low = 1 / math.sqrt(2), -math.sqrt(2)  # standardised: two above the mean, one below
    load = token_load(routing, window, 1, delta=1.5) / LOAD_UNIT
    want = [1.0] + [1 / (1 + math.exp(1.5 * z)) for z in (high, low, high)]
    assert load.tolist() == pytest.approx(want, abs=1e-4)
    # No spread, no preference: every image token weighs a half.
    flat = dataclasses.replace(routing, hidden=torch.ones(4, 2))
    assert (token_load(flat, window, 1, 1.5) / LOAD_UNIT).tolist() == [1, 0.5, 0.5, 0.5]


def test_capacity_follows_the_visual_share():
    routing = routing_of(0, batch=1, length=4, experts=3, top_k=1, ranks=1)
    routing = dataclasses.replace(routing, modality=torch.tensor([0, 1, 1, 1], dtype=torch.uint8))
    load = torch.full((4,), LOAD_UNIT)  # visual share 3/4
    window = torch.zeros(4, dtype=torch.int64)
    kind = torch.tensor([1, -1, 0])
    units = capacity_units(torch.tensor([8]), load, routing, window, kind, rho=0.5)
    # C (1 + 0.5 m (3/4 - 1/2)) = 8 * 1.125, 8 * 0.875, 8
    assert (units[0] / LOAD_UNIT).tolist() == [9, 7, 8]
    assert capacity_units(torch.tensor([8]), load, routing, window, None, 0.5).tolist() == [
        [8 * LOAD_UNIT] * 3
    ]


def test_modality_of_experts():
    visual, text = torch.tensor([60, 20, 20]), torch.tensor([2, 6, 2])
    # Shares .6 .2 .2 and .2 .6 .2
    assert modality_of_experts(visual, text).tolist() == [1, -1, 0]
    assert modality_of_experts(torch.zeros(3), text).tolist() == [-1, -1, -1]


def test_neighbours():
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.2], [-1.0, 0.0]])
    assert neighbours(vectors).tolist() == [[2, 1, 3], [2, 0, 3], [0, 1, 3], [1, 2, 0]]
    same = neighbours(torch.ones(4, 3))
    assert same.tolist() == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]


def test_mean_kl():
    reference = torch.tensor([[0.0, math.log(3)], [1.0, 1.0]])
    changed = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    first = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert mean_kl(reference, changed) == pytest.approx(first / 2)
    assert mean_kl(reference, changed, torch.tensor([True, False])) == pytest.approx(first)
    assert mean_kl(reference, reference) == 0
    with pytest.raises(ValueError, match="at least one position"):
        mean_kl(reference, changed, torch.tensor([False, False]))
    with pytest.raises(ValueError, match="changed must have shape"):
        mean_kl(reference, changed[:1])


def test_share_of_token():
    shares = share_of_token(torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
    assert shares.tolist() == [[0.25, 0.75], [0, 0]]


def brute_force(skip_frac, text_grid, image_grid, target):
    """Every text threshold's least image threshold, without pairs that another makes needless."""
    pairs = []
    for tau_text in text_grid:
        meets = [tau for tau in image_grid if skip_frac(tau_text, tau) >= target]
        if meets and (not pairs or meets[0] < pairs[-1][1]):
            pairs.append((tau_text, meets[0], skip_frac(tau_text, meets[0])))
    return pairs


@pytest.mark.parametrize("seed", range(30))
def test_frontier_equals_trying_all_pairs_in_fewer_calls(seed: int):
    rng = np.random.default_rng(seed)
    skip_frac = skip_fraction_of(
        torch.tensor(rng.exponential(size=40)), torch.tensor(rng.exponential(size=160) / 2)
    )
    text_grid = sorted(rng.uniform(0, 2, size=12).tolist())
    image_grid = sorted(rng.uniform(0, 2, size=17).tolist())
    target = float(rng.uniform(0, 1))
    calls = []

    def counted(tau_text: float, tau_image: float) -> float:
        calls.append((tau_text, tau_image))
        return skip_frac(tau_text, tau_image)

    pairs = frontier(counted, text_grid, image_grid, target)
    assert len(calls) <= len(text_grid) + len(image_grid)
    assert pairs == brute_force(skip_frac, text_grid, image_grid, target)

    def loss(tau_text: float, tau_image: float) -> float:
        return 3 * tau_text + tau_image

    if pairs:
        best = search_thresholds(skip_frac, loss, text_grid, image_grid, target)
        assert best.loss == min(
            loss(text, image)
            for text in text_grid
            for image in image_grid
            if skip_frac(text, image) >= target
        )
        assert best.skip_frac >= target
    else:
        with pytest.raises(ValueError, match="target must be reachable"):
            search_thresholds(skip_frac, loss, text_grid, image_grid, target)


def test_skip_fraction_counts_what_the_policy_skips():
    importance = torch.tensor([0.1, 0.2, 0.2, 0.4])
    skip_frac = skip_fraction_of(importance, torch.tensor([0.3]))
    assert skip_frac(0.2, 0.3) == pytest.approx(1 / 5)  # below, not at, the threshold
    assert skip_frac(0.21, 0.31) == pytest.approx(4 / 5)
    with pytest.raises(ValueError, match="at least one importance"):
        skip_fraction_of(torch.empty(0), torch.empty(0))


def test_bad_grids():
    for text, image, target, message in (
        ([], [1.0], 0.5, "text_grid must be ascending and not empty"),
        ([1.0], [2.0, 1.0], 0.5, "image_grid must be ascending"),
        ([1.0], [1.0], 1.5, "target must lie in .*, got 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            frontier(lambda a, b: 0.0, text, image, target)


def test_median_ratio():
    weights = torch.tensor([[0.5, 0.25, 0.1], [0.1, 0.8, 0.1], [0.4, 0.4, 0.2], [0.0, 0.0, 0.0]])
    assert median_ratio(weights) == pytest.approx(0.5)  # of .5, .125 and 1
    with pytest.raises(ValueError, match="K >= 2"):
        median_ratio(weights[:, :1])
    with pytest.raises(ValueError, match="positive weight"):
        median_ratio(weights[3:])
