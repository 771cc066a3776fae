"""Padding on either side: which positions are tokens, and how prompts move to the right edge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PAD_ID = -1  # the original collator's padding


def real_tokens(
    input_ids: Tensor | None, attention_mask: Tensor | None, past: int, length: int
) -> Tensor | None:
    """The attention mask with ids of -1 masked, cut to the tokens seen so far.

    Args:
        input_ids: ``[B, S]``, -1 for padding, or None.
        attention_mask: ``[B, past + S]`` or longer, or 4-D (returned as it is), or None.
        past: tokens already in the cache.
        length: S.

    Returns:
        ``[B, past + S]`` bool, or None when every position is a token.

    Raises:
        ValueError: a mask too short for the tokens.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        return attention_mask
    if attention_mask is None:
        # Looking for padding waits for the device: done for a prompt, not in every decode step.
        if input_ids is None or length == 1 or not bool((input_ids == PAD_ID).any()):
            return None
        if past:
            raise ValueError("padding (-1) next to a filled cache needs an attention_mask")
        return input_ids != PAD_ID
    total = past + length
    if attention_mask.shape[1] < total:
        raise ValueError(
            f"attention_mask covers {attention_mask.shape[1]} positions, but there are {total} "
            "tokens"
        )
    mask = attention_mask[:, :total].bool()
    if input_ids is None:
        return mask
    tokens = (input_ids != PAD_ID).to(mask.device)
    return mask & tokens if past == 0 else torch.cat([mask[:, :past], mask[:, past:] & tokens], 1)


def to_left_padding(
    input_ids: Tensor, model_kwargs: Mapping[str, Any], pad_token_id: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Moves right-padded prompts to the right edge.

    Args:
        input_ids: ``[B, S]``, -1 for padding.
        model_kwargs: may hold ``attention_mask`` ``[B, S]`` or longer, ``position_ids``
            ``[B, S]`` and ``image_input_idx`` ``[B, crops, tokens]``.
        pad_token_id: id to put where padding is.

    Returns:
        ``[B, S]`` ids, and the changed keywords; ``attention_mask`` is always among them. Prompts
        whose last column is a token in every row stay where they are.
    """
    given = model_kwargs.get("attention_mask")
    mask = real_tokens(input_ids, given, 0, input_ids.shape[1])
    if mask is None:
        return input_ids, {"attention_mask": torch.ones_like(input_ids)}
    mask = mask.to(input_ids.device)
    changed: dict[str, Tensor] = {}
    if not bool(mask[:, -1].all()):
        # A stable sort: padding first, then the tokens in their order.
        order = mask.long().argsort(dim=1, stable=True)
        input_ids, mask = input_ids.gather(1, order), mask.gather(1, order)
        if model_kwargs.get("position_ids") is not None:
            changed["position_ids"] = model_kwargs["position_ids"].gather(1, order)
        index = model_kwargs.get("image_input_idx")
        if index is not None:
            place = order.argsort(dim=1)
            # A position outside of the prompt stays outside, for the model to refuse.
            inside = (index >= 0) & (index < place.shape[1])
            safe = torch.where(inside, index, 0).long().flatten(1)
            moved = place.gather(1, safe).view_as(index).to(index.dtype)
            changed["image_input_idx"] = torch.where(inside, moved, index)
    changed["attention_mask"] = mask.long()
    return input_ids.masked_fill(~mask, pad_token_id), changed
