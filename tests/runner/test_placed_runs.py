"""``--placement``: options, the run's hash and record, and a changed calibration file."""

from __future__ import annotations

import json

import pytest

from mm_capacity.errors import UserError
from mm_capacity.evaluation import datasets, scoring
from mm_capacity.evaluation.arguments import build_parser, parse
from mm_capacity.evaluation.options import make_plan
from mm_capacity.evaluation.records import find_runs
from mm_capacity.evaluation.results import collect
from mm_capacity.run import main
from tests.runner import fakes


def plan_of(*argv):
    return make_plan(parse(build_parser("run", ""), list(argv)))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--placement", "ltp"), "'lpt'"),
        (("--placement", "lpt"), "--placement lpt needs --ep-size"),
        (("--placement", "lpt", "--ep-size", "4"), "needs --placement-file"),
        (("--placement-file", "c.json"), "goes with --placement lpt or replicated"),
        (("--placement", "lpt", "--replicas", "4"), "--replicas goes with --placement replicated"),
        (
            ("--placement", "replicated", "--ep-size", "4", "--placement-file", "c.json",
             "--replicas", "6"),
            "--replicas 6 must be a multiple of --ep-size 4",
        ),
        (("--policy-arg", "placement=lpt"), "placement"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line(argv, says):
    with pytest.raises(UserError) as caught:
        plan_of(*argv)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_every_policy_of_the_plan_is_placed():
    given = ("--ep-size", "4", "--placement-file", "c.json")
    plan = plan_of("--placement", "replicated", *given)
    wanted = {"placement": "replicated", "placement_file": "c.json", "replicas": 4}
    for choice in plan.policies:
        assert wanted.items() <= dict(choice.options).items()
        assert "c.json" not in choice.slug and "replicated" in choice.slug
    assert plan.policies[0].name == "none" and len(plan.policies) == 19
    # contiguous, in words or not, is what it always was
    assert plan_of("--placement", "contiguous").policies == plan_of().policies


@pytest.fixture
def start(monkeypatch, tiny_vlm, tmp_path):
    world = fakes.World()
    monkeypatch.setattr(datasets, "open_dataset", world.open_dataset)
    monkeypatch.setattr(scoring, "score", world.score)
    monkeypatch.setattr("vlm_adapters.load_model", lambda *a, **k: tiny_vlm)
    fixed = ["--model", "tiny:qwen3_vl_moe", "--data", "SET_A", "--work-dir", str(tmp_path / "out")]

    def start(*argv):
        return main([*fixed, "--batch-size", "4", "--max-new-tokens", "1", "--ep-size", "4",
                     "--device", "cpu", "--check", *argv])  # fmt: skip

    return start


def records(tmp_path):
    return [folder.record() for folder in find_runs(tmp_path / "out")]


def test_hash_record_and_changed_file(start, tmp_path, capsys):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"load": [[9, 1, 8, 1, 7, 1, 6, 1]] * 3}))
    assert start("--policy", "none", "naee") == 0
    placing = ("--placement", "lpt", "--placement-file", str(file))
    assert start("--policy", "none", "naee", *placing) == 0
    plain = [r for r in records(tmp_path) if "placement" not in r["policy"]["options"]]
    first = [r for r in records(tmp_path) if "placement" in r["policy"]["options"]]
    assert len(plain) == len(first) == 2
    assert len({r["setting"] for r in plain}) == len({r["setting"] for r in first}) == 1
    assert plain[0]["setting"] != first[0]["setting"]
    for record in first:
        assert record["policy"]["options"]["placement"] == "lpt"
        assert record["identity"]["policy_files"].keys() == {"placement_file"}
        assert len(record["identity"]["policy_files"]["placement_file"]) == 64
    # Results show the runs placed alike, each beside the baseline placed alike.
    assert set(collect(tmp_path / "out")["run"].str.contains("lpt")) == {True}

    # The same file again: nothing is repeated. Another content: other runs, not mixed with these.
    capsys.readouterr()
    assert start("--policy", "none", "naee", *placing) == 0
    assert capsys.readouterr().out.count("(reused)") == 2
    file.write_text(json.dumps({"load": [[1, 9, 1, 9, 1, 9, 1, 9]] * 3}))
    assert start("--policy", "none", "naee", *placing) == 0
    assert capsys.readouterr().out.count("(reused)") == 0
    assert len(records(tmp_path)) == 6
    third = [r for r in records(tmp_path) if r["hash"] not in {x["hash"] for x in first + plain}]
    assert {r["setting"] for r in third}.isdisjoint({r["setting"] for r in first})


@pytest.mark.parametrize(("name", "content"), [("naee", {"beta": [1.0] * 3}), ("modes", None)])
def test_a_changed_calibration_file_of_a_policy_is_another_run(start, tmp_path, name, content):
    file = tmp_path / "c.json"
    hashes = set()
    for factor in (1.0, 0.5):
        table = content or {"alpha": [1.0] * 3}
        file.write_text(json.dumps({k: [factor * x for x in v] for k, v in table.items()}))
        assert start("--policy", name, "--no-baseline", "--policy-arg", f"calibration={file}") == 0
        hashes |= {r["identity"]["policy_files"]["calibration"] for r in records(tmp_path)}
    assert len(records(tmp_path)) == len(hashes) == 2


def test_copies_and_a_policy_that_needs_one_rank_are_refused_before_the_start(
    start, tmp_path, capsys
):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"load": [[9, 1, 8, 1, 7, 1, 6, 1]] * 3}))
    argv = ("--placement", "replicated", "--placement-file", str(file))
    assert start("--policy", "rank-tail", *argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'rank-tail'" in line and "4 replicas" in line
    assert not any(r.get("answers_complete") for r in records(tmp_path))
    assert start("--policy", "none", *argv) == 0
