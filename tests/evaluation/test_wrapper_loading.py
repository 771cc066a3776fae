"""While a wrapper is built, device, dtype and foreign code are the user's, not the wrapper's."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

from mm_capacity.errors import UserError
from mm_capacity.evaluation.vlmeval_models import WrapperChoice
from mm_capacity.evaluation.wrappers import build
from mm_capacity.evaluation.wrappers_loading import Loading, owners
from tests.evaluation import tiny_checkpoints

CODE = """
import pathlib
from transformers import PretrainedConfig
pathlib.Path({marker!r}).touch()

class ForeignConfig(PretrainedConfig):
    model_type = "foreign"
"""


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    return str(tiny_checkpoints.glm(tmp_path_factory.mktemp("glm")))


def methods():
    return {owner: vars(owner)["from_pretrained"] for owner in owners()}


def test_transformers_is_as_before():
    before = methods()
    assert {transformers.PreTrainedModel, transformers.AutoProcessor} <= set(before)
    with pytest.raises(KeyError), Loading("cpu").applied():
        assert all(vars(owner)["from_pretrained"] is not m for owner, m in before.items())
        raise KeyError
    assert methods() == before


def test_device_dtype_and_attention(glm):
    loading = Loading("cpu", "float32")
    with loading.applied():
        model = AutoModelForImageTextToText.from_pretrained(
            glm,
            torch_dtype=torch.bfloat16,
            device_map="cuda",
            attn_implementation="flash_attention_2",
        )
    assert model.device.type == "cpu" and model.dtype is torch.float32
    assert model.config._attn_implementation == "sdpa"
    assert list(loading.changes) == [
        "device_map: cuda -> cpu",
        "dtype: torch.bfloat16 -> torch.float32",
        "attn_implementation: flash_attention_2 -> sdpa",
    ]


def test_what_agrees_is_left_alone(glm):
    loading = Loading("cpu")
    with loading.applied():
        model = AutoModelForImageTextToText.from_pretrained(
            glm, dtype=torch.bfloat16, device_map="cpu", attn_implementation="eager"
        )
    assert model.dtype is torch.bfloat16 and model.config._attn_implementation == "eager"
    assert loading.changes == {}


@pytest.mark.parametrize("asked", [AutoModel, AutoModelForCausalLM])
def test_a_native_family_is_loaded_whole(glm, asked):
    """Wrappers ask auto classes that only the checkpoint's own code would fit."""
    loading = Loading("cpu")
    with loading.applied():
        model = asked.from_pretrained(glm, trust_remote_code=True)
    assert type(model).__name__ == "Glm4vMoeForConditionalGeneration"
    assert f"class: {asked.__name__} -> AutoModelForImageTextToText" in loading.changes


class Foreign:
    """Asks for the checkpoint's own code."""

    def __init__(self, model_path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, trust_remote_code=True)


@pytest.mark.parametrize("trusted", [False, True])
def test_foreign_code_runs_only_when_the_user_says_so(tmp_path, monkeypatch, trusted):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    folder, marker = tmp_path / "foreign", tmp_path / "code_ran"
    folder.mkdir()
    auto = {"AutoConfig": "foreign.ForeignConfig", "AutoModelForCausalLM": "foreign.ForeignModel"}
    config = {"model_type": "foreign", "auto_map": auto}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "foreign.py").write_text(CODE.format(marker=str(marker)))
    choice = WrapperChoice("Foreign-30B-A3B", Foreign, {"model_path": str(folder)})
    with pytest.raises(UserError) as caught:  # with the code, there is no model in it
        build(choice, device="cpu", dtype="auto", trust_remote_code=trusted)
    assert marker.exists() is trusted
    hint = "needs the checkpoint's own code, which is run only with --trust-remote-code"
    assert (hint in str(caught.value)) is not trusted


class Stubborn:
    """Casts its model itself."""

    def __init__(self, model_path: str) -> None:
        loaded = AutoModelForImageTextToText.from_pretrained(model_path, dtype="auto")
        self.model = loaded.to(torch.bfloat16)


def test_a_dtype_that_the_wrapper_does_not_follow_is_an_error(glm):
    choice = WrapperChoice("Stubborn-30B-A3B", Stubborn, {"model_path": glm})
    build(choice, device="cpu", dtype="bfloat16", trust_remote_code=False)
    with pytest.raises(UserError, match="casts its model to torch.bfloat16 itself, not to float32"):
        build(choice, device="cpu", dtype="float32", trust_remote_code=False)
