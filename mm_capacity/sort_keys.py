"""Sort keys: floats, hashes and flags as integers, packed so that one sort compares them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vlm_adapters.modality import Modality

MODALITIES = ("uniform", "image-first", "text-first")

_WORD_BITS = 63
_HALF_WORD_BITS = 31


@dataclass(frozen=True)
class SortKey:
    """One sort key; of two assignments the one with the smaller key stays.

    The key is ``offset + sign * values``. The offset joins the packed word as one constant, where
    shifting and turning the values themselves would cost passes over them.

    Attributes:
        values: integers (or bools), shape ``[T, K']`` or ``[T, 1]``.
        bits: width of the values, at most 32.
        descending: greater values stay.
        signed: values lie in ``[-2**(bits-1), 2**(bits-1))``, not in ``[0, 2**bits)``.
    """

    values: Tensor
    bits: int
    descending: bool = False
    signed: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.bits <= 32:
            raise ValueError(f"bits must lie in [0, 32], got {self.bits}")

    @property
    def sign(self) -> int:
        return -1 if self.descending else 1

    @property
    def offset(self) -> int:
        """Puts the key into ``[0, 2**bits)``."""
        top = 2 ** (self.bits - 1) if self.signed else 2**self.bits
        return top - 1 if self.descending else top if self.signed else 0

    def at(self, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """The values of M entries of a key on the CPU, turned so that the smaller one stays."""
        values = self.values.numpy()[row, column if self.values.shape[1] > 1 else 0]
        return ~values if self.descending else values


def float_keys(values: Tensor) -> list[SortKey]:
    """Integer keys that order floats exactly: the greater float has the smaller key.

    The bits of an IEEE float, read as a sign-magnitude integer, order like the float; turning over
    all bits but the sign of the negative ones makes them a two's-complement integer that does.
    -0.0 equals 0.0, as in a comparison. float64 needs two keys of 32 bits, every other type one.
    """
    # Adding 0.0 turns -0.0 into 0.0; half precision widens to float32 without loss.
    if values.dtype == torch.float64:
        bits = (values + 0.0).view(torch.int64)
        bits ^= (bits >> 63) & 0x7FFF_FFFF_FFFF_FFFF
        return [
            SortKey(bits >> 32, 32, descending=True, signed=True),
            SortKey(bits & 0xFFFF_FFFF, 32, descending=True),
        ]
    bits = (values.to(torch.float32) + 0.0).view(torch.int32)
    turn = bits >> 31
    turn &= 0x7FFF_FFFF
    turn ^= bits
    return [SortKey(turn, 32, descending=True, signed=True)]


def modality_key(tags: Tensor, modality: str) -> SortKey:
    """Padding goes first, then what the modality order says.

    Args:
        tags: ``[T]`` uint8 of :class:`~vlm_adapters.modality.Modality`.
        modality: ``"uniform"``, ``"image-first"`` or ``"text-first"``.
    """
    if modality == "image-first":
        # TEXT 0, IMAGE 1, VIDEO 2, PAD 3 become 0, 1, 1, 2.
        return SortKey(((tags + 1) >> 1).unsqueeze(1), 2)
    padding = (tags == int(Modality.PAD)).to(torch.uint8)
    if modality == "uniform":
        return SortKey(padding.unsqueeze(1), 1)
    return SortKey((padding * 2 + (tags == Modality.TEXT)).unsqueeze(1), 2)


def positions_in_window(valid: Tensor, window: Tensor | None, windows: int) -> Tensor:
    """How many valid tokens of the same window come before each token.

    Unlike an index into the batch, this does not change when padding is added on either side.

    Args:
        valid: ``[T]`` bool.
        window: ``[T]`` int64, or None for one window.
        windows: number of windows.

    Returns:
        ``[T]`` int64.
    """
    counts = valid.to(torch.int64)
    if window is None:
        return counts.cumsum(0) - counts
    by_window = torch.argsort(window, stable=True)
    counts = counts[by_window]
    before = counts.cumsum(0) - counts
    totals = torch.zeros(windows, dtype=torch.int64, device=valid.device)
    totals.scatter_add_(0, window, valid.to(torch.int64))
    before -= (totals.cumsum(0) - totals)[window[by_window]]
    return torch.empty_like(before).scatter_(0, by_window, before)


def hash_key(seed: int, layer: int, *parts: Tensor) -> Tensor:
    """A 32-bit integer hash of (seed, layer, parts...), the same on every device.

    A generator's stream would depend on the device and on the batch's layout; a hash of what
    identifies the assignment does not.
    """
    start = _mix(_mix(seed & 0xFFFF_FFFF) ^ (seed >> 32 & 0xFFFF_FFFF))
    state: int | Tensor = _mix(start ^ layer)
    for part in parts:
        state = _mix(part ^ state)
    assert isinstance(state, Tensor)
    return state


def _mix(x):
    """A bijection of 32-bit integers; multiplier below 2^31, so int64 never overflows.

    Source: the xor-shift-multiply construction of integer finalisers (MurmurHash3's fmix32), with
    the multiplier 0x45d9f3b.
    """
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFF_FFFF
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFF_FFFF
    return x ^ (x >> 16)


@dataclass(frozen=True)
class Packed:
    """Sort keys in one integer per entry.

    Attributes:
        words: ``[T, K']`` int64; smaller comes first.
        shift: bits below the first key.
        constant: what was left out of every word: word + constant is not negative and holds the
            first key in the bits from ``shift`` on.
    """

    words: Tensor
    shift: int
    constant: int

    def firsts(self, count: int) -> Tensor:
        """``[count]`` int64, the smallest word whose first key is 0, 1, 2, ..."""
        step = 1 << self.shift
        stop = (count - 1) * step + 1 - self.constant
        return torch.arange(-self.constant, stop, step, device=self.words.device)


def pack(keys: Sequence[SortKey], shape: torch.Size) -> Packed:
    """Packs keys, most significant first, into one int64 per entry.

    Keys that do not fit together are replaced, from the least significant on, by the rank of the
    word they form. Entries that all keys together tell apart keep their order. Each round takes in
    at least one more key: a rank of fewer than 2^31 entries and a key of 32 bits fit in one word.

    Args:
        keys: sort keys.
        shape: ``[T, K']``, to which their values broadcast.
    """
    rest = list(keys)
    tail: list[SortKey] = []
    bits = sum(key.bits for key in rest)
    while bits > _WORD_BITS:
        tail_bits = sum(key.bits for key in tail)
        while len(rest) > 1 and tail_bits + rest[-1].bits <= _WORD_BITS:
            tail_bits += rest[-1].bits
            tail.insert(0, rest.pop())
        word = _combine(tail, shape).words.reshape(-1)
        rank = torch.empty_like(word)
        rank.scatter_(
            0, torch.argsort(word, stable=True), torch.arange(len(word), device=word.device)
        )
        tail = [SortKey(rank.view(shape), max(len(word) - 1, 0).bit_length())]
        bits = sum(key.bits for key in rest) + tail[0].bits
    return _combine([*rest, *tail], shape)


def pack_top(keys: Sequence[SortKey], shape: torch.Size) -> tuple[np.ndarray, np.ndarray, bool]:
    """Packs the 31 highest bits of keys on the CPU into one int32 per entry.

    Args:
        keys: sort keys, most significant first.
        shape: ``[T, K']``, to which their values broadcast.

    Returns:
        ``[T * K']`` int32 words; ``[2**bits of the first key]`` int32, the smallest word whose
        first key is 0, 1, 2, ...; and whether the words hold all bits of the keys.
    """
    place, constant = _HALF_WORD_BITS, 0
    terms = []
    for key in keys:
        if not key.bits:
            continue
        dropped = max(0, key.bits - place)
        place -= key.bits - dropped
        constant += (key.offset >> dropped) << place
        values = key.values.numpy()
        terms.append((values >> dropped if dropped else values, key.sign * (1 << place)))
        if not place:
            break
    terms.sort(key=lambda term: term[0].size)  # as in _combine
    words: np.ndarray = np.zeros((1, 1), dtype=np.int32)
    for values, factor in terms:
        term = np.multiply(values, np.int32(factor), dtype=np.int32, casting="unsafe")
        words = np.add(words, term, out=term if term.shape == shape else None)
    step = 1 << (_HALF_WORD_BITS - keys[0].bits)
    firsts = np.arange(-constant, 2**_HALF_WORD_BITS - constant, step, dtype=np.int64)
    fits = sum(key.bits for key in keys) <= _HALF_WORD_BITS
    return np.broadcast_to(words, shape).reshape(-1), firsts.astype(np.int32), fits


def _combine(keys: Sequence[SortKey], shape: torch.Size) -> Packed:
    """The words that the keys form; together they must fit."""
    place = sum(key.bits for key in keys)
    shift = place - keys[0].bits
    constant = 0
    terms = []
    for key in keys:
        place -= key.bits
        constant += key.offset << place
        terms.append((key.values, key.sign * (1 << place)))
    # Per-token keys first: they are summed at [T, 1], and only the sum is spread over the slots.
    terms.sort(key=lambda term: term[0].numel())
    values, factor = terms[0]
    words = values.to(torch.int64) * factor
    for values, factor in terms[1:]:
        if words.shape == shape:
            words.add_(values, alpha=factor)
        else:
            words = torch.add(words, values, alpha=factor)
    return Packed(words.expand(shape).contiguous(), shift, constant)
