"""``python -m mm_capacity.inspect``."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from mm_capacity.inspect import main
from mm_capacity.inspection.doctor import examine
from mm_capacity.inspection.model import default_conversation
from vlm_adapters import load_model
from vlm_adapters.base import RouterChoice

WITHOUT_TORCH = (
    "import sys; from mm_capacity.inspect import main\n"
    "try:\n    code = main({arguments!r})\nexcept SystemExit as error:\n    code = error.code\n"
    "assert 'torch' not in sys.modules, 'torch was imported'\nsys.exit(code)"
)


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        (["--help"], 0, "usage: python -m mm_capacity.inspect"),
        (["--families"], 0, "qwen3_vl_moe"),
        ([], 2, "error: one of the arguments --families --model --tiny is required"),
        (["--tiny", "nope"], 2, "error: unknown family 'nope'; known: aria"),
        (["--nope"], 2, "error: "),
        (["--tiny", "aria", "--limit", "3"], 2, "error: --limit needs --data"),
        (["--tiny", "aria", "--gamma", "0"], 2, "error: --gamma must be a finite number"),
        (["--tiny", "aria", "--dtype", "int4"], 2, "error: unknown dtype 'int4'"),
        (["--tiny", "aria", "--data", "D", "--limit", "0"], 2, "error: --limit must be at least 1"),
    ],
)
def test_what_needs_no_model_needs_no_torch(arguments, code, said):
    start = time.process_time()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH.format(arguments=arguments)],
        capture_output=True,
        text=True,
    )
    assert time.process_time() - start < 2
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr
    if code:
        assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family", ["glm4v_moe", "olmoe", "qwen3_vl_moe", "llama4", "molmoe", "deepseek_vl2"]
)
def test_a_healthy_model(family, capsys):
    assert main(["--tiny", family]) == 0
    out = capsys.readouterr().out
    for word in ("layers", "experts   E = ", "router", "backend", "tokens", "straggler", "doctor"):
        assert word in out
    assert out.count("  ok  ") == 5
    assert out.strip().endswith("verdict   healthy")


def test_the_groups_and_the_backend_are_named(capsys):
    main(["--tiny", "glm4v_moe"])
    out = capsys.readouterr().out
    assert "sigmoid + bias for the choice, groups by sum of two" in out
    assert "(1 of 2 groups)" in out
    assert "Glm4vMoeTextExperts by grouped_mm" in out
    assert "8 image" in out


def test_prompts_of_a_data_set(capsys, tmp_path):
    code = main(
        [
            "--tiny",
            "qwen3_vl_moe",
            "--data",
            "DIGITS_MCQ",
            "--limit",
            "2",
            "--lmu-data",
            str(tmp_path),
        ]
    )
    assert code == 0, capsys.readouterr()
    assert " image" in capsys.readouterr().out


@pytest.mark.parametrize(
    "model, said",
    [("/no/such/folder", "does not exist"), ("tiny:diffusion_gemma", "block diffusion")],
)
def test_a_model_that_cannot_be_loaded(model, said, capsys):
    assert main(["--model", model]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1


def findings(vlm) -> dict[str, bool]:
    inputs = vlm.prepare(default_conversation(vlm))
    return {finding.name: finding.ok for finding in examine(vlm, inputs, gamma=0.25)}


def test_the_doctor_sees_a_router_that_is_misread(monkeypatch):
    vlm = load_model("tiny:glm4v_moe")
    honest = type(vlm.adapter).read_scores

    def misread(self, layer, output, hidden):
        choice = honest(self, layer, output, hidden)
        scores = torch.softmax(output[0], dim=-1)
        return RouterChoice(scores, choice.index, choice.weights, choice.allowed)

    monkeypatch.setattr(type(vlm.adapter), "read_scores", misread)
    assert not findings(vlm)["router is read right"]


def test_the_doctor_sees_experts_that_ignore_the_policy():
    """The experts compute from what the router said, whatever is handed to them."""
    vlm = load_model("tiny:glm4v_moe")
    for layer in vlm.adapter.moe_layers(vlm.model):
        layer.block.experts.forward = lambda hidden, index, weights: hidden
    result = findings(vlm)
    assert result["none is bit-identical"]
    assert not result["gamma 0.25 drops and load <= C"]


@pytest.mark.parametrize("family", ["glm4v_moe", "molmoe", "deepseek_vl2"])
def test_the_doctor_sees_an_image_that_is_not_tagged(family, monkeypatch):
    vlm = load_model(f"tiny:{family}")
    assert findings(vlm)["image tokens are tagged"]
    inputs = vlm.prepare(default_conversation(vlm))
    monkeypatch.setattr(
        type(vlm.adapter), "tag_tokens", lambda self, inputs: torch.zeros_like(inputs["input_ids"])
    )
    found = {each.name: each.ok for each in examine(vlm, inputs, gamma=0.25)}
    assert not found["image tokens are tagged"]
