"""What a token is, from the point of view of a capacity policy."""

from __future__ import annotations

from enum import IntEnum


class Modality(IntEnum):
    """Modality of one token; tensors of tags hold these values as ``uint8``.

    ``PAD`` marks positions that the attention mask leaves out. They are not
    counted in a capacity window and are dropped before anything else.
    """

    TEXT = 0
    IMAGE = 1
    VIDEO = 2
    PAD = 3
