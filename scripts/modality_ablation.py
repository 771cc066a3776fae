"""Which modality should be dropped first? uniform / image-first / text-first, policy by policy.

    python scripts/modality_ablation.py [options of python -m mm_capacity.run]

Writes modality_ablation.csv and modality_ablation.md into the work directory, beside what the
runner writes: value (paired difference to the baseline ± its standard error), one column for
each gamma.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm_capacity.evaluation.plan import MODALITIES, Plan
from mm_capacity.evaluation.progress import forgiving_streams
from mm_capacity.run import command

GRID = {"modality": list(MODALITIES), "gamma": ["0.5", "1.0", "1.5"]}


def write_tables(plan: Plan, results: Any) -> None:
    """Writes a table for each metric over all questions."""
    from mm_capacity.report.tables import headline_metrics, markdown, pivot, write_table

    work_dir: Path = plan.settings.work_dir
    parts = []
    for metric in headline_metrics(results):
        table = pivot(results, metric)
        table.insert(2, "metric", metric)
        parts.append(table)
    write_table(parts, work_dir / "modality_ablation")
    print(markdown(parts[0]))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command(
        argv,
        prog="scripts/modality_ablation.py",
        description=(__doc__ or "").split("\n")[0],
        grid=GRID,
        after=write_tables,
    )


if __name__ == "__main__":
    forgiving_streams()
    sys.exit(main())
