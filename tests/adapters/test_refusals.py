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


@pytest.mark.parametrize("model_type", ["llava", "deepseek_vl", "qwen3_vl", "gemma3"])
def test_a_dense_vlm(model_type):
    from transformers import AutoConfig

    said = f"'{model_type}' is not supported: it is dense"
    with pytest.raises(UnsupportedModelError, match=said) as caught:
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


class Unnamed(nn.Module):
    """Experts that keep the call, but are a list of quantised parts."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


@pytest.mark.parametrize("experts", [Unnamed(), nn.ModuleList([nn.Linear(2, 2)])])
def test_experts_that_do_not_say_how_many_they_are(experts):
    """Even where nothing looks like a router: a layer must not be left out silently."""
    model = tiny_model("glm4v_moe")
    block = adapter_for(model).moe_layers(model)[1].block
    block.experts = experts
    with pytest.raises(UnsupportedModelError, match="are out of reach, load the model") as caught:
        adapter_for(model)
    assert type(experts).__name__ in one_line(caught)
    block.gate = nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match="are out of reach"):
        adapter_for(model)


def test_quantised_buffers():
    model = tiny_model("glm4v_moe")
    layer = adapter_for(model).moe_layers(model)[0]
    layer.experts.register_buffer("qweight", torch.zeros(8, 4, 4, dtype=torch.int32))
    with pytest.raises(UnsupportedModelError, match=r"are quantised \(int32\)") as caught:
        adapter_for(model)
    one_line(caught)


@pytest.mark.parametrize("name", ["glm4v_moe", "llama4"])
def test_a_second_policy_on_one_model(name):
    model = tiny_model(name)
    ids = {"input_ids": torch.arange(12, 40)[None]}
    policy = make_policy("token-drop", gamma=0.5)
    with torch.no_grad(), limit_capacity(model, policy):
        under = model(**ids).logits
        with pytest.raises(ValueError, match="runs under a capacity policy already") as caught:
            with limit_capacity(model, make_policy("none")):
                pass
        one_line(caught)
        assert torch.equal(under, model(**ids).logits)
    with limit_capacity(model, policy):
        pass


@pytest.mark.parametrize("name", ["glm4v_moe", "llama4"])
def test_two_models_of_one_configuration(name):
    """One's policy leaves the other alone, whichever context is left first."""
    first = tiny_model(name)
    second = type(first)(first.config).eval()
    adapter_for(second).after_loading(second)
    ids = {"input_ids": torch.arange(12, 40)[None]}
    policy = make_policy("token-drop", gamma=0.5)
    with torch.no_grad():
        before = [model(**ids).logits for model in (first, second)]
        contexts = [limit_capacity(model, policy, check=True) for model in (first, second)]
        contexts[0].__enter__()
        assert torch.equal(before[1], second(**ids).logits)
        contexts[1].__enter__()
        contexts[0].__exit__(None, None, None)
        assert torch.equal(before[0], first(**ids).logits)
        assert not torch.equal(before[1], second(**ids).logits)
        contexts[1].__exit__(None, None, None)
        assert torch.equal(before[1], second(**ids).logits)


@pytest.mark.parametrize("which", ["grouped_mm", "batched_mm"])
def test_an_implementation_that_does_not_know_the_dropped(which):
    """It would read beyond the experts, or leave uninitialised memory in the result."""
    model = tiny_model("glm4v_moe")
    model.set_experts_implementation(which)
    policy = make_policy("token-drop", gamma=0.5)
    with pytest.raises(ValueError, match=f"'{which}', which does not know the id") as caught:
        with limit_capacity(model, policy, skip_dropped=False):
            pass
    one_line(caught)
    ids = {"input_ids": torch.arange(12, 40)[None]}
    with torch.no_grad(), limit_capacity(model, policy, check=True):
        ours = model(**ids).logits
    model.set_experts_implementation("eager")
    with torch.no_grad(), limit_capacity(model, policy, check=True, skip_dropped=False):
        torch.testing.assert_close(model(**ids).logits, ours, atol=1e-5, rtol=1e-5)


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
