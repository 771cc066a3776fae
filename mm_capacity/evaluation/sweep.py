"""Runs a plan: every model loaded once, every data set opened once, one folder per run."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation.generate import split_batches
from mm_capacity.evaluation.identity import identity_of
from mm_capacity.evaluation.models import ModelHandle, one_line
from mm_capacity.evaluation.plan import DataChoice, Plan, PolicyChoice
from mm_capacity.evaluation.progress import Progress
from mm_capacity.evaluation.records import CURRENT_FILE, write_text
from mm_capacity.evaluation.single import Run, execute
from mm_capacity.evaluation.suggest import UnknownNameError

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


@dataclass
class Outcome:
    """What a sweep came to.

    Attributes:
        runs: every run that was tried, in order.
        failures: one line for each thing that failed or was lost.
        interrupted: the user stopped it.
    """

    runs: list[Run] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        if self.interrupted:
            return EXIT_INTERRUPTED
        return EXIT_FAILED if self.failures else EXIT_OK


def run_plan(plan: Plan) -> Outcome:
    """Executes a plan and returns what became of every run.

    Raises:
        UserError: nothing could be run at all.
    """
    settings = plan.settings
    make_work_dir(settings.work_dir)
    outcome = Outcome()
    if settings.mode != "infer":
        check_judge(settings.judge)
    handles = [ModelHandle(choice, settings) for choice in plan.models]
    policies = [build_policy(choice) for choice in plan.policies]
    opened = open_all(plan, outcome)
    questions = sum(len(data.frame) for _, data in opened)
    progress = Progress(questions * len(handles) * len(policies), settings.progress)
    try:
        with progress.running():
            for handle in handles:
                try:
                    runs = [
                        make_run(plan, handle, choice, data, policy)
                        for choice, data in opened
                        for policy in policies
                    ]
                    prepare_model(handle, runs)
                    execute_all(runs, outcome, progress)
                except UserError as error:
                    if not outcome.runs and len(handles) == 1:
                        raise
                    outcome.failures.append(str(error))
                    progress.say(f"failed: {error}")
                    progress.skip(questions * len(policies))
                finally:
                    handle.release()
    except KeyboardInterrupt:
        outcome.interrupted = True
    if not outcome.runs and not outcome.interrupted:
        raise UserError("; ".join(outcome.failures))
    return outcome


def check_judge(judge: str) -> None:
    """Makes sure that the judge can be asked, before hours of answers wait for it.

    Raises:
        UserError: it cannot.
    """
    if judge != "exact_matching":
        from mm_capacity.evaluation import scoring

        scoring.check_judge(judge)


def make_work_dir(path: Path) -> None:
    """Makes the work directory and tries to write in it.

    Raises:
        UserError: it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"work directory {str(path)!r} cannot be written: {reason}") from error


def build_policy(choice: PolicyChoice) -> tuple[PolicyChoice, Any]:
    """The choice with its policy.

    Raises:
        UserError: the policy refuses an option.
    """
    try:
        return choice, choice.build()
    except (TypeError, ValueError) as error:
        raise UserError(f"policy {choice.name!r}: {one_line(error)}") from error


def open_all(plan: Plan, outcome: Outcome) -> list[tuple[DataChoice, Any]]:
    """Opens every data set; one that cannot be opened is a failure, and the others go on.

    Raises:
        UserError: a name that VLMEvalKit does not know, or no data set could be opened.
    """
    from mm_capacity.evaluation.datasets import open_dataset

    opened = []
    for choice in plan.data:
        try:
            data = open_dataset(
                choice.dataset, limit=plan.limit(choice), lmu_data=plan.settings.lmu_data
            )
        except UnknownNameError:
            raise
        except UserError as error:
            outcome.failures.append(str(error))
            continue
        check_class(choice, data)
        opened.append((choice, data))
        for warning in data.warnings:
            print(f"warning: {warning}", flush=True)
    if not opened:
        raise UserError("; ".join(dict.fromkeys(outcome.failures)))
    for failure in outcome.failures:
        print(f"failed: {failure}", flush=True)
    return opened


def check_class(choice: DataChoice, data: Any) -> None:
    """A config file's ``class`` must be what the data set is.

    Raises:
        UserError: it is not.
    """
    classes = type(data.dataset).__mro__
    if choice.dataset_class is not None and choice.dataset_class not in (
        cls.__name__ for cls in classes
    ):
        theirs = [cls for cls in classes if cls.__module__.startswith("vlmeval.")]
        raise UserError(
            f"config: class {choice.dataset_class!r} of data {choice.name!r} is wrong, "
            f"VLMEvalKit's class for {choice.dataset!r} is {(theirs or classes)[0].__name__!r}"
        )


def make_run(
    plan: Plan,
    handle: ModelHandle,
    choice: DataChoice,
    data: Any,
    policy: tuple[PolicyChoice, Any],
) -> Run:
    """Names the folder of one run; loads nothing that can be told without."""
    identity = identity_of(plan, handle, choice, data, policy[1])
    return Run(plan, handle, choice, data, policy[0], policy[1], identity)


def prepare_model(handle: ModelHandle, runs: list[Run]) -> None:
    """Loads the model if a run needs it, before the first run starts.

    Raises:
        UserError: it cannot be loaded, or cannot be put under a policy.
    """
    if all(run.mode == "eval" or (not run.fresh and run.is_answered()) for run in runs):
        return
    from mm_capacity.attach import limit_capacity

    ranks = handle.ep_size
    for policy in {repr(run.policy): run.policy for run in runs}.values():
        try:
            with limit_capacity(
                handle.vlm.model, policy, adapter=handle.vlm.adapter, ep_size=ranks
            ):
                pass
        except (ValueError, TypeError) as error:
            raise UserError(f"model {handle.choice.name!r}: {one_line(error)}") from error


def execute_all(runs: list[Run], outcome: Outcome, progress: Progress) -> None:
    """Executes the runs of one model in order, data set by data set.

    Raises:
        UserError: another process works in one of their folders; nothing was run.
    """
    for run in runs:
        with run.folder.lock():
            pass
    by_data: dict[str, list[Run]] = {}
    for run in runs:
        by_data.setdefault(run.choice.name, []).append(run)
    for same_data in by_data.values():
        first = same_data[0]
        batches = split_batches(first.data.frame, first.plan.settings.batch_size)
        preparer = first.handle.preparer(first.data, batches)
        for run in same_data:
            outcome.runs.append(run)
            progress.begin(run.label)
            execute(run, preparer, progress)
            if run.is_scored:  # not before: an unfinished setting must not hide finished results
                mark_current(run)
            number = f"[{len(outcome.runs)}/{run.plan.runs}]"
            left = f", {progress.left()} left" if progress.asked and progress.to_do else ""
            progress.say(f"{number} {run.line()}{left}")
            if run.failure is not None:
                outcome.failures.append(f"{run.label}: {run.failure}")


def mark_current(run: Run) -> None:
    """Notes the setting whose runs the results of this model and data set now show."""
    write_text(run.folder.path.parent / CURRENT_FILE, run.setting_hash + "\n")
