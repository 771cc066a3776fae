"""A real process, really killed, loses at most the answer in flight."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mm_capacity import run as command_line
from mm_capacity.evaluation import datasets, scoring
from mm_capacity.evaluation.records import find_runs
from tests.runner.fakes import World

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = [
    *("--model", "tiny:qwen3_vl_moe", "--data", "SET_A", "--gamma", "0.5"),
    *("--policy", "token-drop", "--no-baseline", "--max-new-tokens", "1", "--device", "cpu"),
]

SLOW_RUN = """
import json, sys, time
from mm_capacity import run as command_line
from mm_capacity.evaluation import datasets, scoring, single
from tests.runner.fakes import World
world = World()
datasets.open_dataset, scoring.score = world.open_dataset, world.score
real = single.answer
def slow(*args, **kwargs):
    answered = real(*args, **kwargs)
    time.sleep(0 if single_calls.append(1) or len(single_calls) < 3 else 600)
    return answered
single_calls = []
single.answer = slow
sys.exit(command_line.main(json.loads(sys.argv[1])))
"""


def kill_after_two_answers(work_dir: Path) -> int:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_RUN, json.dumps([*ARGUMENTS, "--work-dir", str(work_dir)])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            assert process.poll() is None, process.stderr.read()
            runs = find_runs(work_dir)
            if runs and len(runs[0].predictions()) == 2:
                break
            time.sleep(0.1)
    finally:
        process.kill()
        process.communicate()
    return process.returncode


def test_what_was_answered_is_kept_and_the_rest_is_asked(tmp_path, monkeypatch, tiny_vlm):
    assert kill_after_two_answers(tmp_path / "killed") == -signal.SIGKILL
    (folder,) = find_runs(tmp_path / "killed")
    assert len(folder.predictions()) == 2
    assert folder.record()["status"] == "running"
    kept = folder.predictions_file.read_text("utf-8")

    world = World()
    monkeypatch.setattr(datasets, "open_dataset", world.open_dataset)
    monkeypatch.setattr(scoring, "score", world.score)
    monkeypatch.setattr("vlm_adapters.load_model", lambda *a, **k: tiny_vlm)
    monkeypatch.setattr("mm_capacity.report.PLOTS", {})
    for work_dir in (tmp_path / "killed", tmp_path / "whole"):
        assert command_line.main([*ARGUMENTS, "--work-dir", str(work_dir)]) == 0
    assert world.opened[0].asked == [20, 30]
    (whole,) = find_runs(tmp_path / "whole")
    assert folder.predictions_file.read_text("utf-8").startswith(kept)
    assert world.scored[0] == world.scored[1]
    assert folder.record()["load"] == whole.record()["load"]
    assert folder.record()["status"] == "done"
