"""MolmoE checkpoint folders: what loads, what round-trips, what is refused and how."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from molmoe_golden import DATA, expected, inputs, make_folder, raw_config
from safetensors.torch import load_file

from vlm_adapters import load_model
from vlm_adapters.molmoe.checkpoint import original_shapes, register
from vlm_adapters.molmoe.configuration import MolmoeConfig
from vlm_adapters.molmoe.modeling import MolmoeForConditionalGeneration


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "molmoe")


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same_text_logits(model) -> bool:
    with torch.no_grad():
        logits = model(**inputs("text")).logits[0, expected()["text.logits_positions"]]
    return bool((logits - expected()["text.logits"]).abs().max() < 5e-5)


# -- names and shapes ----------------------------------------------------------------


def test_names_and_shapes_of_the_recorded_model():
    wanted = json.loads((DATA / "model" / "shapes.json").read_text())
    made = original_shapes(MolmoeConfig.from_dict(raw_config()))
    assert {name: list(shape) for name, shape in made.items()} == wanted


def test_names_and_shapes_of_the_release():
    """MolmoE-1B-0924 at full size, on the meta device."""
    config = raw_config() | {
        "d_model": 2048,
        "n_heads": 16,
        "n_layers": 16,
        "vocab_size": 50280,
        "embedding_size": 50304,
        "additional_vocab_size": 128,
        "moe_num_experts": 64,
        "moe_top_k": 8,
    }
    config["vision_backbone"] = config["vision_backbone"] | {
        "image_emb_dim": 1024,
        "image_num_heads": 16,
        "image_num_key_value_heads": 16,
        "image_head_dim": 64,
        "image_mlp_dim": 4096,
        "image_num_layers": 23,
    }
    made = original_shapes(MolmoeConfig.from_dict(config))
    assert made == release_shapes()
    assert sum(math.prod(shape) for shape in made.values()) == 7_221_875_712


def release_shapes() -> dict[str, tuple[int, ...]]:
    """Every parameter of the release's safetensors files."""
    vision, tower = "model.vision_backbone", "model.vision_backbone.image_vit"
    shapes = {
        "model.transformer.wte.embedding": (50304, 2048),
        "model.transformer.wte.new_embedding": (128, 2048),
        "model.transformer.ln_f.weight": (2048,),
        "lm_head.weight": (50304, 2048),
        f"{vision}.pad_embed": (2, 2048),
        f"{vision}.image_projector.w1.weight": (1024, 1024),
        f"{vision}.image_projector.w2.weight": (2048, 1024),
        f"{vision}.image_projector.w3.weight": (1024, 1024),
        f"{vision}.image_pooling_2d.wo.weight": (1024, 1024),
        f"{vision}.image_pooling_2d.wo.bias": (1024,),
        f"{tower}.class_embedding": (1024,),
        f"{tower}.positional_embedding": (577, 1024),
        f"{tower}.patch_embedding.weight": (1024, 588),
        f"{tower}.pre_ln.weight": (1024,),
        f"{tower}.pre_ln.bias": (1024,),
    }
    for part in ("wq", "wk", "wv"):
        shapes[f"{vision}.image_pooling_2d.{part}.weight"] = (1024, 2048)
        shapes[f"{vision}.image_pooling_2d.{part}.bias"] = (1024,)
    for n in range(16):
        block = f"model.transformer.blocks.{n}"
        shapes[f"{block}.attn.att_proj.weight"] = (6144, 2048)
        shapes[f"{block}.attn.attn_out.weight"] = (2048, 2048)
        shapes[f"{block}.mlp.gate.weight"] = (64, 2048)
        for norm in ("attn.q_norm", "attn.k_norm", "attn.attn_norm", "mlp.ff_norm"):
            shapes[f"{block}.{norm}.weight"] = (2048,)
        for e in range(64):
            shapes[f"{block}.mlp.experts.{e}.gate_proj.weight"] = (1024, 2048)
            shapes[f"{block}.mlp.experts.{e}.up_proj.weight"] = (1024, 2048)
            shapes[f"{block}.mlp.experts.{e}.down_proj.weight"] = (2048, 1024)
    for n in range(23):
        block = f"{tower}.transformer.resblocks.{n}"
        for part in ("wq", "wk", "wv", "wo"):
            shapes[f"{block}.attention.{part}.weight"] = (1024, 1024)
            shapes[f"{block}.attention.{part}.bias"] = (1024,)
        shapes[f"{block}.feed_forward.w1.weight"] = (4096, 1024)
        shapes[f"{block}.feed_forward.w1.bias"] = (4096,)
        shapes[f"{block}.feed_forward.w2.weight"] = (1024, 4096)
        shapes[f"{block}.feed_forward.w2.bias"] = (1024,)
        for norm in ("attention_norm", "ffn_norm"):
            shapes[f"{block}.{norm}.weight"] = (1024,)
            shapes[f"{block}.{norm}.bias"] = (1024,)
    return shapes


# -- loading and saving --------------------------------------------------------------


def test_experts_are_fused_and_saved_apart(folder, tmp_path):
    model = MolmoeForConditionalGeneration.from_pretrained(folder)
    experts = model.model.transformer.blocks[1].mlp.experts
    original = weights(folder)
    for e in (0, 7):
        name = f"model.transformer.blocks.1.mlp.experts.{e}"
        gate, up = experts.gate_up_proj[e].chunk(2)
        assert torch.equal(gate, original[f"{name}.gate_proj.weight"])
        assert torch.equal(up, original[f"{name}.up_proj.weight"])
        assert torch.equal(experts.down_proj[e], original[f"{name}.down_proj.weight"])
    model.save_pretrained(tmp_path / "again")
    saved = weights(tmp_path / "again")
    assert saved.keys() == original.keys()
    assert all(torch.equal(saved[name], original[name]) for name in saved)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    changed = {"auto_map", "architectures", "transformers_version", "vision_backbone"}
    kept = {key: value for key, value in raw_config().items() if key not in changed}
    assert {key: config[key] for key in kept} == kept
    assert kept.keys() <= config.keys() and "auto_map" not in config
    assert same_text_logits(MolmoeForConditionalGeneration.from_pretrained(tmp_path / "again"))


def test_a_model_that_was_not_loaded_saves_in_the_original_layout(tmp_path):
    model = MolmoeForConditionalGeneration(MolmoeConfig.from_dict(raw_config()))
    model.save_pretrained(tmp_path)
    saved = {name: list(tensor.shape) for name, tensor in weights(tmp_path).items()}
    assert saved == json.loads((DATA / "model" / "shapes.json").read_text())


def test_shards_dtype_and_device_map(folder, tmp_path):
    model = MolmoeForConditionalGeneration.from_pretrained(folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="300KB")
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        shutil.copyfile(folder / name, tmp_path / "shards" / name)
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    vlm = load_model(str(tmp_path / "shards"), device="cpu")
    assert vlm.model.dtype == torch.float32 and same_text_logits(vlm.model)
    half = load_model(str(tmp_path / "shards"), dtype="bfloat16").model
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    placed = MolmoeForConditionalGeneration.from_pretrained(
        tmp_path / "shards", device_map={"": "cpu"}
    )
    assert same_text_logits(placed)


def test_auto_classes_once_registered(folder):
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    register()
    register()
    assert isinstance(AutoConfig.from_pretrained(folder), MolmoeConfig)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert isinstance(model, MolmoeForConditionalGeneration) and same_text_logits(model)
    assert type(AutoProcessor.from_pretrained(folder)).__name__ == "MolmoProcessor"


def test_importing_registers_nothing():
    """No module of the package calls anything for its effect while it is imported."""
    import ast

    import vlm_adapters.molmoe

    for path in Path(vlm_adapters.molmoe.__file__).parent.glob("*.py"):
        for statement in ast.parse(path.read_text()).body:
            called = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            assert not called, f"{path.name}: line {statement.lineno}"
            assert isinstance(
                statement,
                (
                    ast.Expr,
                    ast.Import,
                    ast.ImportFrom,
                    ast.Assign,
                    ast.AnnAssign,
                    ast.FunctionDef,
                    ast.ClassDef,
                ),
            )


def test_stop_and_padding_come_from_the_tokenizer(folder):
    vlm = load_model(str(folder))
    assert vlm.model.generation_config.eos_token_id == vlm.processor.tokenizer.eos_token_id == 499
    assert vlm.model.generation_config.pad_token_id == 1
    # Without the tokenizer nothing stops.
    bare = MolmoeForConditionalGeneration.from_pretrained(folder)
    assert bare.generation_config.eos_token_id is None


def test_left_over_tokenizer_files_change_nothing(folder):
    """The release's folder holds maps that contradict its tokenizer_config.json."""
    plain = load_model(str(folder)).processor
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<|start|>", "unk_token": "<|unk|>", "pad_token": "<|pad|>"})
    )
    (folder / "added_tokens.json").write_text(json.dumps({"<im_start>": 100278}))
    path = folder / "tokenizer_config.json"
    named = json.loads(path.read_text()) | {"tokenizer_class": "GPTNeoXTokenizer"}
    path.write_text(json.dumps(named))
    mixed = load_model(str(folder)).processor
    assert mixed.special_ids() == plain.special_ids()
    assert mixed.tokenizer.pad_token_id == 1
    assert torch.equal(mixed.process("Hello")["input_ids"], plain.process("Hello")["input_ids"])
