"""How one image becomes crops, masks and token positions ("overlap-and-resize-c2").

The image is shown twice: whole, squeezed into one base square, and enlarged onto a grid of crops
that overlap by margins of patches. Patches in a margin that a neighbour covers too are computed but
get no token. Pure functions of numbers and arrays; the tokens' ids come in later.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

# The normalisation of CLIP. The original processor uses these constants whatever the config says.
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class TilingSpec:
    """Sizes of the tiling.

    Attributes:
        max_crops: most crops of the enlarged image.
        overlap_margins: ``(left or top, right or bottom)`` margins in patches.
        base_size: ``(height, width)`` of a crop in pixels.
        patch_size: side of a patch in pixels.
        token_grid: ``(rows, columns)`` of pooled patches in a crop.
    """

    max_crops: int = 12
    overlap_margins: tuple[int, int] = (4, 4)
    base_size: tuple[int, int] = (336, 336)
    patch_size: int = 14
    token_grid: tuple[int, int] = (12, 12)

    def __post_init__(self) -> None:
        if self.max_crops < 1:
            raise ValueError(f"max_crops={self.max_crops}: at least one crop is needed")
        if any(margin < 0 for margin in self.overlap_margins):
            raise ValueError(f"overlap_margins={self.overlap_margins}: cannot be negative")
        for side, tokens in zip(self.base_size, self.token_grid, strict=True):
            if side % self.patch_size or tokens < 1 or (side // self.patch_size) % tokens:
                raise ValueError(
                    f"base_image_input_size={self.base_size}: a side must be a multiple of "
                    f"image_patch_size={self.patch_size} whose patches image_token_length="
                    f"{self.token_grid} pools evenly"
                )
        if min(self.window) < 1:
            raise ValueError(
                f"overlap_margins={self.overlap_margins} leave nothing of a crop of "
                f"{self.patches} patches"
            )

    @property
    def patches(self) -> tuple[int, int]:
        """``(rows, columns)`` of patches in a crop."""
        return self.base_size[0] // self.patch_size, self.base_size[1] // self.patch_size

    @property
    def window(self) -> tuple[int, int]:
        """``(rows, columns)`` of patches by which neighbouring crops are apart."""
        shared = sum(self.overlap_margins)
        return self.patches[0] - shared, self.patches[1] - shared

    @property
    def margin_px(self) -> int:
        """Pixels of both margins together."""
        return sum(self.overlap_margins) * self.patch_size

    def canvas(self, grid: tuple[int, int]) -> tuple[int, int]:
        """``(height, width)`` in pixels of the picture that a grid of crops covers."""
        rows, cols = grid
        return (
            rows * self.window[0] * self.patch_size + self.margin_px,
            cols * self.window[1] * self.patch_size + self.margin_px,
        )


def choose_grid(height_px: int, width_px: int, spec: TilingSpec) -> tuple[int, int]:
    """The ``(rows, columns)`` of crops for an image.

    The grid that enlarges the image least, or, when every grid would shrink it, the one that
    shrinks it least; the first in order of (crops, rows) on a tie. All in float32, as the ties
    depend on it. A side equal to the margins divides by zero: infinite, so that the other decides.
    """
    most = spec.max_crops
    grids = [(r, c) for r in range(1, most + 1) for c in range(1, most + 1) if r * c <= most]
    grids.sort(key=lambda grid: (grid[0] * grid[1], grid[0]))
    step = np.array([side * spec.patch_size for side in spec.window])
    sizes = np.array(grids) * step
    room = np.array([height_px - spec.margin_px, width_px - spec.margin_px], dtype=np.float32)
    with np.errstate(divide="ignore"):
        scale = (sizes.astype(np.float32) / room).min(axis=-1)
    if (scale < 1).all():
        return grids[int(scale.argmax())]
    return grids[int(np.where(scale < 1, np.float32(1e10), scale).argmin())]


def resize_and_pad(
    image: torch.Tensor, target: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fits an image into a canvas, aspect kept, centred, the rest black.

    Args:
        image: ``[3, height, width]`` float32 in [0, 1].
        target: ``(height, width)`` of the canvas in pixels.

    Returns:
        The normalised canvas ``[height, width, 3]`` float32 (the padding is black *before* the
        normalisation), and ``[height, width]`` bool, True where the image is.

    Raises:
        ValueError: a side of the image would shrink to nothing.
    """
    height, width = image.shape[-2:]
    scale = min(np.float32(target[0] / height), np.float32(target[1] / width))
    # Truncation of a float32 product: the original's rounding, off by one against exact arithmetic.
    new_height, new_width = int(np.float32(height) * scale), int(np.float32(width) * scale)
    if min(new_height, new_width) < 1:
        raise ValueError(
            f"image of {width}x{height} pixels is too thin to tile: fitted into "
            f"{target[1]}x{target[0]} its short side would be less than one pixel"
        )
    resized = F.interpolate(
        image[None], (new_height, new_width), mode="bilinear", align_corners=False, antialias=True
    )[0].clamp(0.0, 1.0)
    top, left = (target[0] - new_height) // 2, (target[1] - new_width) // 2
    canvas = torch.zeros(target[0], target[1], 3)
    canvas[top : top + new_height, left : left + new_width] = resized.permute(1, 2, 0)
    mask = torch.zeros(target[0], target[1], dtype=torch.bool)
    mask[top : top + new_height, left : left + new_width] = True
    return (canvas - torch.tensor(CLIP_MEAN)) / torch.tensor(CLIP_STD), mask


def to_patches(pixels: torch.Tensor, patch: int) -> torch.Tensor:
    """``[height, width, channels]`` to ``[patches, patch * patch * channels]``, both row-major."""
    height, width, channels = pixels.shape
    blocks = pixels.view(height // patch, patch, width // patch, patch, channels)
    return blocks.permute(0, 2, 1, 3, 4).reshape(-1, patch * patch * channels)


def _kept(index: int, count: int, tokens: int, pool: int, margins: tuple[int, int]) -> range:
    """Pooled rows (or columns) of crop ``index`` out of ``count`` that get a token."""
    first = 0 if index == 0 else margins[0] // pool
    last = tokens if index == count - 1 else tokens - margins[1] // pool
    return range(first, last)


def patch_order(grid: tuple[int, int], spec: TilingSpec) -> tuple[np.ndarray, tuple[int, int]]:
    """Rank of each pooled patch in the raster order of the stitched picture.

    Returns:
        ``[crops, tokens]`` int64, -1 for a patch that a neighbour shows; and the
        ``(rows, columns)`` of the stitched picture in pooled patches.
    """
    rows, cols = grid
    tokens_h, tokens_w = spec.token_grid
    pool_h, pool_w = spec.patches[0] // tokens_h, spec.patches[1] // tokens_w
    keep_rows = [_kept(i, rows, tokens_h, pool_h, spec.overlap_margins) for i in range(rows)]
    keep_cols = [_kept(j, cols, tokens_w, pool_w, spec.overlap_margins) for j in range(cols)]
    height, width = sum(map(len, keep_rows)), sum(map(len, keep_cols))
    raster = np.arange(height * width).reshape(height, width)
    order = np.full((rows, cols, tokens_h, tokens_w), -1)
    top = 0
    for i, row_range in enumerate(keep_rows):
        left = 0
        for j, col_range in enumerate(keep_cols):
            part = raster[top : top + len(row_range), left : left + len(col_range)]
            order[i, j][row_range.start : row_range.stop, col_range.start : col_range.stop] = part
            left += len(col_range)
        top += len(row_range)
    return order.reshape(rows * cols, tokens_h * tokens_w), (height, width)


@dataclass(frozen=True)
class Tiles:
    """One image, tiled.

    Attributes:
        images: ``[1 + crops, patches, patch values]`` float32; the whole image first.
        masks: ``[1 + crops, patches]`` float32, see :func:`tile`.
        order: ``[crops, tokens]``, from :func:`patch_order`.
        token_rows: pooled rows and columns of the stitched picture.
    """

    images: torch.Tensor
    masks: torch.Tensor
    order: np.ndarray
    token_rows: tuple[int, int]


def tile(image: torch.Tensor, spec: TilingSpec) -> Tiles:
    """Cuts an image into its whole view and its crops.

    ``masks`` holds the share of real pixels of each patch, but one row late: row 0, used for the
    whole image, is that of crop 0, and the last row, used for the last crop, is -1. The released
    weights were trained on exactly this.

    Args:
        image: ``[3, height, width]`` float32 in [0, 1].
        spec: sizes.
    """
    grid = choose_grid(image.shape[-2], image.shape[-1], spec)
    canvas, real = resize_and_pad(image, spec.canvas(grid))
    whole, _ = resize_and_pad(image, spec.base_size)
    step_h, step_w = (side * spec.patch_size for side in spec.window)
    views, masks = [to_patches(whole, spec.patch_size)], []
    for i in range(grid[0]):
        for j in range(grid[1]):
            area = (
                slice(i * step_h, i * step_h + spec.base_size[0]),
                slice(j * step_w, j * step_w + spec.base_size[1]),
            )
            views.append(to_patches(canvas[area], spec.patch_size))
            share = to_patches(real[area][..., None].float(), spec.patch_size)
            masks.append(share.mean(dim=-1))
    masks.append(torch.full_like(masks[0], -1.0))
    order, token_rows = patch_order(grid, spec)
    return Tiles(torch.stack(views), torch.stack(masks), order, token_rows)
