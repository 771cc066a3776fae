"""DiffusionGemma: refused.

It writes a block of tokens by denoising: after the encoder has read the prompt, the decoder routes
the whole block again at every denoising step. Prefill, decode and a window of capacity, as this
project defines them, have no meaning there, and half of the routed tokens are noise.

Source: ``transformers/models/diffusion_gemma/modeling_diffusion_gemma.py`` (interface).
"""

from __future__ import annotations

from typing import Any, ClassVar

from .base import UnsupportedModelError
from .generic import NativeAdapter
from .registry import config_value

REASON = "block diffusion: tokens are routed again at every denoising step, so no prefill to cap"


class DiffusionGemmaAdapter(NativeAdapter):
    """See the module docstring."""

    name: ClassVar[str] = "diffusion_gemma"
    model_types: ClassVar[tuple[str, ...]] = ("diffusion_gemma",)

    @classmethod
    def matches(cls, config: Any) -> bool:
        if config_value(config, "model_type") in cls.model_types:
            raise UnsupportedModelError(f"model type 'diffusion_gemma' is not supported: {REASON}")
        return False

    @classmethod
    def tiny_model(cls, seed: int = 0) -> Any:
        raise UnsupportedModelError(f"model type 'diffusion_gemma' is not supported: {REASON}")
