"""The generic adapter on Qwen3-VL-MoE, and the errors of loading."""

from __future__ import annotations

import json

import pytest
import torch
from pictures import picture, question

from mm_capacity import limit_capacity, make_policy
from vlm_adapters import ADAPTERS, adapter_for, load_model
from vlm_adapters.base import ModelLoadError, UnsupportedModelError
from vlm_adapters.generic import NativeAdapter
from vlm_adapters.modality import Modality
from vlm_adapters.registry import adapter_class, adapter_class_for


def test_layers_are_all_found(tiny_vlm):
    layers = tiny_vlm.adapter.moe_layers(tiny_vlm.model)
    config = tiny_vlm.model.config.text_config
    assert len(layers) == config.num_hidden_layers == 3
    assert [layer.index for layer in layers] == [0, 1, 2]
    assert {(layer.num_experts, layer.top_k) for layer in layers} == {(8, 2)}
    assert type(adapter_for(tiny_vlm.model)).name == "qwen3_vl_moe"


@torch.no_grad()
def test_scores_times_scale_are_the_weights(tiny_vlm):
    layer = tiny_vlm.adapter.moe_layers(tiny_vlm.model)[0]
    hidden = torch.randn(11, 32)
    choice = tiny_vlm.adapter.read_scores(layer, layer.router(hidden), hidden)
    picked = choice.scores.gather(1, choice.index)
    scale = choice.weights / picked
    torch.testing.assert_close(scale, scale[:, :1].expand_as(scale), atol=1e-5, rtol=1e-5)
    assert torch.equal(choice.scores.topk(2).indices, choice.index)


@pytest.mark.parametrize("images", [0, 1, 3])
def test_tags_count_the_image_positions(tiny_vlm, images):
    inputs = tiny_vlm.prepare(question("How many?", *(picture(i) for i in range(images))))
    tags = tiny_vlm.adapter.tag_tokens(inputs)
    per_image = (64 // 8 // 2) ** 2
    assert int((tags == Modality.IMAGE).sum()) == images * per_image
    ids = tiny_vlm.model.config.image_token_id
    assert torch.equal(tags == Modality.IMAGE, inputs["input_ids"] == ids)
    # Without the processor's token types the ids of the configuration tell the same.
    del inputs["mm_token_type_ids"]
    assert torch.equal(tiny_vlm.adapter.tag_tokens(inputs), tags)


def test_video_tokens_are_tagged(tiny_vlm):
    config = tiny_vlm.model.config
    ids = torch.tensor([[9, config.video_token_id, config.image_token_id, 9]])
    expected = [Modality.TEXT, Modality.VIDEO, Modality.IMAGE, Modality.TEXT]
    assert tiny_vlm.adapter.tag_tokens({"input_ids": ids}).tolist() == [expected]


def test_padding_comes_from_the_mask(tiny_vlm):
    batch = tiny_vlm.prepare_batch(
        [question("Short?", picture()), question("A much longer question?", picture())]
    )
    tags = tiny_vlm.adapter.tag_tokens(batch)
    assert torch.equal(tags == Modality.PAD, batch["attention_mask"] == 0)
    assert int((tags == Modality.PAD).sum()) == len("A much longer question?") - len("Short?")
    # In a decode step with a cache the mask is longer than the ids.
    step = {"input_ids": batch["input_ids"][:, -1:], "attention_mask": batch["attention_mask"]}
    assert tiny_vlm.adapter.tag_tokens(step).tolist() == [[Modality.TEXT]] * 2


def test_pixels_without_image_tokens_are_an_error(tiny_vlm, one_question):
    inputs = dict(one_question)
    inputs["mm_token_type_ids"] = torch.zeros_like(inputs["mm_token_type_ids"])
    with pytest.raises(ValueError, match="'pixel_values' but no token is tagged as image"):
        tiny_vlm.adapter.tag_tokens(inputs)


def test_a_mask_that_is_not_two_dimensional_is_an_error(tiny_vlm, one_question):
    inputs = {**one_question, "attention_mask": torch.ones(1, 1, 4, 4)}
    with pytest.raises(ValueError, match=r"\[B, S\] tensor, got \(1, 1, 4, 4\)"):
        tiny_vlm.adapter.tag_tokens(inputs)


@torch.no_grad()
def test_a_static_cache(tiny_vlm, one_question):
    """Its decode steps come with a four-dimensional mask."""
    greedy = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    before = tiny_vlm.model.generate(**one_question, **greedy)
    with limit_capacity(tiny_vlm.model, make_policy("none"), check=True):
        assert torch.equal(before, tiny_vlm.model.generate(**one_question, **greedy))


def test_an_image_that_the_template_drops_is_an_error(tiny_vlm):
    template = tiny_vlm.processor.chat_template
    tiny_vlm.processor.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    try:
        with pytest.raises(ValueError, match="image"):
            tiny_vlm.prepare(question("Where?", picture()))
    finally:
        tiny_vlm.processor.chat_template = template


@torch.no_grad()
def test_folder_round_trip(tiny_vlm, one_question, tmp_path):
    """A saved model loads through its folder like any other."""
    tiny_vlm.model.save_pretrained(tmp_path)
    tiny_vlm.processor.save_pretrained(tmp_path)
    again = load_model(str(tmp_path))
    inputs = again.prepare(question("What is in this picture?", picture()))
    assert all(torch.equal(inputs[k], one_question[k]) for k in one_question)
    # Not bit by bit: weights mapped from a file are aligned differently in memory.
    torch.testing.assert_close(
        again.model(**inputs).logits, tiny_vlm.model(**one_question).logits, atol=1e-5, rtol=1e-5
    )
    half = load_model(str(tmp_path), dtype="bfloat16")
    assert half.model.dtype == torch.bfloat16


def test_generate_with_and_without_cache(tiny_vlm, one_question):
    greedy = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    with_cache = tiny_vlm.model.generate(**one_question, **greedy)
    without = tiny_vlm.model.generate(**one_question, **greedy, use_cache=False)
    assert torch.equal(with_cache, without)
    assert len(tiny_vlm.decode(one_question, with_cache)) == 1


def test_registry_lists_without_imports():
    for name, target in ADAPTERS.items():
        module, attribute = target.split(":")
        assert module.startswith("vlm_adapters.") and attribute
        cls = adapter_class(name)
        assert cls.name == name
        assert cls.__module__ == module


def test_unknown_adapter_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown adapter 'nope'; known: qwen3_vl_moe"):
        adapter_class("nope")


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"model_type": "qwen3_vl_moe"}, "qwen3_vl_moe"),
        (
            {"model_type": "new_vl_moe", "vision_config": {}, "text_config": {"num_experts": 8}},
            "native",
        ),
    ],
)
def test_adapter_for_a_configuration(config, expected):
    assert adapter_class_for(config).name == expected


@pytest.mark.parametrize(
    "config, said",
    [
        (
            {"model_type": "llava", "vision_config": {}, "text_config": {"hidden_size": 8}},
            "it is dense, its language model",
        ),
        ({"model_type": "multi_modality", "language_config": {"model_type": "llama"}}, "llama"),
        ({"model_type": "bert"}, "looked for an adapter"),
    ],
)
def test_a_family_without_experts_is_refused(config, said):
    with pytest.raises(UnsupportedModelError, match="is not supported: ") as caught:
        adapter_class_for(config)
    assert said in str(caught.value)


def test_a_model_without_moe_layer_names_what_was_looked_for():
    with pytest.raises(UnsupportedModelError, match="no mixture-of-experts layer: looked through"):
        NativeAdapter(None).moe_layers(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_missing_folder_and_missing_config(tmp_path):
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(ModelLoadError, match="holds no config.json"):
        load_model(str(tmp_path))


def test_unknown_hub_id_offline_is_one_line():
    with pytest.raises(ModelLoadError, match="no such folder") as caught:
        load_model("nobody/no-such-model-here")
    assert "\n" not in str(caught.value)


def test_folder_without_weights_is_one_line(tiny_vlm, tmp_path):
    tiny_vlm.processor.save_pretrained(tmp_path)
    tiny_vlm.model.config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="could not be loaded") as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    with pytest.raises(UnsupportedModelError, match="llava"):
        load_model(str(tmp_path))
