"""Shared fixtures. Everything runs offline, on the CPU."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
from PIL import Image


def picture(seed: int = 0, size: tuple[int, int] = (64, 64)) -> Image.Image:
    """A random RGB picture, ``size`` = (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def question(text: str, *images: Image.Image) -> list[dict]:
    """A conversation with images before one text."""
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="session")
def tiny_vlm():
    """A random Qwen3-VL-MoE: 3 MoE layers, 8 experts, top 2."""
    from vlm_adapters import load_model

    return load_model("tiny:qwen3_vl_moe")


@pytest.fixture(scope="session")
def one_question(tiny_vlm):
    """Inputs with one picture and a text."""
    return tiny_vlm.prepare(question("What is in this picture?", picture()))
