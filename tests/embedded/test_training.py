"""The training script's own claims: packing changes nothing, prompts are the benchmark's."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def parts():
    """The script's modules, its tokenizer and an untrained model."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import train_digits_model as script
        from digits_model import architecture, batches, tokenizer
    finally:
        sys.path.remove(str(SCRIPTS))
    torch.manual_seed(0)
    text = tokenizer.build_tokenizer()
    return script, architecture, batches, text, architecture.build_model(text).eval()


@torch.no_grad()
def test_a_packed_question_is_computed_as_it_is_alone(parts):
    """Every answer token of a packed row gets the logits of a prompt with that one question."""
    script, architecture, batches, tokenizer, model = parts
    maker = batches.BatchMaker(tokenizer, seed=3)
    packed = maker.make(2, 3, reading=1)
    together = script.forward(model, packed)

    again = batches.BatchMaker(tokenizer, seed=3)
    processor = architecture.build_processor(tokenizer)
    for row in range(2):
        scene = batches.draw_scene(again.rng, "train", batches.warp_glyph)
        segments = again._segments(scene, 3, 1, batches.OFTEN)
        where = torch.nonzero(packed.labels[row] != batches.IGNORE).flatten().tolist()
        for _, prompt, target in segments:
            messages = [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": scene.image},
                        {"type": "text", "text": prompt},
                    ],
                }
            ]
            inputs = processor.apply_chat_template(
                [messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
            answer = torch.tensor([maker.encode(target) + maker.end])
            length = inputs["input_ids"].shape[1]
            inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], dim=1)
            for key, fill in (("attention_mask", 1), ("mm_token_type_ids", 0)):
                inputs[key] = torch.cat([inputs[key], torch.full_like(answer, fill)], dim=1)
            alone = model(**inputs).logits[0, length - 1 : -1]
            mine, where = where[: answer.shape[1]], where[answer.shape[1] :]
            assert packed.labels[row, mine].tolist() == answer[0].tolist()
            torch.testing.assert_close(together[row, mine], alone, atol=2e-4, rtol=1e-4)
        assert not where


def test_the_processor_makes_the_training_pixels(parts):
    _, architecture, batches, tokenizer, _ = parts
    scene = batches.draw_scene(random.Random(1), "train")
    processor = architecture.build_processor(tokenizer)
    made = processor.image_processor(images=[scene.image], return_tensors="pt")
    assert made["image_grid_thw"].tolist() == [[1, 12, 12]]
    torch.testing.assert_close(
        made["pixel_values"], batches.patchify(scene.image), atol=1e-6, rtol=0
    )


def test_text_only_batches_teach_only_what_follows_from_the_text(parts):
    """What the picture tells (digits, colours, readings) is never learned without it."""
    _, _, batches, tokenizer, _ = parts
    for batch in (
        batches.BatchMaker(tokenizer, seed=0).make(3, 8, reading=0, with_image=False),
        batches.BatchMaker(tokenizer, seed=1).drills(3, options=0, sums=0, questions=8),
    ):
        assert batch.pixels is None
        learned = [tokenizer.decode([t]).strip() for t in batch.labels[batch.labels >= 0].tolist()]
        results = {"larger", "smaller", "equal", *(str(n) for n in range(19))}
        assert set(learned) <= {"A", "B", "C", "D", "yes", "no", "<|im_end|>"} | results
        assert not set(learned).isdisjoint(results)


@pytest.mark.parametrize(
    ("target", "picture"),
    [
        ("3+4=7 B", "3+4="),
        ("red,none,blue=1 no", "red,none,blue="),
        ("3,7 smaller A", "3,7"),
        ("red C", "red"),
        ("5 yes", "5"),
    ],
)
def test_what_only_the_picture_tells(parts, target, picture):
    assert parts[2].given(target) == picture


def test_the_tokenizer_reads_any_text(parts):
    tokenizer = parts[3]
    text = "Ünïcode 漢字 🙂 12 + 3?\n\tA. None"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_balance_loss_is_one_when_balanced(parts):
    """1 under uniform routing, E for a collapsed router."""
    script = parts[0]
    experts, rows = 4, 4
    uniform = torch.eye(experts) * 1e-6
    valid = torch.ones(rows, dtype=torch.bool)
    assert float(script.balance_loss([uniform], valid, 1)) == pytest.approx(1, abs=1e-4)
    collapsed = torch.zeros(rows, experts)
    collapsed[:, 0] = 50
    assert float(script.balance_loss([collapsed], valid, 1)) == pytest.approx(experts, abs=1e-4)


@pytest.mark.long
def test_the_script_runs(parts, tmp_path, monkeypatch):
    script = parts[0]
    monkeypatch.setattr(
        sys,
        "argv",
        ["train", "--out", str(tmp_path), "--scale", "0.002"],
    )
    script.main()
    from vlm_adapters import load_model

    assert load_model(str(tmp_path)).adapter.name == "qwen3_vl_moe"
