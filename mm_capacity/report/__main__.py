"""``python -m mm_capacity.report WORKDIR``: table, results.csv and plots from the records."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mm_capacity.errors import UserError
from mm_capacity.evaluation.arguments import Parser
from mm_capacity.evaluation.progress import forgiving_streams
from mm_capacity.report import write_report


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(
        prog="python -m mm_capacity.report",
        description="Redoes the table, results.csv and the plots of a work directory.",
    )
    parser.add_argument("work_dir", metavar="WORKDIR", type=Path, help="of earlier runs")
    try:
        args = parser.parse_args(argv)
        if not args.work_dir.is_dir():
            name = str(args.work_dir)
            raise UserError(f"{name!r} is not a directory: give the --work-dir of earlier runs")
        write_report(args.work_dir)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    forgiving_streams()
    sys.exit(main())
