"""Paired differences against slow, obvious arithmetic."""

from __future__ import annotations

import math
import random
from statistics import fmean, stdev

import pytest

from mm_capacity.evaluation.paired import difference

CATEGORIES = {"OCR": "mme_perception", "color": "mme_perception", "code": "mme_cognition"}


def mme_score(seed: int, images: int = 5) -> dict:
    """score.json of an MME-like run: two questions for every image."""
    rng = random.Random(seed)
    hits, questions, index, unit = [], [], 0, 0
    for category in CATEGORIES:
        for _ in range(images):
            for _ in range(2):
                hits.append([index, float(rng.random() < 0.6)])
                questions.append([index, unit, [category]])
                index += 1
            unit += 1
    members = {}
    for category, group in CATEGORIES.items():
        members.setdefault(group, []).append(category)
    return {"metrics": [], "hits": {"accuracy": hits}, "questions": questions, "members": members}


def by_image(score: dict) -> dict[tuple[str, int], list[float]]:
    found: dict[tuple[str, int], list[float]] = {}
    for (_, hit), (_, unit, (category,)) in zip(
        score["hits"]["accuracy"], score["questions"], strict=True
    ):
        found.setdefault((category, unit), []).append(hit)
    return found


def points(pair: list[float]) -> float:
    return 100 * sum(pair) / 2 + 100 * (pair == [1.0, 1.0])


def changes(ours: dict, theirs: dict, value, category=None) -> list[float]:
    a, b = by_image(ours), by_image(theirs)
    return [value(a[k]) - value(b[k]) for k in a if category in (None, k[0])]


def error(values: list[float]) -> float:
    return stdev(values) / math.sqrt(len(values))


@pytest.mark.parametrize("seed", range(3))
def test_pairs_are_one_draw(seed):
    ours, theirs = mme_score(seed), mme_score(seed + 100)
    for category in (None, *CATEGORIES):
        name = "accuracy" if category is None else f"accuracy/{category}"
        expected = changes(ours, theirs, fmean, category)
        assert difference(ours, theirs, name) == pytest.approx((fmean(expected), error(expected)))


@pytest.mark.parametrize("seed", range(3))
def test_mme_points(seed):
    ours, theirs = mme_score(seed), mme_score(seed + 100)
    parts = {c: changes(ours, theirs, points, c) for c in CATEGORIES}
    for category, part in parts.items():
        found = difference(ours, theirs, f"mme/{category}")
        assert found == pytest.approx((fmean(part), error(part)))
    perception = [parts["OCR"], parts["color"]]
    assert difference(ours, theirs, "mme_perception") == pytest.approx(
        (sum(map(fmean, perception)), math.sqrt(sum(error(p) ** 2 for p in perception)))
    )


def simple(hits: dict, metrics: dict | None = None, verdicts: str = "accuracy") -> dict:
    return {
        "metrics": [{"name": name, "value": value} for name, value in (metrics or {}).items()],
        "hits": {verdicts: [[index, hit] for index, hit in hits.items()]} if hits else {},
        "questions": [[index, number, []] for number, index in enumerate(hits)],
    }


def test_only_questions_that_both_answered_count():
    ours, theirs = simple({1: 1.0, 2: 1.0, 3: 0.0, 9: 1.0}), simple({1: 0.0, 2: 1.0, 3: 1.0})
    assert difference(ours, theirs, "accuracy") == pytest.approx((0.0, error([1, 0, -1])))


def test_equal_runs_differ_by_nothing_at_all():
    score = mme_score(1)
    for name in ("accuracy", "mme_perception", "mme/OCR"):
        assert difference(score, score, name) == (0.0, 0.0)


def test_a_metric_without_verdicts_has_a_difference_without_an_error():
    delta, stderr = difference(simple({}, {"vlmeval/x": 5.0}), simple({}, {"vlmeval/x": 3.0}),
                               "vlmeval/x")  # fmt: skip
    assert delta == 2.0 and math.isnan(stderr)


def test_what_cannot_be_told_is_nan():
    assert all(map(math.isnan, difference(simple({1: 1.0}), simple({2: 1.0}), "accuracy")))
    assert math.isnan(difference(simple({}), simple({}), "accuracy")[0])
    delta, stderr = difference(simple({1: 1.0}), simple({1: 0.0}), "accuracy")
    assert delta == 1.0 and math.isnan(stderr)
