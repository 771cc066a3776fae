"""Several data sets at once, each in a process of its own.

The processes only work ahead: each makes the runs of its data sets in the common work directory.
Afterwards the whole plan is run as it would be without them, which finds the runs made, does what
is missing, and reports what failed. So nothing about a run depends on the number of processes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mm_capacity.evaluation.plan import Plan

THREADS = "OMP_NUM_THREADS"


def shares(plan: Plan) -> list[Plan]:
    """The plan in ``settings.jobs`` parts, data set by data set in turn."""
    jobs = plan.settings.jobs
    return [replace(plan, data=plan.data[part::jobs]) for part in range(jobs)]


def run_ahead(plan: Plan) -> tuple[Plan, bool]:
    """Makes the runs of a plan in several processes, this one among them.

    Args:
        plan: its data sets are at least as many as its jobs.

    Returns:
        The plan that picks up the runs made (without ``fresh``), and whether the user
        interrupted.
    """
    from mm_capacity.errors import UserError
    from mm_capacity.evaluation.sweep import make_work_dir, run_plan

    make_work_dir(plan.settings.work_dir)
    mine, *others = shares(plan)
    context = multiprocessing.get_context("spawn")
    interrupted = False
    with threads_shared(plan.settings.jobs):
        workers = []
        for number, share in enumerate(others, 1):
            log = plan.settings.work_dir / f"job-{number}.log"
            names = ", ".join(choice.name for choice in share.data)
            print(f"a process of its own runs {names}; it writes to {log}", flush=True)
            workers.append(context.Process(target=_work, args=(share, log), daemon=True))
            workers[-1].start()
        try:
            interrupted = run_plan(mine).interrupted
        except UserError:
            pass  # the whole plan meets it again, and says so
        except KeyboardInterrupt:
            interrupted = True
        for worker in workers:
            worker.join()
    return replace(plan, settings=replace(plan.settings, fresh=False)), interrupted


def _work(share: Plan, log: Path) -> None:
    from mm_capacity.errors import UserError
    from mm_capacity.evaluation.sweep import run_plan

    quiet = replace(share, settings=replace(share.settings, progress="lines"))
    with log.open("w", encoding="utf-8") as stream:
        sys.stdout = sys.stderr = stream
        try:
            for failure in run_plan(quiet).failures:
                print(f"failed: {failure}", flush=True)
        except UserError as error:
            print(f"failed: {error}", flush=True)
        except KeyboardInterrupt:
            print("interrupted", flush=True)


@contextmanager
def threads_shared(jobs: int) -> Iterator[None]:
    """Gives each process its share of this one's threads; what is slower is to share a core."""
    import torch

    before: dict[str, Any] = {"threads": torch.get_num_threads(), "variable": os.getenv(THREADS)}
    each = max(1, before["threads"] // jobs)
    torch.set_num_threads(each)
    os.environ[THREADS] = str(each)
    try:
        yield
    finally:
        torch.set_num_threads(before["threads"])
        if before["variable"] is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = before["variable"]
