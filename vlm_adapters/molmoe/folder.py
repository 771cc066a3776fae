"""A checkpoint folder's files: which there must be, whether they can be read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

from safetensors import SafetensorError, safe_open

from ..base import ModelLoadError, UnsupportedModelError
from .configuration import MolmoeConfig

HUB_PATTERNS = ("*.json", "*.safetensors", "*.txt")  # no pickled weights, no code
INDEX_FILE, WEIGHTS_FILE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_SHOWN = 8  # names listed in an error before "and N more"


def few(names: Iterable[str]) -> str:
    """The first names of a list in natural reading, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(ordered[:_SHOWN]) + more


def weight_files(folder: str) -> list[str]:
    """Paths of the safetensors files of a checkpoint folder.

    Raises:
        ModelLoadError: there are none, the index is broken or names a file that is missing or lies
            outside of the folder.
    """
    index = os.path.join(folder, INDEX_FILE)
    names: list[str] = []
    if os.path.isfile(index):
        try:
            with open(index, encoding="utf-8") as stream:
                content = json.load(stream)
            names = sorted(set(content["weight_map"].values()))
            content["metadata"]  # transformers reads it
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(
                f"{index} is not a safetensors index with 'metadata' and 'weight_map': {error}"
            ) from error
    # Beside an index the single file is what transformers loads: both have to be whole.
    if not names or os.path.isfile(os.path.join(folder, WEIGHTS_FILE)):
        names.append(WEIGHTS_FILE)
    outside = [name for name in names if os.path.basename(name) != name]
    if outside:
        raise ModelLoadError(f"{index} names files outside of its folder: {few(outside)}")
    missing = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    if missing:
        raise ModelLoadError(
            f"{folder} lacks weights: {few(missing)} (needed: {WEIGHTS_FILE}, or {INDEX_FILE} and "
            "the files it names)"
        )
    return [os.path.join(folder, name) for name in names]


def stored_shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes in a folder's safetensors files; reads only their headers.

    Raises:
        ModelLoadError: a file cannot be read, for example because it is truncated.
    """
    shapes = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as stream:
                for name in stream.keys():
                    shapes[name] = tuple(stream.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            size = os.path.getsize(path)
            raise ModelLoadError(
                f"{path} ({size} bytes) is truncated or damaged: {error}; copy it again"
            ) from error
    return shapes


def local_folder(source: str) -> str:
    """The folder of a checkpoint: ``source`` itself, or its copy fetched from the hub.

    Raises:
        ModelLoadError: neither; says which files are needed.
    """
    folder = os.path.expanduser(source)
    if os.path.isdir(folder):
        return folder
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(source, allow_patterns=list(HUB_PATTERNS))
    except Exception as error:
        # The hub client raises a family of unrelated exceptions when it is offline.
        raise ModelLoadError(
            f"model {source!r} is no folder and cannot be fetched from the hub "
            f"({type(error).__name__}); a local copy needs config.json, {WEIGHTS_FILE} (or "
            f"{INDEX_FILE} and its files), {', '.join(TOKENIZER_FILES)} and {PROCESSOR_FILES[0]}"
        ) from error


def check_files(folder: str) -> None:
    """Checks that a folder holds config, weights, tokenizer and processor side by side.

    Raises:
        ModelLoadError: names the first kind of file that is missing.
    """
    if not os.path.isdir(folder):
        raise ModelLoadError(f"{folder} is not a folder")
    for kind, names, every in (
        ("configuration", ("config.json",), True),
        ("tokenizer", TOKENIZER_FILES, True),
        ("processor", PROCESSOR_FILES, False),
    ):
        there = [name for name in names if os.path.isfile(os.path.join(folder, name))]
        if len(there) < (len(names) if every else 1):
            lacking = [name for name in names if name not in there]
            raise ModelLoadError(
                f"{folder} lacks its {kind} file: {(' and ' if every else ' or ').join(lacking)}"
            )
    for name in (*TOKENIZER_FILES, *PROCESSOR_FILES):
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            _check_json(path)
    weight_files(folder)


def _check_json(path: str) -> None:
    """Raises ModelLoadError unless a file holds a JSON object, as a truncated one does not."""
    try:
        with open(path, encoding="utf-8") as stream:
            content = json.load(stream)
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}); copy it again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a {type(content).__name__}, not a JSON object")


def usable_config(folder: str) -> MolmoeConfig:
    """The configuration of a folder, once it is one that this port computes.

    Raises:
        ModelLoadError: a value of config.json is of the wrong kind.
        UnsupportedModelError: a dense model, or a setting that is not implemented.
    """
    try:
        config = MolmoeConfig.from_pretrained(folder)
        config.check_supported()
    except UnsupportedModelError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        path = os.path.join(folder, "config.json")
        raise ModelLoadError(f"{path} holds a value of the wrong kind: {reason}") from error
    return config
