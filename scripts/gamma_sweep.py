"""How low can the capacity factor go? Scores, drops and load over many gammas.

    python scripts/gamma_sweep.py [options of python -m mm_capacity.run]

Writes gamma_sweep.csv and gamma_sweep.md into the work directory, beside what the runner
writes: one row for each policy, modality and gamma.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from mm_capacity.evaluation.plan import Plan
from mm_capacity.evaluation.progress import forgiving_streams
from mm_capacity.run import command

GRID = {
    "modality": ["image-first"],
    "gamma": ["0.25", "0.5", "0.75", "1.0", "1.25", "1.5", "2.0", "3.0"],
}


def write_tables(plan: Plan, results: Any) -> None:
    """Writes the table of all runs."""
    from mm_capacity.report.tables import run_frame, write_table

    write_table([run_frame(results)], plan.settings.work_dir / "gamma_sweep")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command(
        argv,
        prog="scripts/gamma_sweep.py",
        description=(__doc__ or "").split("\n")[0],
        grid=GRID,
        after=write_tables,
    )


if __name__ == "__main__":
    forgiving_streams()
    sys.exit(main())
