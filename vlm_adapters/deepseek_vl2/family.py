"""Which configurations belong to DeepSeek-VL2; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODEL_TYPE = "deepseek_vl_v2"


def why_not_deepseek_vl2(config: Any) -> str | None:
    """Why a configuration is not that of a DeepSeek-VL2, or None when it is.

    DeepSeek-OCR checkpoints use the same ``model_type``. They are told apart by their architecture
    name and by a vision tower that is not one SigLIP (``width`` is a table of towers there).

    Args:
        config: a configuration object or the content of a ``config.json``.
    """

    def read(holder: Any, key: str) -> Any:
        return holder.get(key) if isinstance(holder, Mapping) else getattr(holder, key, None)

    if read(config, "model_type") != MODEL_TYPE:
        return f"model_type is {read(config, 'model_type')!r}, not {MODEL_TYPE!r}"
    named = [name for name in (read(config, "architectures") or []) if "ocr" in name.lower()]
    if named:
        return (
            f"a DeepSeek-OCR checkpoint (architecture {named[0]!r}) shares model_type "
            f"{MODEL_TYPE!r} but has another vision tower and token layout"
        )
    width = read(read(config, "vision_config"), "width")
    if isinstance(width, Mapping):
        return (
            f"vision_config.width lists several towers ({', '.join(map(str, width))}), as in "
            "DeepSeek-OCR checkpoints; DeepSeek-VL2 has one SigLIP tower with an integer width"
        )
    return None
