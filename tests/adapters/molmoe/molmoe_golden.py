"""The recorded behaviour in ``tests/data/molmoe``, and a checkpoint folder made of it."""

from __future__ import annotations

import functools
import json
import lzma
import shutil
from pathlib import Path

import torch
from safetensors.torch import load, load_file
from torch import Tensor

DATA = Path(__file__).parents[2] / "data" / "molmoe"
LAYERS = (0, 1)


def make_folder(folder: Path) -> Path:
    """Config, weights, tokenizer and processor files side by side, as on the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(DATA / "model" / name, folder / name)
    for path in (DATA / "tokenizer").iterdir():
        shutil.copyfile(path, folder / path.name)
    return folder


def change_config(folder: Path, **changes: object) -> None:
    """Overwrites keys of a folder's config.json; those of the tower under ``vision``."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["vision_backbone"].update(changes.pop("vision", {}))
    path.write_text(json.dumps(config | changes))


def raw_config() -> dict:
    return json.loads((DATA / "model" / "config.json").read_text())


@functools.cache
def expected() -> dict[str, Tensor]:
    return load_file(DATA / "model" / "expected.safetensors")


@functools.cache
def inputs(sample: str) -> dict[str, Tensor]:
    """Model inputs of ``single`` (one picture) or ``text``, pixels in float32."""
    stored = load(lzma.decompress((DATA / "model" / "inputs.safetensors.xz").read_bytes()))
    return {
        name.removeprefix(f"{sample}."): value.float() if value.is_floating_point() else value
        for name, value in stored.items()
        if name.startswith(f"{sample}.")
    }


@functools.cache
def processor_cases() -> dict:
    return json.loads((DATA / "processor" / "expected.json").read_text())


@functools.cache
def processor_tensors() -> dict[str, Tensor]:
    return load(lzma.decompress((DATA / "processor" / "expected.safetensors.xz").read_bytes()))


def original_batch() -> dict[str, Tensor]:
    """``single`` and ``text`` in one batch as the original collator pads: -1 on the right."""
    batch = {}
    for name, value in inputs("single").items():
        row = torch.full_like(value, -1)
        if name == "input_ids":
            text = inputs("text")["input_ids"]
            row[:, : text.shape[1]] = text
        batch[name] = torch.cat([value, row])
    return batch
