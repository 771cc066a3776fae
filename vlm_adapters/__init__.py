"""Adapters: one per family of vision-language mixture-of-experts models.

    from vlm_adapters import load_model, adapter_for, ADAPTERS

Importing the package imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .registry import ADAPTERS

if TYPE_CHECKING:
    from .base import Adapter, LoadedVLM, MoELayer, RouterChoice, UnsupportedModelError
    from .loading import load_model
    from .modality import Modality
    from .registry import adapter_for

__all__ = [
    "ADAPTERS",
    "Adapter",
    "LoadedVLM",
    "Modality",
    "MoELayer",
    "RouterChoice",
    "UnsupportedModelError",
    "adapter_for",
    "load_model",
]

_LAZY = {
    "Adapter": "base",
    "LoadedVLM": "base",
    "Modality": "modality",
    "MoELayer": "base",
    "RouterChoice": "base",
    "UnsupportedModelError": "base",
    "adapter_for": "registry",
    "load_model": "loading",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
