"""The whole configuration space against the slow reference, which the recorded samples anchor."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from dsvl2_data import DATA, expected, sample
from dsvl2_reference import Reference
from PIL import Image
from safetensors.torch import load_file
from test_dsvl2_golden import LOGITS_ATOL, WEIGHTS_ATOL, run
from transformers.core_model_loading import revert_weight_conversion

from vlm_adapters.base import LoadedVLM
from vlm_adapters.deepseek_vl2.adapter import DeepseekVL2Adapter
from vlm_adapters.deepseek_vl2.checkpoint import register
from vlm_adapters.deepseek_vl2.configuration import DeepseekVLV2Config
from vlm_adapters.deepseek_vl2.image_processing import DeepseekVLV2ImageProcessor
from vlm_adapters.deepseek_vl2.modeling import DeepseekVLV2ForCausalLM
from vlm_adapters.deepseek_vl2.processing import DeepseekVLV2Processor
from vlm_adapters.deepseek_vl2.tiny import tiny_settings, tiny_tokenizer

# float32 against float64; these routers are sharper than the recorded ones, and some weights are
# scaled by 2.5. Measured: up to 3.3e-6. A wrong formula shows above 1e-3.
EXACT_WEIGHTS_ATOL = 8e-6
YARN = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
GROUPS = {"n_group": 3, "topk_group": 2}
MLA = {"use_mla": True}
NOAUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
LIMITED = {"topk_method": "group_limited_greedy"}

LANGUAGE = {
    "mha": {},
    "mha grouped queries": {"num_key_value_heads": 2},
    "mla": MLA,
    "mla low-rank queries": MLA | {"q_lora_rank": 10},
    "mla ignores key-value heads": MLA | {"num_key_value_heads": 2},
    "normalised and scaled": {"norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "scaled only": {"routed_scaling_factor": 2.5},
    "one expert is not normalised": {
        "num_experts_per_tok": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.0,
    },
    "sigmoid greedy": {"scoring_func": "sigmoid"},
    "group limited": LIMITED | GROUPS,
    "group limited to one": LIMITED | {"n_group": 2, "topk_group": 1, "norm_topk_prob": True},
    "group limited sigmoid": LIMITED | GROUPS | {"scoring_func": "sigmoid"},
    "bias": NOAUX,
    "bias normalised and scaled": NOAUX | {"norm_topk_prob": True, "routed_scaling_factor": 2.0},
    "bias and groups": NOAUX | GROUPS | {"num_experts_per_tok": 3},
    "bias, softmax, groups": NOAUX | GROUPS | {"scoring_func": "softmax"},
    "every second layer": {"num_hidden_layers": 4, "first_k_dense_replace": 0, "moe_layer_freq": 2},
    "no shared experts": {"n_shared_experts": None},
    "eps and base": {"rms_norm_eps": 1e-3, "rope_theta": 300.0},
    "mla eps and base": MLA | {"q_lora_rank": 10, "rms_norm_eps": 1e-3, "rope_theta": 300.0},
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "mla linear": MLA | {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "dynamic": {
        "rope_scaling": {"type": "dynamic", "factor": 4.0},
        "max_position_embeddings": 20,
    },
    "mla dynamic": MLA
    | {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 20},
    "yarn": {"rope_scaling": YARN},
    "mla yarn": MLA | {"rope_scaling": YARN},
    "mla yarn mscale": MLA | {"rope_scaling": YARN | {"mscale": 0.7}},
    "mla yarn mscale_all_dim": MLA | {"rope_scaling": YARN | {"mscale_all_dim": 0.5}},
    "mla yarn both": MLA
    | {"rope_scaling": YARN | {"mscale": 1.2, "mscale_all_dim": 0.4, "beta_fast": 4}},
}
LAYOUT: dict[str, dict[str, Any]] = {
    "global view last": {"global_view_pos": "tail"},
    "even grid": {"vision_config": {"image_size": 56}},
    "one patch": {"vision_config": {"image_size": 14}},
    "ratio 3": {"projector_config": {"downsample_ratio": 3}},
    "deep projector": {"projector_config": {"depth": 4, "mlp_ratio": 2}},
}


def build(settings: dict[str, Any]) -> tuple[LoadedVLM, Reference]:
    """A model with random parameters of every kind, and the reference on the same ones."""
    torch.manual_seed(7)
    config = DeepseekVLV2Config.from_dict(copy.deepcopy(settings))
    model = DeepseekVLV2ForCausalLM(config).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() == 1:
                # Norms, biases, newline, separator and the router's bias, which start alike.
                tensor.add_(torch.randn_like(tensor) * 0.15)
    vision, projector = config.vision_config, config.projector_config
    side = vision.image_size
    candidates = [(side * w, side * h) for w, h in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3))]
    images = DeepseekVLV2ImageProcessor(candidates, vision.patch_size, projector.downsample_ratio)
    processor = DeepseekVLV2Processor(images, tiny_tokenizer())
    register()
    original = revert_weight_conversion(model, dict(model.state_dict()))
    vlm = LoadedVLM(model=model, processor=processor, adapter=DeepseekVL2Adapter(config))
    return vlm, Reference(original, settings)


def messages(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "See"}]
    for seed, size in enumerate(sizes):
        torch.manual_seed(seed)
        pixels = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8)
        parts.append({"type": "image", "image": Image.fromarray(pixels.numpy())})
        parts.append({"type": "text", "text": f" {seed}?"})
    return [{"role": "user", "content": parts}]


def compare(vlm: LoadedVLM, reference: Reference, inputs: dict[str, Any]) -> None:
    output, routing = run(vlm, inputs)
    embeds = reference.embed(
        inputs["input_ids"][0],
        inputs["images_seq_mask"][0],
        inputs["images"][0],
        inputs["images_spatial_crop"][0].tolist(),
    )
    wanted = reference.logits(embeds)
    for layer, (experts, weights) in reference.routing.items():
        assert torch.equal(routing[layer][0], experts)
        assert (routing[layer][1] - weights).abs().max() <= EXACT_WEIGHTS_ATOL
    assert set(routing) == set(reference.routing)
    assert (output.logits[0] - wanted).abs().max() <= LOGITS_ATOL


@pytest.mark.parametrize(
    ("kind", "name"),
    [("mha", "text_only"), ("mla", "text_only"), ("mla", "one_tile"), ("mla", "tall_2x3")],
)
def test_reference_gives_the_recorded_logits(kind: str, name: str) -> None:
    config = json.loads((DATA / kind / "config.json").read_text())
    reference = Reference(load_file(DATA / kind / "model.safetensors"), config)
    inputs, wanted = sample(kind, name), expected(kind, name)
    embeds = reference.embed(
        inputs["input_ids"][0],
        inputs["images_seq_mask"][0],
        inputs["images"][0],
        inputs["images_spatial_crop"][0].tolist(),
    )
    logits = reference.logits(embeds)
    assert (logits[:, ::8] - wanted["logits_every_8th"][0]).abs().max() <= LOGITS_ATOL
    for layer, (experts, weights) in reference.routing.items():
        assert torch.equal(experts, wanted[f"layers.{layer}.topk_idx"])
        assert (weights - wanted[f"layers.{layer}.topk_weight"]).abs().max() <= WEIGHTS_ATOL


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_settings(name: str) -> None:
    settings = tiny_settings(**LANGUAGE[name])
    vlm, reference = build(settings)
    compare(vlm, reference, vlm.prepare(messages((90, 40), (40, 80))))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_groups_of_fewer_than_k_experts(scoring: str) -> None:
    """Two experts are left for three places: the third place, whoever takes it, weighs nothing."""
    groups = {"n_group": 3, "topk_group": 1, "num_experts_per_tok": 3}
    vlm, reference = build(tiny_settings(**LIMITED, **groups, scoring_func=scoring))
    inputs = vlm.prepare(messages((90, 40)))
    output, routing = run(vlm, inputs)
    embeds = reference.embed(
        inputs["input_ids"][0],
        inputs["images_seq_mask"][0],
        inputs["images"][0],
        inputs["images_spatial_crop"][0].tolist(),
    )
    assert (output.logits[0] - reference.logits(embeds)).abs().max() <= LOGITS_ATOL
    for layer, (experts, weights) in reference.routing.items():
        dense = torch.zeros(len(experts), 6).scatter(1, experts, weights.float())
        index, ours = routing[layer]
        assert (ours == 0).sum(dim=1).eq(1).all()
        made = torch.zeros(len(experts), 6).scatter(1, index, ours)
        assert (made - dense).abs().max() <= EXACT_WEIGHTS_ATOL
    layer = vlm.adapter.moe_layers(vlm.model)[0]
    hidden = torch.randn(5, 32)
    choice = vlm.adapter.read_scores(layer, layer.router(hidden), hidden)
    assert choice.allowed is not None and choice.allowed.gather(1, choice.index).all()
    assert torch.equal(choice.scores.gather(1, choice.index), choice.weights)


@pytest.mark.parametrize("sizes", [(32, 20), (30, 16), (31, 9)])
def test_sizes_that_the_grouped_product_cannot_take(sizes: tuple[int, int]) -> None:
    """torch's grouped product wants rows of whole 16 bytes; others run expert by expert."""
    settings = tiny_settings(**MLA, hidden_size=sizes[0], moe_intermediate_size=sizes[1])
    settings["projector_config"]["n_embed"] = sizes[0]
    vlm, reference = build(settings)
    assert vlm.model.config.language_config._experts_implementation == "eager"
    compare(vlm, reference, vlm.prepare(messages((90, 40))))
    low = vlm.model.bfloat16()
    assert low(**vlm.prepare(messages((90, 40)))).logits.isfinite().all()


@pytest.mark.parametrize("name", LAYOUT)
def test_image_settings(name: str) -> None:
    settings = tiny_settings()
    for key, value in LAYOUT[name].items():
        if isinstance(value, dict):
            settings[key].update(value)
        else:
            settings[key] = value
    vlm, reference = build(settings)
    compare(vlm, reference, vlm.prepare(messages((90, 40), (40, 80))))
    compare(vlm, reference, vlm.prepare(messages((200, 200))))
    compare(vlm, reference, vlm.prepare(messages((90, 40), (40, 80), (60, 60))))


@pytest.mark.parametrize(
    "name",
    ["mha grouped queries", "mla low-rank queries", "bias and groups", "mla yarn both", "linear"],
)
def test_cache_and_padding_change_no_answer(name: str) -> None:
    """With cache or without, alone or padded in a batch: the same greedy tokens."""
    vlm, _ = build(tiny_settings(**LANGUAGE[name]))
    conversations = [messages((90, 40)), messages(), messages((30, 70), (50, 50), (20, 20))]
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 1}
    settings["eos_token_id"] = 511_000
    wanted = []
    for conversation in conversations:
        inputs = vlm.prepare(conversation)
        slow = vlm.model.generate(**inputs, **settings, use_cache=False)
        assert torch.equal(vlm.model.generate(**inputs, **settings), slow)
        wanted.append(slow[0, -4:].tolist())
    batch = vlm.prepare_batch(conversations)
    for use_cache in (True, False):
        made = vlm.model.generate(**batch, **settings, use_cache=use_cache)
        assert made[:, -4:].tolist() == wanted


def test_dynamic_scaling_follows_the_sequence_at_hand() -> None:
    """A long prompt in between leaves no trace, also not within the scaled range."""
    vlm, _ = build(tiny_settings(**LANGUAGE["dynamic"]))
    short, longer = (vlm.prepare(messages(*sizes)) for sizes in (((90, 40),), ((90, 40), (40, 80))))
    assert short["input_ids"].shape[1] > 20
    with torch.no_grad():
        before = vlm.model(**short).logits
        vlm.model(**longer)
        assert torch.equal(vlm.model(**short).logits, before)


def test_yarn_defaults_are_those_of_deepseek() -> None:
    config = DeepseekVLV2Config.from_dict(
        tiny_settings(**MLA, rope_scaling={"type": "yarn", "factor": 4.0})
    )
    rope = config.language_config.rope_parameters
    assert rope["original_max_position_embeddings"] == 4096
    assert rope["attention_factor"] == pytest.approx(1.1386294361119891)
