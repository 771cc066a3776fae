"""Original checkpoint files: names, shapes, shards, round trips, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from dsvl2_data import DATA, meta, sample
from safetensors.torch import load_file, save_file

from vlm_adapters.base import ModelLoadError, UnsupportedModelError
from vlm_adapters.deepseek_vl2.adapter import DeepseekVL2Adapter
from vlm_adapters.deepseek_vl2.checkpoint import original_parameters, register
from vlm_adapters.deepseek_vl2.configuration import DeepseekVLV2Config
from vlm_adapters.deepseek_vl2.loading import read_config
from vlm_adapters.deepseek_vl2.modeling import DeepseekVLV2ForCausalLM

TOWER = {
    "layers": 27,
    "mlp_ratio": 3.7362,
    "model_name": "siglip_so400m_patch14_384",
    "model_type": "vision",
    "patch_size": 14,
    "width": 1152,
}
LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
SHARED = {"first_k_dense_replace": 1, "n_shared_experts": 2, "num_experts_per_tok": 6}
RELEASES: dict[str, dict[str, Any]] = {
    "tiny": SHARED
    | {
        "hidden_size": 1280,
        "num_hidden_layers": 12,
        "num_attention_heads": 10,
        "num_key_value_heads": 10,
        "use_mla": False,
        "kv_lora_rank": None,
        "q_lora_rank": None,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "v_head_dim": 0,
        "intermediate_size": 6848,
        "moe_intermediate_size": 896,
        "n_routed_experts": 64,
        "topk_method": "greedy",
        "vocab_size": 129280,
    },
    "small": SHARED
    | LATENT
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "topk_method": "greedy",
        "vocab_size": 102400,
    },
    "base": SHARED
    | LATENT
    | {
        "hidden_size": 2560,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 72,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.0,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 129280,
    },
}


def release(name: str) -> dict[str, Any]:
    """A config.json with the fields that a release file gives."""
    language = RELEASES[name]
    return {
        "model_type": "deepseek_vl_v2",
        "architectures": ["DeepseekVLV2ForCausalLM"],
        "tile_tag": "2D",
        "global_view_pos": "head",
        "candidate_resolutions": [[384, 384], [768, 384]],
        "torch_dtype": "bfloat16",
        "vision_config": TOWER,
        "projector_config": {"model_type": "mlp_projector", "n_embed": language["hidden_size"]},
        "language_config": {"model_type": "deepseek_v2", **language},
    }


def listed_parameters(language: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a release, spelled out."""
    d, heads = language["hidden_size"], language["num_attention_heads"]
    found: dict[str, tuple[int, ...]] = {
        "image_newline": (d,),
        "view_seperator": (d,),
        "vision.patch_embed.proj.weight": (1152, 3, 14, 14),
        "vision.patch_embed.proj.bias": (1152,),
        "vision.pos_embed": (1, 729, 1152),
        "vision.norm.weight": (1152,),
        "vision.norm.bias": (1152,),
        "projector.layers.0.weight": (d, 4608),
        "projector.layers.0.bias": (d,),
        "projector.layers.2.weight": (d, d),
        "projector.layers.2.bias": (d,),
        "language.model.embed_tokens.weight": (language["vocab_size"], d),
        "language.model.norm.weight": (d,),
        "language.lm_head.weight": (language["vocab_size"], d),
    }
    for block in range(27):
        for part, rows, columns in (
            ("attn.qkv", 3456, 1152),
            ("attn.proj", 1152, 1152),
            ("mlp.fc1", 4304, 1152),
            ("mlp.fc2", 1152, 4304),
        ):
            found[f"vision.blocks.{block}.{part}.weight"] = (rows, columns)
            found[f"vision.blocks.{block}.{part}.bias"] = (rows,)
        for part in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            found[f"vision.blocks.{block}.{part}"] = (1152,)
    for layer in range(language["num_hidden_layers"]):
        name = f"language.model.layers.{layer}."
        found[name + "input_layernorm.weight"] = (d,)
        found[name + "post_attention_layernorm.weight"] = (d,)
        if language.get("use_mla", True):
            attention = {
                "q_proj": (heads * 192, d),
                "kv_a_proj_with_mqa": (576, d),
                "kv_a_layernorm": (512,),
                "kv_b_proj": (heads * 256, 512),
                "o_proj": (d, heads * 128),
            }
        else:
            attention = {f"{part}_proj": (d, d) for part in "qkvo"}
        for part, shape in attention.items():
            found[f"{name}self_attn.{part}.weight"] = shape
        blocks = {"mlp": language["intermediate_size"]}
        if layer:
            width = language["moe_intermediate_size"]
            blocks = {f"mlp.experts.{e}": width for e in range(language["n_routed_experts"])}
            blocks["mlp.shared_experts"] = 2 * width
            found[name + "mlp.gate.weight"] = (language["n_routed_experts"], d)
            if language["topk_method"] == "noaux_tc":
                found[name + "mlp.gate.e_score_correction_bias"] = (language["n_routed_experts"],)
        for block, width in blocks.items():
            found[f"{name}{block}.gate_proj.weight"] = (width, d)
            found[f"{name}{block}.up_proj.weight"] = (width, d)
            found[f"{name}{block}.down_proj.weight"] = (d, width)
    return found


@pytest.mark.parametrize("name", RELEASES)
def test_release_skeletons(name: str) -> None:
    config = DeepseekVLV2Config.from_dict(release(name))
    assert original_parameters(config) == listed_parameters(RELEASES[name])
    assert config.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_recorded_parameter_lists(kind: str) -> None:
    raw = json.loads((DATA / kind / "config.json").read_text())
    wanted = {
        key: tuple(shape)
        for key, shape in meta(kind)["parameters"].items()
        if not key.startswith("vision.attn_pool.")
    }
    assert original_parameters(DeepseekVLV2Config.from_dict(raw)) == wanted


def test_omitted_fields_take_the_class_defaults() -> None:
    config = DeepseekVLV2Config.from_dict({"model_type": "deepseek_vl_v2"})
    vision, language = config.vision_config, config.language_config
    assert (vision.image_size, vision.heads, vision.patch_size, vision.width) == (384, 16, 16, 1024)
    assert (config.projector_config.input_dim, config.projector_config.n_embed) == (1152, 2048)
    assert language.rope_parameters == {"rope_theta": 1e4, "rope_type": "default"}
    assert (language.rms_norm_eps, language.use_mla, language.norm_topk_prob) == (1e-6, True, False)
    assert (language.routed_scaling_factor, language.q_lora_rank) == (1.0, 1536)
    assert (language.topk_method, config.tile_tag) == ("gready", "tile_tag")
    assert (language.bos_token_id, language.eos_token_id) == (100000, 100001)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_saved_checkpoint_is_the_original_one(recorded: Any, tmp_path: Path, kind: str) -> None:
    model = recorded(kind).model
    model.save_pretrained(tmp_path)
    original = load_file(DATA / kind / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    used = {key for key in original if not key.startswith("vision.attn_pool.")}
    assert set(saved) == used
    assert all(torch.equal(saved[key], original[key]) for key in used)
    again = DeepseekVLV2ForCausalLM.from_pretrained(tmp_path)
    assert again.config.to_diff_dict() == model.config.to_diff_dict()
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["model_type"] == "deepseek_vl_v2"
    assert raw["architectures"] == ["DeepseekVLV2ForCausalLM"]
    inputs = sample(kind, "text_only")
    with torch.no_grad():
        assert torch.equal(again(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize(
    "language",
    [
        {"use_mla": True, "q_lora_rank": 10, "topk_method": "noaux_tc"},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.7}},
        {"num_key_value_heads": 2, "rope_theta": 500.0, "kv_lora_rank": None},
    ],
    ids=["mla", "yarn", "mha"],
)
def test_new_models_are_saved_in_the_original_layout(
    tmp_path: Path, language: dict[str, Any]
) -> None:
    vlm = DeepseekVL2Adapter.tiny_model(3, **language)
    vlm.model.save_pretrained(tmp_path, max_shard_size="100KB")
    vlm.processor.save_pretrained(tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    names = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(names) == set(original_parameters(vlm.model.config))
    again = DeepseekVL2Adapter.load(str(tmp_path))
    messages = [{"role": "user", "content": "Hello"}]
    with torch.no_grad():
        first = vlm.model(**vlm.prepare(messages)).logits
        assert torch.equal(again.model(**again.prepare(messages)).logits, first)


def test_shards_dtype_and_device_map(recorded: Any, folder: Any) -> None:
    target = folder("mla")
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    # Experts of one layer spread over shards, as in the releases.
    keys = sorted(tensors)
    shards = {f"model-{i + 1:05d}-of-00003.safetensors": keys[i::3] for i in range(3)}
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, target / file)
    index = {
        "metadata": {},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    vlm = DeepseekVL2Adapter.load(str(target), device_map={"": "cpu"})
    inputs = sample("mla", "one_tile")
    with torch.no_grad():
        wanted = recorded("mla").model(**inputs).logits
        assert torch.equal(vlm.model(**inputs).logits, wanted)
    half = DeepseekVL2Adapter.load(str(target), dtype="bfloat16").model
    assert half.model.language_model.layers[1].mlp.experts.down_proj.dtype == torch.bfloat16
    assert half.model.language_model.layers[1].mlp.gate.e_score_correction_bias.dtype == (
        torch.float32
    )


def test_auto_classes_after_registration(folder: Any) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    register()
    register()  # repeatable
    target = folder("mla")
    assert isinstance(AutoConfig.from_pretrained(target), DeepseekVLV2Config)
    model = AutoModelForImageTextToText.from_pretrained(target)
    assert isinstance(model, DeepseekVLV2ForCausalLM)
    processor = AutoProcessor.from_pretrained(target)
    assert type(processor).__name__ == "DeepseekVLV2Processor"
    assert processor.tokenizer.encode("a<image>b", add_special_tokens=False) == [67, 412, 68]


def test_importing_the_adapter_registers_nothing() -> None:
    """It cannot: transformers, which holds the registries, is not even imported."""
    code = "import sys, vlm_adapters.deepseek_vl2.adapter; assert 'transformers' not in sys.modules"
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=300)


OCR = {
    "model_type": "deepseek_vl_v2",
    "architectures": ["DeepseekOCRForCausalLM"],
    "vision_config": {
        "model_name": "deeplip_b_l",
        "width": {"clip-l-14-224": {}, "sam_vit_b": {}},
    },
    "projector_config": {"projector_type": "linear"},
}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (OCR, "DeepSeek-OCR checkpoint \\(architecture 'DeepseekOCRForCausalLM'\\)"),
        (OCR | {"architectures": None}, "several towers \\(clip-l-14-224, sam_vit_b\\)"),
    ],
)
def test_ocr_checkpoints_are_told_apart(config: dict[str, Any], reason: str, folder: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        DeepseekVL2Adapter.matches(config)
    with pytest.raises(ValueError, match=reason):
        DeepseekVLV2Config.from_dict(dict(config))
    target = folder("mla")
    (target / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=reason) as raised:
        DeepseekVL2Adapter.load(str(target))
    assert "\n" not in str(raised.value)


def test_matches() -> None:
    raw = release("tiny")
    assert DeepseekVL2Adapter.matches(raw)
    assert DeepseekVL2Adapter.matches(DeepseekVLV2Config.from_dict(raw))
    assert not DeepseekVL2Adapter.matches({"model_type": "qwen3_vl_moe"})
    with pytest.raises(UnsupportedModelError, match="model_type is 'llama'"):
        read_config({"model_type": "llama"})


def edit(file: Path, change: Any) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def truncate(target: Path) -> None:
    data = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(data[: len(data) // 2])


def cut(name: str) -> Any:
    def apply(target: Path) -> None:
        text = (target / name).read_text(encoding="utf-8")
        (target / name).write_text(text[: len(text) // 2], encoding="utf-8")

    return apply


def with_tensors(change: Any) -> Any:
    def apply(target: Path) -> None:
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        save_file(tensors, target / "model.safetensors")

    return apply


def set_tensor(name: str, shape: tuple[int, ...]) -> Any:
    return with_tensors(lambda tensors: tensors.__setitem__(name, torch.zeros(shape)))


def set_field(part: str, key: str, value: Any) -> Any:
    def change(config: dict[str, Any]) -> None:
        holder = config[part] if part else config
        holder[key] = value
        if value is None:
            del holder[key]

    return lambda target: edit(target / "config.json", change)


EXPERT = "language.model.layers.2.mlp.experts.5.up_proj.weight"
BROKEN = {
    "truncated": (truncate, "not a complete safetensors file"),
    "no weights": (lambda t: (t / "model.safetensors").unlink(), "holds neither model.safetensors"),
    "missing parameter": (
        with_tensors(lambda tensors: tensors.pop(EXPERT)),
        f"1 missing: {EXPERT}",
    ),
    "unexpected parameter": (set_tensor("vision.extra", (1,)), "1 unexpected: vision.extra"),
    "wrong shape": (
        set_tensor(EXPERT, (32, 60)),
        r"experts.5.up_proj.weight \(32, 60\) instead of",
    ),
    "wrong shape of qkv": (
        set_tensor("vision.blocks.0.attn.qkv.weight", (93, 32)),
        r"attn.qkv.weight \(93, 32\) instead of \(96, 32\)",
    ),
    "no tokenizer": (lambda t: (t / "tokenizer.json").unlink(), "lacks tokenizer.json"),
    "no tokenizer config": (
        lambda t: (t / "tokenizer_config.json").unlink(),
        "lacks tokenizer_config.json",
    ),
    "no processor": (
        lambda t: (t / "processor_config.json").unlink(),
        "lacks processor_config.json",
    ),
    "tokenizer cut off": (cut("tokenizer.json"), "tokenizer.json' is not valid JSON"),
    "tokenizer config cut off": (
        cut("tokenizer_config.json"),
        "tokenizer_config.json' is not valid JSON",
    ),
    "processor cut off": (cut("processor_config.json"), "processor_config.json' is not valid JSON"),
    "processor is a list": (
        lambda t: (t / "processor_config.json").write_text("[]"),
        "holds a list, not a JSON object",
    ),
    "size as text": (
        set_field("vision_config", "image_size", "118"),
        "config.json' holds a value of the wrong kind: unsupported operand",
    ),
    "resolutions": (
        set_field("", "candidate_resolutions", [384]),
        "config.json' holds a value of the wrong kind: cannot unpack",
    ),
    "frequency": (set_field("language_config", "moe_layer_freq", 0), "moe_layer_freq=0"),
    "activation": (set_field("language_config", "hidden_act", "none"), "hidden_act='none'"),
    "rope without factor": (
        set_field("language_config", "rope_scaling", {"type": "yarn"}),
        "rope_scaling.factor=None is not supported, only a number above 0",
    ),
    "rope without type": (
        set_field("language_config", "rope_scaling", {"factor": 2.0}),
        "rope_scaling.type=None is not supported, only a type beside its factor",
    ),
    "other tile": (
        lambda t: edit(t / "processor_config.json", lambda c: c.update(patch_size=16)),
        "makes 7 patches a side, merged by 2, but config.json has 8",
    ),
    "small vocabulary": (
        lambda t: edit(t / "config.json", lambda c: c["language_config"].update(vocab_size=400)),
        "embed_tokens.weight",
    ),
    "shard outside": (
        lambda t: (t / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": {"a": "../model.safetensors"}})
        ),
        "not a file of its folder",
    ),
    "shard missing": (
        lambda t: (t / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": {"a": "model-1.safetensors"}})
        ),
        "lacks model-1.safetensors",
    ),
    "index broken": (
        lambda t: (t / "model.safetensors.index.json").write_text("[]"),
        "not an index",
    ),
    "no topk_method": (
        set_field("language_config", "topk_method", None),
        "topk_method='gready' is not supported, only 'greedy' or",
    ),
    "no tile_tag": (set_field("", "tile_tag", None), "tile_tag='tile_tag' is not supported"),
    "tile_tag 1D": (set_field("", "tile_tag", "1D"), "tile_tag='1D'"),
    "scoring": (set_field("language_config", "scoring_func", "tanh"), "scoring_func='tanh'"),
    "top_k": (set_field("language_config", "num_experts_per_tok", 9), "only 1 to 8 experts"),
    "groups": (set_field("language_config", "n_group", 3), "n_group=3.*a divisor"),
    "projector": (
        set_field("projector_config", "projector_type", "linear"),
        "projector_type='linear' is not supported",
    ),
    "head": (set_field("vision_config", "ignore_head", False), "ignore_head=False"),
    "rope": (
        set_field(
            "language_config",
            "rope_scaling",
            {
                "type": "longrope",
                "factor": 2.0,
                "short_factor": [1.0] * 4,
                "long_factor": [1.0] * 4,
            },
        ),
        "rope_scaling.type='longrope'",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_clear_line_for_broken_checkpoints(folder: Any, name: str) -> None:
    target = folder("mla")
    change, message = BROKEN[name]
    change(target)
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=message) as raised:
        DeepseekVL2Adapter.load(str(target))
    assert "\n" not in str(raised.value)


def test_from_pretrained_is_as_strict(folder: Any) -> None:
    target = folder("mla")
    with_tensors(lambda tensors: tensors.pop("language.model.norm.weight"))(target)
    with pytest.raises(ModelLoadError, match="1 missing: model.language_model.norm.weight"):
        DeepseekVLV2ForCausalLM.from_pretrained(target)
    set_tensor("language.model.norm.weight", (60,))(target)
    with pytest.raises(ModelLoadError, match=r"norm.weight \(60,\) instead of \(64,\)"):
        DeepseekVLV2ForCausalLM.from_pretrained(target)
    set_tensor("language.model.norm.weight", (64,))(target)
    set_tensor("language.extra", (64,))(target)
    with pytest.raises(ModelLoadError, match="1 unexpected: language.extra"):
        DeepseekVLV2ForCausalLM.from_pretrained(target)


def test_missing_folder() -> None:
    with pytest.raises(ModelLoadError, match="no such folder, and the hub could not be reached"):
        DeepseekVL2Adapter.load("./no/such/folder")
