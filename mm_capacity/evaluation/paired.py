"""Differences between two runs on the same questions, with their standard errors.

Pairing by question takes out what the questions have in common, so a difference is told apart
with far fewer questions than two separate accuracies would need. Questions that belong
together (an MME image's two) are one draw. Only questions that both runs answered count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

MME_SUMS = ("mme_perception", "mme_cognition")


def score_table(score: Mapping[str, Any], metric: str) -> pd.DataFrame | None:
    """Verdicts of one metric, one row per question.

    Args:
        score: contents of score.json.
        metric: a key of its ``hits``.

    Returns:
        Columns verdict, unit, and ``groups`` (a tuple of category names), indexed by the
        question's index as text; None when there are no verdicts.
    """
    import pandas as pd

    hits = score.get("hits", {}).get(metric)
    if not hits:
        return None
    facts = {str(index): (unit, tuple(names)) for index, unit, names in score["questions"]}
    rows = {str(index): (verdict, *facts[str(index)]) for index, verdict in hits}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["verdict", "unit", "groups"])


def difference(
    score: Mapping[str, Any], baseline: Mapping[str, Any], metric: str
) -> tuple[float, float]:
    """A metric's paired difference, run minus baseline.

    Args:
        score: contents of the run's score.json.
        baseline: contents of the baseline's.
        metric: name of the metric (``accuracy``, ``accuracy/<category>``, ``mme_perception``...).

    Returns:
        Difference and standard error; NaN for what cannot be told: both when a run has no such
        metric, the error of a metric for which there are no verdicts by question.
    """
    name, _, category = metric.partition("/")
    points = name == "mme" or name in MME_SUMS
    verdicts = "accuracy" if points else name
    ours, theirs = score_table(score, verdicts), score_table(baseline, verdicts)
    if ours is None or theirs is None:
        return _value(score, metric) - _value(baseline, metric), math.nan
    theirs = theirs[["verdict"]].rename(columns={"verdict": "verdict_baseline"})
    both = ours.join(theirs, how="inner")
    if name in MME_SUMS:
        return _mme_sum(both, _members(score, name))
    if category:
        both = both[[category in groups for groups in both["groups"]]]
    return _points(both) if points else _mean(both)


def _value(score: Mapping[str, Any], metric: str) -> float:
    for entry in score.get("metrics", []):
        if entry["name"] == metric and entry["value"] is not None:
            return float(entry["value"])
    return math.nan


def _mean(both: pd.DataFrame) -> tuple[float, float]:
    change = both["verdict"] - both["verdict_baseline"]
    return _estimate(change, change.groupby(both["unit"]).mean())


def _points(both: pd.DataFrame) -> tuple[float, float]:
    """MME points of one category: an image scores 100 for its mean and 100 for both right."""
    units = both.groupby("unit")
    ours, theirs = units["verdict"], units["verdict_baseline"]
    change = 100 * (ours.mean() - theirs.mean()) + 100 * (ours.min() - theirs.min())
    return _estimate(change, change)


def _mme_sum(both: pd.DataFrame, members: set[str]) -> tuple[float, float]:
    """Sum of the points over categories; the errors add as squares."""
    parts = []
    for category in sorted(members):
        rows = both[[category in groups for groups in both["groups"]]]
        if len(rows):
            parts.append(_points(rows))
    if not parts:
        return math.nan, math.nan
    return sum(p[0] for p in parts), math.sqrt(sum(p[1] ** 2 for p in parts))


def _members(score: Mapping[str, Any], name: str) -> set[str]:
    """Categories behind one of MME's two sums."""
    return set(score.get("members", {}).get(name, ()))


def _estimate(values: pd.Series, draws: pd.Series) -> tuple[float, float]:
    if not len(draws):
        return math.nan, math.nan
    error = draws.std(ddof=1) / math.sqrt(len(draws)) if len(draws) > 1 else math.nan
    return float(values.mean()), float(error)
