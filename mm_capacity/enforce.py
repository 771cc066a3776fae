"""Who stays: sort keys and a limit per group turn into a keep mask. Only here are assignments dropped.

Every assignment gets one integer in which its group (window and expert, or window and rank) fills
the high bits, then the sort keys, then a tie-breaker that makes it unique inside its group; smaller
stays. One sort of these integers puts each group's survivors in front, so the C-th entry of a group
is the bound that decides for all of the group at once. Because the integers are unique, the result
depends on neither the sorting algorithm nor the device, thread count or memory layout.

Nothing here makes the host wait for the device unless ``validate`` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mm_capacity.capacity import SCOPES
from mm_capacity.routing import is_visual
from vlm_adapters.modality import Modality

ORDERS = ("score", "order", "reverse", "random")
MODALITIES = ("uniform", "image-first", "text-first")

_WORD_BITS = 63


@dataclass(frozen=True)
class SortKey:
    """One sort key; of two assignments the one with the smaller value stays.

    Attributes:
        values: int64, shape ``[T, K']``, ``[T, 1]`` or ``[1, K']``, in ``[0, 2**bits)``.
        bits: width of the key.
    """

    values: Tensor
    bits: int


def keep_assignments(
    expert: Tensor,
    scores: Tensor,
    capacity: Tensor,
    *,
    experts: int,
    tags: Tensor,
    window: Tensor | None = None,
    scope: str = "expert",
    rank_of_expert: Tensor | None = None,
    ranks: int = 1,
    modality: str = "uniform",
    order: str = "score",
    original: Tensor | None = None,
    seed: int = 0,
    layer: int = 0,
    validate: bool = False,
) -> Tensor:
    """Which candidate assignments stay under a capacity.

    The candidates of one group compete: one expert in one window (scope ``expert``), or all experts
    of one rank in one window (scope ``device``). Of each group the C greatest stay, compared by, most
    significant first: not padding; is an original (only with ``original``); modality; order; the
    earlier token; the greater score; the lower expert id.

    Args:
        expert: ``[T, K']`` int64, candidate experts of each token, distinct within a token; the id
            ``experts`` (NO_EXPERT) marks an empty slot, which never stays.
        scores: ``[T, K']`` float, router score of each candidate; any finite or infinite value.
        capacity: ``[windows]`` int64, C of each window.
        experts: E.
        tags: ``[T]`` uint8, :class:`~vlm_adapters.modality.Modality` of each token; VIDEO counts
            as IMAGE.
        window: ``[T]`` int64 window of each token, or None when there is one window.
        scope: ``"expert"`` or ``"device"``.
        rank_of_expert: ``[E]`` int64; needed by scope ``device``.
        ranks: R.
        modality: ``"uniform"`` (no key), ``"image-first"`` (image tokens are dropped first) or
            ``"text-first"`` (the reverse).
        order: ``"score"`` (higher stays), ``"order"`` (earlier token stays), ``"reverse"`` (later
            token stays) or ``"random"``.
        original: ``[T, K']`` bool, True for the router's own picks, to put them in front of added
            candidates; None makes no difference between the two.
        seed: seed of order ``random``, a non-negative integer.
        layer: index of the MoE layer, so that ``random`` differs between layers.
        validate: check values as well as shapes (the host waits for the device).

    Returns:
        ``[T, K']`` bool, True where the assignment stays. Every group keeps at most C.

    Raises:
        ValueError: an argument does not fit; the message names it and its value.

    Source: arXiv 2503.05066, Algorithm 1 (token drop) and Algorithm 2 (expanded drop), with
    lexicographic keys in place of arithmetic on scores.
    """
    _check(expert, scores, capacity, tags, window, original, rank_of_expert, scope, modality, order)
    if validate:
        _check_values(expert, scores, capacity, experts)
    tokens = expert.shape[0]
    windows = capacity.shape[0]
    if windows == 1:
        window = None
    group, groups_per_window = expert, experts
    if scope == "device":
        assert rank_of_expert is not None
        group = _with_sentinel(rank_of_expert, ranks)[expert]
        groups_per_window = ranks
    if window is not None:
        no_group = windows * groups_per_window
        in_window = group + (window * groups_per_window).unsqueeze(1)
        group = torch.where(group == groups_per_window, no_group, in_window)

    index = torch.arange(tokens, device=expert.device).unsqueeze(1)
    token_bits = max(tokens - 1, 0).bit_length()
    score_keys = float_keys(scores) if order == "score" or scope == "device" else []
    keys = [_bit(tags == Modality.PAD)]
    if original is not None:
        keys.append(SortKey((~original).to(torch.int64), 1))
    if modality != "uniform":
        keys.append(_bit(tags == Modality.TEXT if modality == "text-first" else is_visual(tags)))
    if order == "score":
        keys += score_keys
    elif order == "random":
        position = positions_in_window(tags != Modality.PAD, window, windows)
        keys.append(SortKey(hash_key(seed, layer, position.unsqueeze(1), expert), 32))
    if order == "reverse":
        keys.append(SortKey(max(tokens - 1, 0) - index, token_bits))
    else:
        keys.append(SortKey(index, token_bits))
    if scope == "device":
        # Two assignments of one token meet in a rank's group: greater score, then lower id.
        keys += score_keys if order != "score" else []
        keys.append(SortKey(expert, experts.bit_length()))
    limit = capacity.repeat_interleave(groups_per_window)
    return keep_first(group, limit, keys)


def keep_first(group: Tensor, limit: Tensor, keys: Sequence[SortKey]) -> Tensor:
    """Keeps, of every group, the entries with the smallest keys, up to the group's limit.

    Args:
        group: ``[T, K']`` int64 in ``[0, G]``; entries of group G never stay.
        limit: ``[G]`` int64, most entries a group keeps.
        keys: sort keys, most significant first; together they must tell all entries of a group
            apart.

    Returns:
        ``[T, K']`` bool.
    """
    groups = limit.shape[0]
    packed, shift = _pack([SortKey(group, groups.bit_length()), *keys], group.shape)
    ordered = _sorted(packed.reshape(-1))
    firsts = torch.arange(groups + 1, device=group.device) << shift
    start = torch.searchsorted(ordered, firsts)
    end = torch.minimum(start[:-1] + limit, start[1:])
    # The last key that stays; a group that keeps nothing gets -1, below every key.
    last = ordered[(end - 1).clamp(min=0)] if ordered.numel() else torch.full_like(end, -1)
    bound = torch.cat([torch.where(end > start[:-1], last, -1), last.new_full((1,), -1)])
    return packed <= bound.index_select(0, group.reshape(-1)).view(group.shape)


def keep_within(
    group: Tensor, room: Tensor, load: Tensor, keys: Sequence[SortKey]
) -> Tensor:
    """Keeps, of every group, the longest run of entries in key order whose load fits.

    The first entry that does not fit ends the run, also when a later, lighter one would fit.

    Args:
        group: ``[T, K']`` int64 in ``[0, G]``; entries of group G never stay.
        room: ``[G]`` int64, load that a group may keep.
        load: ``[T, K']`` int64, load of each entry, at least 0. Integers, so that the order of
            summation changes nothing.
        keys: as for :func:`keep_first`.

    Returns:
        ``[T, K']`` bool.
    """
    groups = room.shape[0]
    packed, shift = _pack([SortKey(group, groups.bit_length()), *keys], group.shape)
    ordered, index = torch.sort(packed.reshape(-1))
    sorted_group = ordered >> shift
    running = load.reshape(-1)[index].cumsum(0)
    start = torch.searchsorted(ordered, torch.arange(groups + 1, device=group.device) << shift)
    before = torch.cat([running.new_zeros(1), running])[start]
    limit = torch.cat([room, room.new_full((1,), -1)])
    fits = running - before[sorted_group] <= limit[sorted_group]
    return torch.empty_like(fits).scatter_(0, index, fits).view(group.shape)


def float_keys(values: Tensor) -> list[SortKey]:
    """Integer keys that order floats exactly: the greater float has the smaller key.

    The bits of an IEEE float, read as a sign-magnitude integer, order like the float. -0.0 equals
    0.0, as in a comparison. float64 needs two keys of 32 bits, every other type one.
    """
    if values.dtype == torch.float64:
        bits = (values + 0.0).view(torch.int64)
        bits = bits ^ ((~bits >> 63) & 0x7FFF_FFFF_FFFF_FFFF)
        low = SortKey(bits & 0xFFFF_FFFF, 32)
        return [SortKey((bits >> 32) & 0xFFFF_FFFF, 32), low]
    # Adding 0.0 turns -0.0 into 0.0; half precision widens to float32 without loss.
    narrow = (values.to(torch.float32) + 0.0).view(torch.int32)
    narrow = narrow ^ ((~narrow >> 31) & 0x7FFF_FFFF)
    return [SortKey(narrow.to(torch.int64) & 0xFFFF_FFFF, 32)]


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


def _pack(keys: Sequence[SortKey], shape: torch.Size) -> tuple[Tensor, int]:
    """Packs keys into one int64 of the given shape; returns it and the shift of the first key.

    Keys that do not fit together are replaced, from the least significant on, by the rank of the
    word they form: as long as words are unique per group, this keeps their order.
    """
    rest = list(keys)
    tail: list[SortKey] = []
    bits = sum(key.bits for key in rest)
    while bits > _WORD_BITS:
        tail_bits = sum(key.bits for key in tail)
        while len(rest) > 1 and tail_bits + rest[-1].bits <= _WORD_BITS:
            tail_bits += rest[-1].bits
            tail.insert(0, rest.pop())
        word = _combine(tail, shape).reshape(-1)
        rank = torch.empty_like(word)
        rank.scatter_(
            0, torch.argsort(word, stable=True), torch.arange(len(word), device=word.device)
        )
        tail = [SortKey(rank.view(shape), max(len(word) - 1, 0).bit_length())]
        bits = sum(key.bits for key in rest) + tail[0].bits
    return _combine([*rest, *tail], shape), bits - keys[0].bits


def _combine(keys: Sequence[SortKey], shape: torch.Size) -> Tensor:
    shift = sum(key.bits for key in keys)
    shifted = []
    for key in keys:
        shift -= key.bits
        shifted.append((key.values, shift))
    # Per-token keys first: they are summed at [T, 1], and only the sum is spread over the slots.
    shifted.sort(key=lambda item: item[0].numel())
    total = shifted[0][0] << shifted[0][1]
    for values, places in shifted[1:]:
        total = torch.add(total, values, alpha=1 << places)
    return total.expand(shape).contiguous()


def _sorted(keys: Tensor) -> Tensor:
    """``keys`` ``[N]`` int64 in ascending order."""
    if keys.device.type == "cpu":
        # Values without indices is all that is needed, and numpy's vectorised sort returns just
        # them, in about half the time of torch.sort.
        return torch.from_numpy(np.sort(keys.numpy()))
    return torch.sort(keys).values


def _bit(flag: Tensor) -> SortKey:
    return SortKey(flag.to(torch.int64).unsqueeze(1), 1)


def _with_sentinel(table: Tensor, last: int) -> Tensor:
    return torch.cat([table, table.new_full((1,), last)])


def _check(expert, scores, capacity, tags, window, original, rank_of_expert, scope, modality, order):
    if expert.dim() != 2 or expert.dtype != torch.int64:
        raise ValueError(f"expert must be int64 [T, K], got {expert.dtype} {list(expert.shape)}")
    for name, value in (("scores", scores), ("original", original)):
        if value is not None and value.shape != expert.shape:
            raise ValueError(
                f"{name} must have shape {list(expert.shape)}, got {list(value.shape)}"
            )
    if not scores.is_floating_point():
        raise ValueError(f"scores must be a float tensor, got {scores.dtype}")
    for name, value in (("tags", tags), ("window", window)):
        if value is not None and value.shape != expert.shape[:1]:
            raise ValueError(f"{name} must have shape {[len(expert)]}, got {list(value.shape)}")
    if capacity.dim() != 1 or capacity.dtype != torch.int64 or capacity.shape[0] < 1:
        raise ValueError(
            f"capacity must be int64 [windows], got {capacity.dtype} {list(capacity.shape)}"
        )
    if window is None and capacity.shape[0] != 1:
        raise ValueError(f"window must be given for {capacity.shape[0]} windows, got None")
    for name, value, known in (
        ("scope", scope, SCOPES),
        ("modality", modality, MODALITIES),
        ("order", order, ORDERS),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    if scope == "device" and rank_of_expert is None:
        raise ValueError("rank_of_expert must be given for scope 'device', got None")


def _check_values(expert: Tensor, scores: Tensor, capacity: Tensor, experts: int) -> None:
    nans = int(torch.isnan(scores).sum())
    if nans:
        raise ValueError(f"scores must not be NaN, got {nans} NaN values")
    outside = expert[(expert < 0) | (expert > experts)]
    if outside.numel():
        raise ValueError(f"expert must lie in [0, {experts}], got {int(outside[0])}")
    if int(capacity.min()) < 0:
        raise ValueError(f"capacity must not be negative, got {int(capacity.min())}")
