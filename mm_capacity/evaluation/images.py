"""Images of a data set: from base64 to RGB files that VLMEvalKit's prompts may point to.

Every mode becomes 8-bit RGB. 16-bit grey is scaled (value / 257), not clipped. Transparent
images are laid on white, as a page shows them; VLMEvalKit's own conversion would show
whatever colour lies hidden under the transparent parts, mostly black.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

WHITE = (255, 255, 255)
TRANSPARENT_MODES = frozenset(("RGBA", "RGBa", "LA", "La", "PA"))
# VLMEvalKit takes a cell of at most this many characters as the index of another question.
REFERENCE_CHARACTERS = 64


class BadImageError(Exception):
    """This image cannot be used; the message says why."""


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts any image to 8-bit RGB of the same size.

    Args:
        image: an opened image; of an animation the current frame is taken.

    Returns:
        A new image that holds no file.
    """
    if image.mode.startswith("I") or image.mode == "F":
        return _from_deep_grey(image).convert("RGB")
    if image.mode in TRANSPARENT_MODES or "transparency" in image.info:
        rgba = image.convert("RGBA")
        page = Image.new("RGBA", rgba.size, (*WHITE, 255))
        return Image.alpha_composite(page, rgba).convert("RGB")
    return image.convert("RGB")


def _from_deep_grey(image: Image.Image) -> Image.Image:
    """One channel of more than 8 bits, scaled to 8: full scale is 65535, or 1 for small floats.

    Values beyond full scale make their own maximum the full scale.
    """
    values = np.nan_to_num(np.asarray(image, dtype=np.float64))
    top = float(values.max(initial=0.0))
    if image.mode == "F":
        full = 1.0 if top <= 1 else max(255.0, top)
    else:
        full = max(65535.0, top)
    scaled = np.clip(np.round(values * (255 / full)), 0, 255)
    return Image.fromarray(scaled.astype(np.uint8))


def decode(text: str) -> bytes:
    """Bytes of a base64 cell.

    Raises:
        BadImageError: it is not base64.
    """
    try:
        return base64.b64decode(text)
    except (binascii.Error, ValueError) as error:
        raise BadImageError(f"not base64 ({error})") from error


def open_rgb(source: bytes | Path) -> Image.Image:
    """Opens an image completely.

    Raises:
        BadImageError: no image, a damaged one, or one of absurd size.
    """
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            image.load()
            return to_rgb(image)
    except FileNotFoundError:
        raise BadImageError(f"no such image file: {source!s}") from None
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise BadImageError(f"no readable image ({_short(error)})") from error


def probe(text: str) -> None:
    """Checks a base64 cell cheaply: base64 and image header, not the pixels.

    Raises:
        BadImageError: the check failed.
    """
    raw = decode(text)
    try:
        with Image.open(io.BytesIO(raw)):
            pass
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise BadImageError(f"no readable image ({_short(error)})") from error


def check_inside(path: str | Path, roots: Iterable[Path]) -> Path:
    """The real path of an image file, if it lies in one of the allowed folders.

    Args:
        path: absolute path, from a data file.
        roots: folders that it may lie in, symbolic links resolved.

    Raises:
        BadImageError: it lies elsewhere; nothing there was opened.
    """
    real = Path(os.path.realpath(path))
    for root in roots:
        if real.is_relative_to(os.path.realpath(root)):
            return real
    raise BadImageError(f"the image path {str(path)[:120]!r} leads out of the data folder")


class ImageStore:
    """RGB PNG files made from base64 cells, each content once.

    Args:
        folder: private folder for the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, text: str) -> Path:
        """The file of a base64 cell, made when first asked for.

        Raises:
            BadImageError: the cell holds no image.
        """
        name = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        path = self.folder / f"{name}.png"
        if not path.exists():
            image = open_rgb(decode(text))
            partial = path.with_suffix(".partial")
            image.save(partial, format="PNG", compress_level=1)
            os.replace(partial, path)
        return path


def _short(error: Exception) -> str:
    # Pillow puts the address of the buffer into the message: drop it, so that records compare.
    text = " ".join(str(error).split()).replace("'", "")
    return text.split(" <_io")[0][:120] or type(error).__name__
