"""Original checkpoint folders: what must be in them, what goes where, what is wrong with them.

The original files hold each expert as three matrices; transformers' weight conversion stacks them
into the fused parameters on loading and takes them apart on saving, so that a saved folder is again
one in the original layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from ..base import ModelLoadError
from .configuration import MODEL_TYPE, MolmoeConfig

HUB_PATTERNS = ("*.json", "*.safetensors", "*.txt")  # no pickled weights, no code
INDEX_FILE, WEIGHTS_FILE = "model.safetensors.index.json", "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_SHOWN = 8  # names listed in an error before "and N more"


def register() -> None:
    """Makes MolmoE known to transformers' Auto classes and weight conversion; can be called again.

    A model type that transformers itself comes to own is left to it.
    """
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText
    from transformers import AutoProcessor as Processor
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    from .image_processing import MolmoImageProcessor
    from .modeling import MolmoeForConditionalGeneration
    from .processing import MolmoProcessor

    # An expert's matrices have OLMoE's names and layout.
    register_checkpoint_conversion_mapping(
        MolmoeForConditionalGeneration.__name__,
        get_checkpoint_conversion_mapping("olmoe"),
        overwrite=True,
    )
    AutoConfig.register(MODEL_TYPE, MolmoeConfig, exist_ok=True)
    AutoModelForImageTextToText.register(
        MolmoeConfig, MolmoeForConditionalGeneration, exist_ok=True
    )
    AutoImageProcessor.register(
        MolmoeConfig,
        image_processor_classes={"pil": MolmoImageProcessor, "torchvision": MolmoImageProcessor},
        exist_ok=True,
    )
    Processor.register(MolmoeConfig, MolmoProcessor, exist_ok=True)


def original_shapes(config: MolmoeConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the original checkpoint of a config, without allocating it."""
    from transformers.core_model_loading import revert_weight_conversion

    from .modeling import MolmoeForConditionalGeneration

    register()
    with torch.device("meta"):
        model = MolmoeForConditionalGeneration(config)
    state = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


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
    if os.path.isfile(index):
        try:
            with open(index, encoding="utf-8") as stream:
                names = sorted(set(json.load(stream)["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index} is not a safetensors index: {error}") from error
    else:
        names = [WEIGHTS_FILE]
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


def check_weights(folder: str, config: MolmoeConfig) -> None:
    """Compares a folder's files with what the config describes, before anything is allocated.

    Raises:
        ModelLoadError: parameters are missing, unexpected or of the wrong shape; lists them by
            their original names.
    """
    expected, stored = original_shapes(config), stored_shapes(folder)
    if any(name.endswith("experts.gate_up_proj") for name in stored):
        return  # saved with fused experts: left to the check after loading
    missing = set(expected) - set(stored)
    if config.weight_tying:
        missing.discard("lm_head.weight")
    unexpected = set(stored) - set(expected)
    shapes = [
        f"{name} {list(stored[name])} instead of {list(expected[name])}"
        for name in expected.keys() & stored.keys()
        if expected[name] != stored[name]
    ]
    _complain(folder, missing, unexpected, shapes)


def _complain(
    source: str, missing: Iterable[str], unexpected: Iterable[str], shapes: Iterable[str]
) -> None:
    parts = [
        f"{len(list(names))} {kind}: {few(names)}"
        for kind, names in (
            ("missing", list(missing)),
            ("unexpected", list(unexpected)),
            ("of the wrong shape", list(shapes)),
        )
        if names
    ]
    if parts:
        raise ModelLoadError(
            f"{source} does not fit its config.json; parameters {'; '.join(parts)}"
        )


def local_folder(source: str) -> str:
    """The folder of a checkpoint: ``source`` itself, or its copy fetched from the hub.

    Raises:
        ModelLoadError: neither; says which files are needed.
    """
    if os.path.isdir(source):
        return source
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
    weight_files(folder)


class LoadChecks(PreTrainedModel):
    """Base of the model classes: nothing is loaded in part, nothing is saved half converted."""

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, source: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As the base class; a checkpoint that does not fit is an error that lists why.

        Raises:
            ModelLoadError: parameters are missing, unexpected or of the wrong shape.
        """
        register()
        folder = str(source)
        with_info = kwargs.pop("output_loading_info", False)
        if os.path.isdir(folder) and not kwargs.get("subfolder") and not kwargs.get("variant"):
            config = kwargs.get("config")
            if not isinstance(config, MolmoeConfig):
                config = MolmoeConfig.from_pretrained(config or folder)
            check_weights(folder, config)
        kwargs.setdefault("use_safetensors", True)  # never unpickles a foreign file
        loaded: Any = super().from_pretrained(source, *args, output_loading_info=True, **kwargs)
        model, info = loaded
        shapes = [
            f"{name} {list(found)} instead of {list(wanted)}"
            for name, found, wanted in info["mismatched_keys"]
        ]
        _complain(folder, info["missing_keys"], info["unexpected_keys"], shapes)
        return (model, info) if with_info else model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class, in the original layout also for a model that was not loaded."""
        register()
        return super().save_pretrained(*args, **kwargs)
