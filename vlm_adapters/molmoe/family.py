"""Which configurations belong to MolmoE; imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODEL_TYPE = "molmo"


def why_not_molmoe(config: Any) -> str | None:
    """Why a configuration is not that of a MolmoE, or None when it is.

    Args:
        config: a configuration object or the content of a ``config.json``.
    """

    def read(key: str) -> Any:
        return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)

    if read("model_type") != MODEL_TYPE:
        return f"model_type is {read('model_type')!r}, not {MODEL_TYPE!r}"
    block, experts = read("block_type"), read("moe_num_experts")
    if block != "moe" and (experts is None or read("n_layers") is None):
        return (
            "a dense Molmo (model_type 'molmo' without moe_num_experts and n_layers) has no "
            "experts to cap; use a MolmoE checkpoint such as allenai/MolmoE-1B-0924"
        )
    if block != "moe":
        return f"a dense Molmo (block_type {block!r}, not 'moe') has no experts to cap"
    # A MoE config that leaves the number out takes the class default.
    if experts is not None and (not isinstance(experts, int) or experts < 1):
        return f"a dense Molmo (moe_num_experts {experts!r}) has no experts to cap"
    return None
