"""Original checkpoints: which parameters they hold, where those go, what does not fit.

The original files hold each expert as three matrices; transformers' weight conversion stacks them
into the fused parameters on loading and takes them apart on saving, so that a saved folder is again
one in the original layout.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from ..base import ModelLoadError
from .configuration import MolmoeConfig
from .family import MODEL_TYPE
from .folder import few, stored_shapes, usable_config


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
                config = usable_config(str(config or folder))
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
