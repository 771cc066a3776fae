"""From images to tiles of the vision tower's size, with Pillow as the original does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers import BaseImageProcessor
from transformers.feature_extraction_utils import BatchFeature

Size = tuple[int, int]

# A prompt with more images than this shows every image in one tile.
MOST_CROPPED_IMAGES = 2


def best_resolution(size: Size, candidates: Sequence[Size]) -> Size:
    """The candidate that keeps most pixels of an image, then wastes least; the first on a tie.

    Args:
        size: (width, height) of the image.
        candidates: (width, height) pairs.
    """
    width, height = size

    def value(candidate: Size) -> tuple[int, int]:
        scale = min(candidate[0] / width, candidate[1] / height)
        area = int(width * scale) * int(height * scale)
        kept = min(area, width * height)
        return kept, kept - candidate[0] * candidate[1]

    return max(candidates, key=value)


class DeepseekVLV2ImageProcessor(BaseImageProcessor):
    """Cuts images into a global view and local tiles.

    Args:
        candidate_resolutions: (width, height) pairs in pixels; the first entry's width is the side
            of a tile.
        patch_size: pixels along one side of a patch.
        downsample_ratio: patches along one side of the block that becomes one token.
        image_mean: per channel; also the colour of the padding.
        image_std: per channel.
        normalize: whether to apply mean and standard deviation.
    """

    model_input_names = ["images", "images_spatial_crop"]

    def __init__(
        self,
        candidate_resolutions: Sequence[Sequence[int]] = ((384, 384),),
        patch_size: int = 14,
        downsample_ratio: int = 2,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        normalize: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not candidate_resolutions:
            raise ValueError("candidate_resolutions is empty: its first entry is the tile's size")
        self.candidate_resolutions = [(int(w), int(h)) for w, h in candidate_resolutions]
        self.patch_size = patch_size
        self.downsample_ratio = downsample_ratio
        self.image_mean = tuple(image_mean)
        self.image_std = tuple(image_std)
        # Not 'normalize', which is a method of the base class.
        self.do_normalize = normalize

    @property
    def tile(self) -> int:
        """Side of a tile in pixels."""
        return self.candidate_resolutions[0][0]

    @property
    def side(self) -> int:
        """t, tokens along one side of a tile."""
        return -(-(self.tile // self.patch_size) // self.downsample_ratio)

    def image_tokens(self, across: int, down: int) -> int:
        """Tokens of an image with so many local tiles: global view, separator, local view."""
        side = self.side
        return side * (side + 1) + 1 + down * side * (across * side + 1)

    def preprocess(self, images: Sequence[Image.Image], **kwargs: Any) -> BatchFeature:
        """Cuts the images of one prompt.

        Args:
            images: PIL images of any mode; alpha is dropped.

        Returns:
            ``images`` ``[N, 3, side, side]`` float32, of each image the global view and then its
            local tiles row by row, and ``images_spatial_crop`` ``[M, 2]`` int64, tiles across and
            down. Without images one zero tile and one ``[0, 0]`` row.

        Raises:
            ValueError: an image is so thin that nothing of it is left in a tile.
        """
        if kwargs:
            raise ValueError(f"unknown arguments {', '.join(sorted(kwargs))}; known: images")
        crop = len(images) <= MOST_CROPPED_IMAGES
        tiles: list[Tensor] = []
        crops: list[Size] = []
        for image in images:
            if not isinstance(image, Image.Image):
                raise ValueError(f"images must be PIL images, got {type(image).__name__}")
            rgb = image.convert("RGB")
            target = (self.tile, self.tile)
            if crop:
                target = best_resolution(rgb.size, self.candidate_resolutions)
            crops.append((target[0] // self.tile, target[1] // self.tile))
            tiles.append(self._to_tensor(self._fit(rgb, (self.tile, self.tile))))
            tiles.extend(self._cut(self._fit(rgb, target)))
        if not tiles:
            tiles, crops = [torch.zeros(3, self.tile, self.tile)], [(0, 0)]
        return BatchFeature(
            {"images": torch.stack(tiles), "images_spatial_crop": torch.tensor(crops)}
        )

    def _fit(self, image: Image.Image, size: Size) -> Image.Image:
        """Scales to fit inside ``size`` and pads evenly."""
        width, height = image.size
        if round(min(height / width * size[0], width / height * size[1])) < 1:
            raise ValueError(
                f"image of {width}x{height} pixels is too thin: scaled to fit {size[0]}x{size[1]} "
                f"its short side vanishes; sides up to about 1:{2 * min(size)} can be used"
            )
        colour = tuple(int(mean * 255) for mean in self.image_mean)
        return ImageOps.pad(image, size, method=Image.Resampling.BICUBIC, color=colour)

    def _cut(self, image: Image.Image) -> list[Tensor]:
        tile = self.tile
        return [
            self._to_tensor(image.crop((left, top, left + tile, top + tile)))
            for top in range(0, image.height, tile)
            for left in range(0, image.width, tile)
        ]

    def _to_tensor(self, image: Image.Image) -> Tensor:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
        if not self.do_normalize:
            return pixels
        mean, std = torch.tensor(self.image_mean), torch.tensor(self.image_std)
        return (pixels - mean[:, None, None]) / std[:, None, None]
