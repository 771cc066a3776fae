"""``python -m mm_capacity.report WORKDIR``: table, results.csv and plots from the records."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mm_capacity.errors import UserError
from mm_capacity.report import write_report


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m mm_capacity.report",
        description="Redoes the table, results.csv and the plots of a work directory.",
    )
    parser.add_argument("work_dir", type=Path)
    args = parser.parse_args(argv)
    try:
        if not args.work_dir.is_dir():
            raise UserError(f"{str(args.work_dir)!r} is not a directory")
        write_report(args.work_dir)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
