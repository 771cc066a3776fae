"""Which families of the installed transformers are covered, and why others are not.

A family is *covered* if there is a tiny model of one of its classes in
:mod:`vlm_adapters.tiny_families`: the tests run every one of them. Imports neither torch nor
transformers.
"""

from __future__ import annotations

from dataclasses import dataclass

from .discovery import Family, scan
from .registry import ADAPTERS
from .tiny_families import FAMILIES

REFUSED = {
    "diffusion_gemma": (
        "block diffusion: tokens are routed again at every denoising step, so no prefill to cap"
    ),
    "vitpose_backbone": "experts of a pose backbone: chosen by data set, not routed, and no text",
}
NOTES = {
    "dots3_note": "experts of the vision tower are left alone",
    "ernie4_5_vl_moe": "text and image experts of a layer count as two layers",
    "gemma4": "with experts only (`enable_moe_block`)",
    "inkling2_loop": "a looped layer is capped in each of its passes",
    "llama4": "stands in for the block's forward; 5.24.0 needs a hook to run at all",
    "qwen3_omni_moe": "the thinker; the talker is left alone",
}
WRAPPERS_APART = {
    "florence2": "needs an encoder-decoder",
    "fuyu": "has no vision settings of its own",
    "paligemma": "takes Gemma only",
}
PORTS = {
    "molmoe": "MolmoE-1B (softmax)",
    "deepseek_vl2": "DeepSeek-VL2 (softmax, or sigmoid + bias with groups)",
}


@dataclass(frozen=True)
class Coverage:
    """One line of the table.

    Attributes:
        family: what the scan found.
        adapter: registry name of its adapter, ``""`` if there is none.
        status: ``covered``, ``adapter needed`` or ``not supported``.
        note: the reason, or what is special.
    """

    family: Family
    adapter: str
    status: str
    note: str


def coverage() -> list[Coverage]:
    """One entry per family that the scan finds."""
    lines = []
    for family in scan()[0]:
        tiny = [name for name, spec in FAMILIES.items() if spec.model_class in family.classes]
        tiny = [name for name in tiny if "+" not in name]
        if family.name in REFUSED:
            status, adapter = "not supported", ""
        elif tiny:
            status, adapter = "covered", adapter_name(tiny[0])
        else:
            status, adapter = "adapter needed", ""
        note = REFUSED.get(family.name) or NOTES.get(family.name, "")
        lines.append(Coverage(family, adapter, status, note))
    return lines


def adapter_name(tiny: str) -> str:
    """Registry name of the adapter of a tiny family."""
    return tiny if tiny in ADAPTERS else "native"


def wrapped() -> list[str]:
    """Tiny families that are a wrapper around a language model of another folder, as ``a+b``."""
    return [name for name in FAMILIES if "+" in name]


def text_only() -> list[str]:
    """Tiny families that take no images."""
    return [name for name, spec in FAMILIES.items() if spec.vision is None]
