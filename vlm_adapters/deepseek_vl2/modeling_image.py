"""From tiles to image vectors: the projector and the order in which vectors stand in a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .configuration import DeepseekVLV2Config


class DeepseekVLV2Projector(nn.Module):
    """Merges blocks of ``ratio x ratio`` patches of a tile and maps them to the decoder's width."""

    def __init__(self, config: DeepseekVLV2Config) -> None:
        super().__init__()
        projector = config.projector_config
        self.ratio = projector.downsample_ratio
        self.grid = config.vision_config.grid
        hidden = projector.n_embed * projector.mlp_ratio
        layers: list[nn.Module] = [nn.Linear(projector.input_dim * self.ratio**2, hidden)]
        for _ in range(projector.depth - 2):
            layers += [nn.GELU(), nn.Linear(hidden, hidden)]
        layers += [nn.GELU(), nn.Linear(hidden, projector.n_embed)]
        self.layers = nn.Sequential(*layers)

    @property
    def side(self) -> int:
        """t, vectors along one side of a tile."""
        return -(-self.grid // self.ratio)

    def forward(self, features: Tensor) -> Tensor:
        """``[N, grid * grid, C]`` patch features to ``[N, t * t, D]``, rows from the top."""
        missing = self.side * self.ratio - self.grid
        picture = features.transpose(1, 2).unflatten(2, (self.grid, self.grid))
        picture = F.pad(picture, (0, missing, 0, missing))
        # Channel-major blocks: the ratio**2 values of one channel stay together.
        merged = F.pixel_unshuffle(picture, self.ratio)
        return self.layers(merged.flatten(2).transpose(1, 2))


def lay_out(
    tiles: Tensor, across: int, down: int, newline: Tensor, separator: Tensor, head: bool
) -> Tensor:
    """The vectors of one image in prompt order.

    The local tiles are joined to one picture first, so that a row runs through all tiles of a tile
    row; a newline ends each row of the picture and of the global view.

    Args:
        tiles: ``[1 + across * down, t * t, D]``, the global view first.
        across: local tiles in a row.
        down: rows of local tiles.
        newline: ``[D]``.
        separator: ``[D]``, between the two views.
        head: global view first.

    Returns:
        ``[t * (t + 1) + 1 + down * t * (across * t + 1), D]``
    """
    side = round(tiles.shape[1] ** 0.5)
    squares = tiles.unflatten(1, (side, side))
    joined = squares[1:].unflatten(0, (down, across)).transpose(1, 2)
    local = _end_rows(joined.reshape(down * side, across * side, -1), newline)
    whole = _end_rows(squares[0], newline)
    first, last = (whole, local) if head else (local, whole)
    return torch.cat((first, separator[None].to(first), last))


def _end_rows(picture: Tensor, newline: Tensor) -> Tensor:
    column = newline.to(picture).expand(len(picture), 1, -1)
    return torch.cat((picture, column), dim=1).flatten(0, 1)


def row_crops(images_spatial_crop: Tensor) -> list[list[tuple[int, int]]]:
    """(across, down) of the images of each batch row; a row ends at its first ``[0, 0]``."""
    rows = []
    for row in images_spatial_crop.tolist():
        sizes = [(across, down) for across, down in row]
        empty = [i for i, (across, down) in enumerate(sizes) if across == 0 or down == 0]
        rows.append(sizes[: empty[0]] if empty else sizes)
    return rows


def tile_counts(crops: Sequence[tuple[int, int]]) -> list[int]:
    """Tiles of each image, its global view included."""
    return [1 + across * down for across, down in crops]


def split_mask(mask: Tensor, tokens: int, cache: Cache | None) -> tuple[Tensor, Tensor]:
    """Cuts ``images_seq_mask`` into what a forward pass brings in and what came before.

    Args:
        mask: ``[B, S]`` for this pass alone, or ``[B, L]`` of the whole prompt, which the cache
            holds the beginning of.
        tokens: S.
        cache: keys and values of earlier tokens.

    Returns:
        the mask of this pass ``[B, S]`` bool, and the earlier part ``[B, past]`` bool.

    Raises:
        ValueError: the mask is too short.
    """
    mask = mask.bool()
    past = 0
    if mask.shape[1] != tokens and cache is not None:
        past = int(cache.get_seq_length())
    if mask.shape[1] < past + tokens:
        raise ValueError(
            f"images_seq_mask covers {mask.shape[1]} positions, {past + tokens} are needed"
        )
    return mask[:, past : past + tokens], mask[:, :past]
