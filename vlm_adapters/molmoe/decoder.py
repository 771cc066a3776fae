"""The text side of MolmoE: attention and mixture-of-experts blocks.

Router, experts and norm are those of transformers' OLMoE, whose mathematics they share: softmax
over all experts in float32, the K greatest, their probabilities as weights without renormalisation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.olmoe.modeling_olmoe import (
    OlmoeExperts,
    OlmoeRMSNorm,
    OlmoeTopKRouter,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .configuration import MolmoeConfig


class MolmoeTopKRouter(OlmoeTopKRouter):
    """Returns ``(logits [T, E], weights [T, K], index [T, K])``; the weights sum to less than 1."""


class MolmoeExperts(OlmoeExperts):
    """E gated experts, fused: ``gate_up_proj [E, 2F, D]``, ``down_proj [E, D, F]``.

    Inherits the dispatch of ``use_experts_implementation``, so that ``grouped_mm``, ``batched_mm``,
    ``eager`` and every function in ``ALL_EXPERTS_FUNCTIONS`` apply; ``eager`` skips the id E.
    """


class MolmoeSparseMoeBlock(nn.Module):
    """Norm, router and experts of one layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.ff_norm = OlmoeRMSNorm(config.d_model, eps=config.layer_norm_eps)
        self.gate = MolmoeTopKRouter(config)
        self.experts = MolmoeExperts(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[B, S, D]`` to ``[B, S, D]``, without the residual."""
        tokens = self.ff_norm(hidden_states).flatten(0, 1)
        _, weights, index = self.gate(tokens)
        return self.experts(tokens, index, weights).view_as(hidden_states)


class MolmoeAttention(nn.Module):
    """Causal attention; queries and keys are normalised over their full width, then rotated."""

    is_causal = True

    def __init__(self, config: MolmoeConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.attention_head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.sizes = [config.d_model, kv_size, kv_size]
        self.num_key_value_groups = config.n_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attn_norm = OlmoeRMSNorm(config.d_model, eps=config.layer_norm_eps)
        self.att_proj = nn.Linear(config.d_model, sum(self.sizes), bias=False)
        self.q_norm = OlmoeRMSNorm(config.d_model, eps=config.layer_norm_eps)
        self.k_norm = OlmoeRMSNorm(kv_size, eps=config.layer_norm_eps)
        self.attn_out = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """``[B, S, D]`` to ``[B, S, D]`` without the residual, and the weights if they were kept.

        Args:
            hidden_states: ``[B, S, D]``.
            position_embeddings: cosine and sine ``[B, S, head_dim]``, float32.
            attention_mask: as made by transformers' masking utilities.
            cache: keys (rotated) and values of earlier tokens.
            **kwargs: for the attention function.
        """
        query, key, value = self.att_proj(self.attn_norm(hidden_states)).split(self.sizes, dim=-1)
        query, key, value = (
            state.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for state in (self.q_norm(query), self.k_norm(key), value)
        )
        # Rotated in float32: bfloat16 cannot tell neighbouring positions apart far into a prompt.
        rotated = apply_rotary_pos_emb(query.float(), key.float(), *position_embeddings)
        query, key = (state.to(value.dtype) for state in rotated)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.config.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.attn_out(output.flatten(-2)), weights


class MolmoeBlock(GradientCheckpointingLayer):
    """One decoder layer."""

    def __init__(self, config: MolmoeConfig, layer_idx: int) -> None:
        super().__init__()
        self.attn = MolmoeAttention(config, layer_idx)
        self.mlp = MolmoeSparseMoeBlock(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        attended, _ = self.attn(hidden_states, **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(hidden_states)


class MolmoeEmbedding(nn.Module):
    """Two tables read as one: ids from ``embedding`` on are rows of ``new_embedding``."""

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(config.output_size, config.d_model))
        self.new_embedding: nn.Parameter | None = None
        if config.additional_vocab_size:
            self.new_embedding = nn.Parameter(
                torch.empty(config.additional_vocab_size, config.d_model)
            )

    @property
    def weight(self) -> nn.Parameter:
        """The table that the output layer may share."""
        return self.embedding

    def forward(self, input_ids: Tensor) -> Tensor:
        """``[B, S]`` to ``[B, S, D]``."""
        if self.new_embedding is None:
            return nn.functional.embedding(input_ids, self.embedding)
        # Two lookups instead of joining the tables: joining copies them in every decode step.
        split = self.embedding.shape[0]
        new = input_ids >= split
        old_rows = nn.functional.embedding(input_ids.masked_fill(new, 0), self.embedding)
        new_rows = nn.functional.embedding(
            (input_ids - split).masked_fill(~new, 0), self.new_embedding
        )
        return torch.where(new[..., None], new_rows, old_rows)


class MolmoeTransformer(nn.Module):
    """Embedding, decoder layers and final norm, under their original names."""

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__()
        self.wte = MolmoeEmbedding(config)
        self.blocks = nn.ModuleList(MolmoeBlock(config, n) for n in range(config.n_layers))
        self.ln_f = OlmoeRMSNorm(config.d_model, eps=config.layer_norm_eps)


def rotary_tables(config: MolmoeConfig, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of half-rotation RoPE, float32.

    Not a buffer, so that ``model.to(torch.bfloat16)`` cannot round the frequencies.

    Args:
        config: gives ``rope_theta`` and the head's width.
        position_ids: ``[B, S]`` int64.

    Returns:
        Two tensors ``[B, S, head_dim]``.
    """
    dim = config.attention_head_dim
    steps = torch.arange(0, dim, 2, device=position_ids.device, dtype=torch.float32)
    frequencies = 1.0 / config.rope_theta ** (steps / dim)
    angles = position_ids[..., None].float() * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()
