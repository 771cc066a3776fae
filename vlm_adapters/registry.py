"""Which adapter belongs to which model. Holds strings: listing it imports nothing heavy.

A new family is one file under ``vlm_adapters/`` and one line in ADAPTERS.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from .base import Adapter

ADAPTERS: dict[str, str] = {
    "qwen3_vl_moe": "vlm_adapters.qwen3_vl_moe:Qwen3VLMoeAdapter",
    "molmoe": "vlm_adapters.molmoe.adapter:MolmoEAdapter",
    "deepseek_vl2": "vlm_adapters.deepseek_vl2.adapter:DeepseekVL2Adapter",
    "gemma4": "vlm_adapters.gemma4:Gemma4Adapter",
    "inkling_mm_model": "vlm_adapters.inkling:InklingAdapter",
    "ernie4_5_vl_moe": "vlm_adapters.ernie4_5_vl_moe:Ernie45VLMoeAdapter",
    "qwen3_omni_moe_thinker": "vlm_adapters.qwen3_omni_moe:Qwen3OmniMoeAdapter",
    "llama4": "vlm_adapters.llama4:Llama4Adapter",
    "diffusion_gemma": "vlm_adapters.diffusion_gemma:DiffusionGemmaAdapter",
    # Last: takes any native model whose MoE layers have the usual seam.
    "native": "vlm_adapters.generic:NativeAdapter",
}

# Where a configuration keeps that of its language model.
LANGUAGE_MODEL_KEYS = ("text_config", "language_config", "llm_config")


def adapter_class(name: str) -> type[Adapter]:
    """Imports the adapter of a registry name.

    Raises:
        ValueError: the name is unknown; lists the known ones.
    """
    if name not in ADAPTERS:
        raise ValueError(f"unknown adapter {name!r}; known: {', '.join(ADAPTERS)}")
    module, attribute = ADAPTERS[name].split(":")
    return getattr(import_module(module), attribute)


def adapter_class_for(config: Any) -> type[Adapter]:
    """The adapter class for a model configuration.

    Args:
        config: a configuration object or the dictionary of a ``config.json``.

    Raises:
        UnsupportedModelError: no adapter takes it, with what was looked for.
    """
    from .base import UnsupportedModelError
    from .native_parts import EXPERT_COUNT_KEYS, expert_count

    for name in ADAPTERS:
        cls = adapter_class(name)
        if cls.matches(config):
            return cls
    model_type = config_value(config, "model_type")
    inner = [config_value(config, key) for key in LANGUAGE_MODEL_KEYS]
    dense = next((each for each in inner if each is not None), None)
    if dense is not None and expert_count(dense) <= 1:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not supported: it is dense, its language model "
            f"({config_value(dense, 'model_type') or 'of no named type'}) has no experts to cap "
            f"(looked for {', '.join(EXPERT_COUNT_KEYS)})"
        )
    raise UnsupportedModelError(
        f"model type {model_type!r} is not supported: looked for an adapter among "
        f"{', '.join(ADAPTERS)}, and for image and text settings ('vision_config') with a number "
        "of experts in the text settings, which a native mixture-of-experts VLM has"
    )


def adapter_for(model: nn.Module) -> Adapter:
    """The adapter of a loaded model.

    Raises:
        UnsupportedModelError: no adapter takes it, or it has no MoE layer.
    """
    from .base import UnsupportedModelError

    config = getattr(model, "config", None)
    if config is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no 'config': pass the transformers model itself"
        )
    adapter = adapter_class_for(config)(config)
    adapter.moe_layers(model)
    return adapter


def config_value(config: Any, key: str, default: Any = None) -> Any:
    """Reads a key of a configuration object or dictionary."""
    if isinstance(config, dict):
        return config.get(key, default)
    return getattr(config, key, default)
