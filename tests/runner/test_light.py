"""What needs no model comes back at once and imports nothing heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "vlmeval", "pandas", "matplotlib", "sklearn")
LIMIT_S = 2.0
ATTEMPTS = 3  # the limit is about the program, not about what else the machine is doing

PROBE = """
import json, sys
from mm_capacity.run import main
try:
    code = main(json.loads(sys.argv[1]))
except SystemExit as stop:
    code = stop.code or 0
heavy = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
print(json.dumps({"code": code, "heavy": heavy}))
"""


def start(*argv: str) -> tuple[dict, str, str, float]:
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(argv), json.dumps(HEAVY)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    seconds = time.perf_counter() - begin
    lines = done.stdout.strip().splitlines()
    assert lines, done.stderr
    return json.loads(lines[-1]), "\n".join(lines[:-1]), done.stderr, seconds


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["--help"], 0, "--gamma"),
        (["--dry-run"], 0, "38 runs"),
        (["--dry-run", "--data", "MMBench_DEV_EN", "MME"], 0, "MolmoE"),
        (["--dry-run", "--config", "configs/digits.json"], 0, "38 runs"),
        (["--dry-run", "--config", "configs/qwen3_vl_moe_mmbench_mme.json"], 0, "10 runs"),
        (["--list", "policies"], 0, "token-drop"),
        (["--list", "models"], 0, "digits-moe"),
        (["--list", "data"], 0, "DIGITS_MCQ"),
        (["--list", "plots"], 0, "expert_load"),
        (["--list", "polices"], 2, "'policies'"),
        (["--gamma", "0"], 2, "gamma"),
        (["--policy", "tokn-drop"], 2, "token-drop"),
        (["--work-dir", "pyproject.toml/x"], 2, "work"),
        (["--config", "no.json"], 2, "no.json"),
        (["--nonsense"], 2, "--nonsense"),
    ],
)
def test_light_commands(argv, code, says):
    best = float("inf")
    for _ in range(ATTEMPTS):
        report, out, err, seconds = start(*argv)
        assert report == {"code": code, "heavy": []}
        assert says in (out if code == 0 else err)
        if code == 2:
            assert len(err.strip().splitlines()) == 1
        best = min(best, seconds)
        if best < LIMIT_S:
            break
    assert best < LIMIT_S


def test_the_policy_options_are_those_of_the_classes():
    import dataclasses
    import importlib

    from mm_capacity.evaluation.policy_options import policy_fields
    from mm_capacity.policies import POLICIES

    for name, place in POLICIES.items():
        module, _, attribute = place.partition(":")
        cls = getattr(importlib.import_module(module), attribute)
        assert policy_fields(name) == {f.name for f in dataclasses.fields(cls) if f.init}
