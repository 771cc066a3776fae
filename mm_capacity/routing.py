"""The two records that a policy sees: what the router chose, what is left of it.

Symbols (T tokens, E experts, K top_k, R ranks) are those of ``docs/design.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vlm_adapters.modality import Modality


@dataclass(frozen=True)
class Routing:
    """The router's choice in one MoE layer of one forward pass.

    Attributes:
        scores: ``[T, E]`` float, router scores of every expert (for a softmax
            router the probabilities). They rank assignments and weigh added ones.
        expert: ``[T, K]`` int64, the experts the router picked; the first slot
            need not be the greatest.
        weights: ``[T, K]`` float, the weight the router gave each pick (after
            its normalisation and scaling).
        modality: ``[T]`` uint8, values of :class:`vlm_adapters.modality.Modality`.
        sequence: ``[T]`` int64, row of the batch that the token belongs to.
            Tokens are in batch-row-major order; "earlier" means smaller index.
        sequences: number of batch rows (a host integer, so that windows need
            no device synchronisation).
        rank_of_expert: ``[E]`` int64, the expert-parallel rank that holds each expert.
        rank_of_token: ``[T]`` int64, the rank that holds each token.
        ranks: R, number of ranks.
        layer: index of this MoE layer, 0-based.
        layers: L, number of MoE layers of the model.
        hidden: ``[T, D]`` float or None, the hidden states that enter the router;
            only filled in for policies whose ``needs_hidden`` is True.
        allowed: ``[T, E]`` bool or None, experts an expansion may use (a
            group-limited router restricts a token to its groups); None means all.
        validate: also check values, not only shapes, when a policy decides. Reading
            values makes the host wait for the device, hence off by default.
    """

    scores: Tensor
    expert: Tensor
    weights: Tensor
    modality: Tensor
    sequence: Tensor
    sequences: int
    rank_of_expert: Tensor
    rank_of_token: Tensor
    ranks: int = 1
    layer: int = 0
    layers: int = 1
    hidden: Tensor | None = None
    allowed: Tensor | None = None
    validate: bool = False

    @property
    def tokens(self) -> int:
        """T."""
        return self.expert.shape[0]

    @property
    def top_k(self) -> int:
        """K."""
        return self.expert.shape[1]

    @property
    def experts(self) -> int:
        """E; also the sentinel id NO_EXPERT of a dropped assignment."""
        return self.scores.shape[1]

    @property
    def valid(self) -> Tensor:
        """``[T]`` bool, False for padding."""
        return self.modality != int(Modality.PAD)

    @property
    def visual(self) -> Tensor:
        """``[T]`` bool, True for image and video tokens."""
        return is_visual(self.modality)

    def check(self) -> None:
        """Checks shapes and dtypes, and with ``validate`` the values too.

        Raises:
            ValueError: an argument does not fit; the message names it and its value.
        """
        check_shapes(self)
        if self.validate:
            check_values(self)


@dataclass(frozen=True)
class Decision:
    """What a policy leaves of a :class:`Routing`.

    Attributes:
        expert: ``[T, K']`` int64; a dropped assignment holds NO_EXPERT (= E).
            K' >= K when the policy added experts.
        weights: ``[T, K']`` float, 0 where ``expert`` is NO_EXPERT.
        window: ``[T]`` int64, capacity window of each token (all 0 for ``batch``).
        windows: number of windows.
        capacity: ``[windows]`` int64 on the same device, C of each window, or
            None when the policy caps no count (the trace then cannot check one).
        capacity_scope: what ``capacity`` bounds: ``"expert"`` (each expert keeps
            at most C) or ``"device"`` (the experts of a rank together).
    """

    expert: Tensor
    weights: Tensor
    window: Tensor
    windows: int
    capacity: Tensor | None = None
    capacity_scope: str = "expert"


def unchanged(routing: Routing) -> Decision:
    """The decision that keeps every assignment (policy ``none``)."""
    return Decision(
        expert=routing.expert,
        weights=routing.weights,
        window=torch.zeros_like(routing.sequence),
        windows=1,
    )


def is_visual(tags: Tensor) -> Tensor:
    """True where a token is of an image or a video, the two being treated alike."""
    return (tags == int(Modality.IMAGE)) | (tags == int(Modality.VIDEO))


def check_shapes(routing: Routing) -> None:
    """Checks everything about a routing that the host knows without waiting for the device.

    Raises:
        ValueError: a shape, a dtype or a count does not fit.
    """
    if routing.scores.dim() != 2 or not routing.scores.is_floating_point():
        raise ValueError(f"scores must be float [T, E], got {_describe(routing.scores)}")
    if routing.expert.dim() != 2 or routing.expert.dtype != torch.int64:
        raise ValueError(f"expert must be int64 [T, K], got {_describe(routing.expert)}")
    tokens, experts = routing.scores.shape
    top_k = routing.expert.shape[1]
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be between 1 and experts={experts}, got top_k={top_k}")
    if routing.ranks < 1 or experts % routing.ranks:
        raise ValueError(f"ranks must divide experts={experts}, got ranks={routing.ranks}")
    if routing.sequences < 1:
        raise ValueError(f"sequences must be at least 1, got {routing.sequences}")
    expected: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("expert", (tokens, top_k)),
        ("weights", (tokens, top_k)),
        ("modality", (tokens,)),
        ("sequence", (tokens,)),
        ("rank_of_token", (tokens,)),
        ("rank_of_expert", (experts,)),
    )
    for name, shape in expected:
        value = getattr(routing, name)
        if tuple(value.shape) != shape:
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(value.shape)}")
    if routing.allowed is not None and routing.allowed.shape != routing.scores.shape:
        raise ValueError(
            f"allowed must have shape {[tokens, experts]}, got {list(routing.allowed.shape)}"
        )
    if routing.hidden is not None and routing.hidden.shape[0] != tokens:
        raise ValueError(f"hidden must have {tokens} rows, got {_describe(routing.hidden)}")


def check_values(routing: Routing) -> None:
    """Checks the values of a routing; the host waits for the device.

    Raises:
        ValueError: a score or a weight is NaN, or an id is out of range.
    """
    for name in ("scores", "weights"):
        bad = int(torch.isnan(getattr(routing, name)).sum())
        if bad:
            raise ValueError(f"{name} must not be NaN, got {bad} NaN values")
    bounds = (
        ("expert", routing.experts, "experts"),
        ("sequence", routing.sequences, "sequences"),
        ("rank_of_expert", routing.ranks, "ranks"),
        ("rank_of_token", routing.ranks, "ranks"),
        ("modality", len(Modality), "modalities"),
    )
    for name, bound, unit in bounds:
        value = getattr(routing, name)
        if value.numel() == 0:
            continue
        low, high = int(value.min()), int(value.max())
        if low < 0 or high >= bound:
            raise ValueError(
                f"{name} must lie in [0, {bound}) ({unit}), got {low if low < 0 else high}"
            )
    if bool((routing.sequence[1:] < routing.sequence[:-1]).any()):
        raise ValueError("sequence must not decrease: tokens come in batch-row-major order")
    picked = routing.expert.sort(dim=1).values
    twice = picked[:, 1:][picked[:, 1:] == picked[:, :-1]]
    if twice.numel():
        raise ValueError(f"expert must not name one expert twice for a token, got {int(twice[0])}")
    local = torch.bincount(routing.rank_of_expert, minlength=routing.ranks)
    uneven = local != routing.experts // routing.ranks
    if bool(uneven.any()):
        raise ValueError(
            f"rank_of_expert must give every rank {routing.experts // routing.ranks} experts, "
            f"got {local.tolist()}"
        )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
