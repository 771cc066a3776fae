"""Router and experts of DeepSeek-VL2's language model.

The seam is the one of transformers' native MoE blocks: ``gate`` returns
``(logits, top_k_weights, top_k_index)`` and ``experts`` is called with
``(hidden_states, top_k_index, top_k_weights)`` and skips the id E.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP

from .configuration import DeepseekVLV2TextConfig


class DeepseekVLV2Router(nn.Module):
    """Scores all experts in float32 and picks K of them for each token.

    Source: DeepSeek-V2 (arXiv 2405.04434) section 2.1.2 for ``group_limited_greedy``, DeepSeek-V3
    (arXiv 2412.19437) section 2.1.2 for the bias of ``noaux_tc``.
    """

    def __init__(self, config: DeepseekVLV2TextConfig) -> None:
        super().__init__()
        self.num_experts = config.n_routed_experts or 0
        self.top_k = config.num_experts_per_tok or 0
        self.topk_method = config.topk_method
        self.scoring_func = config.scoring_func
        self.norm_topk_prob = config.norm_topk_prob
        self.routed_scaling_factor = config.routed_scaling_factor
        self.groups, self.kept_groups = config.groups
        # float32 whatever the model's dtype: close scores decide which expert is taken.
        self.weight = nn.Parameter(
            torch.zeros(self.num_experts, config.hidden_size, dtype=torch.float32)
        )
        if self.topk_method == "noaux_tc":
            self.e_score_correction_bias = nn.Buffer(
                torch.zeros(self.num_experts, dtype=torch.float32)
            )

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes.

        Args:
            hidden_states: ``[..., D]``; T is the product of the leading sizes.

        Returns:
            logits ``[T, E]`` float32, weights ``[T, K]`` float32 (normalised and scaled), expert
            ids ``[T, K]`` int64. The order of the K is not defined.
        """
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1]).float()
        logits = F.linear(hidden, self.weight.float())
        scores = self.scores(logits)
        choice, allowed = self.selection(scores)
        if allowed is not None:
            # To 0, as the original does, not to -inf: it matters where a choice is below 0.
            choice = choice.masked_fill(~allowed, 0.0)
        index = choice.topk(self.top_k, dim=-1, sorted=False).indices
        # The bias plays no part in a weight; a group that is left out does: its scores are 0.
        weights = (scores if self.topk_method == "noaux_tc" else choice).gather(1, index)
        if self.top_k > 1 and self.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights * self.routed_scaling_factor, index

    def scores(self, logits: Tensor) -> Tensor:
        """Router scores ``[T, E]``: what the weights are proportional to."""
        return logits.sigmoid() if self.scoring_func == "sigmoid" else logits.softmax(dim=-1)

    def selection(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the choice is made on.

        Args:
            scores: ``[T, E]``.

        Returns:
            selection scores ``[T, E]`` (with the correction bias under ``noaux_tc``), and the
            experts inside the token's groups ``[T, E]`` bool, or None when every group is kept.
        """
        biased = self.topk_method == "noaux_tc"
        choice = scores + self.e_score_correction_bias if biased else scores
        if self.kept_groups == self.groups:
            return choice, None
        grouped = choice.unflatten(1, (self.groups, -1))
        if biased:
            group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        else:
            group_scores = grouped.amax(dim=-1)
        best = group_scores.topk(self.kept_groups, dim=-1, sorted=False).indices
        kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
        return choice, kept.repeat_interleave(grouped.shape[-1], dim=1)


@use_experts_implementation
class DeepseekVLV2Experts(nn.Module):
    """E gated MLPs with fused parameters, without bias."""

    # Set by the decorator: activation of the first half times the second half.
    _apply_gate: Any

    def __init__(self, config: DeepseekVLV2TextConfig) -> None:
        super().__init__()
        self.num_experts = config.n_routed_experts or 0
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(
            torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim)
        )
        self.down_proj = nn.Parameter(
            torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim)
        )
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The ``eager`` implementation: one expert after another, summed in float32.

        Args:
            hidden_states: ``[T, D]``.
            top_k_index: ``[T, K]``; the id E marks a dropped assignment.
            top_k_weights: ``[T, K]``.
        """
        total = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in top_k_index.unique().tolist():
            if expert >= self.num_experts:
                continue
            token, slot = (top_k_index == expert).nonzero(as_tuple=True)
            gate_up = F.linear(hidden_states[token], self.gate_up_proj[expert])
            output = F.linear(self._apply_gate(gate_up), self.down_proj[expert])
            weight = top_k_weights[token, slot].float().unsqueeze(-1)
            total.index_add_(0, token, output.float() * weight)
        return total.to(hidden_states.dtype)


class DeepseekVLV2MoE(nn.Module):
    """Routed experts plus the shared experts, which are one wider MLP that is always on."""

    def __init__(self, config: DeepseekVLV2TextConfig) -> None:
        super().__init__()
        self.gate = DeepseekVLV2Router(config)
        self.experts = DeepseekVLV2Experts(config)
        self.shared_experts = (
            DeepseekV3MLP(config, config.moe_intermediate_size * config.n_shared_experts)
            if config.n_shared_experts
            else None
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        _, weights, index = self.gate(hidden_states)
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        output = self.experts(flat, index, weights).view_as(hidden_states)
        if self.shared_experts is not None:
            output = output + self.shared_experts(hidden_states)
        return output
