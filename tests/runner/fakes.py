"""A data set and a scorer without VLMEvalKit; the model in these tests is a real tiny one."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pandas as pd

from mm_capacity.errors import UserError
from mm_capacity.evaluation.datasets import BadQuestion
from mm_capacity.evaluation.scoring import Metric, Score
from mm_capacity.evaluation.suggest import unknown
from tests.tsv import picture

SIZES = {"SET_A": 4, "SET_B": 3}


def ask(text: str, seed: int) -> list[dict[str, Any]]:
    """A conversation with one picture."""
    parts = [{"type": "image", "image": picture(seed)}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


class FakeData:
    """Questions as :class:`mm_capacity.evaluation.datasets.EvalData` has them."""

    kind = "VQA"
    official = None
    style = "single"

    def __init__(self, name: str, limit: int | None, bad: dict[Any, str]) -> None:
        size = min(limit or SIZES[name], SIZES[name])
        self.name = name
        self.dataset = self
        self.bad = bad
        self.warnings = [f"{name} is made up"]
        self.digest = hashlib.sha256(f"{name} {sorted(bad)}".encode()).hexdigest()
        self.frame = pd.DataFrame(
            {
                "index": [10 * i for i in range(size)],
                "category": ["even" if i % 2 == 0 else "odd" for i in range(size)],
            }
        )
        self.asked: list[Any] = []

    def line(self, index: Any) -> pd.Series:
        return self.frame[self.frame["index"] == index].iloc[0]

    def messages(self, index: Any) -> list[dict[str, Any]]:
        if index in self.bad:
            raise BadQuestion(index, self.bad[index])
        self.asked.append(index)
        return ask(f"question {index}", index)


class World:
    """What the fakes share: which data sets exist, what is wrong with them, who was asked."""

    def __init__(self) -> None:
        self.bad: dict[str, dict[Any, str]] = {}
        self.missing: set[str] = set()
        self.opened: list[FakeData] = []
        self.scored: list[dict[Any, str]] = []

    def open_dataset(self, name: str, *, limit: Any = None, lmu_data: Any = None) -> FakeData:
        if name not in SIZES:
            raise unknown("data set", name, SIZES)
        if name in self.missing:
            raise UserError(f"{name}: {name}.tsv is missing")
        self.opened.append(FakeData(name, limit, self.bad.get(name, {})))
        return self.opened[-1]

    def score(self, data: Any, predictions: Any, folder: Any, judge: str = "") -> Score:
        """An answer is right when a hash of it is even: any change of an answer may show."""
        self.scored.append(dict(predictions))
        folder.mkdir(exist_ok=True)
        (folder / "fake_score.csv").write_text(judge)
        hits = {
            index: float(hashlib.sha256(text.encode()).digest()[0] % 2 == 0)
            for index, text in predictions.items()
        }
        values = pd.Series(hits)
        error = float("nan") if len(values) < 2 else float(values.sem())
        metrics = [Metric("accuracy", float(values.mean()), error, len(values))]
        return Score(metrics, hits, {}, {"accuracy": hits})


def handle_of(vlm: Any) -> Any:
    """What :class:`mm_capacity.evaluation.generate.Preparer` needs of a model handle."""
    return SimpleNamespace(vlm=vlm)
