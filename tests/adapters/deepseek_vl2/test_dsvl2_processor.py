"""The processor against what the original processor made."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
import torch
from dsvl2_data import DATA, meta, sample
from PIL import Image
from safetensors.torch import load_file

from vlm_adapters.deepseek_vl2.image_processing import (
    DeepseekVLV2ImageProcessor,
    best_resolution,
)
from vlm_adapters.deepseek_vl2.processing import DeepseekVLV2Processor
from vlm_adapters.deepseek_vl2.tiny import tiny_processor

RECORD = json.loads((DATA / "processor" / "meta.json").read_text(encoding="utf-8"))
CASES = RECORD["cases"]
KEYS = ("input_ids", "attention_mask", "images_seq_mask", "images_spatial_crop")
MODEL_SAMPLES = [(kind, name) for kind in ("mha", "mla") for name in meta(kind)["samples"]]


@pytest.fixture
def processor(folder: Any) -> DeepseekVLV2Processor:
    return DeepseekVLV2Processor.from_pretrained(folder("mha"))


def case_images(case: dict[str, Any]) -> list[Image.Image]:
    names = [name for turn in case["conversation"] for name in turn.get("images", [])]
    return [Image.open(DATA / "processor" / "images" / name) for name in names]


def without_names(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": turn["role"], "content": turn["content"]} for turn in conversation]


def as_parts(conversation: list[dict[str, Any]], images: list[Image.Image]) -> list[Any]:
    """The same conversation with images as content parts between the texts."""
    left = iter(images)
    messages = []
    for turn in conversation:
        parts: list[dict[str, Any]] = []
        for position, text in enumerate(turn["content"].split("<image>")):
            if position:
                parts.append({"type": "image", "image": next(left)})
            parts.append({"type": "text", "text": text})
        messages.append({"role": turn["role"], "content": parts})
    return messages


def images_beside_text(conversation: list[dict[str, Any]], images: list[Image.Image]) -> list[Any]:
    """Images as parts in front, and the text with its markers."""
    left = iter(images)
    messages = []
    for turn in conversation:
        count = turn["content"].count("<image>")
        parts: list[dict[str, Any]] = [{"type": "image", "image": next(left)} for _ in range(count)]
        parts.append({"type": "text", "text": turn["content"]})
        messages.append({"role": turn["role"], "content": parts})
    return messages


@pytest.mark.parametrize("how", ["images apart", "parts between", "parts in front"])
@pytest.mark.parametrize("name", CASES)
def test_ids_masks_and_crops_are_equal(
    processor: DeepseekVLV2Processor, name: str, how: str
) -> None:
    case, images = CASES[name], case_images(CASES[name])
    wanted = load_file(DATA / "processor" / f"{name}.safetensors")
    if how == "parts between":
        made = processor(conversations=as_parts(case["conversation"], images))
    elif how == "parts in front":
        made = processor(conversations=images_beside_text(case["conversation"], images))
    else:
        made = processor(conversations=without_names(case["conversation"]), images=images)
    for key in KEYS:
        assert made[key].dtype == wanted[key].dtype
        assert torch.equal(made[key], wanted[key]), key
    assert list(made["images"].shape) == case["images_shape"]
    spans = [len(run) for run in _runs(made["images_seq_mask"][0].tolist())]
    assert sum(spans) == case["image_token_count"]


def _runs(mask: list[bool]) -> list[list[int]]:
    runs: list[list[int]] = []
    for position, marked in enumerate(mask):
        if marked and position and mask[position - 1]:
            runs[-1].append(position)
        elif marked:
            runs.append([position])
    return runs


@pytest.mark.parametrize("name", ["gray", "rgba", "tall", "wide", "two_images"])
def test_tiles_are_within_one_grey_level(processor: DeepseekVLV2Processor, name: str) -> None:
    made = processor(
        conversations=without_names(CASES[name]["conversation"]), images=case_images(CASES[name])
    )["images"]
    stacked = torch.from_numpy(np.array(Image.open(DATA / "processor" / f"{name}.tiles.png")))
    wanted = (stacked.unflatten(0, (-1, 384)).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
    assert (made[0] - wanted).abs().max() <= 2 / 255 + 1e-6


@pytest.mark.parametrize("name", CASES)
def test_tiles_equal_the_recorded_ones_bitwise_or_in_the_mean(
    processor: DeepseekVLV2Processor, name: str
) -> None:
    case = CASES[name]
    made = processor(conversations=without_names(case["conversation"]), images=case_images(case))[
        "images"
    ]
    digest = hashlib.sha256(made.contiguous().numpy().tobytes()).hexdigest()
    # Bitwise with the recording Pillow; another one may differ by a grey level here and there.
    if digest != case["images_float32_sha256"]:
        means = made[0].double().mean((1, 2, 3))
        assert torch.allclose(means, torch.tensor(case["tile_means"]).double(), atol=1e-3)


@pytest.mark.parametrize(("kind", "name"), MODEL_SAMPLES)
def test_model_samples_come_out_of_their_images(folder: Any, kind: str, name: str) -> None:
    made_by = DeepseekVLV2Processor.from_pretrained(folder(kind))
    file = DATA / kind / f"{name}.image0.png"
    images = [Image.open(file)] if file.exists() else []
    made = made_by(conversations=meta(kind)["samples"][name]["conversation"], images=images)
    wanted = sample(kind, name)
    for key in KEYS:
        assert torch.equal(made[key], wanted[key]), key
    assert (made["images"] - wanted["images"]).abs().max() <= 2 / 255 + 1e-6


def test_batch_is_padded_left(processor: DeepseekVLV2Processor) -> None:
    wanted = load_file(DATA / "processor" / "batch.safetensors")
    order = RECORD["batch"]["order"]
    made = processor(
        conversations=[without_names(CASES[name]["conversation"]) for name in order],
        images=[case_images(CASES[name]) for name in order],
    )
    for key in KEYS:
        assert torch.equal(made[key], wanted[key].to(made[key].dtype)), key
    assert list(made["images"].shape) == RECORD["batch"]["images_shape"]
    assert not made["images"][1].any()


def test_raw_prompt(processor: DeepseekVLV2Processor) -> None:
    record = RECORD["prompt_mode"]
    made = processor(text=record["prompt"], images=[Image.new("RGB", (64, 64))])
    ids = made["input_ids"][0]
    assert len(ids) == record["len"]
    assert ids[~made["images_seq_mask"][0]].tolist() == record["text_ids"]
    again = processor(prompt=record["prompt"], images=[Image.new("RGB", (64, 64))])
    assert torch.equal(again["input_ids"], made["input_ids"])


@pytest.mark.parametrize("text", RECORD["tokenizer"]["ids"])
def test_tokenizer_is_a_byte_level_bpe(processor: DeepseekVLV2Processor, text: str) -> None:
    made = processor.tokenizer.encode(text, add_special_tokens=False)
    assert made == RECORD["tokenizer"]["ids"][text]


def test_best_resolutions() -> None:
    candidates = json.loads((DATA / "mha" / "config.json").read_text())["candidate_resolutions"]
    assert len(RECORD["best_resolution"]) == 82
    for size, wanted in RECORD["best_resolution"]:
        found = best_resolution(tuple(size), [tuple(one) for one in candidates])
        assert list(found) == wanted, size


def test_missing_tokens_are_added_in_order(folder: Any) -> None:
    target = folder("mha")
    added = RECORD["tokenizer"]["special"]
    names = ["<image>", "<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>"]
    names += ["<|User|>", "<|Assistant|>"]
    tokens = json.loads((target / "tokenizer.json").read_text())
    tokens["added_tokens"] = [one for one in tokens["added_tokens"] if one["content"] not in names]
    (target / "tokenizer.json").write_text(json.dumps(tokens))
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings.pop("additional_special_tokens")
    settings["added_tokens_decoder"] = {
        key: one
        for key, one in settings["added_tokens_decoder"].items()
        if one["content"] not in names
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = DeepseekVLV2Processor.from_pretrained(target).tokenizer
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in added} == added
    assert tokenizer.padding_side == "left"


def test_saved_processor_is_the_same(processor: DeepseekVLV2Processor, tmp_path: Any) -> None:
    processor.save_pretrained(tmp_path / "saved")
    again = DeepseekVLV2Processor.from_pretrained(tmp_path / "saved")
    assert again.to_dict() == processor.to_dict()
    original = json.loads((DATA / "mha" / "processor_config.json").read_text())
    saved = json.loads((tmp_path / "saved" / "processor_config.json").read_text())
    assert saved == original
    case = CASES["two_images"]
    arguments = {
        "conversations": without_names(case["conversation"]),
        "images": case_images(case),
    }
    first, second = processor(**arguments), again(**arguments)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_image_parts_stand_on_their_own_line() -> None:
    """What a list content gives when its texts bring no line breaks along."""
    processor = tiny_processor()
    image = Image.new("RGB", (42, 42))
    parts = [
        {"type": "image", "image": image},
        {"type": "image", "image": image},
        {"type": "text", "text": "What?"},
    ]
    made = processor(conversations=[{"role": "user", "content": parts}])
    same = processor(
        conversations=[{"role": "user", "content": "<image>\n<image>\nWhat?"}],
        images=[image, image],
    )
    assert torch.equal(made["input_ids"], same["input_ids"])


def test_answers_in_progress_and_system_prompts() -> None:
    processor = tiny_processor()

    def text(messages: list[dict[str, str]], **more: str) -> str:
        ids = processor(conversations=messages, **more)["input_ids"][0]
        return processor.tokenizer.decode(ids[1:])

    ask = {"role": "user", "content": " Hi "}
    begun = text([ask, {"role": "assistant", "content": " So "}])
    assert begun == "<|User|>: Hi\n\n<|Assistant|>:So"
    assert text([ask]) == text([ask, {"role": "assistant", "content": ""}])
    assert text([ask], system_prompt="Be brief.").startswith("Be brief.<|User|>: Hi")


THIN = Image.new("RGB", (1, 5000))
SMALL = Image.new("RGB", (10, 10))


@pytest.mark.parametrize(
    ("content", "images", "message"),
    [
        ("<image> a", [SMALL, SMALL], "1 <image> marker.*2 image.*each image needs one marker"),
        ("<image><image> a", [SMALL], "2 <image> marker.*1 image"),
        ("no marker", [SMALL], "0 <image> marker.*1 image"),
        ("<image>", [THIN], "1x5000 pixels is too thin"),
        ("<image>", ["file.png"], "PIL images, got str"),
    ],
)
def test_one_clear_line_for_bad_prompts(content: str, images: list[Any], message: str) -> None:
    processor = tiny_processor()
    with pytest.raises(ValueError, match=message) as raised:
        processor(conversations=[{"role": "user", "content": content}], images=images)
    assert "\n" not in str(raised.value)


def test_each_message_needs_its_own_markers() -> None:
    parts = [{"type": "image", "image": SMALL}, {"type": "image", "image": SMALL}]
    messages = [
        {"role": "user", "content": [*parts, {"type": "text", "text": "<image> a"}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "<image> c"},
    ]
    with pytest.raises(ValueError, match="1 <image> marker.*2 image"):
        tiny_processor()(conversations=messages)
    with pytest.raises(ValueError, match="1 <image> marker.*0 image"):
        tiny_processor()(conversations=messages[2:])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "tool", "content": "x"}], "unknown role 'tool'; known: user"),
        ([{"role": "assistant", "content": "x"}], "out of place"),
        ([{"role": "system", "content": "x"}], "no user message"),
        ([{"role": "user", "content": [{"type": "video"}]}], "content part 'video'"),
        ([], "no user message"),
    ],
)
def test_one_clear_line_for_bad_conversations(messages: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        tiny_processor()(conversations=messages)
    assert "\n" not in str(raised.value)


def test_extreme_but_possible_images() -> None:
    candidates = json.loads((DATA / "mha" / "config.json").read_text())["candidate_resolutions"]
    cutter = DeepseekVLV2ImageProcessor(candidates)
    made = cutter.preprocess([Image.new("RGB", (10, 1000)), Image.new("1", (1, 1))])
    assert made["images_spatial_crop"].tolist() == [[1, 3], [1, 1]]
