"""The image half of the MolmoE processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

from .tiling import CLIP_MEAN, CLIP_STD, Tiles, TilingSpec, tile

# Names of the original processor's options -> our sizes; other names are refused.
SIZE_OPTIONS = (
    "max_crops",
    "overlap_margins",
    "base_image_input_size",
    "image_token_length_w",
    "image_token_length_h",
    "image_patch_size",
)


def tiling_spec(options: dict[str, Any]) -> TilingSpec:
    """Sizes from options in the original names; one that is absent, None or 0 takes its default."""
    default = TilingSpec()
    chosen = {key: value for key, value in options.items() if value}
    base = chosen.get("base_image_input_size", default.base_size)
    height, width = (base, base) if isinstance(base, int) else base
    return TilingSpec(
        max_crops=int(chosen.get("max_crops", default.max_crops)),
        overlap_margins=tuple(chosen.get("overlap_margins", default.overlap_margins)),
        base_size=(int(height), int(width)),
        patch_size=int(chosen.get("image_patch_size", default.patch_size)),
        token_grid=(
            int(chosen.get("image_token_length_h", default.token_grid[0])),
            int(chosen.get("image_token_length_w", default.token_grid[1])),
        ),
    )


def to_rgb_tensor(image: Any) -> torch.Tensor:
    """``[3, height, width]`` float32 in [0, 1] of a picture.

    A PIL image is converted to RGB: alpha is dropped, not composited, and the EXIF orientation is
    ignored, both as in the original. An array must be height x width x 3 and is cast to bytes.

    Raises:
        TypeError, ValueError: not a picture, or an array of another shape.
    """
    if isinstance(image, Image.Image):
        pixels = np.array(image.convert("RGB"))
    elif isinstance(image, np.ndarray):
        if image.ndim != 3 or image.shape[-1] != 3:
            raise ValueError(
                f"image array of shape {image.shape}: expected height x width x 3 (RGB)"
            )
        pixels = image.astype(np.uint8)
    else:
        raise TypeError(
            f"image of type {type(image).__name__}: expected a PIL image or a "
            "height x width x 3 array"
        )
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


class MolmoImageProcessor(BaseImageProcessor):
    """Tiles pictures; see :mod:`vlm_adapters.molmoe.tiling`.

    The name is the one that the original ``preprocessor_config.json`` asks for.

    Args:
        max_crops: most crops of the enlarged image.
        overlap_margins: margins of a crop in patches.
        base_image_input_size: ``(height, width)`` of a crop in pixels.
        image_token_length_w: pooled patches in a row of a crop.
        image_token_length_h: pooled patches in a column of a crop.
        image_patch_size: side of a patch in pixels.
        **kwargs: the file's other keys, kept for saving; normalisation always uses CLIP's
            constants.
    """

    model_input_names = ["images", "image_masks"]

    def __init__(
        self,
        max_crops: int = 12,
        overlap_margins: Sequence[int] = (4, 4),
        base_image_input_size: Sequence[int] = (336, 336),
        image_token_length_w: int = 12,
        image_token_length_h: int = 12,
        image_patch_size: int = 14,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("auto_map", None)
        kwargs.setdefault("do_normalize", True)
        kwargs.setdefault("image_mean", list(CLIP_MEAN))
        kwargs.setdefault("image_std", list(CLIP_STD))
        super().__init__(**kwargs)
        self.max_crops = max_crops
        self.overlap_margins = list(overlap_margins)
        self.base_image_input_size = list(base_image_input_size)
        self.image_token_length_w = image_token_length_w
        self.image_token_length_h = image_token_length_h
        self.image_patch_size = image_patch_size

    def options(self) -> dict[str, Any]:
        """This processor's own sizes, by their original names."""
        return {key: getattr(self, key) for key in SIZE_OPTIONS}

    def tile(self, image: Any, spec: TilingSpec | None = None) -> Tiles:
        """Tiles one picture with the given sizes, or with this processor's own."""
        return tile(to_rgb_tensor(image), spec or tiling_spec(self.options()))

    def preprocess(self, images: Any, *args: Any, **kwargs: Any) -> BatchFeature:
        """Tiles one picture.

        Args:
            images: one picture, or a list of one.
            *args: none is taken.
            **kwargs: sizes for this call, by their original names.

        Returns:
            ``images`` ``[1 + crops, patches, patch values]`` and ``image_masks``
            ``[1 + crops, patches]``.
        """
        kwargs.pop("return_tensors", None)
        unknown = sorted(set(kwargs) - set(SIZE_OPTIONS))
        if args or unknown:
            raise TypeError(f"unknown image options {unknown}; known: {', '.join(SIZE_OPTIONS)}")
        picture = only_image(images)
        if picture is None:
            raise ValueError("no image given")
        tiles = self.tile(picture, tiling_spec({**self.options(), **kwargs}))
        return BatchFeature({"images": tiles.images, "image_masks": tiles.masks})


def only_image(images: Any) -> Any | None:
    """The one image of a prompt, None without any.

    Raises:
        ValueError: more than one. The original gives a second image the token positions of the
            first, so that its features are lost; no released checkpoint was trained for it.
    """
    if images is None:
        return None
    if not isinstance(images, (list, tuple)):
        return images
    if len(images) > 1:
        raise ValueError(
            f"{len(images)} images in one prompt: MolmoE takes one image per prompt; "
            "join them into one picture, or ask about each alone"
        )
    return images[0] if images else None
