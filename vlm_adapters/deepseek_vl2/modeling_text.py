"""The language model: a DeepSeek-V2 decoder from transformers' Llama and DeepSeek-V3 parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3MLP,
    DeepseekV3RMSNorm,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration import DeepseekVLV2TextConfig
from .moe import DeepseekVLV2Experts, DeepseekVLV2MoE, DeepseekVLV2Router

# torch's grouped product wants rows of whole 16 bytes: 8 values of a half precision, to which a
# model may be cast at any time.
ALIGNED = 8


class DeepseekVLV2RotaryEmbedding(nn.Module):
    """cos and sin of the positions, computed from the configuration in every call.

    It keeps no state: with ``dynamic`` scaling the frequencies follow the sequence at hand and not
    the longest one seen before, and a cast of the model to bfloat16 cannot round a table.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin ``[B, S, width]`` in the dtype of ``x``, for ``[B, S]`` positions."""
        if self.rope_type == "default":
            inv_freq, scale = LlamaRotaryEmbedding.compute_default_rope_parameters(self.config)
        else:
            length = int(position_ids.max()) + 1 if self.rope_type == "dynamic" else None
            rope_init = ROPE_INIT_FUNCTIONS[self.rope_type]
            inv_freq, scale = rope_init(self.config, x.device, seq_len=length)
        angle = position_ids[..., None].float() * inv_freq.to(x.device, torch.float32)
        angle = torch.cat((angle, angle), dim=-1)
        return (angle.cos() * scale).to(x.dtype), (angle.sin() * scale).to(x.dtype)


class DeepseekVLV2LatentAttention(DeepseekV3Attention):
    """MLA; ``num_key_value_heads`` plays no part in it, every head has keys of its own."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.num_key_value_groups = 1


class DeepseekVLV2DecoderLayer(GradientCheckpointingLayer):
    """Attention (MLA, or Llama's with ``use_mla`` off) and MLP or experts, both pre-norm."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        attention = DeepseekVLV2LatentAttention if config.use_mla else LlamaAttention
        self.self_attn = attention(config, layer_idx)
        is_moe = config.is_moe_layer(layer_idx)
        self.mlp = DeepseekVLV2MoE(config) if is_moe else DeepseekV3MLP(config)
        self.input_layernorm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = DeepseekV3RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps
        )

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DeepseekVLV2PreTrainedModel(PreTrainedModel):
    """Settings that the text model and the whole model share."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DeepseekVLV2DecoderLayer"]
    _skip_keys_device_placement = ["cache"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # The attention-pool head of the tower is in the files and never used.
    _keys_to_ignore_on_load_unexpected = [r"vision(_tower)?\.attn_pool\."]
    _keep_in_fp32_modules_strict = ["gate.weight", "e_score_correction_bias"]

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """As the base class, but ``eager`` by default for sizes that ``grouped_mm`` cannot take."""
        text = self.config.get_text_config()
        sizes = (getattr(text, "hidden_size", 0), getattr(text, "moe_intermediate_size", 0))
        if requested_experts is None and any(size % ALIGNED for size in sizes):
            return "eager"
        return super().get_correct_experts_implementation(requested_experts)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers looks for the decorator in the source of the module that defines the model;
        # ours is in moe.py.
        return True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.get_text_config().initializer_range
        if isinstance(module, DeepseekVLV2Router):
            init.normal_(module.weight, mean=0.0, std=std)
            if hasattr(module, "e_score_correction_bias"):
                init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, DeepseekVLV2Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)


class DeepseekVLV2TextModel(DeepseekVLV2PreTrainedModel):
    """The decoder without its output layer."""

    config_class = DeepseekVLV2TextConfig
    _can_record_outputs = {
        "hidden_states": DeepseekVLV2DecoderLayer,
        "attentions": [
            OutputRecorder(DeepseekVLV2LatentAttention, index=1),
            OutputRecorder(LlamaAttention, index=1),
        ],
        "router_logits": OutputRecorder(DeepseekVLV2Router, index=0),
    }

    def __init__(self, config: DeepseekVLV2TextConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DeepseekVLV2DecoderLayer(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = DeepseekV3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DeepseekVLV2RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """Runs the decoder.

        Args:
            input_ids: ``[B, S]``; or ``inputs_embeds`` ``[B, S, D]``.
            attention_mask: ``[B, past + S]``, 0 at padding, or a ready 4-D mask.
            position_ids: ``[B, S]``; counted from the cache's length by default, padding included.
            cache: keys and values of earlier tokens (MLA: their compressed form).
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(past, past + hidden.shape[1], device=hidden.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        position_embeddings = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=mask,
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                cache=cache,
                **kwargs,
            )
        return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden), cache=cache)
