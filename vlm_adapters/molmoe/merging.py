"""Where image features go: they are added to the token embeddings at their positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def add_image_features(
    inputs_embeds: Tensor,
    images: Tensor,
    image_masks: Tensor | None,
    image_input_idx: Tensor | None,
    encode: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Adds the features of all images of a batch to its token embeddings.

    Args:
        inputs_embeds: ``[B, S, D]``.
        images: ``[B, crops, patches, values]``.
        image_masks: ``[B, crops, patches]`` or None.
        image_input_idx: ``[B, crops, tokens]``, positions; a negative one has no token.
        encode: crops ``[N, patches, values]`` and masks to features ``[N, tokens, D]``; gets only
            the crops that have a position, not those that fill up a batch.

    Returns:
        ``[B, S, D]``.

    Raises:
        ValueError: shapes that do not belong together, positions outside of the prompt, or two
            features for one position.
    """
    rows, length = inputs_embeds.shape[:2]
    device = inputs_embeds.device
    index = _checked(images, image_masks, image_input_idx, rows).to(device, torch.long)
    placed = index >= 0
    shown = placed.any(dim=-1)
    if not bool(shown.any()):
        return inputs_embeds
    if int(index.max()) >= length:
        raise ValueError(
            f"image_input_idx points at position {int(index.max())} of a prompt of {length} "
            "tokens: pass the whole prompt that the processor made (no chunked prefill)"
        )
    row = torch.arange(rows, device=device)[:, None, None] * length
    flat = (index + row)[placed]
    if flat.unique().numel() != flat.numel():
        raise ValueError(
            "image_input_idx gives one position to two patches: several images in one prompt are "
            "not supported"
        )
    masks = None if image_masks is None else image_masks.to(device)[shown]
    features = encode(images.to(device)[shown], masks)
    if features.shape[1] != index.shape[2]:
        raise ValueError(
            f"image_input_idx has {index.shape[2]} positions for a crop, the vision backbone makes "
            f"{features.shape[1]} vectors of it"
        )
    vectors = features[placed[shown]].to(device, inputs_embeds.dtype)
    return inputs_embeds.flatten(0, 1).index_add(0, flat, vectors).view_as(inputs_embeds)


def _checked(
    images: Tensor, image_masks: Tensor | None, image_input_idx: Tensor | None, rows: int
) -> Tensor:
    """``image_input_idx``, once its shape and those of the others fit the batch."""
    if images.dim() != 4 or images.shape[0] != rows:
        raise ValueError(
            f"images of shape {list(images.shape)} for {rows} prompt(s): expected [prompts, crops, "
            "patches, values]"
        )
    if image_input_idx is None:
        raise ValueError("images without image_input_idx: nothing says where their features go")
    if image_input_idx.dim() != 3 or image_input_idx.shape[:2] != images.shape[:2]:
        raise ValueError(
            f"image_input_idx of shape {list(image_input_idx.shape)} for images of shape "
            f"{list(images.shape)}: expected one row of positions for each crop"
        )
    if image_masks is not None and image_masks.shape != images.shape[:3]:
        raise ValueError(
            f"image_masks of shape {list(image_masks.shape)}: expected {list(images.shape[:3])}"
        )
    return image_input_idx
