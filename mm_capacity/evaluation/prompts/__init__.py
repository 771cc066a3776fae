"""How VLMEvalKit's own wrapper of a model family asks, for families that run here as ports.

A family is asked in the same way whatever name it was loaded by: VLMEvalKit's, a hub id or a
folder. All other families get the data set's own prompt. Listing imports nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mm_capacity.evaluation.prompts.base import Prompts

PROMPTS: dict[str, str] = {
    "molmoe": "mm_capacity.evaluation.prompts.molmoe:MolmoEPrompts",
    "deepseek_vl2": "mm_capacity.evaluation.prompts.deepseek_vl2:DeepseekVL2Prompts",
}
"""Registry name of the adapter -> how its family is asked."""


def prompts_for(family: str) -> Prompts:
    """How a family is asked.

    Args:
        family: registry name of its adapter (:data:`vlm_adapters.ADAPTERS`).
    """
    target = PROMPTS.get(family, "mm_capacity.evaluation.prompts.base:Prompts")
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)()
