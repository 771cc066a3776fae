"""The vision tower's output, computed once and used under every policy.

Experts sit behind the vision tower, so what it makes of an image is the same whatever the
policy. ``generate`` of transformers 5 encodes images before the first forward pass and also takes
their encoding instead of pixels (``mm_encoder_outputs``); that way in is used here, for models
that have it.

Source: ``transformers/generation/utils.py`` (interface of ``generate``).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

ENCODED = "mm_encoder_outputs"
PIXELS = ("pixel_values", "pixel_values_images", "image_patches")


def encode_images(model: Any, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replaces pixels by their encoding where the model takes it.

    Args:
        model: a transformers model.
        inputs: keyword arguments of ``generate``.

    Returns:
        The same arguments with ``mm_encoder_outputs`` instead of the pixels, or ``inputs`` as
        they are when there are no pixels or the model has no such way in.
    """
    import torch

    pixels = [name for name in PIXELS if inputs.get(name) is not None]
    encoder = getattr(getattr(model, "base_model", None), "get_image_features", None)
    if len(pixels) != 1 or encoder is None:
        return inputs
    if ENCODED not in inspect.signature(type(model).forward).parameters:
        return inputs
    wanted = inspect.signature(encoder).parameters
    if pixels[0] not in wanted:
        return inputs
    arguments = {name: inputs[name] for name in wanted if name in inputs}
    with torch.no_grad():
        encoded = encoder(**arguments, return_dict=True)
    rest = {name: value for name, value in inputs.items() if name != pixels[0]}
    return {**rest, ENCODED: {"image": encoded}}


def fresh(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that ``generate`` may add to; the tensors are shared."""
    return {k: dict(v) if k == ENCODED else v for k, v in inputs.items()}


def n_bytes(value: Any) -> int:
    """Memory of all tensors in a nest of mappings and sequences."""
    if hasattr(value, "element_size"):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(n_bytes(part) for part in value.values())
    if isinstance(value, (list, tuple)):
        return sum(n_bytes(part) for part in value)
    return 0
