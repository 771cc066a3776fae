"""Values of options, from the command line or a config file: each is right, or a UserError."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_capacity.errors import UserError

LARGEST = 2**63 - 1
"""What a 64-bit integer of torch holds."""


def parse_gamma(value: Any) -> float | None:
    """A capacity factor; ``"none"`` is the baseline.

    Raises:
        UserError: not a number, not finite, or not above 0.
    """
    if isinstance(value, str) and value.strip().lower() == "none":
        return None
    try:
        gamma = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        gamma = math.nan
    if not math.isfinite(gamma) or gamma <= 0:
        raise UserError(
            f"gamma {value!r} cannot be used: it must be a finite number above 0 (0.5, 1.0), "
            "or none for the baseline"
        )
    return gamma


def check_work_dir(text: str) -> Path:
    """A folder that can be written, or made; checked without making it.

    Raises:
        UserError: it cannot.
    """
    path = folder("work directory", text)
    nearest = path
    try:
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
    except OSError as error:
        raise UserError(f"work directory {text!r} cannot be used: {error.strerror}") from error
    if not nearest.is_dir():
        raise UserError(f"work directory {text!r} cannot be made: {str(nearest)!r} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"work directory {text!r} cannot be written: no permission in {nearest}")
    return path


def folder(what: str, text: Any) -> Path:
    """A path as the user wrote it; an empty one would silently be the current folder.

    Raises:
        UserError: it is empty, not text, or cannot be a path.
    """
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise UserError(f"{what} {text!r} cannot be used: give the path of a folder")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~somebody
        raise UserError(f"{what} {text!r} cannot be used: {error}") from error


def whole_number(flag: str, value: Any, *, least: int, most: int = LARGEST) -> int:
    """A whole number from ``least`` to ``most``.

    Raises:
        UserError: it is none, or outside.
    """
    try:
        if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
            raise ValueError
        number = int(value)
    except (TypeError, ValueError):
        number = least - 1
    if number < least:
        raise UserError(f"{flag} must be a whole number of at least {least}, got {value!r}")
    if number > most:
        raise UserError(f"{flag} must be a whole number of at most {most}, got {value!r}")
    return number


def flag(name: str, options: Mapping[str, Any]) -> bool:
    value = options.get(name, False)
    if not isinstance(value, bool):
        raise UserError(f"{name!r} must be true or false, got {value!r}")
    return value


def as_list(name: str, value: Any) -> list[Any]:
    values = value if isinstance(value, (list, tuple)) else [value]
    if not values:
        raise UserError(f"{name!r} is an empty list")
    return ["none" if v is None else v for v in values]


def unique_names(flag: str, values: Sequence[str]) -> list[str]:
    if any(not value.strip() for value in values):
        raise UserError(f"{flag} got an empty name")
    return list(dict.fromkeys(values))
