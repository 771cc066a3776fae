"""The space of MolmoE configurations, against slow code that follows the definition."""

from __future__ import annotations

import molmoe_reference
import pytest
import torch
from molmoe_golden import DATA, expected, inputs, raw_config
from safetensors.torch import load_file

from vlm_adapters.base import UnsupportedModelError
from vlm_adapters.molmoe.checkpoint import register
from vlm_adapters.molmoe.configuration import MolmoeConfig
from vlm_adapters.molmoe.family import why_not_molmoe
from vlm_adapters.molmoe.modeling import MolmoeForConditionalGeneration
from vlm_adapters.registry import adapter_class_for

SMALL = {
    "d_model": 24,
    "n_heads": 4,
    "n_layers": 2,
    "mlp_ratio": 1,
    "vocab_size": 40,
    "embedding_size": 44,
    "additional_vocab_size": 6,
    "moe_num_experts": 5,
    "moe_top_k": 2,
    "vit_layers": [-1],
    "initializer_range": 0.3,
    "vision_backbone": {
        "image_emb_dim": 8,
        "image_num_heads": 2,
        "image_num_key_value_heads": 2,
        "image_head_dim": 4,
        "image_mlp_dim": 10,
        "image_num_layers": 2,
    },
}

VARIANTS = {
    "as it is": {},
    "expert width given": {"mlp_hidden_size": 40, "mlp_ratio": 7},
    "mlp_ratio": {"mlp_ratio": 3},
    "grouped key/value heads": {"n_kv_heads": 2},
    "multi-query": {"n_kv_heads": 1},
    "all experts": {"moe_top_k": 5},
    "one expert": {"moe_num_experts": 1, "moe_top_k": 1},
    "other eps and theta": {"layer_norm_eps": 1e-2, "rope_theta": 37.0},
    "tied": {"weight_tying": True},
    "no second table": {"additional_vocab_size": None},
    "other vit layers": {"vit_layers": [0, -1, 1]},
    "unused keys": {"moe_capacity_factor": 0.1, "activation_type": "gelu", "moe_zloss_weight": 3.0},
}
TOWERS = {
    "grouped heads": {"image_num_key_value_heads": 1},
    "other head width and eps": {"image_head_dim": 6, "image_norm_eps": 1e-2},
}


def build(changes: dict, tower: dict | None = None, seed: int = 0):
    """A float64 model with random weights and its original state."""
    from transformers.core_model_loading import revert_weight_conversion

    config = raw_config() | SMALL | changes
    vision = raw_config()["vision_backbone"] | SMALL["vision_backbone"] | (tower or {})
    config["vision_backbone"] = vision
    register()
    torch.manual_seed(seed)
    model = MolmoeForConditionalGeneration(MolmoeConfig.from_dict(dict(config))).double().eval()
    # grouped_mm and the float32 attention of the tower would round.
    model.set_experts_implementation("eager")
    model.config.float32_attention = False
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model, revert_weight_conversion(model, model.state_dict()), config


def prompt(config: dict, length: int = 20):
    """Ids of both tables, and a picture of two crops of which a few patches have a place."""
    generator = torch.Generator().manual_seed(1)
    top = config["embedding_size"] + (config["additional_vocab_size"] or 0)
    ids = torch.randint(0, top, (length,), generator=generator)
    ids[0] = top - 1
    images = torch.randn(2, 576, 588, generator=generator, dtype=torch.float64)
    masks = torch.rand(2, 576, generator=generator)
    masks[0, :200], masks[0, 200:400], masks[1] = 1.0, 0.0, -1.0
    index = torch.full((2, 144), -100)
    index[0, :6], index[1, 3:8] = torch.arange(2, 8), torch.tensor([11, 9, 10, 8, 12])
    return ids, images, masks, index


@pytest.mark.parametrize("sample", ["single", "text"])
def test_slow_code_is_right(sample):
    """It computes what the original recorded."""
    weights = load_file(DATA / "model" / "model.safetensors")
    given = {name: value[0] for name, value in inputs(sample).items()}
    logits = molmoe_reference.logits(weights, raw_config(), **given)
    golden = expected()
    wanted = golden[f"{sample}.logits"]
    assert (logits[golden[f"{sample}.logits_positions"]] - wanted).abs().max() < 5e-5


@pytest.mark.parametrize(
    ("changes", "tower"),
    [*((c, None) for c in VARIANTS.values()), *(({}, t) for t in TOWERS.values())],
    ids=[*VARIANTS, *TOWERS],
)
@torch.no_grad()
def test_against_slow_code(changes, tower):
    model, state, config = build(changes, tower)
    ids, images, masks, index = prompt(config)
    if config["weight_tying"]:
        state.pop("lm_head.weight", None)
    with_image = molmoe_reference.logits(state, config, ids, images, masks, index)
    given = {"images": images[None], "image_masks": masks[None], "image_input_idx": index[None]}
    assert with_image.shape == (len(ids), config["embedding_size"])
    torch.testing.assert_close(
        model(ids[None], **given).logits[0], with_image, atol=1e-5, rtol=1e-5
    )
    text = molmoe_reference.logits(state, config, ids)
    torch.testing.assert_close(model(ids[None]).logits[0], text, atol=1e-5, rtol=1e-5)
    assert (with_image - text).abs().max() > 1e-2
    # Step by step with a cache, the same.
    step = model(ids[None, :13], **given, use_cache=True)
    rest = model(ids[None, 13:], cache=step.cache, use_cache=True)
    both = torch.cat([step.logits, rest.logits], dim=1)[0]
    torch.testing.assert_close(both, with_image, atol=1e-5, rtol=1e-5)


def test_tied_weights_are_one_tensor(tmp_path):
    model, _, _ = build({"weight_tying": True})
    assert model.lm_head.weight is model.model.transformer.wte.embedding
    model.float().save_pretrained(tmp_path)
    again = MolmoeForConditionalGeneration.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.transformer.wte.embedding
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_position_embeddings_of_another_grid():
    model, _, _ = build({})
    tower = model.model.vision_backbone.image_vit
    assert tower.positions(576) is tower.positional_embedding
    smaller = tower.positions(16)
    assert smaller.shape == (17, 8)
    assert torch.equal(smaller[0], tower.positional_embedding[0])
    with pytest.raises(ValueError, match="only square grids"):
        tower.positions(15)


def test_transformers_names():
    config = MolmoeConfig.from_dict(raw_config() | {"mlp_hidden_size": 100})
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 2, 4)
    assert (config.num_experts, config.num_local_experts, config.num_experts_per_tok) == (8, 8, 2)
    assert (config.num_key_value_heads, config.intermediate_size) == (4, 50)
    assert (config.tie_word_embeddings, config.rms_norm_eps) == (False, 1e-5)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert config.vision_backbone.image_num_layers == 10
    again = MolmoeConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    assert "rope_parameters" not in config.to_dict()


def test_omitted_keys_take_the_original_defaults():
    config = MolmoeConfig()
    assert (config.weight_tying, config.rope, config.moe_num_experts, config.moe_top_k) == (
        True,
        False,
        8,
        2,
    )
    with pytest.raises(ValueError, match="block_type='sequential' is not supported"):
        MolmoeForConditionalGeneration(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope": False}, "rope=False is not supported, only True"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported, only None"),
        ({"norm_after": True}, "norm_after=True"),
        ({"image_pooling_2d": "stack"}, "image_pooling_2d='stack'"),
        ({"layer_norm_type": "default"}, "layer_norm_type='default'"),
        ({"moe_top_k": 9}, "moe_top_k=9 is not supported, only 1 to 8 experts"),
        ({"moe_top_k": 0}, "moe_top_k=0 is not supported, only 1 to 8 experts"),
        ({"n_heads": 3}, "n_heads=3 is not supported, only a divisor of d_model=64"),
        ({"n_kv_heads": 3}, "n_kv_heads=3 is not supported, only a divisor of n_heads=4"),
        ({"head_dim": 5}, "head_dim=5 is not supported, only d_model/n_heads=16"),
        (
            {"vit_layers": [-11]},
            r"vit_layers=\[-11\] is not supported, only layers of a tower that has 10",
        ),
    ],
)
def test_other_mathematics_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        MolmoeForConditionalGeneration(MolmoeConfig.from_dict(raw_config() | changes))


def test_rope_scaling_is_refused():
    scaled = raw_config() | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    with pytest.raises(UnsupportedModelError, match="no rope scaling: 'linear'"):
        MolmoeConfig.from_dict(scaled)


def test_the_number_of_experts_has_a_default():
    """8 experts, 2 of which act; ``block_type`` alone says that it is a MolmoE."""
    short = raw_config()
    del short["moe_num_experts"], short["moe_top_k"]
    assert why_not_molmoe(short) is None
    config = MolmoeConfig.from_dict(short)
    assert (config.moe_num_experts, config.moe_top_k) == (8, 2)
    assert "moe_num_experts 0" in why_not_molmoe(raw_config() | {"moe_num_experts": 0})


@pytest.mark.parametrize(
    ("changes", "experts"),
    [
        ({"d_model": 24, "mlp_hidden_size": 40}, "eager"),  # 20 wide
        ({"d_model": 20, "n_heads": 2, "mlp_hidden_size": 32}, "eager"),
        ({"d_model": 24, "mlp_hidden_size": 48}, "grouped_mm"),
    ],
)
@torch.no_grad()
def test_sizes_that_the_grouped_product_cannot_take(changes, experts):
    """torch's grouped product wants rows of whole 16 bytes; others run expert by expert."""
    config = MolmoeConfig.from_dict(raw_config() | SMALL | changes)
    model = MolmoeForConditionalGeneration(config).eval()
    assert config._experts_implementation == experts
    ids = prompt(raw_config() | SMALL)[0]
    assert model(ids[None]).logits.isfinite().all()
    assert model.bfloat16()(ids[None]).logits.isfinite().all()


def test_a_dense_molmo_is_refused():
    assert why_not_molmoe(raw_config()) is None
    dense = {"model_type": "molmo", "hidden_size": 3584, "num_hidden_layers": 28}
    with pytest.raises(UnsupportedModelError, match="a dense Molmo .* has no experts to cap"):
        adapter_class_for(dense)
    with pytest.raises(ValueError, match="not a MolmoE config: a dense Molmo"):
        MolmoeConfig.from_dict(dense)
    sequential = raw_config() | {"block_type": "sequential"}
    with pytest.raises(UnsupportedModelError, match="block_type 'sequential'"):
        adapter_class_for(sequential)
    assert adapter_class_for(raw_config()).name == "molmoe"
    assert adapter_class_for(MolmoeConfig.from_dict(raw_config())).name == "molmoe"
    assert "model_type is 'qwen2'" in why_not_molmoe({"model_type": "qwen2"})


def test_the_expert_parallel_plan_names_the_experts():
    from transformers.distributed.configuration_utils import DistributedConfig

    model, _, _ = build({})
    assert model.supports_tp_plan in (True, False)  # asking must not fail
    layers = {f"model.transformer.blocks.{n}.mlp.experts" for n in (0, 1)}
    expanded = model._expand_parallel_plan(dict(model.ep_plan))
    assert layers <= set(expanded)
    assert {expanded[name] for name in layers} == {"ep_dispatch_experts"}
    for name in layers:
        assert expanded[f"{name}.gate_up_proj"] == expanded[f"{name}.down_proj"] == "grouped_gemm"
    assert DistributedConfig().ep_plan is None
