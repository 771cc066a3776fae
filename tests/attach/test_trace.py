"""The trace against counting by hand."""

from __future__ import annotations

from collections import Counter

import pandas as pd
import pytest
import torch

from mm_capacity.routing import Decision, Routing
from mm_capacity.trace import MODALITIES, CapacityExceededError, Trace, summarize
from vlm_adapters.modality import Modality

E, K, R = 4, 2, 2
TEXT, IMAGE, PAD = int(Modality.TEXT), int(Modality.IMAGE), int(Modality.PAD)


def routing(layer: int = 0) -> Routing:
    expert = torch.tensor([[0, 1], [0, 1], [0, 2], [0, 3], [0, 1], [2, 3]])
    return Routing(
        scores=torch.rand(6, E),
        expert=expert,
        weights=torch.full((6, K), 0.5),
        modality=torch.tensor([TEXT, IMAGE, IMAGE, TEXT, IMAGE, PAD], dtype=torch.uint8),
        sequence=torch.tensor([0, 0, 0, 1, 1, 1]),
        sequences=2,
        rank_of_expert=torch.tensor([0, 0, 1, 1]),
        rank_of_token=torch.zeros(6, dtype=torch.int64),
        ranks=R,
        layer=layer,
        layers=2,
    )


# Token 1 loses expert 0, token 2 loses both and gets expert 3 instead, token 4 loses both.
AFTER = torch.tensor([[0, 1, E], [E, 1, E], [E, E, 3], [0, 3, E], [E, E, E], [E, E, E]])


def decision(window: str = "batch", capacity: int | None = None) -> Decision:
    r = routing()
    by_row = window == "sequence"
    windows = 2 if by_row else 1
    return Decision(
        expert=AFTER,
        weights=(AFTER < E).float(),
        window=r.sequence if by_row else torch.zeros_like(r.sequence),
        windows=windows,
        capacity=None if capacity is None else torch.full((windows,), capacity),
    )


def traced(window: str = "policy", decided: Decision | None = None, check: bool = False) -> Trace:
    placement = [torch.tensor([0, 0, 1, 1])] * 2
    trace = Trace(["a", "b"], [K, K], placement, R, window=window, check=check)
    for layer in range(2):
        trace.record(routing(layer), decided or decision())
    trace.end_pass()
    return trace


def by_hand() -> Counter:
    """(expert, modality) -> (assigned, kept, added) without padding."""
    counts: Counter = Counter()
    r = routing()
    for t in range(6):
        if int(r.modality[t]) == PAD:
            continue
        name = Modality(int(r.modality[t])).name.lower()
        before = set(r.expert[t].tolist())
        for e in before:
            counts[e, name, "assigned"] += 1
        for e in AFTER[t].tolist():
            if e != E:
                counts[e, name, "kept"] += 1
                counts[e, name, "added"] += e not in before
    return counts


def test_frame_equals_counting_by_hand():
    frame = traced().frame()
    assert list(frame.columns) == [
        "step", "layer", "expert", "rank", "modality", "assigned", "kept", "added",
    ]  # fmt: skip
    expected = by_hand()
    for layer in range(2):
        part = frame[frame["layer"] == layer]
        for row in part.itertuples():
            for column in ("assigned", "kept", "added"):
                assert getattr(row, column) == expected[row.expert, row.modality, column]
            assert row.rank == row.expert // 2
        assert part["assigned"].sum() == 10
        assert part["kept"].sum() == sum(v for k, v in expected.items() if k[2] == "kept") == 6


def test_summary_by_hand():
    summary = traced().summary()
    # 5 tokens that are not padding: N_mean = 2 * 5 / 4; expert 0 receives all five.
    assert summary["tokens"] == 5
    assert summary["straggler_before"] == pytest.approx(5 / 2.5)
    assert summary["straggler_after"] == pytest.approx(2 / 2.5)
    # Ranks receive 8 and 2 of 10 assignments; after: 4 on rank 0, 2 on rank 1.
    assert summary["rank_straggler_before"] == pytest.approx(8 / 5)
    assert summary["rank_straggler_after"] == pytest.approx(4 / 5)
    assert summary["max_expert_load"] == 2
    assert summary["max_rank_load"] == 4
    # Image: 6 assignments, kept originals: token 1's expert 1. Text: 4, all kept.
    assert summary["drop_frac_image"] == pytest.approx(5 / 6)
    assert summary["drop_frac_text"] == 0
    assert summary["drop_frac"] == pytest.approx(5 / 10)
    assert summary["added"] == 2  # one per layer
    assert summary["zero_expert_tokens"] == 2  # token 4, in both layers
    assert summary["zero_expert_frac"] == pytest.approx(2 / 10)


@pytest.mark.parametrize("window, steps", [("batch", 1), ("sequence", 2)])
def test_steps_follow_the_window(window, steps):
    by_policy = traced("policy", decision(window))
    forced = traced(window, decision("batch"))
    for trace in (by_policy, forced):
        assert trace.steps == steps
        assert trace.layers().groupby("layer")["step"].nunique().tolist() == [steps] * 2
    assert by_policy.layers().equals(forced.layers())


def test_several_passes_number_their_steps():
    trace = traced()
    trace.record(routing(0), decision("sequence"))
    trace.record(routing(1), decision("sequence"))
    trace.end_pass()
    assert trace.steps == 3
    assert sorted(trace.frame()["step"].unique()) == [0, 1, 2]


def test_an_empty_trace_has_no_numbers():
    trace = Trace(["a"], [K], [torch.zeros(E, dtype=torch.int64)], 1)
    assert trace.frame().empty
    assert trace.summary() == {"steps": 0, "layers": 1}


def test_a_modality_that_is_absent_has_no_drop_share():
    r = routing()
    only_text = Routing(**{**vars(r), "modality": torch.full((6,), TEXT, dtype=torch.uint8)})
    trace = Trace(["a"], [K], [r.rank_of_expert], R)
    trace.record(only_text, decision())
    trace.end_pass()
    assert trace.summary()["drop_frac_image"] is None


@pytest.mark.parametrize("capacity, passes", [(2, True), (1, False)])
def test_check(capacity, passes):
    if passes:
        traced(decided=decision(capacity=capacity), check=True)
        return
    with pytest.raises(CapacityExceededError, match="layer 'a', window 0: expert 0 keeps 2"):
        traced(decided=decision(capacity=capacity), check=True)


def test_check_by_rank():
    base = decision(capacity=4)
    by_rank = Decision(**{**vars(base), "capacity_scope": "device"})
    traced(decided=by_rank, check=True)
    tighter = Decision(**{**vars(by_rank), "capacity": torch.tensor([3])})
    with pytest.raises(CapacityExceededError, match="rank 0 keeps 4"):
        traced(decided=tighter, check=True)


def test_modalities_exclude_padding():
    assert Modality.PAD not in MODALITIES


def test_clear_forgets_counts_and_goes_on_numbering():
    trace = traced()
    trace.notes.append("a note")
    trace.clear()
    assert trace.frame().empty and trace.layers().empty and trace.notes == ["a note"]
    trace.record(routing(), decision())
    trace.end_pass()
    assert trace.steps == 2 and set(trace.frame()["step"]) == {1}


def test_a_summary_of_joined_layers_is_that_of_the_contexts_together():
    one, two = traced(), traced()
    joined = pd.concat([one.layers(), two.layers().assign(step=1)], ignore_index=True)
    assert summarize(joined, 1)["kept"] == one.summary()["kept"] + two.summary()["kept"]
    assert summarize(one.layers(), len(one.names)) == one.summary()
