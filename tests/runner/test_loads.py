"""Load counts of batches join into those of the run, by the rules of a single trace."""

from __future__ import annotations

import pandas as pd
import pytest

from mm_capacity import limit_capacity, make_policy
from mm_capacity.evaluation.loads import LoadFiles, summarize
from tests.runner.fakes import ask

COLUMNS = ["step", "layer", "expert", "rank", "modality", "assigned", "kept", "added"]


@pytest.fixture(scope="module")
def traces(tiny_vlm):
    """One trace over three forward passes, and one trace for each of them."""
    policy = make_policy("expanded-drop", gamma=0.5, modality="image-first", window="sequence")
    batches = [
        tiny_vlm.prepare_batch([ask(f"{n} {i}", n + i) for i in range(n)]) for n in (1, 2, 3)
    ]
    options = {"adapter": tiny_vlm.adapter, "ep_size": 4, "trace_window": "sequence"}
    with limit_capacity(tiny_vlm.model, policy, **options) as whole:
        for inputs in batches:
            tiny_vlm.model(**inputs)
    parts = []
    for inputs in batches:
        with limit_capacity(tiny_vlm.model, policy, **options) as part:
            tiny_vlm.model(**inputs)
        parts.append(part)
    return whole, parts


@pytest.fixture
def files(tmp_path, traces):
    files = LoadFiles(tmp_path)
    for number, part in enumerate(traces[1]):
        files.save(number, part.frame(), part.layers())
    return files


def same(a: pd.DataFrame, b: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(
        a.reset_index(drop=True), b.reset_index(drop=True), check_dtype=False
    )


def test_joined_batches_equal_one_trace(files, traces):
    whole, _ = traces
    layers = files.merge([0, 1, 2])
    same(layers.drop(columns="batch").sort_values(["step", "layer"]),
         whole.layers().sort_values(["step", "layer"]))  # fmt: skip
    stored = pd.read_parquet(files.trace)
    assert list(stored.columns) == COLUMNS
    keys = COLUMNS[:5]
    same(stored.sort_values(keys), whole.frame()[COLUMNS].sort_values(keys))
    assert summarize(layers, whole.names) == pytest.approx(whole.summary())


def test_a_batch_counts_only_when_both_its_files_are_there(files):
    assert files.has(2)
    files._chunk("layers", 2).unlink()
    assert not files.has(2)


def test_split_undoes_merge(files, traces):
    files.merge([0, 1, 2])
    before = pd.read_parquet(files.trace)
    files.drop_chunks()
    assert not files.has(0)
    files.split()
    assert all(files.has(n) for n in range(3))
    files.merge([0, 1, 2])
    same(before, pd.read_parquet(files.trace))


def test_expert_counts_are_sums_over_the_run(files, traces):
    whole, _ = traces
    files.merge([0, 1, 2])
    keys = ["layer", "expert", "modality"]
    expected = whole.frame().groupby(keys, as_index=False)[["assigned", "kept"]].sum()
    same(files.expert_counts(), expected)


def test_a_run_without_any_answer_has_an_empty_summary(tmp_path):
    layers = LoadFiles(tmp_path).merge([])
    assert summarize(layers)["steps"] == 0
