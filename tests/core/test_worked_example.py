"""The worked example of docs/design.md, written out, for the policies and for the oracle."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mm_capacity.policies import make_policy
from mm_capacity.routing import Routing
from tests import oracle
from vlm_adapters.modality import Modality

FIRST = [0.9, 0.8, 0.7, 0.6, 0.2, 0.1]  # scores of expert 0
SECOND = [0.05, 0.1, 0.3, 0.15, 0.6, 0.4]  # scores of expert 1
TEXT, IMAGE, VIDEO = Modality.TEXT, Modality.IMAGE, Modality.VIDEO


def example(image: Modality = IMAGE) -> Routing:
    """E = 2, K = 1, T = 6; tokens 0-3 image, 4-5 text; all choose expert 0."""
    scores = torch.tensor([FIRST, SECOND]).T.contiguous()
    return Routing(
        scores=scores,
        expert=torch.zeros(6, 1, dtype=torch.int64),
        weights=scores[:, :1],
        modality=torch.tensor([image] * 4 + [TEXT] * 2, dtype=torch.uint8),
        sequence=torch.zeros(6, dtype=torch.int64),
        sequences=1,
        rank_of_expert=torch.zeros(2, dtype=torch.int64),
        rank_of_token=torch.zeros(6, dtype=torch.int64),
        validate=True,
    )


def tokens_of(decision, expert: int) -> set[int]:
    return {t for t, ids in enumerate(decision.expert.tolist()) if expert in ids}


@pytest.mark.parametrize("image", [IMAGE, VIDEO])
@pytest.mark.parametrize(
    ("order", "modality", "stay"),
    [
        ("score", "uniform", {0, 1, 2}),
        ("score", "image-first", {4, 5, 0}),
        ("score", "text-first", {0, 1, 2}),
        ("order", "uniform", {0, 1, 2}),
        ("reverse", "uniform", {3, 4, 5}),
        ("reverse", "image-first", {4, 5, 3}),
    ],
)
def test_token_drop(order: str, modality: str, stay: set[int], image: Modality):
    policy = make_policy("token-drop", gamma=1, order=order, modality=modality)
    routing = example(image)
    decision = policy.decide(routing)
    assert decision.capacity is not None and decision.capacity.tolist() == [3]
    assert tokens_of(decision, 0) == stay
    assert tokens_of(decision, 1) == set()
    for token, weight in enumerate(decision.weights[:, 0].tolist()):
        assert weight == (pytest.approx(FIRST[token]) if token in stay else 0)
    expected = oracle.ORACLES["token-drop"](dataclasses.asdict(policy), oracle.Plain.of(routing))
    assert {t for t in range(6) if 0 in expected.kept[t]} == stay


def test_expansion_fills_spare_room():
    policy = make_policy("expanded-drop", gamma=1, originals_first=True)
    with pytest.warns(UserWarning, match="expert-choice routing"):
        decision = policy.decide(example())
    assert tokens_of(decision, 0) == {0, 1, 2}
    # The three tokens with the greatest scores for expert 1: .6 .4 .3
    assert tokens_of(decision, 1) == {4, 5, 2}
    # The router hands out scores unscaled here, so an added weight is the score itself.
    assert decision.weights[4].sum().item() == pytest.approx(0.6)
    assert decision.weights[2].tolist() == pytest.approx([0.7, 0, 0.3])
