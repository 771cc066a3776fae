"""What the MolmoE model classes share: initialisation, and what transformers may do with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import initialization as init
from transformers.utils.output_capturing import OutputRecorder

from .checkpoint import LoadChecks
from .configuration import MolmoeConfig
from .decoder import (
    MolmoeAttention,
    MolmoeBlock,
    MolmoeEmbedding,
    MolmoeExperts,
    MolmoeTopKRouter,
)
from .vision import MolmoeVisionBackbone, MolmoeVisionTransformer

# torch's grouped product wants rows of whole 16 bytes: 8 values of a half precision, to which a
# model may be cast at any time.
ALIGNED = 8


class MolmoePreTrainedModel(LoadChecks):
    """What the MolmoE classes share: initialisation, what transformers may do with them."""

    config_class = MolmoeConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    input_modalities = ["image", "text"]
    supports_gradient_checkpointing = True
    _no_split_modules = ["MolmoeBlock", "MolmoeVisionBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "router_logits": OutputRecorder(MolmoeTopKRouter, index=0),
        "hidden_states": MolmoeBlock,
        "attentions": MolmoeAttention,
    }

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """As the base class, but ``eager`` by default for sizes that ``grouped_mm`` cannot take."""
        sizes = (self.config.d_model, self.config.intermediate_size)
        if requested_experts is None and any(size % ALIGNED for size in sizes):
            return "eager"
        return super().get_correct_experts_implementation(requested_experts)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """transformers guesses this from the source of this file; the experts live in another."""
        return True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        own: tuple[Tensor | None, ...] = ()
        if isinstance(module, MolmoeExperts):
            own = (module.gate_up_proj, module.down_proj)
        elif isinstance(module, MolmoeTopKRouter):
            own = (module.weight,)
        elif isinstance(module, MolmoeEmbedding):
            own = (module.embedding, module.new_embedding)
        elif isinstance(module, MolmoeVisionTransformer):
            own = (module.class_embedding, module.positional_embedding)
        elif isinstance(module, MolmoeVisionBackbone):
            own = (module.pad_embed,)
        for parameter in own:
            if parameter is not None:
                init.normal_(parameter, mean=0.0, std=self.config.initializer_range)

    def get_input_embeddings(self) -> nn.Module:
        base: Any = self.base_model
        return base.transformer.wte

    def set_input_embeddings(self, value: nn.Module) -> None:
        base: Any = self.base_model
        base.transformer.wte = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered: the two embedding tables have fixed meanings."""
        raise NotImplementedError("MolmoE has a fixed vocabulary: its embeddings cannot be resized")
