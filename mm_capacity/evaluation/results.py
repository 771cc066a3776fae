"""From run folders to ``results.csv``: one row per run and metric, differences to the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_capacity.evaluation.paired import difference
from mm_capacity.evaluation.plan import BASELINE
from mm_capacity.evaluation.records import CURRENT_FILE, FINISHED, RunFolder, find_runs, write_text

if TYPE_CHECKING:
    import pandas as pd

OPTION_COLUMNS = ("gamma", "modality", "order", "window", "placement")
LOAD_COLUMNS = (
    "drop_frac_image", "drop_frac_text", "straggler_before", "straggler_after",
    "max_expert_load", "max_rank_load", "zero_expert_tokens",
)  # fmt: skip
COLUMNS = [
    "model", "data", "policy", "gamma", "modality", "order", "scope", "window", "ep_size",
    "placement", "n", "metric", "value", "stderr", "delta", "delta_stderr", *LOAD_COLUMNS,
    "seconds", "run",
]  # fmt: skip
TEXT_COLUMNS = (
    "model", "data", "policy", "modality", "order", "scope", "window", "placement", "metric", "run",
)  # fmt: skip


@dataclass(frozen=True)
class ScoredRun:
    """A finished run: its folder below the work directory, run.json and score.json."""

    name: str
    record: Mapping[str, Any]
    score: Mapping[str, Any]

    @property
    def group(self) -> tuple[str, str, str]:
        """Runs of one group differ in the policy only."""
        return self.record["model"], self.record["data"], self.record["setting"]

    @property
    def is_baseline(self) -> bool:
        return self.record["policy"]["name"] == BASELINE.name


def scored_runs(work_dir: Path) -> list[ScoredRun]:
    """The finished runs below a work directory, of the current setting of each data set.

    Runs of another setting (another limit, batch size, checkpoint, version) stay on disk but
    are not comparable, so they are left out.
    """
    runs = []
    for folder in find_runs(work_dir):
        record = folder.record()
        if record.get("status") not in FINISHED or not folder.score_file.exists():
            continue
        if record["setting"] == _current_setting(folder, record):
            name = str(folder.path.relative_to(work_dir))
            runs.append(ScoredRun(name, record, folder.score()))
    return runs


def _current_setting(folder: RunFolder, record: Mapping[str, Any]) -> str:
    file = folder.path.parent / CURRENT_FILE
    return file.read_text(encoding="utf-8").strip() if file.exists() else record["setting"]


def collect(work_dir: Path) -> pd.DataFrame:
    """All results of a work directory in long form (:data:`COLUMNS`)."""
    import pandas as pd

    runs = scored_runs(work_dir)
    baselines = {run.group: run for run in runs if run.is_baseline}
    rows = [row for run in runs for row in run_rows(run, baselines.get(run.group))]
    frame = pd.DataFrame(rows, columns=COLUMNS)
    for column in COLUMNS:
        if column in TEXT_COLUMNS:
            frame[column] = frame[column].fillna("").astype(object)
        else:
            frame[column] = pd.to_numeric(frame[column])
    frame["_first"] = frame["policy"] != BASELINE.name
    keys = ["model", "data", "_first", "policy", "modality", "order", "gamma", "run"]
    return frame.sort_values(keys, kind="stable", ignore_index=True).drop(columns="_first")


def run_rows(run: ScoredRun, baseline: ScoredRun | None) -> list[dict[str, Any]]:
    """Rows of one run, one per metric.

    Args:
        run: the run.
        baseline: the run without capacity on the same questions, None if there is none.
    """
    record = run.record
    options = record["policy"]["options"]
    load = record.get("load") or {}
    common = {
        "model": record["model"],
        "data": record["data"],
        "policy": record["policy"]["name"],
        "scope": record["policy"].get("scope"),
        "ep_size": record["ep_size"],
        "seconds": record.get("seconds"),
        "run": run.name,
        **{key: options.get(key) for key in OPTION_COLUMNS},
        **{key: load.get(key) for key in LOAD_COLUMNS},
    }
    rows = []
    for metric in run.score["metrics"]:
        row = {
            **common,
            "metric": metric["name"],
            "value": metric["value"],
            "stderr": metric["stderr"],
            "n": metric["n"],
        }
        if baseline is not None and not run.is_baseline:
            row["delta"], row["delta_stderr"] = difference(
                run.score, baseline.score, metric["name"]
            )
        rows.append(row)
    return rows


def write_csv(results: pd.DataFrame, path: Path) -> None:
    """Writes the results; a number that there is not becomes an empty cell."""
    write_text(path, results.to_csv(index=False, na_rep="", float_format="%.8g"))
