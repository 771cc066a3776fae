"""Qwen3-Omni-MoE: the thinker, alone or inside the whole model.

Router mathematics: softmax over all experts in float32, top-k, divided by their sum.
Token layout: image and video tokens by the thinker's token ids; audio tokens are text here.
Not supported: the talker, which speaks what the thinker wrote; its experts are left alone.

Source: ``transformers/models/qwen3_omni_moe/modeling_qwen3_omni_moe.py`` (interface).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from .generic import NativeAdapter
from .registry import config_value


class Qwen3OmniMoeAdapter(NativeAdapter):
    """See the module docstring."""

    name: ClassVar[str] = "qwen3_omni_moe_thinker"
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_omni_moe_thinker", "qwen3_omni_moe")

    @property
    def token_config(self) -> Any:
        return config_value(self.config, "thinker_config") or self.config

    @property
    def text_only(self) -> bool:
        return False

    def entry(self, model: nn.Module) -> nn.Module:
        return getattr(model, "thinker", model)
