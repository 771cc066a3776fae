"""MolmoE folders that are refused: each with one line that names what is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from molmoe_golden import change_config, make_folder, raw_config
from safetensors.torch import load_file, save_file

from vlm_adapters import load_model
from vlm_adapters.base import ModelLoadError
from vlm_adapters.molmoe.configuration import MolmoeConfig
from vlm_adapters.molmoe.modeling import MolmoeForConditionalGeneration


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "molmoe")


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def store(folder, tensors) -> None:
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")


def refused(folder, pattern) -> None:
    with pytest.raises(ModelLoadError, match=pattern) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def test_missing_parameters(folder):
    tensors = weights(folder)
    del tensors["model.transformer.blocks.0.mlp.experts.3.up_proj.weight"]
    del tensors["lm_head.weight"]
    store(folder, tensors)
    refused(folder, r"2 missing: lm_head.weight, model\..*experts\.3\.up_proj\.weight$")


def test_unexpected_parameters(folder):
    tensors = weights(folder)
    store(folder, tensors | {f"model.extra.{n}": torch.zeros(1) for n in range(10)})
    refused(folder, r"10 unexpected: model.extra.0, .*model.extra.7 and 2 more$")


def test_parameters_of_the_wrong_shape(folder):
    tensors = weights(folder)
    tensors["model.transformer.ln_f.weight"] = torch.ones(63)
    name = "model.transformer.blocks.1.mlp.experts.0.down_proj.weight"
    tensors[name] = tensors[name].T
    store(folder, tensors)
    refused(
        folder, r"2 of the wrong shape: .*experts.0.down_proj.weight \[32, 64\] instead of \[64"
    )


def test_a_config_of_another_size(folder):
    change_config(folder, moe_num_experts=9)
    refused(folder, r"6 missing: .*; .* of the wrong shape: .*gate.weight \[8, 64\] instead of \[9")


def test_a_truncated_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(folder, r"model.safetensors \(1394160 bytes\) is truncated or damaged")


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("tokenizer.json", "lacks its tokenizer file: tokenizer.json$"),
        ("tokenizer_config.json", "lacks its tokenizer file: tokenizer_config.json$"),
        ("preprocessor_config.json", "lacks its processor file: preprocessor_config.json or"),
        ("model.safetensors", r"lacks weights: model.safetensors \(needed: "),
        ("config.json", "holds no config.json"),
    ],
)
def test_a_missing_file(folder, name, pattern):
    (folder / name).unlink()
    refused(folder, pattern)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"]
)
def test_a_truncated_side_file(folder, name):
    text = (folder / name).read_text(encoding="utf-8")
    (folder / name).write_text(text[: len(text) // 2], encoding="utf-8")
    refused(folder, f"{name} is not valid JSON")
    (folder / name).write_text("[]")
    refused(folder, f"{name} holds a list, not a JSON object")


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"d_model": None}, "config.json holds a value of the wrong kind: unsupported operand"),
        ({"vit_layers": -2}, "config.json holds a value of the wrong kind: 'int' object"),
    ],
)
def test_a_config_value_of_the_wrong_kind(folder, changes, pattern):
    change_config(folder, **changes)
    refused(folder, pattern)


def test_an_index_that_names_other_files(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "model-2.safetensors"}})
    )
    refused(folder, "lacks weights: model-2.safetensors")
    index.write_text(
        json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "../other.safetensors"}})
    )
    refused(folder, "names files outside of its folder: ../other.safetensors")
    index.write_text("{}")
    refused(folder, "is not a safetensors index")
    # A single file that lies beside a good index is the one that would be loaded.
    single = folder / "model.safetensors"
    whole = single.read_bytes()
    (folder / "model-1.safetensors").write_bytes(whole)
    named = {
        "metadata": {},
        "weight_map": {name: "model-1.safetensors" for name in weights(folder)},
    }
    index.write_text(json.dumps(named))
    load_model(str(folder))
    single.write_bytes(whole[:-1000])
    refused(folder, "model.safetensors .* is truncated or damaged")
    single.unlink()
    load_model(str(folder))


def test_checks_hold_without_the_adapter(folder):
    """``from_pretrained`` itself loads nothing in part, also in the fused layout."""
    tensors = weights(folder)
    del tensors["model.transformer.ln_f.weight"]
    store(folder, tensors)
    with pytest.raises(ModelLoadError, match="1 missing: model.transformer.ln_f.weight"):
        MolmoeForConditionalGeneration.from_pretrained(folder)
    model = MolmoeForConditionalGeneration(MolmoeConfig.from_dict(raw_config()))
    state = model.state_dict()
    store(folder, state)
    MolmoeForConditionalGeneration.from_pretrained(folder)
    del state["model.vision_backbone.pad_embed"]
    store(folder, state)
    with pytest.raises(ModelLoadError, match="1 missing: model.vision_backbone.pad_embed"):
        MolmoeForConditionalGeneration.from_pretrained(folder)


def test_a_hub_id_without_network():
    from vlm_adapters.molmoe.adapter import MolmoEAdapter

    with pytest.raises(ModelLoadError, match="a local copy needs config.json") as caught:
        MolmoEAdapter.load("allenai/MolmoE-1B-0924-not-here")
    assert "\n" not in str(caught.value)
