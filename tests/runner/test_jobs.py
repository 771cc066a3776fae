"""``--jobs``: several processes make the runs that one makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mm_capacity.errors import UserError
from mm_capacity.evaluation.arguments import build_parser, parse
from mm_capacity.evaluation.jobs import shares
from mm_capacity.evaluation.options import make_plan
from mm_capacity.run import main

SMALL = ["--limit", "4", "--gamma", "0.5", "--policy", "token-drop", "--modality", "image-first"]


def plan_of(*argv: str):
    return make_plan(parse(build_parser("run", ""), argv))


def answers(work_dir: Path) -> dict[str, list[tuple]]:
    found = {}
    for file in work_dir.glob("digits-moe/*/*/predictions.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        name = str(file.parent.relative_to(work_dir))
        found[name] = [(row["index"], row["prediction"]) for row in rows]
    return found


def test_shares_are_the_plan(tmp_path):
    plan = plan_of("--jobs", "2", "--work-dir", str(tmp_path))
    parts = shares(plan)
    assert [[d.name for d in part.data] for part in parts] == [["DIGITS_MCQ"], ["DIGITS_YN"]]
    assert all(part.policies == plan.policies for part in parts)
    assert all(part.trace_window == plan.trace_window for part in parts)


def test_more_processes_than_data_sets():
    with pytest.raises(UserError, match="--jobs 3: .* there are 2; give at most 2"):
        plan_of("--jobs", "3")
    with pytest.raises(UserError, match="there is 1; give at most 1"):
        plan_of("--jobs", "2", "--data", "DIGITS_YN")


def test_two_processes_make_the_same_runs(tmp_path, capfd):
    one, two = tmp_path / "one", tmp_path / "two"
    assert main([*SMALL, "--work-dir", str(one)]) == 0
    assert main([*SMALL, "--work-dir", str(two), "--jobs", "2", "--fresh"]) == 0
    assert len(answers(one)) == 4
    assert answers(one) == answers(two)
    assert "[2/2] digits-moe DIGITS_YN token-drop" in (two / "job-1.log").read_text()
    assert "a process of its own runs DIGITS_YN" in capfd.readouterr().out
    assert (two / "results.csv").exists()
