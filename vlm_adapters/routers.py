"""Router mathematics: how a router turns logits into picks and weights.

A router is described by what is written in its class, not by the family's name, so that a family
that comes with a new transformers is read the same way, and a router that reads otherwise is
refused. Four things vary:

- scoring: ``softmax`` over all experts, or ``sigmoid`` of each logit. A softmax over the chosen
  logits only is proportional to the softmax over all, and needs no case of its own.
- bias: experts are chosen by score + bias, but weighed by the score alone.
- groups: only the experts of the best groups of a token may be chosen. A group is as good as its
  best expert (``max``) or its two best together (``sum of two``).
- weights: normalised over the chosen, times a constant, times a constant of the expert.

The router score that policies rank and weigh by is the quantity that weights are proportional to,
without the bias: what a dropped assignment takes away is its weight, and the bias is a correction
for balance that never reaches the output.

Source: ``transformers/models/*/modeling_*.py`` of transformers 5.24, the classes named
``*Router`` (interfaces and formulas).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .base import UnsupportedModelError
from .router_formula import RouterFormula, formula_of_source

_KNOWN: dict[Any, RouterFormula] = {}


def formula_of_class(router_class: type) -> RouterFormula:
    """The formula of a router class; its source is read once.

    Raises:
        UnsupportedModelError: its source cannot be read or holds no known scoring.
    """
    if router_class not in _KNOWN:
        formula = None
        # A class that only overrides something else inherits its base's scoring.
        for each in router_class.__mro__[: router_class.__mro__.index(nn.Module)]:
            try:
                formula = formula_of_source(inspect.getsource(each))
            except (OSError, TypeError):
                continue
            if formula is not None:
                break
        if formula is None:
            raise UnsupportedModelError(
                f"router {router_class.__name__} is not understood: neither softmax nor sigmoid "
                "in its code; this family needs an adapter of its own"
            )
        _KNOWN[router_class] = formula
    return _KNOWN[router_class]


def scores_of(router: nn.Module, logits: Tensor) -> Tensor:
    """``[T, E]`` float32: the quantity that weights are proportional to, from the logits."""
    formula = formula_of_class(type(router))
    scoring = formula.scoring
    chosen = getattr(router, "score_fn", None)
    if chosen is not None:
        scores = chosen(logits.float())
    elif scoring == "sigmoid":
        scores = logits.float().sigmoid()
    else:
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
    if formula.expert_scale:
        scores = scores * _attribute(router, "per_expert_scale").float()
    return scores


def selection_scores(router: Any, scores: Tensor) -> Tensor:
    """``[T, E]``: what the choice is made by: scores, plus the bias if the router has one."""
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is None and hasattr(router, "moe_statics"):
        bias = router.moe_statics.e_score_correction_bias.reshape(-1)
    return scores if bias is None else scores + bias.float()


def allowed_experts(router: nn.Module, selection: Tensor) -> Tensor | None:
    """``[T, E]`` bool: experts of the groups that the router admits, None if it admits all.

    Args:
        router: a group-limited router, or any other.
        selection: ``[T, E]``, from :func:`selection_scores`.

    Source: transformers/models/deepseek_v3/modeling_deepseek_v3.py (group of the two best),
        transformers/models/deepseek_v2/modeling_deepseek_v2.py (group of the best).
    """
    formula = formula_of_class(type(router))
    groups, admitted = getattr(router, "num_group", None), getattr(router, "topk_group", None)
    limited = getattr(router, "topk_method", "group_limited_greedy") == "group_limited_greedy"
    if not formula.groups or not limited or not groups or not admitted or admitted >= groups:
        return None
    tokens, experts = selection.shape
    grouped = selection.view(tokens, groups, experts // groups)
    if formula.groups == "max":
        value = grouped.max(dim=-1).values
    else:
        value = grouped.topk(2, dim=-1).values.sum(dim=-1)
    best = value.topk(admitted, dim=-1, sorted=False).indices
    mask = torch.zeros_like(value, dtype=torch.bool).scatter_(1, best, True)
    return mask.repeat_interleave(experts // groups, dim=1)


def check_choice(router: nn.Module, scores: Tensor, index: Tensor, weights: Tensor) -> str | None:
    """What is wrong with a reading of a router's output, None if nothing.

    Checks that the picks are the greatest selection scores among the admitted experts, and that
    weights are the scores times one factor per token.

    Args:
        router: the router.
        scores: ``[T, E]`` as read.
        index: ``[T, K]``, the router's picks.
        weights: ``[T, K]``, the router's weights.
    """
    formula = formula_of_class(type(router))
    base = (
        scores / _attribute(router, "per_expert_scale").float() if formula.expert_scale else scores
    )
    selection = selection_scores(router, base)
    allowed = allowed_experts(router, selection)
    if allowed is not None:
        if not bool(allowed.gather(1, index).all()):
            return "a pick lies outside of the groups that were read"
        selection = selection.masked_fill(~allowed, -torch.inf)
    worst = selection.gather(1, index).amin(dim=1)
    best_left = selection.scatter(1, index, -torch.inf).amax(dim=1)
    slack = 1e-5 if weights.dtype == torch.float32 else 2e-2
    if bool((worst < best_left - slack).any()):
        return "the picks are not the experts with the greatest scores that were read"
    own = scores.gather(1, index)
    factor = weights.float().sum(dim=1, keepdim=True) / own.sum(dim=1, keepdim=True)
    if not torch.allclose(weights.float(), own * factor, rtol=slack * 10, atol=slack):
        return "the weights are not proportional to the scores that were read"
    return None


def _attribute(router: Any, name: str) -> Any:
    return getattr(router, name)
