"""Candidate assignments: the router's own picks, and the ways to add to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mm_capacity.enforce import keep_first
from mm_capacity.routing import Routing
from mm_capacity.sort_keys import SortKey, float_keys


@dataclass(frozen=True)
class Candidates:
    """Assignments that compete for capacity.

    Attributes:
        expert: ``[T, K']`` int64, the router's K picks first; NO_EXPERT marks an empty slot.
        scores: ``[T, K']`` float.
        weights: ``[T, K']`` float.
        original: ``[T, K']`` bool to rank originals above added candidates, or None.
    """

    expert: Tensor
    scores: Tensor
    weights: Tensor
    original: Tensor | None = None


def originals(routing: Routing) -> Candidates:
    """The router's own picks."""
    return Candidates(routing.expert, routing.scores.gather(1, routing.expert), routing.weights)


def added_weights(routing: Routing, expert: Tensor) -> Tensor:
    """Weights of experts that the router did not pick: score times the token's scale.

    The scale that the router applied to a token is read off the pick with the greatest absolute
    score, where rounding disturbs the ratio of weight to score least.

    Args:
        routing: the router's choice.
        expert: ``[T, M]`` int64; NO_EXPERT gets weight 0.

    Returns:
        ``[T, M]`` in the dtype of the router's weights.
    """
    empty = expert == routing.experts
    # At least float32, so that half precision rounds once, at the end.
    exact = torch.promote_types(routing.scores.dtype, torch.float32)
    scores = routing.scores.gather(1, expert.masked_fill(empty, 0)).to(exact)
    own = routing.scores.gather(1, routing.expert).to(exact)
    strongest = own.abs().argmax(dim=1, keepdim=True)
    anchor = own.gather(1, strongest)
    anchor_weight = routing.weights.gather(1, strongest).to(exact)
    scale = torch.where(anchor == 0, 0.0, anchor_weight / torch.where(anchor == 0, 1.0, anchor))
    return torch.where(empty, 0.0, scores * scale).to(routing.weights.dtype)


def with_added(routing: Routing, added: Tensor, *, originals_first: bool) -> Candidates:
    """The router's picks plus added experts.

    Args:
        routing: the router's choice.
        added: ``[T, M]`` int64, NO_EXPERT for an empty slot, none of them an original.
        originals_first: fill in :attr:`Candidates.original`.
    """
    original = None
    if originals_first:
        picks = torch.ones_like(routing.expert, dtype=torch.bool)
        original = torch.cat([picks, torch.zeros_like(added, dtype=torch.bool)], dim=1)
    expert = torch.cat([routing.expert, added], dim=1)
    somewhere = torch.cat([routing.expert, added.masked_fill(added == routing.experts, 0)], dim=1)
    return Candidates(
        expert,
        routing.scores.gather(1, somewhere),
        torch.cat([routing.weights, added_weights(routing, added)], dim=1),
        original,
    )


def local_experts(routing: Routing) -> Tensor:
    """The experts on each token's own rank that the token may use and did not pick.

    Padding gets none.

    Returns:
        ``[T, E / R]`` int64 in ascending order, NO_EXPERT where a local expert is left out.
    """
    per_rank = routing.experts // routing.ranks
    by_rank = torch.argsort(routing.rank_of_expert, stable=True)
    local = by_rank.view(routing.ranks, per_rank)[routing.rank_of_token]
    place = torch.empty_like(by_rank)
    place[by_rank] = torch.arange(routing.experts, device=by_rank.device) % per_rank
    # Mark the picks among the local experts; picks on other ranks go to a column thrown away.
    picked_here = routing.rank_of_expert[routing.expert] == routing.rank_of_token.unsqueeze(1)
    column = torch.where(picked_here, place[routing.expert], per_rank)
    out = torch.zeros(len(local), per_rank + 1, dtype=torch.bool, device=local.device)
    out = out.scatter_(1, column, True)[:, :per_rank] | ~routing.valid.unsqueeze(1)
    if routing.allowed is not None:
        out |= ~routing.allowed.gather(1, local)
    return local.masked_fill(out, routing.experts)


def next_best_experts(routing: Routing, count: int) -> Tensor:
    """The experts with the greatest scores that the token may use and did not pick.

    Equal scores: the lower id comes first. Padding gets none.

    Args:
        routing: the router's choice.
        count: most experts to add per token.

    Returns:
        ``[T, min(count, E - K)]`` int64, best first, NO_EXPERT where fewer are allowed.
    """
    count = min(count, routing.experts - routing.top_k)
    out = torch.zeros_like(routing.scores, dtype=torch.bool).scatter_(1, routing.expert, True)
    out |= ~routing.valid.unsqueeze(1)
    if routing.allowed is not None:
        out |= ~routing.allowed
    keys = float_keys(routing.scores)
    if len(keys) == 1:
        ids = torch.arange(routing.experts, device=out.device)
        key = torch.add(ids, keys[0].values, alpha=-(1 << 30))  # greater score, then lower id
        key.masked_fill_(out, torch.iinfo(torch.int64).max)
        best = key.topk(count, dim=1, largest=False)
        chosen, left_out = best.indices, best.values == torch.iinfo(torch.int64).max
    else:
        # float64: no room for the id beside the key, so a stable sort keeps the lower id first.
        ranked = torch.sort(
            routing.scores.masked_fill(out, -torch.inf) + 0.0, dim=1, descending=True, stable=True
        ).indices
        by_out = out.gather(1, ranked).to(torch.uint8).argsort(dim=1, stable=True)
        chosen = ranked.gather(1, by_out)[:, :count]
        left_out = out.gather(1, chosen)
    return chosen.masked_fill(left_out, routing.experts)


def best_of_ranks(routing: Routing, count: int) -> Tensor:
    """On every rank, the experts with the greatest scores that the token may use and did not pick.

    Equal scores: the lower id comes first.

    Args:
        routing: the router's choice.
        count: experts to name per token and rank, at most E / R.

    Returns:
        ``[T, R, count]`` int64, best first, NO_EXPERT where a rank has fewer.
    """
    tokens, experts = routing.scores.shape
    out = torch.zeros_like(routing.scores, dtype=torch.bool).scatter_(1, routing.expert, True)
    if routing.allowed is not None:
        out |= ~routing.allowed
    members = routing.rank_of_expert.argsort(stable=True)  # by rank, then by id
    shape = tokens, routing.ranks, experts // routing.ranks
    out = out.index_select(1, members).view(shape)
    scores = routing.scores.index_select(1, members)
    keys = float_keys(scores)
    if len(keys) == 1:
        key = torch.add(members, keys[0].values, alpha=-(1 << 30)).view(shape)
        best = key.masked_fill_(out, torch.iinfo(torch.int64).max).topk(count, 2, largest=False)
        place, left_out = best.indices, best.values == torch.iinfo(torch.int64).max
    else:
        # float64: no room for the id beside the key, so stable sorts keep the lower id first.
        score = scores.view(shape).masked_fill(out, -torch.inf) + 0.0
        place = score.argsort(dim=2, descending=True, stable=True)
        place = place.gather(2, out.gather(2, place).byte().argsort(dim=2, stable=True))
        place = place[:, :, :count]
        left_out = out.gather(2, place)
    ids = members.view(1, *shape[1:]).expand(shape).gather(2, place)
    return ids.masked_fill(left_out, experts)


def strongest_per_token(candidates: Candidates, keep: Tensor, experts: int, most: int) -> Tensor:
    """Keeps at most ``most`` survivors of each token.

    Compared by: original first (if :attr:`Candidates.original` is set), greater score, lower id.

    Args:
        candidates: the candidates.
        keep: ``[T, K']`` bool, survivors so far.
        experts: E.
        most: most survivors per token.

    Returns:
        ``[T, K']`` bool, a subset of ``keep``.
    """
    tokens = len(keep)
    token = torch.arange(tokens, device=keep.device).unsqueeze(1)
    keys = float_keys(candidates.scores)
    if candidates.original is not None:
        keys.insert(0, SortKey(candidates.original, 1, descending=True))
    keys.append(SortKey(candidates.expert, experts.bit_length()))
    limit = torch.full((tokens,), most, dtype=torch.int64, device=keep.device)
    return keep_first(torch.where(keep, token, tokens), limit, keys)


def compact(candidates: Candidates, keep: Tensor, experts: int, width: int) -> Candidates:
    """Moves the survivors of each token to the front of ``width`` columns.

    Args:
        candidates: the candidates.
        keep: ``[T, K']`` bool, at most ``width`` per token.
        experts: E.
        width: columns to return.

    Returns:
        Candidates ``[T, width]``; NO_EXPERT and weight 0 in empty slots.
    """
    column = torch.where(keep, keep.cumsum(dim=1) - 1, width)

    def move(values: Tensor, empty: float) -> Tensor:
        # Dropped entries all land in one extra column that is cut off.
        moved = values.new_full((len(values), width + 1), empty)
        return moved.scatter_(1, column, values)[:, :width].contiguous()

    return Candidates(
        move(candidates.expert, experts),
        move(candidates.scores, 0),
        move(candidates.weights, 0),
    )
