"""Metrics and their standard errors, from VLMEvalKit's verdict on each question.

- ``accuracy``: mean over questions, in [0, 1]; where VLMEvalKit scores circularly, over the
  base questions alone ("vanilla"). ``accuracy/<category>`` likewise.
- ``accuracy_circular``: share of base questions right in all their circular copies.
- ``mme_perception``, ``mme_cognition``, ``mme/<category>``: MME's points. A category has
  100 * accuracy + 100 * (share of images with both answers right); the sums run over categories.
- ``vlmeval/<column>``: for other kinds, VLMEvalKit's own numbers as they are.

Standard errors: questions that belong together (an MME image's two) are one draw. Of a mean
over n draws it is the sample standard deviation over the square root of n; of a sum over
categories the root of the summed squares. Nothing is random, so no seed. NaN for one draw.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from mm_capacity.evaluation.units import Style, unit_keys

# Source of the split: vlmeval/dataset/utils/yorn.py, MME_rating.
MME_COGNITION = frozenset(
    ("code_reasoning", "commonsense_reasoning", "numerical_calculation", "text_translation")
)
MME_PERCEPTION = frozenset(
    (
        "OCR", "artwork", "celebrity", "color", "count", "existence", "landmark", "position",
        "posters", "scene",
    )
)  # fmt: skip
# Metric name, VLMEvalKit's column, categories.
MME_SUMS = (
    ("mme_perception", "perception", MME_PERCEPTION),
    ("mme_cognition", "reasoning", MME_COGNITION),
)
# Columns of VLMEvalKit's own tables that are an overall share or percentage, best first.
OVERALL_NAMES = ("overall", "acc", "accuracy", "average", "score")


@dataclass(frozen=True)
class Metric:
    """One number.

    Attributes:
        name: see the module's docstring.
        value: the number.
        stderr: its standard error; NaN if it cannot be told.
        n: questions behind it.
        category: the category it is about, None for all.
    """

    name: str
    value: float
    stderr: float
    n: int
    category: str | None = None


@dataclass(frozen=True)
class Score:
    """What an evaluation gave.

    Attributes:
        metrics: headline metrics first.
        correct: index -> verdict in [0, 1] of each question behind ``accuracy``.
        left_out: index -> why a question does not count.
        hits: metric name -> index -> verdict, for paired differences of other metrics.
    """

    metrics: list[Metric]
    correct: dict[Any, float]
    left_out: dict[Any, str] = field(default_factory=dict)
    hits: dict[str, dict[Any, float]] = field(default_factory=dict)


class Verdicts:
    """VLMEvalKit's verdict on each question.

    Args:
        table: columns ``index`` and ``verdict`` (in [0, 1]), and those that name categories.
        style: "pairs" if the questions of an image are one draw.
    """

    def __init__(self, table: pd.DataFrame, style: Style = "single") -> None:
        self.table = table
        self.values = table["verdict"].astype(float)
        numbers: dict[Any, int] = {}
        keys = unit_keys(table, style)
        self.units = pd.Series([numbers.setdefault(k, len(numbers)) for k in keys])

    def by_index(self) -> dict[Any, float]:
        """index -> verdict."""
        return dict(zip(self.table["index"].tolist(), self.values.tolist(), strict=True))

    def mean(self, name: str) -> Metric:
        """The mean over all questions, under a name."""
        return self._mean(name, self.units >= 0, None)

    def per_category(self, name: str) -> list[Metric]:
        """The mean in each category and upper category: ``name/<category>``."""
        found: dict[str, Metric] = {}
        for column in ("category", "l2-category"):
            if column not in self.table:
                continue
            for category in sorted(set(self.table[column].dropna())):
                metric = f"{name}/{category}"
                rows = self.table[column] == category
                found.setdefault(metric, self._mean(metric, rows, category))
        return list(found.values())

    def _mean(self, name: str, rows: pd.Series, category: str | None) -> Metric:
        values = self.values[rows]
        draws = values.groupby(self.units[rows]).mean()
        return Metric(name, float(values.mean()), standard_error(draws), len(values), category)

    def mme(self, own: Mapping[Any, Any]) -> tuple[list[Metric], list[Metric]]:
        """MME's sums and categories: VLMEvalKit's values, with standard errors over images.

        An image scores 100 * (mean of its two answers) + 100 * (both right); a category's
        points are the mean over its images. Source: vlmeval/dataset/utils/yorn.py, MME_rating.

        Args:
            own: VLMEvalKit's points by column name.

        Returns:
            The sums, of those with a category in the data, and the categories.
        """
        points = []
        for category in sorted(set(self.table["category"])):
            rows = self.table["category"] == category
            answers = self.values[rows].groupby(self.units[rows])
            images = 100 * answers.mean() + 100 * answers.min()
            value, n = float(own[category]), int(rows.sum())
            points.append(Metric(f"mme/{category}", value, standard_error(images), n, category))
        sums = []
        for name, column, members in MME_SUMS:
            parts = [metric for metric in points if metric.category in members]
            if parts:
                stderr = math.hypot(*(metric.stderr for metric in parts))
                n = sum(metric.n for metric in parts)
                sums.append(Metric(name, float(own[column]), stderr, n))
        return sums, points


def standard_error(draws: pd.Series) -> float:
    """Standard error of a mean over independent draws; NaN for a single one."""
    return float(draws.std(ddof=1) / math.sqrt(len(draws))) if len(draws) > 1 else math.nan


def vqa_verdicts(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Adds the verdicts of VLMEvalKit's VQA scoring, by its own rule for the data set.

    Args:
        table: with the column ``eval_match``, lists of matches with each gold answer.
        name: data set name.
    """
    from vlmeval.dataset.utils.vqa_eval import hit_calculate

    matches = [{"match": ast.literal_eval(str(cell))} for cell in table["eval_match"]]
    return table.assign(verdict=[float(hit) for hit in hit_calculate(matches, name)])


def own_numbers(returned: Any) -> dict[str, Any]:
    """The first row of what VLMEvalKit returned: a table, or a dictionary."""
    if isinstance(returned, pd.DataFrame):
        return {str(k): v for k, v in returned.iloc[0].items()} if len(returned) else {}
    return dict(returned) if isinstance(returned, Mapping) else {}


def foreign_metrics(returned: Any, n: int) -> list[Metric]:
    """VLMEvalKit's own numbers, under its names.

    Args:
        returned: by its evaluation.
        n: questions behind them.
    """
    return [
        Metric(f"vlmeval/{name}", float(value), math.nan, n)
        for name, value in own_numbers(returned).items()
        if isinstance(value, int | float | np.number) and not isinstance(value, bool)
    ]


def overall_accuracy(metrics: list[Metric]) -> Metric | None:
    """The accuracy among VLMEvalKit's own numbers, as a share; None if there is none."""
    named = {metric.name.removeprefix("vlmeval/").lower(): metric for metric in metrics}
    for name in OVERALL_NAMES:
        if name in named:
            value = named[name].value
            share = value / 100 if value > 1 else value
            return Metric("accuracy", share, math.nan, named[name].n)
    return None
