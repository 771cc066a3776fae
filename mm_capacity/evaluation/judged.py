"""Answers of a run to its score.json: metrics, and what every question scored."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation.generate import plain_index
from mm_capacity.evaluation.records import now, write_text

if TYPE_CHECKING:
    from mm_capacity.evaluation.scoring import Metric
    from mm_capacity.evaluation.single import Run


def score_run(run: Run) -> None:
    """Scores the answers in a run's folder and writes score.json.

    Raises:
        UserError: there is no answer, or VLMEvalKit cannot score them.
    """
    from mm_capacity.evaluation.scoring import MME_COGNITION, MME_PERCEPTION, score

    folder = run.folder
    predictions = {
        row["index"]: row["prediction"] for row in folder.predictions() if "error" not in row
    }
    if not predictions:
        raise UserError("every question was lost, so there is nothing to score")
    judge = run.plan.settings.judge
    result = score(run.data, predictions, folder.score_folder, judge=judge)
    content = {
        "judge": judge,
        "metrics": [_plain(metric) for metric in result.metrics],
        "hits": {
            metric: [[plain_index(index), float(hit)] for index, hit in hits.items()]
            for metric, hits in result.hits.items()
        },
        "questions": _questions(run.data),
        "members": {
            "mme_perception": sorted(MME_PERCEPTION),
            "mme_cognition": sorted(MME_COGNITION),
        },
        "left_out": [[plain_index(index), why] for index, why in result.left_out.items()],
    }
    write_text(folder.score_file, json.dumps(content) + "\n")
    status = "done-with-errors" if run.record.get("lost") else "done"
    run.record = folder.update(status=status, finished=now(), judge=judge, error=None)


def _questions(data: Any) -> list[list[Any]]:
    """For each question: index, the draw that it belongs to, the categories it counts in."""
    from mm_capacity.evaluation.units import unit_keys

    frame = data.frame
    keys = unit_keys(frame, "pairs" if data.style == "pairs" else "single")
    units = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    columns = [frame[c] for c in ("category", "l2-category") if c in frame]
    names = [list(row) for row in zip(*columns, strict=True)] or [[]] * len(frame)
    return [
        [plain_index(index), units[key], [str(name) for name in row]]
        for index, key, row in zip(frame["index"], keys, names, strict=True)
    ]


def _plain(metric: Metric) -> dict[str, Any]:
    """A metric for JSON, without NaN."""
    return {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in vars(metric).items()
    }
