"""Recorded checkpoints and samples of DeepSeek-VL2 models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

DATA = Path(__file__).parents[2] / "data" / "deepseek_vl2"
CHECKPOINT_FILES = ("config.json", "processor_config.json", "model.safetensors")


def assemble(kind: str, target: Path) -> Path:
    """Lays out a recorded checkpoint with all files side by side."""
    target.mkdir(parents=True, exist_ok=True)
    for name in CHECKPOINT_FILES:
        shutil.copyfile(DATA / kind / name, target / name)
    for file in (DATA / "tokenizer").iterdir():
        shutil.copyfile(file, target / file.name)
    return target


def meta(kind: str) -> dict[str, Any]:
    return json.loads((DATA / kind / "meta.json").read_text(encoding="utf-8"))


def expected(kind: str, name: str) -> dict[str, torch.Tensor]:
    return load_file(DATA / kind / f"{name}.expected.safetensors")


def sample(kind: str, name: str) -> dict[str, torch.Tensor]:
    """Inputs of a recorded sample, batch size 1."""
    inputs = load_file(DATA / kind / f"{name}.inputs.safetensors")
    pixels = inputs.pop("images_u8", None)
    side = json.loads((DATA / kind / "config.json").read_text())["vision_config"]["image_size"]
    if pixels is None:
        inputs["images"] = torch.zeros(1, 1, 3, side, side)
    else:
        if name == "one_tile":  # stored once, both tiles are equal
            pixels = pixels.expand(1, 2, -1, -1, -1)
        inputs["images"] = (pixels.float() / 255 - 0.5) / 0.5
    return inputs
