"""MoDES: skip an expert whose routing probability, scaled by its layer's importance, is small.

Source: arXiv 2511.15690 (MoDES): globally modulated local gating (importance alpha_l * pi_i) and
dual-modality thresholds (one for text, one for vision). alpha_l is the mean KL divergence between
the model's output and its output with layer l's experts skipped; :func:`mean_kl` is that mean,
:mod:`mm_capacity.thresholds` finds thresholds for a wanted share of skipped assignments. Public:
code for two families (ModelTC/MoDES), which calibrates on 1,024 questions of GQA. Ours: padding
counts as vision; without a calibration every alpha is 1; the default thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

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

TAU_TEXT, TAU_IMAGE = 0.02, 0.1


@dataclass(frozen=True, kw_only=True)
class MoDES(Policy):
    """Skips assignment i of layer l when alpha_l * pi_i < tau of the token's modality.

    pi are the router's weights of the token's K picks divided by their sum.

    Attributes:
        tau_text: threshold of text tokens.
        tau_image: threshold of image and video tokens.
        skip_frac: take both thresholds from the calibration's entry for this share of skipped
            assignments; they are then what ``tau_text`` and ``tau_image`` hold.
        tau_scale: factor on both thresholds, to trace one curve through them.
        calibration: path of a JSON file, or its content: ``{"alpha": [one number per MoE layer]}``;
            None: every alpha is 1. For ``skip_frac`` also ``{"thresholds": [{"skip_frac": wanted
            share, "tau_text": ..., "tau_image": ...}]}``.
        renormalize: scale a token's surviving weights to their sum before.
    """

    name: ClassVar[str] = "modes"
    needs_expert_ranks: ClassVar[bool] = False
    knob: ClassVar[str | None] = "tau_scale"
    knob_range: ClassVar[tuple[float, float]] = (0.0, 50.0)
    knob_raises_load: ClassVar[bool] = False

    tau_text: float = TAU_TEXT
    tau_image: float = TAU_IMAGE
    tau_scale: float = 1.0
    skip_frac: float | None = None
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
        if self.skip_frac is not None:
            self._take_thresholds(table)

    def _take_thresholds(self, table: dict[str, Any]) -> None:
        assert self.skip_frac is not None
        number("skip_frac", self.skip_frac, 0, 1)
        entries = table.get("thresholds", [])
        known = [entry["skip_frac"] for entry in entries]
        if self.skip_frac not in known:
            raise ValueError(
                f"skip_frac must be one that calibration has thresholds for "
                f"({', '.join(map(str, known)) or 'none'}), got {self.skip_frac!r}: "
                "scripts/calibrate.py --skip-frac writes them"
            )
        entry = entries[known.index(self.skip_frac)]
        for name, default in (("tau_text", TAU_TEXT), ("tau_image", TAU_IMAGE)):
            number(f"calibration thresholds {name}", entry.get(name), 0)
            if getattr(self, name) not in (default, entry[name]):
                raise ValueError(f"{name} must be left out with skip_frac, got {self.skip_frac!r}")
            object.__setattr__(self, name, entry[name])

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
