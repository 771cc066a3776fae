"""VLMEvalKit's model names lead to the checkpoints behind them."""

from __future__ import annotations

import pytest

from mm_capacity.errors import UserError
from mm_capacity.evaluation.vlmeval_models import (
    EXAMPLES,
    find_wrapper,
    moe_model_names,
    resolve_model,
)


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("Qwen3-VL-30B-A3B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct"),
        ("molmoE-1B-0924", "allenai/MolmoE-1B-0924"),
        ("deepseek_vl2_tiny", "deepseek-ai/deepseek-vl2-tiny"),
        ("Aria", "rhymes-ai/Aria"),
    ],
)
def test_moe_names(name, hub_id):
    assert resolve_model(name) == hub_id
    entry = find_wrapper(name)
    assert entry is not None and entry["hub_id"] == hub_id and entry["moe"]
    assert name in moe_model_names()


@pytest.mark.parametrize(
    "name", ["llava_v1.5_7b", "Qwen2-VL-2B-Instruct", "GPT4o", "Qwen3-VL-8B-Instruct"]
)
def test_names_that_are_no_moe(name):
    entry = find_wrapper(name)
    assert entry is not None and not entry["moe"]
    with pytest.raises(UserError) as caught:
        resolve_model(name)
    assert name in str(caught.value) and "Qwen3-VL-30B-A3B-Instruct" in str(caught.value)


def test_examples_are_moe():
    assert set(EXAMPLES) <= set(moe_model_names())


def test_unknown_names():
    assert find_wrapper("digits") is None
    with pytest.raises(UserError, match="did you mean 'Qwen3-VL-30B-A3B-Instruct'"):
        resolve_model("Qwen3-VL-30B-A3B-Instrct")
