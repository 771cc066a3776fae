"""Calibration of a tiny random model, against sums over what its routers really did."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from mm_capacity import limit_capacity, make_policy
from mm_capacity.calibration import SkipLayer, calibrate, training_conversations, write_table
from mm_capacity.data import digits
from mm_capacity.placement import longest_processing_time, rank_loads
from vlm_adapters.modality import Modality

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = 2


@pytest.fixture(scope="module")
def table(tiny_vlm):
    return calibrate(tiny_vlm, training_conversations(QUESTIONS))


@pytest.fixture(scope="module")
def inputs(tiny_vlm):
    return [tiny_vlm.prepare(c) for c in training_conversations(QUESTIONS)]


def logits(vlm, given):
    with torch.no_grad():
        return vlm.model(**given).logits


def test_loads_are_those_of_the_trace(tiny_vlm, table, inputs):
    with limit_capacity(tiny_vlm.model, make_policy("none")) as trace:
        for given in inputs:
            logits(tiny_vlm, given)
    frame = trace.frame()
    for key, rows in (
        ("load", frame),
        ("load_image", frame[frame["modality"] == "image"]),
        ("load_text", frame[frame["modality"] == "text"]),
    ):
        counts = rows.groupby(["layer", "expert"])["assigned"].sum()
        assert table[key] == [[int(counts.get((x, e), 0)) for e in range(8)] for x in range(3)]
    assert table["questions"] == QUESTIONS
    assert table["tokens"] == sum(given["input_ids"].numel() for given in inputs)


def test_alpha_is_the_divergence_without_that_layers_experts(tiny_vlm, table, inputs):
    """Experts whose output is replaced by zeros, by hand; KL from torch; text tokens only."""
    for number, layer in enumerate(tiny_vlm.adapter.moe_layers(tiny_vlm.model)):
        total, count = 0.0, 0
        for given in inputs:
            text = tiny_vlm.adapter.tag_tokens(given) == Modality.TEXT
            reference = logits(tiny_vlm, given)[text].double().log_softmax(-1)
            handle = layer.experts.register_forward_hook(lambda *a: torch.zeros_like(a[-1]))
            changed = logits(tiny_vlm, given)[text].double().log_softmax(-1)
            handle.remove()
            kl = torch.nn.functional.kl_div(changed, reference, reduction="sum", log_target=True)
            total, count = total + float(kl), count + len(reference)
        assert table["alpha"][number] == pytest.approx(total / count, rel=1e-4)
        assert table["alpha"][number] > 0


def test_marks_neighbours_and_ratios(table):
    for marks, image, text in zip(
        table["modality"], table["load_image"], table["load_text"], strict=True
    ):
        for mark, a, b in zip(marks, image, text, strict=True):
            a, b = a / sum(image), b / sum(text)
            assert mark == (1 if a > 1.25 * b else -1 if b > 1.25 * a else 0)
    assert any(1 in marks for marks in table["modality"])
    for rows in table["neighbours"]:
        assert [sorted([*row, e]) for e, row in enumerate(rows)] == [list(range(8))] * 8
    assert len(table["beta"]) == 3 and all(0 < beta <= 1 for beta in table["beta"])


def test_the_file_is_what_the_policies_read(tiny_vlm, table, inputs, tmp_path):
    path = tmp_path / "calibration.json"
    write_table({"source": {"model": "tiny"}, **table}, path)
    assert json.loads(path.read_text())["alpha"] == table["alpha"]
    plain = {"macs": {"gamma": 0.5}, "modes": {"tau_scale": 4.0}, "naee": {"beta": 1.0}}
    for name, options in plain.items():
        policy = make_policy(name, **options, calibration=str(path))
        with limit_capacity(tiny_vlm.model, policy, ep_size=2) as trace:
            changed = logits(tiny_vlm, inputs[0])
        with limit_capacity(tiny_vlm.model, make_policy(name, **options), ep_size=2):
            without = logits(tiny_vlm, inputs[0])
        assert trace.summary()["drop_frac"] > 0
        assert not torch.equal(changed, without), name
    placed = longest_processing_time(table["load"][0], 2)
    loads = rank_loads(torch.tensor(table["load"][0]), placed)
    assert loads.sum() == sum(table["load"][0]) and loads.max() < sum(table["load"][0]) * 0.6


def test_the_model_is_left_alone(tiny_vlm, inputs):
    before = logits(tiny_vlm, inputs[0])
    calibrate(tiny_vlm, training_conversations(1))
    assert torch.equal(before, logits(tiny_vlm, inputs[0]))
    with limit_capacity(tiny_vlm.model, SkipLayer(layer=1)) as trace:
        logits(tiny_vlm, inputs[0])
    assert trace.layers().groupby("layer")["kept"].sum().gt(0).tolist() == [True, False, True]


def test_only_training_digits_are_shown(monkeypatch):
    splits = []
    real = digits.draw_scene
    monkeypatch.setattr(
        digits, "draw_scene", lambda rng, split, **k: splits.append(split) or real(rng, split, **k)
    )
    asked = list(training_conversations(24))
    assert set(splits) == {"train"} and len(asked) == 24
    texts = [c[0]["content"][1]["text"] for c in asked]
    assert sum("Options:\nA. " in text for text in texts) == 12
    assert sum("Please answer yes or no." in text for text in texts) == 12
    again = [c[0]["content"][1]["text"] for c in training_conversations(24)]
    other = [c[0]["content"][1]["text"] for c in training_conversations(24, seed=1)]
    assert texts == again != other


def test_no_question_is_an_error(tiny_vlm):
    with pytest.raises(ValueError, match="at least one question"):
        calibrate(tiny_vlm, [])


@pytest.fixture
def script(monkeypatch, tiny_vlm):
    monkeypatch.setattr("vlm_adapters.load_model", lambda *a, **k: tiny_vlm)
    spec = importlib.util.spec_from_file_location("calibrate", ROOT / "scripts" / "calibrate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script(script, tmp_path, capsys):
    out = tmp_path / "c.json"
    argv = ["--model", "tiny:qwen3_vl_moe", "--limit", "1", "--out", str(out), "--no-alpha"]
    assert script.main(argv) == 0
    written = json.loads(out.read_text())
    assert "alpha" not in written and len(written["load"]) == 3
    assert written["source"]["model"] == "tiny:qwen3_vl_moe"
    assert "--limit 1" in written["source"]["command"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "--out is missing"),
        (("--out", "nowhere/c.json"), "'nowhere' does not exist"),
        (("--out", "c.json", "--data", "DIGITS_MCQ"), "is a test set"),
        (("--out", "c.json", "--limit", "0"), "--limit"),
    ],
)
def test_bad_input_is_one_line(script, capsys, argv, says):
    assert script.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
