"""What the runner recorded, in a row for each policy and target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from equal_load.knobs import CLOSE_FRAC, Found, Knob
from mm_capacity.evaluation.plan import BASELINE, PolicyChoice

NO_PARAMETER = "no parameter"
SCORES = ("accuracy", "stderr", "delta", "delta_stderr", "n")
MEASURED = ("load", "assignments", "assignments_frac", "zero_expert_tokens", "seconds")


@dataclass(frozen=True)
class Row:
    """A policy, tuned to a target or as it is.

    Attributes:
        choice: the policy with its knob where the search left it.
        found: what the search came to.
        target: load that was searched for, None without a search.
        knob: None without a search.
    """

    choice: PolicyChoice
    found: Found
    target: float | None = None
    knob: Knob | None = None

    @property
    def is_evaluated(self) -> bool:
        return self.found.value is not None or self.knob is None and self.found.load is not None

    @property
    def policy(self) -> str:
        """Name to show; a placement without a policy goes by its own."""
        placement = self.choice.get("placement")
        if self.choice.name == BASELINE.name and placement:
            return f"placement {placement}"
        return self.choice.name

    @property
    def options(self) -> str:
        """Options to show: not the knob, and nothing that all rows have in common."""
        hidden = {"window", "seed", "placement_file", *([self.knob.name] if self.knob else [])}
        if self.choice.name == BASELINE.name:
            hidden.add("placement")
        return " ".join(f"{k}={_shown(v)}" for k, v in self.choice.options if k not in hidden)


def _shown(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) else value


def make_table(
    rows: list[Row], runs: list[Any], baseline: PolicyChoice, questions: int, work_dir: Path
) -> list[dict[str, Any]]:
    """One dictionary per row.

    Args:
        rows: all rows, the baseline among them.
        runs: the finished runs of the policies.
        baseline: the policy that differences refer to.
        questions: how many the search looked at.
        work_dir: run folders are named from here.
    """
    by_choice = {run.policy_choice: run for run in runs}
    reference = by_choice.get(baseline)
    table = []
    for row in rows:
        run = by_choice.get(row.choice) if row.is_evaluated else None
        evaluated = _evaluated(run, reference, work_dir)
        status = row.found.status
        if row.found.met and row.target and evaluated["load"] == evaluated["load"]:
            status = _status(row.target, evaluated["load"], questions)
        table.append(
            {
                "policy": row.policy,
                "options": row.options,
                "target": row.target,
                "knob": row.knob.name if row.knob else "",
                "value": row.found.value,
                "status": status,
                "load_searched": row.found.load,
                **evaluated,
            }
        )
    return table


def _status(target: float, load: float, questions: int) -> str:
    """Whether all questions come to the target too, within twice what the search allows."""
    if abs(load / target - 1) <= 2 * CLOSE_FRAC:
        return "met"
    return f"met on the {questions} questions searched, {load:.3f} on all"


def _evaluated(run: Any, baseline: Any, work_dir: Path) -> dict[str, Any]:
    """Score and load of a run as the runner recorded them; NaN where there is no run."""
    from mm_capacity.evaluation.paired import difference

    if run is None:
        return {**dict.fromkeys((*SCORES, *MEASURED), math.nan), "run": ""}
    record, score = run.folder.record(), run.folder.score()
    (accuracy,) = (m for m in score["metrics"] if m["name"] == "accuracy")
    delta = delta_stderr = math.nan
    if baseline is not None and run is not baseline:
        delta, delta_stderr = difference(score, baseline.folder.score(), "accuracy")
    load = record["load"]
    router = load["kept"] - load["added"]  # of the router's own assignments
    return {
        "accuracy": accuracy["value"],
        "stderr": accuracy["stderr"],
        "delta": delta,
        "delta_stderr": delta_stderr,
        "n": accuracy["n"],
        "load": load["rank_straggler_after"],
        "assignments": load["kept"],
        "assignments_frac": load["kept"] * (1 - load["drop_frac"]) / router if router else math.nan,
        "zero_expert_tokens": load["zero_expert_tokens"],
        "seconds": record["seconds"],
        "run": str(run.folder.path.relative_to(work_dir)),
    }
