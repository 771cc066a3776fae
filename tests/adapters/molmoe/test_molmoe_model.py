"""The MolmoE model against what the original computed with the same weights."""

from __future__ import annotations

import pytest
import torch
from molmoe_golden import LAYERS, expected, inputs, make_folder

from vlm_adapters.molmoe.modeling import MolmoeForConditionalGeneration


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("molmoe"))


@pytest.fixture(scope="module")
def model(folder):
    return MolmoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def run(model, given):
    """Output and what every router returned."""
    routed, hooks = {}, []
    for layer, block in enumerate(model.model.transformer.blocks):

        def keep(module, args, output, layer=layer):
            routed[layer] = output

        hooks.append(block.mlp.gate.register_forward_hook(keep))
    try:
        return model(**given), routed
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("sample", ["single", "text"])
def test_logits_and_experts(model, sample):
    output, routed = run(model, inputs(sample))
    golden = expected()
    positions = golden[f"{sample}.logits_positions"]
    assert (output.logits[0, positions] - golden[f"{sample}.logits"]).abs().max() < 5e-5
    for layer in LAYERS:
        assert torch.equal(routed[layer][2], golden[f"{sample}.selected_experts.{layer}"])
    hidden = model(**inputs(sample), output_hidden_states=True, output_router_logits=True)
    assert len(hidden.hidden_states) == len(LAYERS) + 1
    assert (hidden.hidden_states[0][0] - golden[f"{sample}.inputs_embeds"]).abs().max() < 5e-5
    for layer in LAYERS:
        assert torch.equal(hidden.router_logits[layer], routed[layer][0])


@pytest.mark.parametrize("sample", ["single", "multi", "text"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_routing_weights(model, sample, experts):
    """From the recorded embeddings on, weights agree within 1e-6 in every layer."""
    golden = expected()
    model.set_experts_implementation(experts)
    _, routed = run(model, {"inputs_embeds": golden[f"{sample}.inputs_embeds"][None]})
    for layer in LAYERS:
        logits, weights, index = routed[layer]
        assert torch.equal(index, golden[f"{sample}.selected_experts.{layer}"])
        assert (weights - golden[f"{sample}.routing_weights.{layer}"]).abs().max() < 1e-6
        assert (logits - golden[f"{sample}.router_logits.{layer}"]).abs().max() < 1e-5
        assert (weights.sum(-1) < 1).all()  # no renormalisation
    model.set_experts_implementation("grouped_mm")


def test_routing_weights_end_to_end(model, folder):
    """Through the tower, float32 rounds differently on every machine.

    The recorded weights themselves are a little more than 1e-6 away from exact arithmetic. So ours
    are held to that distance, measured with a float64 copy, plus the 1e-6.
    """
    exact = MolmoeForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )
    exact.config.float32_attention = False
    _, routed = run(model, inputs("single"))
    _, precise = run(exact, inputs("single"))
    for layer in LAYERS:
        golden = expected()[f"single.routing_weights.{layer}"]
        rounding = (precise[layer][1] - golden).abs().max()
        assert rounding < 5e-6
        assert (routed[layer][1] - golden).abs().max() < 1e-6 + rounding


def test_embeddings_instead_of_ids(model):
    """Also with a mask that leaves room for new tokens."""
    golden = expected()
    given = {"inputs_embeds": golden["single.inputs_embeds"][None]}
    wanted = golden["single.logits"]
    for mask in (None, torch.ones(1, 350)):
        logits = model(**given, attention_mask=mask).logits[0, golden["single.logits_positions"]]
        assert (logits - wanted).abs().max() < 5e-5


def test_image_features(model):
    given, golden = inputs("single"), expected()
    features = model.get_image_features(given["images"][0], given["image_masks"][0])
    assert (features - golden["single.image_features"]).abs().max() < 5e-5
    vision = model.model.vision_backbone
    tower = vision.image_vit(given["images"][0], vision.layers)[:, ::36]
    assert (tower - golden["single.vit_concat_slice_t36"]).abs().max() < 5e-5


def test_both_embedding_tables(model):
    """``multi`` holds ids of the second table; its image positions lie apart from them."""
    given = inputs("multi")
    size = model.config.embedding_size
    assert (given["input_ids"] >= size).any()
    made = model.get_input_embeddings()(given["input_ids"])[0]
    text = torch.ones(len(made), dtype=torch.bool)
    index = given["image_input_idx"]
    text[index[index >= 0]] = False
    assert torch.equal(made[text], expected()["multi.inputs_embeds"][text])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_implementations_agree(model, attention, experts):
    model.set_attn_implementation(attention)
    model.set_experts_implementation(experts)
    try:
        assert model.config._experts_implementation == experts
        logits = model(**inputs("text")).logits[0, expected()["text.logits_positions"]]
    finally:
        model.set_attn_implementation("sdpa")
        model.set_experts_implementation("grouped_mm")
    assert (logits - expected()["text.logits"]).abs().max() < 5e-5


def test_dropped_assignments(model):
    """The id E is skipped by ``eager`` and by a registered function, like a weight of zero."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    experts = model.model.transformer.blocks[0].mlp.experts
    torch.manual_seed(0)
    hidden = torch.randn(9, 64)
    index = torch.randint(0, 8, (9, 2))
    weights = torch.rand(9, 2)
    drop = torch.rand(9, 2) < 0.4
    kept = weights.masked_fill(drop, 0.0)
    model.set_experts_implementation("eager")
    wanted = experts(hidden, index, kept)
    assert torch.allclose(experts(hidden, index.masked_fill(drop, 8), kept), wanted, atol=1e-6)
    seen = []

    def own(self, hidden_states, top_k_index, top_k_weights):
        seen.append(tuple(self.gate_up_proj.shape))
        return torch.zeros_like(hidden_states)

    ALL_EXPERTS_FUNCTIONS["molmoe_test"] = own
    try:
        model.set_experts_implementation("molmoe_test")
        assert (experts(hidden, index, kept) == 0).all()
    finally:
        model.set_experts_implementation("grouped_mm")
        del ALL_EXPERTS_FUNCTIONS._local_mapping["molmoe_test"]
    assert seen == [(8, 64, 64)]


def test_a_value_of_minus_one_does_not_blank_a_crop(model):
    """The original blanks a crop that holds a single -1, as a cast to bfloat16 makes; we do not."""
    given = dict(inputs("single"))
    given["images"] = given["images"].clone()
    given["images"][0, 1, 100, 5] = -1.0
    last = model(**given).logits[0, -1]
    assert (last - expected()["single.logits"][-1]).abs().max() < 1e-2
    assert (last - expected()["minus_one_quirk.logits_last"]).abs().max() > 1.0
    # A crop of nothing but -1 has only its padding vectors.
    vision = model.model.vision_backbone
    blank, mask = torch.full((1, 576, 588), -1.0), torch.full((1, 576), -1.0)
    assert torch.equal(vision.encode(blank, mask), vision.pad_embed[1].expand(1, 576, -1))
    assert (vision.encode(blank, None) == 0).all()


def test_bfloat16(model, folder):
    """Within 3e-2 of float32, on average over all logits; where routing agrees, in every norm."""
    half = MolmoeForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    for sample in ("single", "text"):
        full, routed = run(model, inputs(sample))
        low, low_routed = run(half, inputs(sample))
        assert low.logits.dtype == torch.bfloat16
        wanted, got = full.logits[0], low.logits[0].float()
        assert ((got - wanted).abs().mean() / wanted.abs().mean()) < 3e-2
        same = torch.ones(len(wanted), dtype=torch.bool)
        for layer in LAYERS:
            a, b = routed[layer][2].sort(-1).values, low_routed[layer][2].sort(-1).values
            same &= (a == b).all(-1)
        assert same.float().mean() > 0.9
        assert ((got - wanted)[same].norm() / wanted[same].norm()) < 3e-2


def test_the_rotation_stays_in_float32(folder):
    from vlm_adapters.molmoe.decoder import rotary_tables

    model = MolmoeForConditionalGeneration.from_pretrained(folder).to(torch.bfloat16)
    cosine, sine = rotary_tables(model.config, torch.tensor([[3000, 3001]]))
    assert cosine.dtype == sine.dtype == torch.float32
    assert not list(model.buffers())  # nothing that a cast could round


def test_training_step(model):
    given = inputs("text")
    with torch.enable_grad():
        loss = model(**given, labels=given["input_ids"], use_cache=False).loss
        loss.backward()
    experts = model.model.transformer.blocks[0].mlp.experts
    assert loss.isfinite() and experts.gate_up_proj.grad.abs().sum() > 0
    model.zero_grad(set_to_none=True)
    with pytest.raises(ValueError, match="loss_masks is not supported"):
        model(**given, labels=given["input_ids"], loss_masks=torch.ones(1, 32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_input_idx": None}, "images without image_input_idx"),
        (
            {"image_input_idx": lambda x: x[:, :1]},
            r"shape \[1, 1, 144\] for images of shape \[1, 2",
        ),
        ({"image_input_idx": lambda x: x[..., :9]}, "9 positions for a crop, .* makes 144 vectors"),
        ({"image_input_idx": lambda x: x.clamp(min=7)}, "one position to two patches"),
        ({"image_input_idx": lambda x: x + 300}, "position 6.. of a prompt of 342 tokens"),
        ({"images": lambda x: x[0]}, r"images of shape \[2, 576, 588\] for 1 prompt"),
        ({"image_masks": lambda x: x[:, :1]}, r"image_masks of shape \[1, 1, 576\]"),
        ({"images": None}, "image_input_idx without images"),
        ({"input_ids": None}, "either input_ids or inputs_embeds"),
        ({"attention_mask": torch.ones(1, 9)}, "covers 9 positions, but there are 342 tokens"),
    ],
)
def test_inputs_that_do_not_belong_together(model, change, message):
    given = dict(inputs("single"))
    for key, value in change.items():
        given[key] = value(given[key]) if callable(value) else value
    with pytest.raises(ValueError, match=message):
        model(**given)
