"""Modality tags from what a model is called with: token types, token ids, pixels.

A token is an image or a video token if it stands where the vision tower's features go. Three
things that processors of transformers do make this more than reading ``mm_token_type_ids``:

- some count the start, end and row-break tokens of an image as image (InternVL, Pixtral): they are
  text here, since no feature replaces them;
- some write the frames of a video with the image token, between a start and an end token of their
  own (GLM-4.5V, GLM-5), or with nothing but the frame's number in words (Nemotron Omni, whose model
  goes by the pixels that were passed);
- audio tokens have the type 3, and are text as far as a capacity policy is concerned.

InternVL writes frames with the image token too and passes their pixels as images, so nothing tells
them from several images: they are tagged IMAGE, which policies treat like VIDEO.

Source: ``transformers/models/*/processing_*.py`` of transformers 5.24 (token layout).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .modality import Modality
from .registry import config_value

IMAGE_ID_KEYS = ("image_token_id", "image_token_index")
VIDEO_ID_KEYS = ("video_token_id", "video_token_index")
IMAGE_PIXEL_KEYS = ("pixel_values", "pixel_values_images", "images")
VIDEO_PIXEL_KEYS = ("pixel_values_videos",)


@dataclass(frozen=True)
class TokenIds:
    """Ids of a family's vocabulary, None where it has no such token.

    Attributes:
        image: what an image's features replace.
        video: what a video's features replace.
        video_start: begins a video.
        video_end: ends it.
    """

    image: int | None
    video: int | None
    video_start: int | None
    video_end: int | None

    @property
    def placeholders(self) -> list[int]:
        """Ids that features replace."""
        return [token for token in (self.image, self.video) if token is not None]


def first_id(config: Any, keys: tuple[str, ...]) -> int | None:
    """The first of some configuration keys that holds a token id."""
    values = (config_value(config, key) for key in keys)
    return next((value for value in values if isinstance(value, int)), None)


def tags_of(ids: Tensor, types: Tensor | None, known: TokenIds) -> Tensor:
    """Tags without regard to padding and pixels.

    Args:
        ids: ``[B, S]`` int64.
        types: ``[B, S]``, the processor's token types, or None.
        known: ids of the family.

    Returns:
        ``[B, S]`` uint8 of TEXT, IMAGE and VIDEO.
    """
    if types is not None:
        tags = types.masked_fill(types > int(Modality.VIDEO), 0).to(torch.uint8)
        if known.placeholders:
            inside = torch.zeros_like(ids, dtype=torch.bool)
            for token in known.placeholders:
                inside |= ids == token
            # Without a single one the types are all there is to go by.
            tags = tags.masked_fill(~inside & inside.any(), int(Modality.TEXT))
        return tags
    tags = torch.zeros_like(ids, dtype=torch.uint8)
    if known.image is not None:
        tags = tags.masked_fill(ids == known.image, int(Modality.IMAGE))
        if known.video_start is not None and known.video_end is not None:
            starts = (ids == known.video_start).cumsum(dim=1)
            ends = (ids == known.video_end).cumsum(dim=1)
            frame = (ids == known.image) & (starts > ends)
            tags = tags.masked_fill(frame, int(Modality.VIDEO))
    if known.video is not None:
        tags = tags.masked_fill(ids == known.video, int(Modality.VIDEO))
    return tags


def pixels_given(inputs: Mapping[str, Any], keys: tuple[str, ...]) -> list[str]:
    """Names of the pixel inputs that are there."""
    return [key for key in keys if inputs.get(key) is not None]


def frames_by_pixels(tags: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """IMAGE becomes VIDEO where the pixels of videos were passed and those of images were not."""
    videos = pixels_given(inputs, VIDEO_PIXEL_KEYS)
    if not videos or pixels_given(inputs, IMAGE_PIXEL_KEYS):
        return tags
    return tags.masked_fill(tags == int(Modality.IMAGE), int(Modality.VIDEO))


def mark_padding(tags: Tensor, mask: Any) -> Tensor:
    """PAD where the attention mask leaves a token out.

    Raises:
        ValueError: the mask is no ``[B, S]`` tensor.
    """
    if mask is None:
        return tags
    if isinstance(mask, Tensor) and mask.dim() == 4 and tags.shape[1] == 1:
        return tags  # a step with a static cache; what it decodes is no padding
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise ValueError(
            "cannot tell padding from tokens: 'attention_mask' must be a [B, S] tensor, got "
            f"{tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}"
        )
    # With a cache the mask also covers what came before; the last columns are ours.
    now = mask[:, -tags.shape[1] :]
    return tags.masked_fill(now == 0, int(Modality.PAD))
