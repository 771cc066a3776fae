"""Random routings and random policy parameters for the oracle tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from mm_capacity.routing import Routing
from vlm_adapters.modality import Modality

HIDDEN = 5  # width of the hidden states of policies that read them

SCORE_KINDS = (
    "softmax",
    "softmax-normalised",
    "coarse",  # few distinct values: many ties
    "equal",
    "sigmoid-bias",  # picked by score + bias, weighed by score, scaled
    "negative",
    "huge",
    "signed-zero",
)
TAG_KINDS = ("mixed", "no-image", "no-text", "video", "left-pad", "right-pad", "all-pad", "any")


def scores_of(rng: np.random.Generator, kind: str, tokens: int, experts: int):
    """Scores that rank and weigh, and the selection scores the router picks by."""
    logits = rng.normal(size=(tokens, experts)) * 2
    if kind.startswith("softmax"):
        scores = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    elif kind == "coarse":
        scores = rng.integers(0, 3, size=(tokens, experts)) / 4
    elif kind == "equal":
        scores = np.full((tokens, experts), rng.choice([0.0, 0.125, 1.0]))
    elif kind == "sigmoid-bias":
        scores = 1 / (1 + np.exp(-logits))
        return scores, scores + rng.normal(size=experts)
    elif kind == "negative":
        scores = logits - 3
    elif kind == "huge":
        scores = logits * 10.0 ** rng.integers(-3, 4)  # float16 still holds them
    else:
        scores = rng.choice([-1.0, -0.0, 0.0, 1.0], size=(tokens, experts))
    return scores, scores


def tags_of(rng: np.random.Generator, kind: str, batch: int, length: int) -> np.ndarray:
    """``[B, S]`` modality tags."""
    tags = rng.choice([Modality.TEXT, Modality.IMAGE], p=[0.3, 0.7], size=(batch, length))
    if kind == "no-image":
        tags[:] = Modality.TEXT
    elif kind == "no-text":
        tags[:] = Modality.IMAGE
    elif kind == "video":
        tags[tags == Modality.IMAGE] = Modality.VIDEO
    elif kind == "all-pad":
        tags[:] = Modality.PAD
    elif kind == "any":
        tags = rng.integers(0, 4, size=(batch, length))
    elif kind in ("left-pad", "right-pad"):
        for row in tags:
            pads = int(rng.integers(0, length + 1))
            row[slice(0, pads) if kind == "left-pad" else slice(length - pads, length)] = (
                Modality.PAD
            )
    return tags


def routing_of(
    seed: int,
    *,
    batch: int,
    length: int,
    experts: int,
    top_k: int,
    ranks: int,
    score_kind: str = "softmax",
    tag_kind: str = "mixed",
    dtype: torch.dtype = torch.float32,
    shuffled_experts: bool = False,
    sliced_tokens: bool = False,
    grouped: bool = False,
    layer: int = 0,
    layers: int = 4,
    hidden: int = 0,
) -> Routing:
    """A routing with the given structure and random content."""
    rng = np.random.default_rng(seed)
    tokens = batch * length
    scores, selection = scores_of(rng, score_kind, tokens, experts)
    scores_t = torch.tensor(scores).to(dtype)
    allowed = None
    if grouped:
        allowed = torch.tensor(rng.random((tokens, experts)) < 0.5)
    # Any K experts will do; take the best, in an order of their own, as some routers do.
    picked = np.argsort(-selection, axis=1, kind="stable")[:, :top_k]
    expert = torch.tensor(rng.permuted(picked, axis=1))
    weights = scores_t.gather(1, expert)
    if score_kind in ("softmax-normalised", "sigmoid-bias"):
        weights = weights / weights.sum(dim=1, keepdim=True) * 2.5
    rank_of_expert = np.arange(experts) // (experts // ranks)
    if shuffled_experts:
        rank_of_expert = rng.permutation(rank_of_expert)
    sequence = np.repeat(np.arange(batch), length)
    rank_of_token = (
        np.arange(tokens) * ranks // max(tokens, 1) if sliced_tokens else sequence % ranks
    )
    hidden_t = None
    if hidden:
        # A coarse grid: hidden states are either equal or clearly different. Double, so that
        # rounding decides nothing.
        hidden_t = torch.tensor(rng.integers(-2, 3, size=(tokens, hidden)), dtype=torch.float64)
    return Routing(
        scores=scores_t,
        expert=expert,
        weights=weights,
        modality=torch.tensor(tags_of(rng, tag_kind, batch, length).reshape(-1)).to(torch.uint8),
        sequence=torch.tensor(sequence),
        sequences=batch,
        rank_of_expert=torch.tensor(rank_of_expert),
        rank_of_token=torch.tensor(rank_of_token),
        ranks=ranks,
        layer=layer,
        layers=layers,
        hidden=hidden_t,
        allowed=allowed,
        validate=True,
    )


@st.composite
def routings(draw: st.DrawFn, hidden: int = 0) -> Routing:
    """Random routings: every structure by hypothesis, the content by a drawn seed."""
    per_rank = draw(st.integers(1, 4))
    ranks = draw(st.integers(1, 4))
    experts = per_rank * ranks
    return routing_of(
        draw(st.integers(0, 2**32 - 1)),
        batch=draw(st.integers(1, 4)),
        length=draw(st.integers(1, 8)),
        experts=experts,
        top_k=draw(st.integers(1, min(experts, 5)) | st.just(experts)),
        ranks=ranks,
        score_kind=draw(st.sampled_from(SCORE_KINDS)),
        tag_kind=draw(st.sampled_from(TAG_KINDS)),
        dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])),
        shuffled_experts=draw(st.booleans()),
        sliced_tokens=draw(st.booleans()),
        grouped=draw(st.integers(0, 3)) == 0,
        layer=draw(st.integers(0, 3)),
        hidden=hidden,
    )


gammas = (
    st.floats(0.01, 10, allow_nan=False)
    | st.sampled_from([0.01, 0.1, 0.3, 0.5, 1, 1.1, 1.25, 1.5, 2, 10])
    | st.fractions(0.25, 4, max_denominator=12).map(float)
)

_COUNT_CAP: dict[str, st.SearchStrategy[Any]] = {
    "gamma": gammas,
    "modality": st.sampled_from(["uniform", "image-first", "text-first"]),
    "order": st.sampled_from(["score", "order", "reverse", "random"]),
    "scope": st.sampled_from(["expert", "device"]),
    "window": st.sampled_from(["batch", "sequence", "rank"]),
    "rounding": st.sampled_from(["ceil", "floor"]),
    "count_padding": st.booleans(),
    "renormalize": st.booleans(),
    "seed": st.integers(0, 2**63 - 1),
}

# Parameters of every policy, by registry name.
PARAMETERS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "none": {},
    "token-drop": _COUNT_CAP,
    "expanded-drop": _COUNT_CAP
    | {
        "overflow": st.sampled_from(["expand", "expand-global"]),
        "originals_first": st.booleans(),
        "rounds": st.integers(1, 4),
        "at_most_top_k": st.booleans(),
        "inside_groups": st.booleans(),
    },
    "expert-drop": {
        "fraction": st.floats(0, 0.49) | st.sampled_from([0.1, 0.125, 0.25]),
        "count": st.none(),
        "window": _COUNT_CAP["window"],
        "renormalize": st.booleans(),
    },
    "macs": {
        "gamma": gammas,
        "delta": st.floats(0, 3),
        "rho": st.floats(0, 2),
        "hops": st.integers(0, 4),
        "calibration": st.none(),
        "window": _COUNT_CAP["window"],
        "rounding": _COUNT_CAP["rounding"],
        "renormalize": st.booleans(),
    },
    "modes": {
        "tau_text": st.floats(0, 0.6),
        "tau_image": st.floats(0, 0.6),
        "tau_scale": st.floats(0, 2),
        "skip_frac": st.none(),
        "calibration": st.none()
        | st.fixed_dictionaries({"alpha": st.lists(st.floats(0, 3), min_size=4, max_size=4)}),
        "renormalize": st.booleans(),
    },
    "naee": {
        "beta": st.floats(0, 1) | st.sampled_from([0, 0.5, 1]),
        "calibration": st.none()
        | st.fixed_dictionaries({"beta": st.lists(st.floats(0, 1), min_size=4, max_size=4)}),
        "renormalize": st.booleans(),
    },
    "visual-top-k": {
        "keep": st.integers(0, 5),
        "first_layer": st.integers(0, 3),
        "renormalize": st.booleans(),
    },
    "top-p": {"p": st.floats(0, 1) | st.sampled_from([0, 0.5, 1]), "renormalize": st.booleans()},
    "random-drop": {
        "like": st.just("token-drop"),
        "arguments": st.just({}),
        "keep_frac": st.none() | st.floats(0, 1),
        "match": st.sampled_from(["window", "modality", "expert"]),
        "renormalize": st.booleans(),
        "seed": _COUNT_CAP["seed"],
    },
    "rank-tail": {
        name: _COUNT_CAP[name]
        for name in ("gamma", "window", "rounding", "count_padding", "renormalize")
    }
    | {"only_image": st.booleans()},
}

_OTHERS = ("none", "token-drop", "expanded-drop", "visual-top-k", "rank-tail")


@st.composite
def policy_and_routing(draw: st.DrawFn, name: str) -> tuple[dict[str, Any], Routing]:
    """Random parameters of a policy, every one of them drawn, and a routing that suits them."""
    arguments = draw(st.fixed_dictionaries(PARAMETERS[name]))
    routing = draw(routings(hidden=HIDDEN if name == "macs" else 0))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if name == "random-drop":
        if arguments["keep_frac"] is not None:
            arguments["match"] = "window"
        arguments["like"] = draw(st.sampled_from(_OTHERS))
        arguments["arguments"] = draw(st.fixed_dictionaries(PARAMETERS[arguments["like"]]))
    if name == "macs":
        experts, layers = routing.experts, routing.layers
        calibration = {}
        if draw(st.booleans()):
            calibration["modality"] = rng.integers(-1, 2, size=(layers, experts)).tolist()
        if draw(st.booleans()):
            calibration["neighbours"] = [
                [_ring(rng, own, experts) for own in range(experts)] for _ in range(layers)
            ]
        arguments["calibration"] = calibration or None
    if name == "modes" and draw(st.booleans()):
        # The thresholds come from the calibration instead; the oracle sees what they became.
        taus = {key: arguments.pop(key) for key in ("tau_text", "tau_image")}
        alpha = (arguments["calibration"] or {"alpha": [1.0] * routing.layers})["alpha"]
        arguments["skip_frac"] = draw(st.floats(0, 1))
        other = {"skip_frac": 2.0, "tau_text": 9.0, "tau_image": 9.0}
        entries = [other, {"skip_frac": arguments["skip_frac"], **taus}]
        arguments["calibration"] = {"alpha": alpha, "thresholds": entries}
    if name == "expert-drop":
        if routing.experts < 3:
            arguments["fraction"] = 0.0
            routing = routing_of(
                rng.integers(2**32), batch=2, length=4, experts=4, top_k=2, ranks=2
            )
        elif draw(st.booleans()):
            arguments["count"] = draw(st.integers(1, routing.experts - 1))
    return arguments, routing


def _ring(rng: np.random.Generator, own: int, experts: int) -> list[int]:
    """Some of the other experts, in random order."""
    others = [e for e in range(experts) if e != own]
    return rng.permutation(others)[: rng.integers(0, experts)].tolist()
