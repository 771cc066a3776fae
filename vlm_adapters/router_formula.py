"""What a router class computes, read off its source text.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RouterFormula:
    """What a router class computes.

    Attributes:
        scoring: ``"softmax"`` or ``"sigmoid"``.
        bias: chosen by score + bias.
        groups: ``""``, ``"max"`` or ``"sum of two"``: how a group is judged, if groups are used.
        normalised: ``"yes"``, ``"no"`` or ``"by configuration"``.
        scaled: weights are multiplied by a constant.
        expert_scale: weights are multiplied by a constant of the expert.
        shared_sink: the shared experts take part in the normalisation.
    """

    scoring: str
    bias: bool = False
    groups: str = ""
    normalised: str = "no"
    scaled: bool = False
    expert_scale: bool = False
    shared_sink: bool = False

    def __str__(self) -> str:
        parts = [self.scoring + (" + bias for the choice" if self.bias else "")]
        if self.groups:
            parts.append(f"groups by {self.groups}")
        if self.normalised != "no":
            kind = "normalised" + (" with the shared experts" if self.shared_sink else "")
            parts.append(kind + (" if configured" if self.normalised != "yes" else ""))
        if self.expert_scale:
            parts.append("times a scale of the expert")
        if self.scaled:
            parts.append("times a constant")
        return ", ".join(parts)


def formula_of_source(source: str) -> RouterFormula | None:
    """Reads the formula off the source text of a router class, None if it has no known scoring."""
    if "sigmoid" in source or "score_fn" in source:
        scoring = "sigmoid"
    elif "softmax" in source:
        scoring = "softmax"
    else:
        return None
    groups = ""
    if "topk_group" in source:
        groups = "sum of two" if ".topk(2" in source else "max"
    normalised = "no"
    if "norm_topk_prob:" in source:
        normalised = "by configuration"
    elif ".sum(dim=-1" in source.replace("group_scores", "") or "logsumexp" in source:
        normalised = "yes"
    elif source.find("topk(") < source.find("softmax(") and "topk(" in source:
        normalised = "yes"  # a softmax over the chosen
    if groups and normalised == "yes" and "denominator" not in source:
        normalised = "no"  # the only sum is that of a group
    return RouterFormula(
        scoring=scoring,
        bias="e_score_correction_bias" in source or "moe_statics" in source,
        groups=groups,
        normalised=normalised,
        scaled=any(
            f"* {factor}" in source
            for factor in ("self.routed_scaling_factor", "self.router_scaling", "self.route_scale")
        ),
        expert_scale="per_expert_scale" in source,
        shared_sink="shared_logits" in source,
    )
