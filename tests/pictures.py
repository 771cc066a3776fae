"""Random pictures and conversations for tests."""

from __future__ import annotations

import numpy as np
from PIL import Image


def picture(seed: int = 0, size: tuple[int, int] = (64, 64)) -> Image.Image:
    """A random RGB picture, ``size`` = (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def question(text: str, *images: Image.Image) -> list[dict]:
    """A conversation with images before one text."""
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
