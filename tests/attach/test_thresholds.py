"""MoDES' thresholds from a model: monotone, as cheap as said, and what the policy then uses."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from mm_capacity import limit_capacity, make_policy
from mm_capacity.calibration import Observe, calibrate, training_conversations, write_table
from mm_capacity.policies.modes_search import quantile_grid, skip_fraction_of
from mm_capacity.thresholds import Importances, candidates, find_thresholds

QUESTIONS, POINTS, WANTED = 2, 6, [0.25, 0.6]


@pytest.fixture(scope="module")
def conversations():
    return list(training_conversations(QUESTIONS))


@pytest.fixture(scope="module")
def alpha(tiny_vlm, conversations):
    return calibrate(tiny_vlm, conversations)["alpha"]


@pytest.fixture(scope="module")
def seen(tiny_vlm, conversations, alpha):
    seen = Importances(alpha)
    for conversation in conversations:
        run(tiny_vlm, conversation, Observe(see=seen.see))
    return seen


def run(vlm, conversation, policy):
    with torch.no_grad(), limit_capacity(vlm.model, policy) as trace:
        vlm.model(**vlm.prepare(conversation))
    return trace


class Passes:
    """Counts the forward passes of a model."""

    def __init__(self, model):
        self.count = 0
        self.handle = model.register_forward_pre_hook(self.add)

    def add(self, *_):
        self.count += 1


def test_the_recorded_share_never_decreases_in_a_threshold(seen):
    skipped = skip_fraction_of(seen.text, seen.image)
    text, image = quantile_grid(seen.text, 12), quantile_grid(seen.image, 12)
    table = [[skipped(a, b) for b in image] for a in text]
    for row in (*table, *zip(*table, strict=True)):
        assert all(low <= high for low, high in itertools.pairwise(row))
    assert table[0][0] == 0 and table[-1][-1] == 1  # from nothing to everything


def test_the_first_layer_is_skipped_as_recorded(tiny_vlm, conversations, alpha):
    """The first MoE layer sees the untouched model's hidden states: recorded is reached."""
    seen = Importances([alpha[0], 0.0, 0.0])
    policy = make_policy("modes", tau_text=0.4 * alpha[0], tau_image=0.45 * alpha[0],
                         calibration={"alpha": alpha})  # fmt: skip
    dropped = total = 0
    for conversation in conversations:
        run(tiny_vlm, conversation, Observe(see=seen.see))
        first = run(tiny_vlm, conversation, policy).layers().query("layer == 0")
        dropped += int((first["assigned"] - first["kept"]).sum())
        total += int(first["assigned"].sum())
    below = sum(
        int((values[values > 0] < tau).sum())
        for values, tau in ((seen.text, policy.tau_text), (seen.image, policy.tau_image))
    )
    assert 0 < dropped == below < total


def test_find_thresholds(tiny_vlm, conversations, alpha, seen):
    passes = Passes(tiny_vlm.model)
    found = find_thresholds(tiny_vlm, conversations, alpha, WANTED, points=POINTS)
    passes.handle.remove()
    fronts = candidates(seen.text, seen.image, WANTED, POINTS)
    pairs = sum(map(len, fronts))
    # One pass to record, one for the reference, one for each pair: O(N D), not O(N D^2).
    assert passes.count == QUESTIONS * (2 + pairs)
    assert all(1 <= len(front) <= POINTS for front in fronts)
    assert [entry["skip_frac"] for entry in found] == WANTED
    for entry, front in zip(found, fronts, strict=True):
        assert (entry["tau_text"], entry["tau_image"]) in [(p.tau_text, p.tau_image) for p in front]
        assert entry["recorded_skip_frac"] >= entry["skip_frac"]
        # What is said to be reached and diverged, again by hand.
        kl = {}
        for pair in front:
            policy = make_policy("modes", tau_text=pair.tau_text, tau_image=pair.tau_image,
                                 calibration={"alpha": alpha})  # fmt: skip
            total = count = skipped = assigned = 0.0
            for conversation in conversations:
                inputs = tiny_vlm.prepare(conversation)
                text = tiny_vlm.adapter.tag_tokens(inputs) == 0
                with torch.no_grad():
                    before = tiny_vlm.model(**inputs).logits[text].double().log_softmax(-1)
                    with limit_capacity(tiny_vlm.model, policy) as trace:
                        after = tiny_vlm.model(**inputs).logits[text].double().log_softmax(-1)
                total += float(
                    torch.nn.functional.kl_div(after, before, reduction="sum", log_target=True)
                )
                count += len(before)
                frame = trace.frame()
                skipped += frame["assigned"].sum() - frame["kept"].sum()
                assigned += frame["assigned"].sum()
            kl[pair.tau_text, pair.tau_image] = (total / count, skipped / assigned)
        best = kl[entry["tau_text"], entry["tau_image"]]
        assert best[0] == pytest.approx(min(value for value, _ in kl.values()), rel=1e-6)
        assert (entry["kl"], entry["reached_skip_frac"]) == pytest.approx(best, rel=1e-6)


def test_the_policy_takes_the_thresholds_of_the_file(alpha, tmp_path):
    file = tmp_path / "c.json"
    entries = [{"skip_frac": 0.25, "tau_text": 0.01, "tau_image": 0.02},
               {"skip_frac": 0.5, "tau_text": 0.03, "tau_image": 0.04}]  # fmt: skip
    write_table({"alpha": alpha, "thresholds": entries}, file)
    assert json.loads(file.read_text())["thresholds"] == entries
    policy = make_policy("modes", skip_frac=0.5, calibration=str(file))
    assert (policy.tau_text, policy.tau_image) == (0.03, 0.04)
    assert "tau_text=0.03" in repr(policy)  # what ran is in the record
    with pytest.raises(ValueError, match=r"thresholds for \(0.25, 0.5\), got 0.4"):
        make_policy("modes", skip_frac=0.4, calibration=str(file))
    with pytest.raises(ValueError, match=r"thresholds for \(none\), got 0.4"):
        make_policy("modes", skip_frac=0.4)
    with pytest.raises(ValueError, match="tau_text must be left out"):
        make_policy("modes", skip_frac=0.5, tau_text=0.5, calibration=str(file))


def test_grids():
    importance = torch.tensor([0.5, 0.1, 0.1, 0.9], dtype=torch.float64)
    grid = quantile_grid(importance, 4)
    assert grid[0] == 0 and grid[-1] > 0.9 and grid == sorted(set(grid))
    assert quantile_grid(torch.empty(0), 4) == [0.0]
    with pytest.raises(ValueError, match="points must be at least 2, got 1"):
        quantile_grid(importance, 1)
    with pytest.raises(ValueError, match="target must lie in"):
        candidates(importance, importance, [1.5], 4)
