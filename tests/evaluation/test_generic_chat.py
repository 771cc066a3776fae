"""A checkpoint that VLMEvalKit has no wrapper for, asked through its processor's chat template."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from transformers import GenerationConfig

from mm_capacity import make_policy
from mm_capacity import run as command_line
from mm_capacity.evaluation.generate import answer
from mm_capacity.evaluation.models import ModelHandle
from mm_capacity.evaluation.plan import ModelChoice, Settings
from mm_capacity.evaluation.records import find_runs
from tests.evaluation import tiny_checkpoints
from tests.pictures import picture, question
from vlm_adapters.modality import Modality

NONE = make_policy("none")


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    folder = tiny_checkpoints.glm(tmp_path_factory.mktemp("generic"))
    # As many instruction-tuned checkpoints: sampling is their default.
    GenerationConfig(
        do_sample=True, temperature=2.0, top_k=50, eos_token_id=2, pad_token_id=0
    ).save_pretrained(folder)
    return folder


def load(folder, **settings):
    return ModelHandle(ModelChoice("m", str(folder)), Settings(device="cpu", **settings)).vlm


INTERLEAVED = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "First "},
            {"type": "image", "image": picture(1)},
            {"type": "text", "text": " then "},
            {"type": "image", "image": picture(2)},
            {"type": "text", "text": ": which one is darker?"},
        ],
    }
]


def test_images_stand_where_they_were_asked(glm):
    vlm = load(glm)
    inputs = vlm.prepare(INTERLEAVED)
    text = vlm.processor.tokenizer.decode(inputs["input_ids"][0])
    images = "<|image_start|>" + "<|image|>" * 4 + "<|image_end|>"
    assert text == f"First {images} then {images}: which one is darker?<|turn|>"
    assert int((vlm.adapter.tag_tokens(inputs) == Modality.IMAGE).sum()) == 8


def test_a_batch_is_padded_on_the_left_and_answers_as_one_by_one(glm):
    vlm = load(glm, dtype="float32")
    conversations = [question("Short?", picture(0)), INTERLEAVED, question("No picture at all.")]
    batch = vlm.prepare_batch(conversations)
    tags = vlm.adapter.tag_tokens(batch)
    padding = (tags == Modality.PAD).int()
    assert padding.sum(1).tolist()[1] == 0 and (padding.sum(1) > 0).tolist() == [True, False, True]
    assert (padding.diff(dim=1) <= 0).all()  # padding first, then tokens
    policy = make_policy("token-drop", gamma=0.5, modality="image-first", window="sequence")
    for chosen in (NONE, policy):
        together = answer(vlm, batch, chosen, max_new_tokens=4, check=True).texts
        alone = [
            answer(vlm, vlm.prepare(one), chosen, max_new_tokens=4, check=True).texts[0]
            for one in conversations
        ]
        assert together == alone


def test_decoding_is_greedy_and_as_long_as_asked(glm):
    vlm = load(glm)
    assert vlm.model.generation_config.do_sample
    inputs = vlm.prepare(INTERLEAVED)
    texts = {answer(vlm, inputs, NONE, max_new_tokens=5, seed=seed).texts[0] for seed in range(4)}
    assert len(texts) == 1
    out = vlm.model(**inputs).logits[0, -1].argmax()
    one = answer(vlm, inputs, NONE, max_new_tokens=1).texts[0]
    assert one == vlm.processor.tokenizer.decode(out, skip_special_tokens=True).strip()


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_pixels_come_in_the_models_dtype(glm, dtype):
    vlm = load(glm, dtype=dtype)
    wanted = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    assert vlm.model.dtype is wanted  # the folder's is float32
    assert vlm.prepare(INTERLEAVED)["pixel_values"].dtype is wanted


@pytest.mark.parametrize("family", ["aria", "llama4", "kimi_k25", "deepseek_ocr2"])
def test_vision_towers_that_do_not_cast_run_in_half_precision(family):
    from vlm_adapters import load_model
    from vlm_adapters.tiny_build import to_dtype

    vlm = load_model(f"tiny:{family}")
    to_dtype(vlm.model, torch.bfloat16)
    answered = answer(vlm, vlm.prepare(INTERLEAVED), NONE, max_new_tokens=2)
    assert set(answered.loads["modality"]) == {"image", "text"}


@pytest.fixture
def copy_of(glm, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(glm, folder)
    return folder


def test_the_whole_command(glm, tmp_path):
    argv = ("--model", str(glm), "--data", "DIGITS_MCQ", "--limit", "3", "--batch-size", "2")
    argv += ("--gamma", "0.5", "--dtype", "bfloat16", "--max-new-tokens", "3", "--check")
    argv += ("--device", "cpu", "--mode", "infer", "--work-dir", str(tmp_path))
    assert command_line.main(argv) == 0
    found = [folder.record() for folder in find_runs(tmp_path)]
    assert len(found) == 3 and {record["dtype"] for record in found} == {"bfloat16"}
    capped = [record for record in found if record["policy"]["name"] != "none"]
    assert all(record["load"]["drop_frac_image"] > 0 for record in capped)


def test_no_chat_template_is_one_line(copy_of, tmp_path, capsys):
    (copy_of / "chat_template.jinja").unlink()
    argv = ("--model", str(copy_of), "--data", "DIGITS_MCQ", "--limit", "2", "--device", "cpu")
    assert command_line.main([*argv, "--work-dir", str(tmp_path / "out")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "Glm4vProcessor has no chat template" in line and "instruction-tuned" in line


def test_a_tokenizer_without_padding_token(copy_of):
    path = copy_of / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    assert settings.pop("pad_token") == "<|pad|>"
    path.write_text(json.dumps(settings))
    vlm = load(copy_of)
    batch = vlm.prepare_batch([question("Short?", picture(0)), INTERLEAVED])
    assert (vlm.adapter.tag_tokens(batch)[0] == Modality.PAD).any()
