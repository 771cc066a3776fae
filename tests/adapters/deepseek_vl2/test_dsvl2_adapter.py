"""The adapter contract: layers, scores, tags, prompts, and the seam that policies hook into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from vlm_adapters.base import UnsupportedModelError
from vlm_adapters.deepseek_vl2.adapter import DeepseekVL2Adapter
from vlm_adapters.modality import Modality

GROUPED = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.0,
}
MLA = {"use_mla": True}


def picture(width: int, height: int) -> Image.Image:
    torch.manual_seed(width)
    pixels = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def ask(text: str, *images: Image.Image) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def tiny() -> Any:
    return DeepseekVL2Adapter.tiny_model()


def test_tiny_model_is_the_same_each_time(tiny: Any) -> None:
    again = DeepseekVL2Adapter.tiny_model().model.state_dict()
    other = DeepseekVL2Adapter.tiny_model(seed=1).model.state_dict()
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    assert all(torch.equal(again[key], value) for key, value in tiny.model.state_dict().items())
    assert not torch.equal(other[name], again[name])
    assert again[name].shape == (6, 40, 32)


def test_layers(tiny: Any) -> None:
    layers = tiny.adapter.moe_layers(tiny.model)
    assert [layer.name for layer in layers] == [
        "model.language_model.layers.1.mlp",
        "model.language_model.layers.2.mlp",
    ]
    assert [layer.index for layer in layers] == [0, 1]
    for layer in layers:
        assert (layer.num_experts, layer.top_k) == (6, 2)
        assert layer.block is tiny.model.get_submodule(layer.name)
        assert layer.router is layer.block.gate and layer.experts is layer.block.experts


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no mixture-of-experts layer"):
        DeepseekVL2Adapter.tiny_model(n_routed_experts=None)


@pytest.mark.parametrize(
    "language",
    [
        {},
        MLA | {"scoring_func": "sigmoid", "routed_scaling_factor": 3.0},
        {"norm_topk_prob": True},
        {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
        GROUPED,
    ],
    ids=["greedy", "sigmoid", "normalised", "group limited", "bias and groups"],
)
def test_scores_are_what_weights_are_proportional_to(language: dict[str, Any]) -> None:
    vlm = DeepseekVL2Adapter.tiny_model(2, **language)
    layer = vlm.adapter.moe_layers(vlm.model)[0]
    if hasattr(layer.router, "e_score_correction_bias"):
        layer.router.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 6))
    torch.manual_seed(0)
    hidden = torch.randn(2, 25, 32)
    output = layer.router(hidden)
    choice = vlm.adapter.read_scores(layer, output, hidden)
    assert choice.scores.shape == (50, 6) and choice.scores.dtype == torch.float32
    assert torch.equal(choice.index, output[2]) and torch.equal(choice.weights, output[1])
    ratio = choice.weights / choice.scores.gather(1, choice.index)
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio), rtol=1e-5)
    if "n_group" not in language:
        assert choice.allowed is None
        return
    groups, kept = language["n_group"], language["topk_group"]
    assert choice.allowed is not None
    members = choice.allowed.unflatten(1, (groups, -1))
    assert torch.equal(members.all(-1), members.any(-1))
    assert (members.any(-1).sum(1) == kept).all()
    assert choice.allowed.gather(1, choice.index).all()


def test_a_pick_outside_the_groups_counts_as_allowed() -> None:
    """Left-out groups are set to 0, which wins over a choice below 0, as in the original."""
    language = {"topk_method": "noaux_tc", "n_group": 3, "topk_group": 2, "n_routed_experts": 3}
    vlm = DeepseekVL2Adapter.tiny_model(**language)
    layer = vlm.adapter.moe_layers(vlm.model)[0]
    layer.router.weight.data.zero_()  # every score is 1/3
    layer.router.e_score_correction_bias.copy_(torch.tensor([0.2, -0.6, -0.9]))
    hidden = torch.randn(4, 32)
    output = layer.router(hidden)
    assert output[2].sort(dim=1).values.tolist() == [[0, 2]] * 4
    choice = vlm.adapter.read_scores(layer, output, hidden)
    assert choice.allowed is not None and choice.allowed.all()


def test_tags_of_a_batch(tiny: Any) -> None:
    inputs = tiny.prepare_batch([ask("Hi", picture(90, 40)), ask("A much longer question?")])
    tags = tiny.adapter.tag_tokens(inputs)
    assert tags.dtype == torch.uint8 and tags.shape == inputs["input_ids"].shape
    across, down = inputs["images_spatial_crop"][0, 0].tolist()
    assert (across, down) == (3, 1)
    # Newlines and the separator included.
    assert int((tags[0] == Modality.IMAGE).sum()) == 2 * 3 + 1 + 2 * (3 * 2 + 1)
    assert not (tags[1] == Modality.IMAGE).any()
    assert torch.equal(tags == Modality.PAD, inputs["attention_mask"] == 0)


@pytest.mark.parametrize("settings", [{}, {"use_cache": False}, {"prefill_chunk_size": 10}])
@pytest.mark.parametrize("language", [{}, MLA], ids=["mha", "mla"])
def test_tags_of_every_pass_of_generate(language: dict[str, Any], settings: dict[str, Any]) -> None:
    vlm = DeepseekVL2Adapter.tiny_model(**language)
    inputs = vlm.prepare_batch([ask("Hi", picture(90, 40)), ask("A much longer question?")])
    prompt = vlm.adapter.tag_tokens(inputs)
    seen = []

    def tag(module: Any, args: Any, kwargs: Any) -> None:
        tags = vlm.adapter.tag_tokens(kwargs)
        assert tags.shape == kwargs["input_ids"].shape
        seen.append(tags)

    handle = vlm.model.register_forward_pre_hook(tag, with_kwargs=True)
    vlm.model.generate(**inputs, **settings, max_new_tokens=3, do_sample=False, eos_token_id=999)
    handle.remove()
    new = torch.full((2, 2), int(Modality.TEXT), dtype=torch.uint8)
    if settings.get("use_cache", True):
        assert torch.equal(torch.cat(seen, dim=1), torch.cat((prompt, new), dim=1))
    else:
        assert torch.equal(seen[-1], torch.cat((prompt, new), dim=1))


def test_inputs_that_cannot_be_tagged(tiny: Any) -> None:
    inputs = tiny.prepare(ask("Hi", picture(90, 40)))
    with pytest.raises(ValueError, match="inputs_embeds together with images_seq_mask"):
        tiny.adapter.tag_tokens({"inputs_embeds": torch.zeros(1, 3, 32)})
    unmarked = inputs | {"images_seq_mask": torch.zeros_like(inputs["images_seq_mask"])}
    with pytest.raises(ValueError, match="tags no token as image"):
        tiny.adapter.tag_tokens(unmarked)
    with pytest.raises(ValueError, match="attention_mask must be"):
        tiny.adapter.tag_tokens(inputs | {"attention_mask": torch.zeros(1, 1, 9, 9)})
    embeds = torch.zeros(1, inputs["input_ids"].shape[1], 32)
    tags = tiny.adapter.tag_tokens(
        {"inputs_embeds": embeds, "images_seq_mask": inputs["images_seq_mask"]}
    )
    assert torch.equal(tags == Modality.IMAGE, inputs["images_seq_mask"])


def test_inputs_that_do_not_fit_each_other(tiny: Any) -> None:
    inputs = tiny.prepare(ask("Hi", picture(90, 40)))
    marked = inputs["images_seq_mask"].clone()
    marked[0, marked[0].nonzero()[0]] = False
    wrong = {
        "marks 20 image positions, the images of the row make 21 vectors": {
            "images_seq_mask": marked
        },
        "needs 4 tiles, images holds 2": {"images": inputs["images"][:, :2]},
        "without images_seq_mask": {"images_seq_mask": None},
        "images or images_spatial_crop is missing": {"images": None},
        "covers 5 positions": {"images_seq_mask": inputs["images_seq_mask"][:, :5]},
        "either input_ids or inputs_embeds": {"input_ids": None},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message) as raised, torch.no_grad():
            tiny.model(**(inputs | change))
        assert "\n" not in str(raised.value)


def test_padding_tiles_and_crops_are_ignored(tiny: Any) -> None:
    inputs = tiny.prepare(ask("Hi", picture(90, 40)))
    more = inputs | {
        "images": torch.cat((inputs["images"], torch.ones(1, 2, 3, 42, 42)), dim=1),
        "images_spatial_crop": torch.tensor([[[3, 1], [0, 0], [2, 1]]]),
    }
    with torch.no_grad():
        assert torch.equal(tiny.model(**more).logits, tiny.model(**inputs).logits)


def test_a_generated_image_id_is_an_ordinary_token(tiny: Any) -> None:
    inputs = tiny.prepare(ask("Hi", picture(90, 40)))
    image_id = tiny.processor.image_token_id

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = torch.full_like(scores, -1.0)
        scores[:, image_id] = 1.0
        return scores

    answers = [
        tiny.model.generate(
            **inputs,
            max_new_tokens=3,
            do_sample=False,
            use_cache=use_cache,
            logits_processor=[force],
            return_dict_in_generate=True,
            output_logits=True,
        )
        for use_cache in (True, False)
    ]
    assert answers[0].sequences[0, -3:].tolist() == [image_id] * 3
    for cached, full in zip(answers[0].logits, answers[1].logits, strict=True):
        assert torch.allclose(cached, full, atol=1e-5)


@pytest.mark.parametrize("language", [{}, MLA], ids=["mha", "mla"])
def test_ready_embeddings_and_continued_caches(language: dict[str, Any]) -> None:
    vlm = DeepseekVL2Adapter.tiny_model(**language)
    model, inputs = vlm.model, vlm.prepare(ask("Hi", picture(90, 40)))
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": 999}
    first = model.generate(**inputs, **settings, return_dict_in_generate=True)
    with torch.no_grad():
        image_inputs = [inputs[k] for k in ("images", "images_seq_mask", "images_spatial_crop")]
        embeds = model.model.embed(inputs["input_ids"], *image_inputs)
    again = model.generate(**inputs, inputs_embeds=embeds, **settings)
    assert torch.equal(again, first.sequences)
    more = torch.cat((first.sequences, torch.tensor([[20, 21, 22]])), dim=1)
    added = more.shape[1] - inputs["input_ids"].shape[1]
    longer = inputs | {
        "input_ids": more,
        "attention_mask": torch.ones_like(more),
        "images_seq_mask": torch.nn.functional.pad(inputs["images_seq_mask"], (0, added)),
    }
    wanted = model.generate(**longer, **settings)
    assert torch.equal(model.generate(**longer, **settings, cache=first.cache), wanted)


def test_decode_and_stop_ids(tiny: Any) -> None:
    inputs = tiny.prepare(ask("Hi"))
    tokenizer = tiny.processor.tokenizer
    added = tokenizer.encode(" fine, thanks ") + [tokenizer.eos_token_id]
    sequence = torch.cat((inputs["input_ids"], torch.tensor([added])), dim=1)
    assert tiny.decode(inputs, sequence) == ["fine, thanks"]
    settings = tiny.model.generation_config
    assert (settings.bos_token_id, settings.eos_token_id, settings.pad_token_id) == (0, 1, 1)


# -- the seam ------------------------------------------------------------------------


def one_by_one(experts: Any, hidden: Any, index: Any, weights: Any) -> torch.Tensor:
    output = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for slot in range(index.shape[1]):
            expert = int(index[token, slot])
            if expert == experts.num_experts:
                continue
            gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            output[token] += weights[token, slot] * (experts.down_proj[expert] @ inner)
    return output


@pytest.mark.parametrize("dropped", [False, True])
def test_eager_experts_skip_the_id_e(tiny: Any, dropped: bool) -> None:
    experts = tiny.adapter.moe_layers(tiny.model)[0].experts
    torch.manual_seed(1)
    hidden, weights = torch.randn(9, 32), torch.rand(9, 2)
    index = torch.randint(0, 6, (9, 2))
    if dropped:
        index[::2, 0], index[3] = 6, 6
    tiny.model.set_experts_implementation("eager")
    try:
        with torch.no_grad():
            made = experts(hidden, index, weights)
    finally:
        tiny.model.set_experts_implementation("grouped_mm")
    assert torch.allclose(made, one_by_one(experts, hidden, index, weights), atol=1e-5)
    if dropped:
        assert not made[3].any()


def test_a_registered_experts_function_is_used(tiny: Any) -> None:
    layers = tiny.adapter.moe_layers(tiny.model)
    inputs = tiny.prepare(ask("Hi", picture(90, 40)))
    config = layers[0].experts.config
    assert all(layer.experts.config is config for layer in layers)
    with torch.no_grad():
        wanted = tiny.model(**inputs).logits
    calls = []

    def slow(experts: Any, hidden: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        calls.append(top_k_index.shape)
        return one_by_one(experts, hidden, top_k_index, top_k_weights)

    before = config._experts_implementation
    ALL_EXPERTS_FUNCTIONS.register("slow_test_experts", slow)
    try:
        config._experts_implementation = "slow_test_experts"
        with torch.no_grad():
            made = tiny.model(**inputs).logits
    finally:
        config._experts_implementation = before
        ALL_EXPERTS_FUNCTIONS._global_mapping.pop("slow_test_experts", None)
    assert calls == [(inputs["input_ids"].shape[1], 2)] * 2
    assert torch.allclose(made, wanted, atol=1e-4)


def test_hooks_on_the_seam_rewrite_the_routing(tiny: Any) -> None:
    """What a policy does: read the router, rewrite index and weights before the experts."""
    layer = tiny.adapter.moe_layers(tiny.model)[0]
    inputs = tiny.prepare(ask("Hi"))

    def drop_all(module: Any, args: Any) -> Any:
        hidden, index, weights = args
        return hidden, torch.full_like(index, module.num_experts), torch.zeros_like(weights)

    outputs = []
    tiny.model.set_experts_implementation("eager")
    handles = [
        layer.experts.register_forward_pre_hook(drop_all),
        layer.experts.register_forward_hook(lambda m, a, output: outputs.append(output)),
    ]
    try:
        with torch.no_grad():
            tiny.model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
        tiny.model.set_experts_implementation("grouped_mm")
    assert not outputs[0].any()


def test_expert_parallel_plan(tiny: Any) -> None:
    prefix = "model.language_model.layers.*.mlp.experts"
    assert tiny.model.ep_plan == {
        prefix: "ep_dispatch_experts",
        prefix + ".gate_up_proj": "grouped_gemm",
        prefix + ".down_proj": "grouped_gemm",
    }
    assert tiny.model.tp_plan[prefix] == "moe_tp_experts"


def test_recorded_outputs(tiny: Any) -> None:
    inputs = tiny.prepare(ask("Hi", picture(90, 40)))
    tiny.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            output = tiny.model(
                **inputs,
                output_hidden_states=True,
                output_router_logits=True,
                output_attentions=True,
            )
    finally:
        tiny.model.set_attn_implementation("sdpa")
    length = inputs["input_ids"].shape[1]
    assert [h.shape for h in output.hidden_states] == [(1, length, 32)] * 4
    assert [logits.shape for logits in output.router_logits] == [(length, 6)] * 2
    assert [a.shape for a in output.attentions] == [(1, 4, length, length)] * 3
