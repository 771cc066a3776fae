"""Who stays: sort keys and limits become a keep mask. The one place where assignments are dropped.

Every assignment gets one integer in which its group (window and expert, or window and rank) fills
the high bits, then the sort keys, then a tie-breaker that makes it unique inside its group; smaller
stays. One sort of these integers puts each group's survivors in front, so the C-th entry of a group
is the bound that decides for all of the group at once. Because the integers are unique, the result
depends on neither the sorting algorithm nor the device, thread count or memory layout.

Nothing here makes the host wait for a device unless ``validate`` is set. On the CPU, where there is
nothing to wait for, the same result comes from the highest 31 bits first and the ties after. Both
paths, and the checks, stay together in this file so that what is dropped can be read in one place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mm_capacity.capacity import SCOPES
from mm_capacity.sort_keys import (
    MODALITIES,
    SortKey,
    float_keys,
    hash_key,
    modality_key,
    pack,
    pack_top,
    positions_in_window,
)
from vlm_adapters.modality import Modality

ORDERS = ("score", "order", "reverse", "random")


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
    of one rank in one window (scope ``device``). Of each group the C greatest stay, compared by,
    most significant first: not padding; is an original (only with ``original``); modality; order;
    the earlier token; the greater score; the lower expert id.

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

    index = torch.arange(tokens, dtype=torch.int32, device=expert.device).unsqueeze(1)
    token_bits = max(tokens - 1, 0).bit_length()
    score_keys = float_keys(scores) if order == "score" or scope == "device" else []
    keys = [modality_key(tags, modality)]
    if original is not None:
        # Padding stays behind all else, also behind additions.
        keys.insert(0, SortKey(original, 1, descending=True))
        keys.insert(0, modality_key(tags, "uniform"))
    if order == "score":
        keys += score_keys
    elif order == "random":
        position = positions_in_window(tags != Modality.PAD, window, windows)
        keys.append(SortKey(hash_key(seed, layer, position.unsqueeze(1), expert), 32))
    keys.append(SortKey(index, token_bits, descending=order == "reverse"))
    if scope == "device":
        # Two assignments of one token meet in a rank's group: greater score, then lower id.
        keys += score_keys if order != "score" else []
        keys.append(SortKey(expert, experts.bit_length()))
    if window is None:
        limit = capacity.expand(groups_per_window)
    else:
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
    keys = [SortKey(group, limit.shape[0].bit_length()), *keys]
    if group.device.type == "cpu":
        return _keep_first_on_cpu(group, limit, keys)
    return _keep_first(group, limit, keys)


def _keep_first(group: Tensor, limit: Tensor, keys: Sequence[SortKey]) -> Tensor:
    """:func:`keep_first` by one sort of packed keys; ``keys`` begin with the group."""
    packed = pack(keys, group.shape)
    last = packed.words.new_full((1,), torch.iinfo(torch.int64).max)
    ordered = torch.cat([torch.sort(packed.words.view(-1)).values, last])
    start = torch.searchsorted(ordered, packed.firsts(limit.shape[0] + 1))
    end = torch.minimum(start[:-1] + limit, start[1:])
    # The first word that does not stay: the next of the group, or else of the group after it. The
    # last group, whose entries never stay, ends where it starts.
    bound = ordered.index_select(0, torch.cat([end, start[-1:]]))
    return packed.words < bound.index_select(0, group.reshape(-1)).view(group.shape)


def _keep_first_on_cpu(group: Tensor, limit: Tensor, keys: Sequence[SortKey]) -> Tensor:
    """:func:`keep_first` with half the memory traffic: the keys' highest 31 bits, then the ties.

    Half-width words sort in half the time or less. Those that equal their group's bound are few, as
    a rule, and the whole keys settle them. How many they are is data; to look at data before going
    on is what costs a wait on other devices, and nothing here.
    """
    words, firsts, exact = pack_top(keys, group.shape)
    group_of = group.reshape(-1).numpy()
    ordered = np.empty(len(words) + 1, dtype=np.int32)
    ordered[:-1] = words
    ordered[:-1].sort()  # numpy's sort is vectorised, and leaves out the indices
    ordered[-1] = np.iinfo(np.int32).max
    start = np.searchsorted(ordered, firsts[: len(limit) + 1])
    end = start.copy()
    np.minimum(start[:-1] + limit.numpy(), start[1:], out=end[:-1])
    bound = ordered[end]
    bound_of = bound.take(group_of)
    keep = words < bound_of
    # How many of the entries that equal their group's bound stay as well.
    ties = end - np.searchsorted(ordered, bound)
    if not exact and ties.any():
        tied = np.flatnonzero(words == bound_of)
        tied = tied[ties[group_of[tied]] > 0]
        keep[tied] = _keep_tied(tied, ties, group_of[tied], keys, group.shape)
    return torch.from_numpy(keep).view(group.shape)


def _keep_tied(
    tied: np.ndarray,
    ties: np.ndarray,
    group: np.ndarray,
    keys: Sequence[SortKey],
    shape: torch.Size,
) -> np.ndarray:
    """Which of the entries ``tied`` stay: of group g the ``ties[g]`` first by their whole keys."""
    row, column = np.divmod(tied, shape[1])
    order = np.lexsort([key.at(row, column) for key in reversed(keys)])
    group = group[order]
    place = np.arange(len(order)) - np.searchsorted(group, group)
    keep = np.empty(len(order), dtype=bool)
    keep[order] = place < ties[group]
    return keep


def keep_within(group: Tensor, room: Tensor, load: Tensor, keys: Sequence[SortKey]) -> Tensor:
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
    packed = pack([SortKey(group, groups.bit_length()), *keys], group.shape)
    ordered, index = torch.sort(packed.words.view(-1))
    sorted_group = group.reshape(-1)[index]
    running = load.reshape(-1)[index].cumsum(0)
    start = torch.searchsorted(ordered, packed.firsts(groups + 1))
    before = torch.cat([running.new_zeros(1), running])[start]
    limit = torch.cat([room, room.new_full((1,), -1)])
    fits = running - before[sorted_group] <= limit[sorted_group]
    return torch.empty_like(fits).scatter_(0, index, fits).view(group.shape)


def _with_sentinel(table: Tensor, last: int) -> Tensor:
    return torch.cat([table, table.new_full((1,), last)])


def _check(
    expert, scores, capacity, tags, window, original, rank_of_expert, scope, modality, order
):
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
