"""The comparison at equal load: the search by itself, and the whole script on a tiny model."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from mm_capacity.evaluation import datasets, scoring
from mm_capacity.evaluation.records import find_runs
from tests.runner import fakes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def parts():
    """The script and its parts."""
    folder = str(ROOT / "scripts")
    sys.path.insert(0, folder)
    try:
        import compare_at_equal_load as script
        from equal_load import knobs, loads, table
    finally:
        sys.path.remove(folder)
    return SimpleNamespace(script=script, knobs=knobs, loads=loads, table=table)


@pytest.fixture(scope="module")
def script(parts):
    return parts.script


@pytest.fixture(scope="module")
def knobs(parts):
    return parts.knobs


def rising(knobs, low=0.01, high=16.0, whole=False):
    return knobs.Knob("gamma", low, high, True, whole)


class Counted:
    """A load function that counts its calls by value."""

    def __init__(self, load):
        self.load, self.asked = load, []

    def __call__(self, value):
        if value not in self.asked:
            self.asked.append(value)
        return self.load(value)


@pytest.mark.parametrize("target", [0.3, 1.1, 1.25, 1.5])
def test_a_continuous_knob_meets_its_target_from_below(knobs, target):
    load_at = Counted(lambda gamma: min(gamma, 1.8))
    found = knobs.find_knob(rising(knobs), target, load_at)
    assert found.met and target * 0.98 <= found.load <= target
    assert len(load_at.asked) <= knobs.STEPS + 2


def test_later_targets_start_from_what_earlier_ones_measured(knobs):
    """Half as many measurements as four searches of their own, and the same answers' quality."""
    targets = [0.5, 0.8, 1.1, 1.5]
    load = lambda gamma: 1.8 * gamma / (gamma + 0.5)  # noqa: E731
    alone = [Counted(load) for _ in targets]
    for target, load_at in zip(targets, alone, strict=True):
        assert knobs.find_knob(rising(knobs), target, load_at).met
    together = Counted(load)
    measured = knobs.Measured(together)
    found = [knobs.find_knob(rising(knobs), target, measured) for target in targets]
    for target, one in zip(targets, found, strict=True):
        assert one.met and target * 0.98 <= one.load <= target
    assert [a.value < b.value for a, b in itertools.pairwise(found)] == [True] * 3
    assert len(together.asked) <= 0.7 * sum(len(load_at.asked) for load_at in alone)
    assert len(together.asked) <= 20


def test_a_load_that_is_not_monotone_ends(knobs):
    found = knobs.find_knob(
        rising(knobs), 1.1, lambda gamma: min(gamma, 1.8) + (0.4 if 0.6 < gamma < 0.7 else 0)
    )
    assert found.value is not None and found.load <= 1.1


@pytest.mark.parametrize("target", [0.6, 1.1, 1.25])
def test_a_knob_that_lowers_the_load(knobs, target):
    knob = knobs.Knob("tau_scale", 0.0, 50.0, False, False)
    found = knobs.find_knob(knob, target, lambda tau: 1.6 / (1 + tau))
    assert found.met and target * 0.98 <= found.load <= target
    assert 1.6 / (1 + found.value) == found.load


def test_a_target_out_of_reach_is_said(knobs):
    found = knobs.find_knob(rising(knobs), 2.0, lambda gamma: min(gamma, 1.8))
    assert not found.met and found.value is None
    assert found.status == "cannot: the load is never above 1.800 at gamma=16"
    found = knobs.find_knob(rising(knobs), 1.1, lambda gamma: max(gamma, 1.2))
    assert found.value is None
    assert found.status == "cannot: the load is never below 1.200 at gamma=0.01"


def test_a_knob_with_steps_names_both_neighbours(knobs):
    loads = {0: 0.1, 1: 0.7, 2: 1.3}
    knob = rising(knobs, 0, 64, whole=True)
    found = knobs.find_knob(knob, 1.1, lambda keep: loads[min(keep, 2)])
    assert (found.value, found.load, found.met) == (1, 0.7, False)
    assert found.status == "not met: nearest are 0.700 at gamma=1 and 1.300 at gamma=2"
    exact = knobs.find_knob(knob, 0.7, lambda keep: loads[min(keep, 2)])
    assert exact.met and exact.value == 1


def test_every_policy_has_a_knob_that_its_class_takes_or_says_so(knobs):
    from mm_capacity.evaluation.plan import PolicyChoice
    from mm_capacity.policies import POLICIES

    without = set()
    for name in POLICIES:
        choice = PolicyChoice(name)
        knob = knobs.knob_of(choice)
        if knob is None:
            without.add(name)
            continue
        assert knob.low < knob.high
        for value in (knob.low, knob.high):
            built = knobs.turned(choice, knob, value).build()
            assert getattr(built, knob.name) == value
    assert without == {"none", "expert-drop"}


@pytest.fixture
def start(monkeypatch, tiny_vlm, tmp_path, script):
    world = fakes.World()
    monkeypatch.setitem(fakes.SIZES, "SET_SIX", 6)
    monkeypatch.setattr(datasets, "open_dataset", world.open_dataset)
    monkeypatch.setattr(scoring, "score", world.score)
    monkeypatch.setattr("vlm_adapters.load_model", lambda *a, **k: tiny_vlm)

    def start(*argv):
        fixed = ["--model", "tiny:qwen3_vl_moe", "--data", "SET_SIX", "--work-dir", str(tmp_path)]
        size = ["--batch-size", "6", "--max-new-tokens", "1", "--device", "cpu"]
        return script.main([*fixed, *size, "--check", *argv])

    return start


def test_end_to_end(start, tmp_path, parts, monkeypatch, capsys):
    # An expert's share of these short questions is a few assignments: loads come in wide steps.
    monkeypatch.setattr(parts.knobs, "CLOSE_FRAC", 0.25)
    monkeypatch.setattr(parts.table, "CLOSE_FRAC", 0.25)
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"load": [[9, 8, 7, 6, 4, 3, 2, 1]] * 3}))
    argv = (
        *("--policy", "token-drop", "visual-top-k", "expert-drop", "--modality", "image-first"),
        *("--target", "0.9", "9", "--place-by", str(file), "--ep-size", "4"),
    )
    assert start(*argv) == 0
    table = pd.read_csv(tmp_path / "equal_load.csv").fillna({"options": "", "run": ""})
    placements = ["placement lpt", "placement replicated"]
    assert table["policy"].tolist() == [
        *("none", "token-drop", "token-drop", "visual-top-k", "visual-top-k", "expert-drop"),
        *placements,
    ]

    def row_of(policy, target):
        (found,) = (row for _, row in table.iterrows()
                    if (row["policy"], row["target"]) == (policy, target))  # fmt: skip
        return found

    tuned = row_of("token-drop", 0.9)
    assert tuned["status"] == "met" and tuned["options"] == "modality=image-first order=score"
    assert 0.9 * (1 - parts.knobs.CLOSE_FRAC) <= tuned["load"] <= 0.9
    # What was searched is what the runner then saw.
    ran = table[table["run"] != ""]
    assert ran["load"].tolist() == pytest.approx(ran["load_searched"].tolist())
    assert (ran["n"] == 6).all() and ran["accuracy"].notna().all()
    others = ran[ran["policy"] != "none"]
    assert others[["delta", "delta_stderr"]].notna().all(axis=None)
    baseline = table.iloc[0]
    assert baseline["assignments_frac"] == 1 and baseline["zero_expert_tokens"] == 0
    assert tuned["assignments"] < baseline["assignments"]
    assert tuned["assignments_frac"] == pytest.approx(
        tuned["assignments"] / baseline["assignments"]
    )
    for policy in ("token-drop", "visual-top-k"):
        unreached = row_of(policy, 9.0)
        assert unreached["status"].startswith("cannot: the load is never above ")
        assert unreached["run"] == ""
    fixed = table[table["policy"].isin(["expert-drop", *placements])]
    assert set(fixed["status"]) == {parts.table.NO_PARAMETER} and fixed["target"].isna().all()
    # Placements drop nothing: every number is the baseline's but the load of the ranks.
    placed = table[table["policy"].isin(placements)]
    for column in ("accuracy", "stderr", "assignments", "zero_expert_tokens", "n"):
        assert (placed[column] == baseline[column]).all(), column
    assert (placed[["delta", "delta_stderr"]] == 0).all(axis=None)
    assert placed["load"].nunique() == 2 and (placed["load"] != baseline["load"]).all()
    assert placed["options"].tolist() == ["", "replicas=4"]
    from mm_capacity.evaluation.results import collect

    shown = collect(tmp_path)["run"]  # of contiguous experts only: they share a setting
    assert not set(placed["run"]) & set(shown) and baseline["run"] in set(shown)

    text = (tmp_path / "equal_load.md").read_text()
    for word in ("compare_at_equal_load.py", "--target 0.9 9", "Seed: 0", "transformers", "cannot"):
        assert word in text
    assert (tmp_path / "equal_load.png").stat().st_size > 1000
    record = next(f.record() for f in find_runs(tmp_path) if f.path.name in tuned["run"])
    assert record["policy"]["options"]["gamma"] == tuned["value"]

    # Again: neither the search nor the runs are repeated.
    monkeypatch.setattr(parts.loads.Loads, "_measure", lambda *a: pytest.fail("measured again"))
    capsys.readouterr()
    assert start(*argv) == 0
    assert "(reused)" in capsys.readouterr().out
    again = pd.read_csv(tmp_path / "equal_load.csv").fillna({"options": "", "run": ""})
    pd.testing.assert_frame_equal(again, table)
    (file,) = (tmp_path / "equal_load_search").iterdir()
    assert all(load > 0 for load in json.loads(file.read_text()).values())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--target", "heavy"), "--target 'heavy'"),
        (("--target", "-1"), "--target"),
        (("--gamma", "1"), "gamma is searched for"),
        (("--mode", "infer"), "--mode infer"),
        (("--search-limit", "0"), "--search-limit"),
        (("--place-replicas", "4"), "--place-replicas goes with --place-by"),
        (("--place-by", "nowhere.json"), "cannot read 'nowhere.json'"),
        (("--place-by", "c.json", "--place-replicas", "3", "--ep-size", "4"), "multiple of"),
        (("--policy", "token-dorp"), "'token-drop'"),
    ],
)
def test_bad_input_is_one_line(start, capsys, argv, says):
    assert start(*argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_dry_run_names_every_policy_once(start, capsys):
    assert start("--dry-run") == 0
    out = capsys.readouterr().out
    assert "policy  macs" in out and "gamma" not in out
    assert out.count("policy  token-drop") == 2  # uniform and image-first


def test_policies_that_a_placement_refuses_say_so(start, tmp_path, parts):
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"load": [[9, 8, 7, 6, 4, 3, 2, 1]] * 3}))
    placing = ("--placement", "replicated", "--placement-file", str(file), "--ep-size", "4")
    assert start("--policy", "rank-tail", "expert-drop", "--target", "9", *placing) == 0
    table = pd.read_csv(tmp_path / "equal_load.csv").fillna({"run": ""})
    assert table["policy"].tolist() == ["placement replicated", "rank-tail", "expert-drop"]
    assert table["status"].iloc[0] == "baseline"
    refused = table.iloc[1]
    assert refused["status"].startswith("refused: policy 'rank-tail'") and refused["run"] == ""
    assert table["accuracy"].notna().tolist() == [True, False, True]


def test_the_search_looks_at_questions_of_all_kinds(parts):
    frame = pd.DataFrame({"index": range(10)})
    assert parts.loads.evenly_spaced(frame, 4)["index"].tolist() == [0, 2, 5, 7]
    for most in (None, 10, 99):
        assert parts.loads.evenly_spaced(frame, most) is frame


@pytest.mark.parametrize(("load", "says"), [(1.03, "met"), (1.2, "met on the 5 questions")])
def test_a_target_missed_on_all_questions_is_said(parts, load, says):
    assert parts.table._status(1.0, load, 5).startswith(says)
