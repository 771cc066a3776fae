"""The comparison at equal load: the search by itself, and the whole script on a tiny model."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from mm_capacity.evaluation import datasets, scoring
from mm_capacity.evaluation.records import find_runs
from tests.runner import fakes

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script():
    path = ROOT / "scripts" / "compare_at_equal_load.py"
    spec = importlib.util.spec_from_file_location("compare_at_equal_load", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def rising(script, low=0.01, high=16.0, whole=False):
    return script.Knob("gamma", low, high, True, whole)


class Counted:
    """A load function that counts its calls by value."""

    def __init__(self, load):
        self.load, self.asked = load, []

    def __call__(self, value):
        if value not in self.asked:
            self.asked.append(value)
        return self.load(value)


@pytest.mark.parametrize("target", [0.3, 1.1, 1.25, 1.5])
def test_a_continuous_knob_meets_its_target_from_below(script, target):
    load_at = Counted(lambda gamma: min(gamma, 1.8))
    found = script.find_knob(rising(script), target, load_at)
    assert found.met and target * 0.98 <= found.load <= target
    assert len(load_at.asked) <= script.STEPS + 2


@pytest.mark.parametrize("target", [0.6, 1.1, 1.25])
def test_a_knob_that_lowers_the_load(script, target):
    knob = script.Knob("tau_scale", 0.0, 50.0, False, False)
    found = script.find_knob(knob, target, lambda tau: 1.6 / (1 + tau))
    assert found.met and target * 0.98 <= found.load <= target
    assert 1.6 / (1 + found.value) == found.load


def test_a_target_out_of_reach_is_said(script):
    found = script.find_knob(rising(script), 2.0, lambda gamma: min(gamma, 1.8))
    assert not found.met and found.value is None
    assert found.status == "cannot: the load is never above 1.800 at gamma=16"
    found = script.find_knob(rising(script), 1.1, lambda gamma: max(gamma, 1.2))
    assert found.value is None
    assert found.status == "cannot: the load is never below 1.200 at gamma=0.01"


def test_a_knob_with_steps_names_both_neighbours(script):
    loads = {0: 0.1, 1: 0.7, 2: 1.3}
    knob = rising(script, 0, 64, whole=True)
    found = script.find_knob(knob, 1.1, lambda keep: loads[min(keep, 2)])
    assert (found.value, found.load, found.met) == (1, 0.7, False)
    assert found.status == "not met: nearest are 0.700 at gamma=1 and 1.300 at gamma=2"
    exact = script.find_knob(knob, 0.7, lambda keep: loads[min(keep, 2)])
    assert exact.met and exact.value == 1


def test_every_policy_has_a_knob_that_its_class_takes_or_says_so(script):
    from mm_capacity.evaluation.plan import PolicyChoice
    from mm_capacity.policies import POLICIES

    without = set()
    for name in POLICIES:
        choice = PolicyChoice(name)
        knob = script.knob_of(choice)
        if knob is None:
            without.add(name)
            continue
        assert knob.low < knob.high
        for value in (knob.low, knob.high):
            built = script.turned(choice, knob, value).build()
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


def test_end_to_end(start, tmp_path, script, monkeypatch, capsys):
    # An expert's share of these short questions is a few assignments: loads come in wide steps.
    monkeypatch.setattr(script, "CLOSE_FRAC", 0.25)
    argv = (
        *("--policy", "token-drop", "visual-top-k", "expert-drop", "--modality", "image-first"),
        *("--target", "0.9", "9"),
    )
    assert start(*argv) == 0
    table = pd.read_csv(tmp_path / "equal_load.csv").fillna({"options": "", "run": ""})
    assert table["policy"].tolist() == ["none", *["token-drop"] * 2, *["visual-top-k"] * 2,
                                        "expert-drop"]  # fmt: skip

    def row_of(policy, target):
        (found,) = (row for _, row in table.iterrows()
                    if (row["policy"], row["target"]) == (policy, target))  # fmt: skip
        return found

    tuned = row_of("token-drop", 0.9)
    assert tuned["status"] == "met" and tuned["options"] == "modality=image-first order=score"
    assert 0.9 * (1 - script.CLOSE_FRAC) <= tuned["load"] <= 0.9
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
    assert table.iloc[-1]["status"] == script.NOT_SEARCHED

    text = (tmp_path / "equal_load.md").read_text()
    for word in ("compare_at_equal_load.py", "--target 0.9 9", "Seed: 0", "transformers", "cannot"):
        assert word in text
    assert (tmp_path / "equal_load.png").stat().st_size > 1000
    record = next(f.record() for f in find_runs(tmp_path) if f.path.name in tuned["run"])
    assert record["policy"]["options"]["gamma"] == tuned["value"]

    # Again: neither the search nor the runs are repeated.
    monkeypatch.setattr(script.Loads, "_measure", lambda *a: pytest.fail("measured again"))
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
