"""VLMEvalKit's model names: which checkpoint stands behind one, and can it be run here."""

from __future__ import annotations

import re
from typing import Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation.suggest import unknown
from mm_capacity.evaluation.vlmeval_process import import_vlmeval

# Hub ids of mixture-of-experts VLMs among VLMEvalKit's models: a size with active parameters
# ("30B-A3B"), or one of the families that do not write it.
MOE_CHECKPOINT = re.compile(
    r"-\d+B-A\d+B|-A\d+B-|MolmoE|deepseek-vl2|GLM-4\.5V|Llama-4-|rhymes-ai/Aria", re.IGNORECASE
)
EXAMPLES = ("Qwen3-VL-30B-A3B-Instruct", "molmoE-1B-0924", "deepseek_vl2_tiny")


def find_wrapper(name: str) -> dict[str, Any] | None:
    """What VLMEvalKit has under a model name.

    Args:
        name: exactly as in VLMEvalKit's ``supported_VLM``.

    Returns:
        None if it has nothing; otherwise ``name``, ``wrapper`` (class name), ``hub_id`` (None
        for a model behind an API) and ``moe`` (whether that checkpoint is known to be a
        mixture of experts).
    """
    import_vlmeval()
    from vlmeval.config import supported_VLM

    if name not in supported_VLM:
        return None
    entry = supported_VLM[name]
    wrapper = getattr(entry, "func", entry)
    hub_id = getattr(entry, "keywords", {}).get("model_path")
    return {
        "name": name,
        "wrapper": getattr(wrapper, "__name__", str(wrapper)),
        "hub_id": hub_id,
        "moe": bool(hub_id and MOE_CHECKPOINT.search(hub_id)),
    }


def moe_model_names() -> list[str]:
    """VLMEvalKit's model names around mixture-of-experts checkpoints."""
    import_vlmeval()
    from vlmeval.config import supported_VLM

    found = (find_wrapper(name) for name in supported_VLM)
    return sorted(entry["name"] for entry in found if entry and entry["moe"])


def resolve_model(name: str) -> str:
    """The hub id behind a VLMEvalKit model name.

    Raises:
        UserError: no such name, or no mixture-of-experts checkpoint behind it.
    """
    entry = find_wrapper(name)
    if entry is None:
        raise unknown("model", name, moe_model_names())
    if not entry["moe"]:
        what = (
            f"around {entry['hub_id']}, which is no mixture of experts known here"
            if entry["hub_id"]
            else "behind an API and cannot be run here"
        )
        raise UserError(
            f"{name} is VLMEvalKit's {entry['wrapper']} {what}; mixtures of experts are, among "
            f"others, {', '.join(EXAMPLES)}"
        )
    return entry["hub_id"]
