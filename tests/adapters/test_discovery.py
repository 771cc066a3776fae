"""The scan over transformers: what it finds, and that it reads routers right."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vlm_adapters.coverage import NOTES, REFUSED, WRAPPERS_APART, coverage, text_only, wrapped
from vlm_adapters.discovery import scan
from vlm_adapters.registry import ADAPTERS
from vlm_adapters.router_formula import RouterFormula, formula_of_source
from vlm_adapters.tiny_families import FAMILIES

# Where the experts hang: in the class itself, in a language model, in a thinker, in another folder.
EXPECTED = {
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "aria": "AriaForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
    "nemotron_h_omni": "NemotronH_Omni_Reasoning_V3",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "step3p7": "Step3p7ForConditionalGeneration",
    "diffusion_gemma": "DiffusionGemmaForBlockDiffusion",
}
DENSE = ("qwen3_vl", "gemma3", "mllama", "deepseek_vl", "qwen3_5", "qwen2_moe", "mixtral")


def test_families_are_found_wherever_the_experts_hang():
    families = {family.name: family for family in scan()[0]}
    for name, head in EXPECTED.items():
        assert head in families[name].classes
    assert families["kimi_k25"].language_model == "deepseek_v3"
    assert families["nemotron_h_omni"].language_model == "nemotron_h"
    assert not families["llama4"].seam
    assert all(f.seam for f in families.values() if f.name not in ("llama4", "vitpose_backbone"))


@pytest.mark.parametrize("name", DENSE)
def test_dense_and_text_only_folders_are_no_families(name):
    assert name not in {family.name for family in scan()[0]}


def test_wrappers_around_any_language_model():
    wrappers = scan()[1]
    assert {"internvl", "llava", "llava_onevision", "mistral3"} <= set(wrappers)
    # Fixed to a dense model of their own, or no language model that answers.
    assert not {"qwen3_vl", "grounding_dino", "kimi_k25"} & set(wrappers)


def test_every_family_works_or_has_a_reason():
    lines = coverage()
    assert [line.family.name for line in lines if line.status == "adapter needed"] == []
    for line in lines:
        if line.status == "covered":
            assert line.adapter in ADAPTERS and line.family.formulas
        else:
            assert line.note


def test_tables_name_nothing_that_is_gone():
    names = {family.name for family in scan()[0]}
    assert set(REFUSED) | set(NOTES) <= names
    assert set(WRAPPERS_APART) <= set(scan()[1])
    assert set(text_only()) | set(wrapped()) <= set(FAMILIES)


SOFTMAX_TOP = "probs = softmax(logits)\nvalue, index = topk(probs, k)\n"


@pytest.mark.parametrize(
    "source, expected",
    [
        (SOFTMAX_TOP, RouterFormula("softmax")),
        (
            SOFTMAX_TOP + "if self.norm_topk_prob:\n    value /= value.sum(dim=-1)\n",
            RouterFormula("softmax", normalised="by configuration"),
        ),
        (
            "value, index = topk(logits, k)\nsoftmax(value)",
            RouterFormula("softmax", normalised="yes"),
        ),
        (
            "scores = logits.sigmoid() + self.e_score_correction_bias\nself.topk_group\n"
            "x.topk(2, dim=-1)[0].sum(dim=-1)\nweights * self.routed_scaling_factor",
            RouterFormula("sigmoid", bias=True, groups="sum of two", scaled=True),
        ),
        ("value, index = topk(logits, k)", None),
    ],
)
def test_formula_of_source(source, expected):
    assert formula_of_source(source) == expected


def test_the_scan_imports_nothing_heavy():
    code = (
        "import sys; from vlm_adapters.coverage import coverage; coverage(); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
