"""Inkling (first generation).

Router mathematics: sigmoid of every logit; chosen by sigmoid + bias; weights are the sigmoids of
the chosen over the sum of theirs and the shared experts', times a constant and a learned scale.
The router also returns the weights of the shared experts, which no policy touches.
Token layout: image tokens by ``image_token_id``, one per patch; audio tokens are text here.
Not supported: the layers that predict further tokens (they run outside of the forward pass).

Source: ``transformers/models/inkling/modeling_inkling.py`` (interface and formula).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .base import MoELayer, RouterChoice
from .generic import NativeAdapter


class InklingAdapter(NativeAdapter):
    """See the module docstring."""

    name: ClassVar[str] = "inkling_mm_model"
    model_types: ClassVar[tuple[str, ...]] = ("inkling_mm_model",)

    def read_scores(self, layer: MoELayer, router_output: Any, hidden: Tensor) -> RouterChoice:
        return super().read_scores(layer, router_output[:3], hidden)
