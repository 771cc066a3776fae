"""Gemma 4 with experts.

Router mathematics: softmax over all experts, top-k, divided by their sum, times a learned scale of
each expert; the router returns probabilities in the place of logits. Scores are the probabilities
times that scale, which is what the weights are proportional to. Beside the experts every layer has
a dense MLP, which sees every token.
Token layout: ``mm_token_type_ids`` with audio as 3 (text here); image tokens of one image see each
other in both directions.
Not supported: dense Gemma 4 (``enable_moe_block`` off).

Source: ``transformers/models/gemma4/modeling_gemma4.py`` (interface and formula).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .base import MoELayer, RouterChoice, UnsupportedModelError
from .generic import NativeAdapter
from .registry import config_value


class Gemma4Adapter(NativeAdapter):
    """See the module docstring."""

    name: ClassVar[str] = "gemma4"
    model_types: ClassVar[tuple[str, ...]] = ("gemma4",)

    @classmethod
    def matches(cls, config: Any) -> bool:
        if config_value(config, "model_type") not in cls.model_types:
            return False
        if not config_value(config_value(config, "text_config"), "enable_moe_block"):
            raise UnsupportedModelError(
                "this Gemma 4 is dense (enable_moe_block is off): it has no experts to cap"
            )
        return True

    def read_scores(self, layer: MoELayer, router_output: Any, hidden: Tensor) -> RouterChoice:
        probabilities, weights, index = router_output
        scores = probabilities * layer.router.per_expert_scale.float()
        return RouterChoice(scores=scores, index=index, weights=weights)
