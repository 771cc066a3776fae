"""MoDES: skip an expert whose routing probability, scaled by its layer's importance, is small.

Source: arXiv 2511.15690 (MoDES): globally modulated local gating (importance alpha_l * pi_i) and
dual-modality thresholds (one for text, one for vision). alpha_l is the mean KL divergence between
the model's output and its output with layer l's experts skipped; :func:`mean_kl` is that mean and
:mod:`mm_capacity.policies.modes_search` finds thresholds. Not public: the calibration samples, and
how padding is treated. Ours: padding counts as vision; without a calibration every alpha is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mm_capacity.policies.base import (
    Policy,
    apply_keep,
    flag,
    layer_value,
    number,
    read_layer_numbers,
)
from mm_capacity.routing import Decision, Routing
from vlm_adapters.modality import Modality


@dataclass(frozen=True, kw_only=True)
class MoDES(Policy):
    """Skips assignment i of layer l when alpha_l * pi_i < tau of the token's modality.

    pi are the router's weights of the token's K picks divided by their sum.

    Attributes:
        tau_text: threshold of text tokens.
        tau_image: threshold of image and video tokens.
        tau_scale: factor on both thresholds, to trace one curve through them.
        calibration: path of a JSON file, or its content: ``{"alpha": [one number per MoE layer]}``;
            None: every alpha is 1.
        renormalize: scale a token's surviving weights to their sum before.
    """

    name: ClassVar[str] = "modes"
    knob: ClassVar[str | None] = "tau_scale"
    knob_range: ClassVar[tuple[float, float]] = (0.0, 50.0)
    knob_raises_load: ClassVar[bool] = False

    tau_text: float = 0.02
    tau_image: float = 0.1
    tau_scale: float = 1.0
    calibration: str | dict | None = None
    renormalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tau_text", "tau_image", "tau_scale"):
            number(name, getattr(self, name), 0)
        flag("renormalize", self.renormalize)
        table = {}
        if self.calibration is not None:
            table = read_layer_numbers("calibration", self.calibration, "alpha")
        object.__setattr__(self, "_table", table)

    def decide(self, routing: Routing) -> Decision:
        routing.check()
        alpha = float(layer_value(self.__dict__["_table"], "alpha", routing, 1.0))
        text = (routing.modality == Modality.TEXT).unsqueeze(1)
        importance = alpha * share_of_token(routing.weights)
        keep = torch.where(
            text,
            importance >= self.tau_text * self.tau_scale,
            importance >= self.tau_image * self.tau_scale,
        )
        expert, weights = apply_keep(
            routing, routing.expert, routing.weights, keep, renormalize=self.renormalize
        )
        return Decision(expert, weights, torch.zeros_like(routing.sequence), 1)


def share_of_token(weights: Tensor) -> Tensor:
    """pi: each weight divided by the sum of its token's weights; 0 where that sum is 0.

    Args:
        weights: ``[T, K]``.

    Returns:
        ``[T, K]`` float64.
    """
    weights = weights.to(torch.float64)
    total = weights.sum(dim=1, keepdim=True)
    return torch.where(total == 0, 0.0, weights / torch.where(total == 0, 1.0, total))


def mean_kl(reference: Tensor, changed: Tensor, valid: Tensor | None = None) -> float:
    """Mean over positions of KL(softmax(reference) || softmax(changed)), in nats.

    alpha_l is this with ``changed`` the logits of the model whose layer l skips its experts.

    Args:
        reference: ``[..., V]`` logits of the untouched model.
        changed: ``[..., V]`` logits of the changed one.
        valid: ``[...]`` bool, positions that count; None counts all.

    Raises:
        ValueError: shapes differ, or no position counts.

    Source: arXiv 2511.15690, the global importance of a layer in its section on globally modulated
    local gating.
    """
    if reference.shape != changed.shape:
        raise ValueError(
            f"changed must have shape {list(reference.shape)}, got {list(changed.shape)}"
        )
    log_p = reference.to(torch.float64).log_softmax(dim=-1)
    log_q = changed.to(torch.float64).log_softmax(dim=-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    if valid is not None:
        divergence = divergence[valid]
    if not divergence.numel():
        raise ValueError("valid must mark at least one position, got none")
    return float(divergence.mean())
