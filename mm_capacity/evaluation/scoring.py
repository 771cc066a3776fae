"""Answers in, scores out: VLMEvalKit's prediction file and VLMEvalKit's evaluation.

Every number rests on VLMEvalKit's own verdict on each question, or is taken from its own table;
what the metrics are called and how their standard errors come about: :mod:`.metrics`.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pandas as pd

from mm_capacity.errors import UserError
from mm_capacity.evaluation.datasets import EvalData
from mm_capacity.evaluation.judges import EXACT_MATCHING, SILENT_FALLBACK, check_judge
from mm_capacity.evaluation.metrics import (
    MME_COGNITION,
    MME_PERCEPTION,
    Metric,
    Score,
    Verdicts,
    foreign_metrics,
    overall_accuracy,
    own_numbers,
    vqa_verdicts,
)
from mm_capacity.evaluation.tsv import TEXT_COLUMNS, read_tsv, words_kept
from mm_capacity.evaluation.units import unit_keys
from mm_capacity.evaluation.vlmeval_process import first_line, import_vlmeval, vlmeval_session

__all__ = ["MME_COGNITION", "MME_PERCEPTION", "Metric", "Score", "check_judge", "score"]

FILE_LABEL = "mm_capacity"


def score(
    data: EvalData,
    predictions: Mapping[Any, str],
    folder: Path,
    judge: str = EXACT_MATCHING,
) -> Score:
    """Scores answers with VLMEvalKit and leaves its files in a folder.

    Files of an earlier evaluation of the same data set in that folder are replaced: VLMEvalKit
    would take its old verdicts for the new answers.

    Args:
        data: the questions.
        predictions: index -> answer. Questions without one are left out; so is the rest of
            their unit, since VLMEvalKit cannot rate half an MME pair.
        folder: where VLMEvalKit's prediction and score files go.
        judge: VLMEvalKit's name of the answer matcher.

    Raises:
        UserError: the judge cannot be used, no question has an answer, or VLMEvalKit cannot
            score this data set.
    """
    import_vlmeval()
    table, left_out = answered_rows(data, predictions)
    if not len(table):
        index, why = next(iter(left_out.items()))
        raise UserError(f"{data.name}: no question can be scored (question {index}: {why})")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mm_capacity_score_") as scratch:
        files = _Files(data, Path(scratch))
        session = vlmeval_session(data.root)
        with session, words_kept(files.text), _private_tmp(files.folder), _plain_tracking(judge):
            returned = _evaluate(data, table, files.predictions, judge)
        result = _read_score(data, files, returned, left_out)
        files.keep(folder)
    return result


def answered_rows(
    data: EvalData, predictions: Mapping[Any, str]
) -> tuple[pd.DataFrame, dict[Any, str]]:
    """The rows of VLMEvalKit's prediction file.

    Returns:
        The questions of every complete unit with the column ``prediction``, and index -> reason
        for the others.
    """
    answers = {str(index): str(text) for index, text in predictions.items()}
    frame = data.frame.copy()
    indices = frame["index"].tolist()
    keys = unit_keys(frame, data.style)
    sizes = Counter(keys)
    left_out: dict[Any, str] = {}
    broken: dict[Any, Any] = {}
    for index, key in zip(indices, keys, strict=True):
        if str(index) not in answers:
            left_out[index] = data.bad.get(index, "no answer")
            broken.setdefault(key, index)
        elif data.style == "pairs" and sizes[key] < 2:
            left_out[index] = "the image has no second question"
    for index, key in zip(indices, keys, strict=True):
        if key in broken and index not in left_out:
            left_out[index] = f"belongs to question {broken[key]}, which has no answer"
    frame["prediction"] = [answers.get(str(index), "") for index in indices]
    keep = [index not in left_out for index in indices]
    return frame[keep].reset_index(drop=True), left_out


def _evaluate(data: EvalData, table: pd.DataFrame, path: Path, judge: str) -> Any:
    """Runs VLMEvalKit's evaluation; what it prints goes to a log file beside ``path``."""
    from vlmeval.smp import dump

    check_judge(judge)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            warnings.filterwarnings("error", message=SILENT_FALLBACK)
            dump(table, str(path))
            return data.dataset.evaluate(str(path), model=judge, nproc=4)
    except Exception as error:
        if SILENT_FALLBACK in str(error):
            raise UserError(
                f"judge {judge!r} does not answer: check its key and the network, or use "
                f"{EXACT_MATCHING}"
            ) from error
        needs_judge = judge == EXACT_MATCHING and data.kind not in ("MCQ", "Y/N")
        hint = "; data of this kind may need a judge model" if needs_judge else ""
        raise UserError(
            f"{data.name}: VLMEvalKit's scoring failed ({first_line(error)}){hint}"
        ) from error
    finally:
        if said.getvalue():
            path.with_suffix(".log").write_text(said.getvalue(), encoding="utf-8")


@contextlib.contextmanager
def _private_tmp(work: Path) -> Iterator[None]:
    """Circular scoring writes to /tmp under the current second: two runs would mix answers.

    The name is the only thing that can be set, so it leads into a folder of this evaluation.
    """
    inside = work / "circular"
    inside.mkdir()
    name = os.path.relpath(os.path.realpath(inside / "table"), os.path.realpath("/tmp"))
    with patch("vlmeval.dataset.utils.multiple_choice.timestr", lambda: name):
        yield
    shutil.rmtree(inside)


@contextlib.contextmanager
def _plain_tracking(judge: str) -> Iterator[None]:
    """Lets exact matching run in a plain loop that saves once, at the end.

    VLMEvalKit saves all verdicts after each one, which pays off when a judge is asked over the
    network. With exact matching it makes the time quadratic: minutes for 4000 questions.
    """
    if judge != EXACT_MATCHING:
        yield
        return
    with patch("vlmeval.dataset.utils.multiple_choice.track_progress_rich", _track):
        yield


def _track(
    func: Callable[..., Any],
    tasks: Iterable[Any],
    save: str | None = None,
    keys: Sequence[Any] = (),
    **_: Any,
) -> list[Any]:
    from vlmeval.smp import dump, load

    results = [func(**task) if isinstance(task, dict) else func(*task) for task in tasks]
    if save is not None:
        earlier = load(save) if os.path.exists(save) else {}
        dump({**earlier, **dict(zip(keys, results, strict=True))}, save)
    return results


def _read_score(data: EvalData, files: _Files, returned: Any, left_out: dict[Any, str]) -> Score:
    """Turns VLMEvalKit's files and table into metrics."""
    circular, pairs = data.style == "circular", data.style == "pairs"
    if data.kind == "Y/N":
        table = files.read("_auxmatch", "score")
    elif circular:
        table = files.read("_*_vanilla_circ0_result", "hit")
    else:
        table = files.read("_*_result", "hit")
    if table is None and (matches := files.read("_results", "eval_match")) is not None:
        table = vqa_verdicts(matches, data.name)
    if table is None:
        return _foreign_score(data, returned, left_out)
    verdicts = Verdicts(table, "pairs" if pairs else "single")
    metrics = [verdicts.mean("accuracy")]
    details = verdicts.per_category("accuracy")
    hits = {"accuracy": verdicts.by_index()}
    if circular and (table := files.read("_*_result", "hit")) is not None:
        groups = Verdicts(table)
        metrics.append(groups.mean("accuracy_circular"))
        details += groups.per_category("accuracy_circular")
        hits["accuracy_circular"] = groups.by_index()
    if pairs:
        sums, points = verdicts.mme(own_numbers(returned))
        metrics += sums
        details += points
    elif data.kind != "MCQ":
        details += foreign_metrics(returned, len(verdicts.table))
    return Score(metrics + details, hits["accuracy"], left_out, hits)


def _foreign_score(data: EvalData, returned: Any, left_out: dict[Any, str]) -> Score:
    """For scoring that keeps no verdict per question: its overall number is the accuracy."""
    metrics = foreign_metrics(returned, len(data.frame) - len(left_out))
    accuracy = overall_accuracy(metrics)
    if accuracy is None:
        names = ", ".join(metric.name for metric in metrics) or "nothing"
        raise UserError(
            f"{data.name}: VLMEvalKit's scoring gave no overall accuracy (it gave {names})"
        )
    return Score([accuracy, *metrics], {}, left_out)


class _Files:
    """VLMEvalKit's files of one evaluation, in a folder that nothing else writes to.

    Args:
        data: what is scored.
        folder: where the evaluation runs.
    """

    def __init__(self, data: EvalData, folder: Path) -> None:
        self.folder = folder
        self.stem = f"{FILE_LABEL}_{data.name}"
        whole_numbers = all(isinstance(index, int) for index in data.frame["index"].tolist())
        self.text = TEXT_COLUMNS if whole_numbers else TEXT_COLUMNS | {"index"}

    @property
    def predictions(self) -> Path:
        """VLMEvalKit's prediction file."""
        return self.folder / f"{self.stem}.tsv"

    def read(self, suffix: str, column: str) -> pd.DataFrame | None:
        """A result table with ``column``, which becomes ``verdict`` if it is one."""
        for path in sorted(self.folder.glob(f"{self.stem}{suffix}.tsv")):
            if "vanilla" in path.name and "vanilla" not in suffix:
                continue
            table = read_tsv(path, self.text)
            if column in table and "index" in table:
                return table.assign(verdict=table[column])
        return None

    def keep(self, folder: Path) -> None:
        """Copies them, in place of those of an earlier evaluation."""
        for old in folder.glob(f"{self.stem}[._]*"):
            if old.is_file():
                old.unlink()
        for path in self.folder.iterdir():
            if path.is_file():
                shutil.copyfile(path, folder / path.name)
