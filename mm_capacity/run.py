"""``python -m mm_capacity.run``: runs models under capacity policies and scores them.

Exit code 0: all went well. 1: a run or data set failed, or questions were lost; the others ran.
2: bad input, nothing ran. 130: interrupted; the same command goes on where it stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation.arguments import build_parser, parse
from mm_capacity.evaluation.options import make_plan
from mm_capacity.evaluation.plan import Plan, describe
from mm_capacity.evaluation.progress import forgiving_streams

if TYPE_CHECKING:
    import pandas as pd

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
PROG = "python -m mm_capacity.run"
DESCRIPTION = (
    "Runs vision-language MoEs under expert-capacity policies, scores the answers with "
    "VLMEvalKit and shows load and drops beside the scores. Without arguments: the embedded "
    "model on the embedded data, 18 policies and the baseline, a few minutes on two CPU cores."
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return command(argv, prog=PROG, description=DESCRIPTION)


def command(
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    grid: Mapping[str, Sequence[Any]] | None = None,
    after: Callable[[Plan, pd.DataFrame], None] | None = None,
) -> int:
    """The runner's command line, also for scripts with another default grid.

    Args:
        argv: arguments; None for those of the process.
        prog: name in the help text.
        description: what the help text says first.
        grid: default values of ``modality`` and ``gamma``.
        after: called with the plan and its results when something was scored.

    Returns:
        The exit code, see the module's docstring.
    """
    try:
        args = parse(build_parser(prog, description), argv)
        if args.list is not None:
            from mm_capacity.evaluation.listing import listing

            for line in listing(args.list, args.lmu_data):
                print(line)
            return 0
        plan = make_plan(args, grid)
        for line in describe(plan, dry_run=args.dry_run):
            print(line, flush=True)
        return 0 if args.dry_run else run_and_report(plan, after)
    except UserError as error:
        print("error:", str(error).replace("\n", " "), file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted: what was answered is kept; the same command resumes", file=sys.stderr)
        return EXIT_INTERRUPTED


def run_and_report(plan: Plan, after: Callable[[Plan, pd.DataFrame], None] | None = None) -> int:
    """Runs a plan, then writes results.csv and the plots and prints the table.

    Returns:
        The exit code.

    Raises:
        UserError: nothing could be run.
    """
    from mm_capacity.evaluation.sweep import run_plan
    from mm_capacity.report import write_report

    if plan.settings.jobs > 1:
        from mm_capacity.evaluation.jobs import run_ahead

        plan, interrupted = run_ahead(plan)
        if interrupted:
            raise KeyboardInterrupt
    outcome = run_plan(plan)
    if outcome.interrupted:
        print("interrupted: what was answered is kept; the same command resumes", file=sys.stderr)
        return outcome.exit_code
    if any(run.is_scored for run in outcome.runs):
        only = {run.folder.path for run in outcome.runs}
        try:
            shown = write_report(plan.settings.work_dir, only=only)
            if after is not None:
                after(plan, shown)
        except OSError as error:
            outcome.failures.append(
                f"the report cannot be written ({error}): once that is mended, "
                f"python -m mm_capacity.report {plan.settings.work_dir} redoes it"
            )
    if plan.settings.mode == "infer":
        print("answers are kept; --mode eval scores them")
    for failure in outcome.failures:
        print(f"failed: {failure}", file=sys.stderr)
    return outcome.exit_code


if __name__ == "__main__":
    forgiving_streams()
    sys.exit(main())
