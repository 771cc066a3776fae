"""What cannot be capped is refused in one clear line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mm_capacity import limit_capacity, make_policy
from vlm_adapters import adapter_for, load_model
from vlm_adapters.base import UnsupportedModelError
from vlm_adapters.generic import NativeAdapter
from vlm_adapters.registry import adapter_class_for
from vlm_adapters.tiny_build import tiny_config, tiny_model


def one_line(caught) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("model_type", ["llava", "deepseek_vl"])
def test_a_dense_vlm(model_type):
    from transformers import AutoConfig

    with pytest.raises(UnsupportedModelError, match=f"'{model_type}' is not supported") as caught:
        adapter_class_for(AutoConfig.for_model(model_type))
    one_line(caught)


def test_dense_gemma_4():
    config = {"model_type": "gemma4", "text_config": {"enable_moe_block": False}}
    with pytest.raises(UnsupportedModelError, match="this Gemma 4 is dense"):
        adapter_class_for(config)


def test_diffusion():
    with pytest.raises(UnsupportedModelError, match="block diffusion"):
        adapter_class_for({"model_type": "diffusion_gemma", "text_config": {"num_experts": 8}})
    with pytest.raises(UnsupportedModelError, match="block diffusion"):
        load_model("tiny:diffusion_gemma")


def test_the_meta_device():
    from transformers import Glm4vMoeForConditionalGeneration

    with torch.device("meta"):
        model = Glm4vMoeForConditionalGeneration(tiny_config("glm4v_moe"))
    with pytest.raises(
        UnsupportedModelError, match="are on the meta device: load the weights"
    ) as c:
        with limit_capacity(model, make_policy("none")):
            pass
    one_line(c)


def test_quantised_matrices():
    model = tiny_model("glm4v_moe")
    layer = adapter_for(model).moe_layers(model)[1]
    weight = layer.experts.down_proj.detach().to(torch.float8_e4m3fn)
    layer.experts.down_proj = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"are quantised \(float8_e4m3fn\)") as caught:
        with limit_capacity(model, make_policy("none")):
            pass
    assert layer.name in one_line(caught)


class Replaced(nn.Module):
    """Experts as a quantisation backend calls them."""

    num_experts = 8

    def forward(self, hidden_states, routing_data, gather_idx, scatter_idx):
        raise NotImplementedError


@pytest.mark.parametrize("name", ["glm4v_moe", "llama4"])
def test_replaced_experts(name):
    model = tiny_model(name)
    adapter = adapter_for(model)
    adapter.moe_layers(model)[1].block.experts = Replaced()
    with pytest.raises(
        UnsupportedModelError, match=r"called with \(hidden_states, routing"
    ) as caught:
        adapter.moe_layers(model)
    assert "Replaced" in one_line(caught)


class Unheard(nn.Module):
    """A router with a scoring of its own."""

    top_k = 2

    def forward(self, hidden):
        return hidden.tanh()


def test_a_router_that_is_not_understood():
    model = tiny_model("glm4v_moe")
    adapter_for(model).moe_layers(model)[0].block.gate = Unheard()
    with pytest.raises(UnsupportedModelError, match="router Unheard is not understood") as caught:
        adapter_for(model)
    one_line(caught)


def test_experts_without_router():
    model = tiny_model("glm4v_moe")
    del adapter_for(model).moe_layers(model)[0].block.gate
    with pytest.raises(UnsupportedModelError, match="no router module beside them"):
        NativeAdapter(model.config).moe_layers(model)


def test_unknown_tiny_family():
    with pytest.raises(ValueError, match="unknown tiny family 'nope'; known: aria"):
        load_model("tiny:nope")
