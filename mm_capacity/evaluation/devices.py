"""Names of devices, from the user's words to what torch takes."""

from __future__ import annotations

import re

from mm_capacity.errors import UserError

NAME = re.compile(r"auto|cpu|(cuda|xpu)(:\d+)?")


def check_name(device: object) -> None:
    """Makes sure that a word can name a device; whether it is there, is not looked at.

    Raises:
        UserError: it cannot.
    """
    if not isinstance(device, str) or not NAME.fullmatch(device):
        raise UserError(f"unknown device {device!r}: use auto, cpu, cuda, cuda:0 or the like")


def find(wanted: str) -> str:
    """The device to load onto; "auto" becomes the accelerator if there is one, else the CPU.

    Args:
        wanted: a checked name.

    Returns:
        A name for torch, or "auto" for several accelerators that share a model.

    Raises:
        UserError: the device is not there.
    """
    import torch

    if wanted == "auto":
        if torch.cuda.device_count() > 1:
            return "auto"  # several: let accelerate place the layers
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = wanted.partition(":")
    if kind == "cpu":
        return wanted
    backend = getattr(torch, kind, None)
    if backend is None or not backend.is_available():
        raise UserError(f"device {wanted!r} is not available here: use --device cpu")
    if number and int(number) >= backend.device_count():
        raise UserError(f"device {wanted!r} does not exist: there are {backend.device_count()}")
    return wanted
