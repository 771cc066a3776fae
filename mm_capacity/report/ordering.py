"""Which modality to drop first: paired differences between the dropping orders at one gamma."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mm_capacity.report.tables import with_error

if TYPE_CHECKING:
    import pandas as pd

PAIRS = (("image-first", "text-first"), ("image-first", "uniform"), ("uniform", "text-first"))
KEYS = ["model", "data", "policy", "order", "window", "gamma"]


def ordering(work_dir: Path, results: pd.DataFrame, metric: str = "accuracy") -> pd.DataFrame:
    """Paired differences between runs that differ in the modality dropped first only.

    Args:
        work_dir: the work directory, for the verdicts by question.
        results: from :func:`mm_capacity.evaluation.results.collect`.
        metric: which one.

    Returns:
        Columns of KEYS, better, worse, difference, stderr: the first of a PAIRS entry minus the
        second. Empty where fewer than two modalities were run.
    """
    import pandas as pd

    from mm_capacity.evaluation.paired import difference
    from mm_capacity.evaluation.results import scored_runs

    scores = {run.name: run.score for run in scored_runs(work_dir)}
    rows = []
    chosen = results[(results["metric"] == metric) & results["modality"].ne("")]
    for key, part in chosen.groupby(KEYS, sort=False):
        by_modality = part.set_index("modality")["run"]
        for better, worse in PAIRS:
            if better not in by_modality or worse not in by_modality:
                continue
            runs = scores.get(by_modality[better]), scores.get(by_modality[worse])
            if runs[0] is None or runs[1] is None:
                continue
            value, stderr = difference(runs[0], runs[1], metric)
            line = dict(zip(KEYS, key, strict=True))
            rows.append(
                {**line, "better": better, "worse": worse, "difference": value, "stderr": stderr}
            )
    columns = [*KEYS, "better", "worse", "difference", "stderr"]
    return pd.DataFrame(rows, columns=columns)


def print_ordering(frame: pd.DataFrame) -> None:
    """Prints one line per data set, policy and gamma."""
    for (model, data), part in frame.groupby(["model", "data"], sort=False):
        print(f"Accuracy, paired differences between dropping orders, {model} on {data}:")
        for (policy, gamma), rows in part.groupby(["policy", "gamma"], sort=False):
            told = "; ".join(
                f"{row.better} - {row.worse} {with_error(row.difference, row.stderr, sign=True)}"
                for row in rows.itertuples()
            )
            print(f"  {policy}, gamma {gamma:g}: {told}", flush=True)
