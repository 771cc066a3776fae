"""ERNIE-4.5-VL: one set of experts for text, another for images, in every layer.

Router mathematics: softmax over the experts of the token's own set; chosen by softmax + bias,
weighed by the softmax over the sum of the chosen. Text and image experts of a decoder layer count
as two MoE layers; each gets its own tokens and its own capacity C = gamma K T / E, T being the
tokens of that set.
Token layout: ``moe_mm_token_type_ids`` says which set a token goes to (the processor sends the
start and end tokens of an image to the image experts too); tags follow ``mm_token_type_ids``.
Without image tokens in the batch, all tokens go to the text experts.
Not supported: nothing known.

Source: ``transformers/models/ernie4_5_vl_moe/modeling_ernie4_5_vl_moe.py`` (interface).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import MoELayer
from .generic import NativeAdapter

IMAGE_EXPERTS = "vision_moe"


class Ernie45VLMoeAdapter(NativeAdapter):
    """See the module docstring."""

    name: ClassVar[str] = "ernie4_5_vl_moe"
    model_types: ClassVar[tuple[str, ...]] = ("ernie4_5_vl_moe",)

    def layer_tokens(self, layer: MoELayer, inputs: Mapping[str, Any]) -> Tensor | None:
        ids, types = inputs["input_ids"], inputs.get("moe_mm_token_type_ids")
        if types is None:
            to_image = torch.zeros_like(ids, dtype=torch.bool)
        else:
            to_image = types[:, -ids.shape[1] :].bool()
        return to_image if layer.name.endswith(IMAGE_EXPERTS) else ~to_image
