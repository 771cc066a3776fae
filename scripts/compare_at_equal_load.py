"""Which policy is better at the same load? Every policy tuned to equal maximum rank load.

    python scripts/compare_at_equal_load.py --target 1.1 1.25 1.5 2 [options of the runner]

For each policy its own parameter (gamma, a threshold, a share) is bisected on the questions until
the maximum rank load, as a multiple of the mean rank load K T / R and averaged over questions and
layers, is as great as possible without exceeding the target. Then the runner evaluates it.
equal_load.csv, equal_load.md and equal_load.png in the work directory show score, load,
assignments and tokens without an expert side by side; a policy that cannot meet a target says so.
Long because the search, the table and the plot are of no use without each other.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation.arguments import build_parser, parse
from mm_capacity.evaluation.options import make_plan
from mm_capacity.evaluation.plan import BASELINE, Plan, PolicyChoice, describe
from mm_capacity.evaluation.values import whole_number
from mm_capacity.policies import POLICIES

PROG = "scripts/compare_at_equal_load.py"
TARGETS = ("1.1", "1.25", "1.5", "2.0")
GRID = {"modality": ["uniform", "image-first"], "gamma": ["1.0"]}
CLOSE_FRAC = 0.02  # a load this far below its target counts as equal to it
STEPS = 14
NOT_SEARCHED = "no parameter to search over"


@dataclass(frozen=True)
class Found:
    """What the search came to for one policy and target.

    Attributes:
        value: the knob's value to evaluate, None when there is none.
        load: maximum rank load over the mean, as searched.
        status: "met", or why not.
    """

    value: float | int | None
    load: float | None
    status: str

    @property
    def met(self) -> bool:
        return self.status == "met"


@dataclass(frozen=True)
class Knob:
    """A policy's own parameter, see :class:`mm_capacity.policies.base.Policy`."""

    name: str
    low: float
    high: float
    raises_load: bool
    whole: bool

    @property
    def hardest(self) -> float:
        return self.low if self.raises_load else self.high

    @property
    def gentlest(self) -> float:
        return self.high if self.raises_load else self.low

    def between(self, a: float, b: float) -> float | None:
        """A value between two others, by ratio; None when they are neighbours."""
        a, b = min(a, b), max(a, b)
        if self.whole:
            return (int(a) + int(b)) // 2 if b - a > 1 else None
        middle = math.sqrt(a * b) if a > 0 else b / 8
        middle = float(f"{middle:.4g}")
        return middle if a < middle < b else None


def find_knob(knob: Knob, target: float, load_at: Callable[[float], float]) -> Found:
    """Bisects a knob for the greatest load that does not exceed the target.

    Args:
        knob: what to turn.
        target: maximum rank load over the mean.
        load_at: load at a value of the knob; keeps what it has measured.
    """

    def shown(value: float) -> str:
        return f"{load_at(value):.3f} at {knob.name}={value:g}"

    hard, gentle = knob.hardest, knob.gentlest
    if load_at(hard) > target:
        return Found(None, None, f"cannot: the load is never below {shown(hard)}")
    if load_at(gentle) < target * (1 - CLOSE_FRAC):
        return Found(None, None, f"cannot: the load is never above {shown(gentle)}")
    if load_at(gentle) <= target:
        return Found(gentle, load_at(gentle), "met")
    below, above = hard, gentle
    for _ in range(STEPS):
        middle = knob.between(below, above)
        if middle is None:
            break
        if load_at(middle) > target:
            above = middle
            continue
        below = middle
        if load_at(below) >= target * (1 - CLOSE_FRAC):
            break
    value = int(below) if knob.whole else below
    if load_at(below) < target * (1 - CLOSE_FRAC):
        status = f"not met: nearest are {shown(below)} and {shown(above)}"
        return Found(value, load_at(below), status)
    return Found(value, load_at(below), "met")


def knob_of(choice: PolicyChoice) -> Knob | None:
    """The knob of a policy, None if it has none."""
    policy = choice.build()
    if policy.knob is None:
        return None
    low, high = policy.knob_range
    whole = isinstance(low, int) and isinstance(high, int)
    return Knob(policy.knob, low, high, policy.knob_raises_load, whole)


def turned(choice: PolicyChoice, knob: Knob, value: float) -> PolicyChoice:
    """The policy with its knob at a value."""
    options = {**dict(choice.options), knob.name: int(value) if knob.whole else float(value)}
    return PolicyChoice(choice.name, tuple(options.items()))


class Loads:
    """Loads of policies on the questions of one data set; measured once, kept in a file.

    Args:
        plan: with one model and one data set.
        handle: the model.
        data: the opened data set.
        search_limit: most questions to measure on; None for all.
    """

    def __init__(self, plan: Plan, handle: Any, data: Any, search_limit: int | None) -> None:
        from mm_capacity.evaluation.generate import Preparer, split_batches
        from mm_capacity.evaluation.prompts.base import Asked
        from mm_capacity.evaluation.records import slug

        self.plan, self.handle, self.data = plan, handle, data
        size = plan.settings.batch_size
        self.batches = split_batches(data.frame.head(search_limit or len(data.frame)), size)
        self.questions = sum(map(len, self.batches))
        self.prepared = Preparer(handle, Asked(data, handle.prompts), self.batches)
        name = f"{slug(plan.models[0].name)}-{slug(plan.data[0].name)}.json"
        self.file = plan.settings.work_dir / "equal_load_search" / name
        self.known: dict[str, float] = {}
        if self.file.exists():
            self.known = json.loads(self.file.read_text(encoding="utf-8"))

    def of(self, choice: PolicyChoice) -> float:
        """Maximum rank load over the mean, averaged over steps and layers."""
        from mm_capacity.evaluation.identity import identity_of
        from mm_capacity.evaluation.records import digest, write_text

        policy = choice.build()
        identity = identity_of(self.plan, self.handle, self.plan.data[0], self.data, policy)
        key = digest({**identity, "questions": self.questions})
        if key not in self.known:
            self.known[key] = self._measure(policy)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, json.dumps(self.known, indent=1) + "\n")
            print(f"  {choice.slug}: load {self.known[key]:.3f}", flush=True)
        return self.known[key]

    def _measure(self, policy: Any) -> float:
        import pandas as pd

        from mm_capacity.evaluation.generate import answer

        settings, parts = self.plan.settings, []
        for number in range(len(self.batches)):
            inputs = self.prepared[number].inputs
            if inputs is not None:
                answered = answer(
                    self.handle.vlm,
                    inputs,
                    policy,
                    max_new_tokens=1,
                    seed=settings.seed,
                    ep_size=self.handle.ep_size,
                    trace_window=self.plan.trace_window,
                    check=settings.check,
                    use_cache=settings.use_cache,
                )
                parts.append(answered.layers)
        if not parts:
            raise UserError(f"{self.data.name}: no question can be asked")
        return float(pd.concat(parts)["rank_straggler_after"].mean())


def base_policies(plan: Plan) -> list[PolicyChoice]:
    """The policies of a plan without gamma, which is searched for; each once, no baseline."""
    kept = {
        PolicyChoice(p.name, tuple((k, v) for k, v in p.options if k != "gamma")): None
        for p in plan.policies
        if p != BASELINE
    }
    return list(kept)


def compare(plan: Plan, targets: Sequence[float], search_limit: int | None) -> tuple[Any, int]:
    """Searches and evaluates one model on one data set.

    Returns:
        The table (a pandas frame), and the runner's exit code.

    Raises:
        UserError: nothing could be run.
    """
    import pandas as pd

    from mm_capacity.evaluation.models import ModelHandle
    from mm_capacity.evaluation.sweep import (
        Outcome,
        build_policy,
        make_work_dir,
        open_all,
        run_plan,
    )

    choices = base_policies(plan)
    for choice in choices:
        build_policy(choice)
    make_work_dir(plan.settings.work_dir)
    opened = open_all(plan, Outcome())
    handle = ModelHandle(plan.models[0], plan.settings)
    loads = Loads(plan, handle, opened[0][1], search_limit)
    without = loads.of(BASELINE)
    rows: list[tuple[PolicyChoice, float | None, Knob | None, Found]] = [
        (BASELINE, None, None, Found(None, without, "baseline"))
    ]
    for choice in choices:
        knob = knob_of(choice)
        if knob is None:
            rows.append((choice, None, None, Found(None, loads.of(choice), NOT_SEARCHED)))
            continue

        def load_at(value: float, choice: PolicyChoice = choice, knob: Knob = knob) -> float:
            return loads.of(turned(choice, knob, value))

        for target in targets:
            found = find_knob(knob, target, load_at)
            tuned = choice if found.value is None else turned(choice, knob, found.value)
            rows.append((tuned, target, knob, found))
    handle.release()
    wanted = [c for c, _, knob, found in rows if knob is None or found.value is not None]
    outcome = run_plan(replace(plan, policies=tuple(dict.fromkeys(wanted))))
    for failure in outcome.failures:
        print(f"failed: {failure}", file=sys.stderr)
    scored = {r.policy_choice: r for r in outcome.runs if r.is_scored}
    results = _results(plan.settings.work_dir)
    table = [
        {
            "model": plan.models[0].name,
            "data": plan.data[0].name,
            "policy": choice.name,
            "options": _options(choice, knob),
            "target": target,
            "knob": knob.name if knob else "",
            "value": found.value,
            "status": found.status,
            "load_searched": found.load,
            **_evaluated(scored.get(choice), results, plan.settings.work_dir),
        }
        for choice, target, knob, found in rows
    ]
    return pd.DataFrame(table), outcome.exit_code


def _options(choice: PolicyChoice, knob: Knob | None) -> str:
    hidden = {"window", "seed", *([knob.name] if knob else [])}
    return " ".join(f"{k}={v}" for k, v in choice.options if k not in hidden)


def _results(work_dir: Path) -> Any:
    from mm_capacity.evaluation.results import collect

    results = collect(work_dir)
    return results[results["metric"] == "accuracy"].set_index("run")


def _evaluated(run: Any, results: Any, work_dir: Path) -> dict[str, Any]:
    """Score and load of a run as the runner recorded them; NaN where there is no run."""
    names = ("accuracy", "stderr", "delta", "delta_stderr", "n")
    name = None if run is None else str(run.folder.path.relative_to(work_dir))
    if name is None or name not in results.index:
        missing = ("load", "assignments", "assignments_frac", "zero_expert_tokens", "seconds")
        return {**dict.fromkeys((*names, *missing), math.nan), "run": ""}
    row, load = results.loc[name], run.folder.record()["load"]
    router = load["kept"] - load["added"]  # of the router's own assignments
    drop = load["drop_frac"]
    return {
        **{k: row["value" if k == "accuracy" else k] for k in names},
        "load": load["rank_straggler_after"],
        "assignments": load["kept"],
        "assignments_frac": load["kept"] * (1 - drop) / router if router else math.nan,
        "zero_expert_tokens": load["zero_expert_tokens"],
        "seconds": row["seconds"],
        "run": name,
    }


def write_outputs(table: Any, work_dir: Path, command: str, seed: int) -> None:
    """Writes equal_load.csv, .md and .png."""
    from mm_capacity.evaluation.environment import git_commit, versions
    from mm_capacity.evaluation.records import write_text
    from mm_capacity.evaluation.results import write_csv
    from mm_capacity.report.tables import markdown

    write_csv(table, work_dir / "equal_load.csv")
    software = ", ".join(f"{name} {number}" for name, number in versions().items())
    text = [
        "# Policies at equal maximum rank load\n",
        f"Command: `{command}`  \nSeed: {seed}  \nVersions: {software}  \n"
        f"Commit: {git_commit() or 'unknown'}\n",
        "Load: maximum over ranks of the kept assignments, over K T / R, mean over questions and "
        "MoE layers. Difference: paired, to the run without capacity. Errors are standard "
        "errors.\n",
    ]
    for (model, data), part in table.groupby(["model", "data"], sort=False):
        text += [f"## {model} on {data}, {part['n'].max():.0f} questions\n", markdown(_shown(part))]
    write_text(work_dir / "equal_load.md", "\n".join(text))
    plot(table, work_dir / "equal_load.png")
    for ending in ("csv", "md", "png"):
        print(work_dir / f"equal_load.{ending}", flush=True)


def _shown(part: Any) -> Any:
    import pandas as pd

    from mm_capacity.report.tables import number, share, with_error

    rows = [
        {
            "policy": f"{row['policy']} {row['options']}".strip(),
            "target": number(row["target"], 2),
            "setting": f"{row['knob']}={row['value']:g}" if row["value"] == row["value"] else "-",
            "load": number(row["load"]),
            "accuracy": with_error(row["accuracy"], row["stderr"]),
            "difference": with_error(row["delta"], row["delta_stderr"], sign=True),
            "assignments": f"{number(row['assignments'], 0)} ({share(row['assignments_frac'])})",
            "no expert": number(row["zero_expert_tokens"], 0),
            "status": row["status"],
        }
        for _, row in part.astype({"value": float}).iterrows()
    ]
    return pd.DataFrame(rows)


def plot(table: Any, target: Path) -> None:
    """Accuracy against maximum rank load, a panel per model and data set, a line per policy.

    Error bars are the standard errors of the paired difference to the run without capacity.
    """
    import matplotlib

    before = matplotlib.get_backend()
    matplotlib.use("agg")  # files only: works without a display
    try:
        import matplotlib.pyplot as plt

        from mm_capacity.report.style import BASELINE_COLOUR, LINES, MARKERS

        panels = list(table.groupby(["model", "data"], sort=False))
        figure, axes = plt.subplots(
            1, len(panels), figsize=(6.4 * len(panels), 5), squeeze=False, layout="constrained"
        )
        for axis, ((model, data), part) in zip(axes.flat, panels, strict=True):
            known = part[part["accuracy"].notna()]
            for _, row in known[known["status"] == "baseline"].iterrows():
                axis.axhline(row["accuracy"], color=BASELINE_COLOUR, lw=1)
                axis.plot(row["load"], row["accuracy"], "*", color=BASELINE_COLOUR, ms=10,
                          label="no capacity")  # fmt: skip
            lines = known[known["status"] != "baseline"].groupby(["policy", "options"], sort=False)
            for i, ((name, options), runs) in enumerate(lines):
                runs = runs.sort_values("load")
                axis.errorbar(
                    runs["load"], runs["accuracy"], yerr=runs["delta_stderr"].fillna(0),
                    color=f"C{i % 10}", linestyle=LINES[i // 10 % len(LINES)],
                    marker=MARKERS[i % len(MARKERS)], ms=4, capsize=2, lw=1.2,
                    label=f"{name} {options}".strip(),
                )  # fmt: skip
            axis.set(title=f"{model}\n{data}", xlabel="maximum rank load / mean rank load")
            axis.set_ylabel("accuracy (± standard error of the paired difference)")
            axis.grid(alpha=0.25)
            axis.legend(fontsize=7)
        figure.savefig(target, dpi=150)
        plt.close(figure)
    finally:
        matplotlib.use(before)


def read_targets(values: Sequence[str]) -> list[float]:
    """Targets as numbers, ascending.

    Raises:
        UserError: one is not a finite number above 0.
    """
    targets = []
    for value in values:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number <= 0:
            raise UserError(f"--target {value!r}: must be a number above 0 (1.25)")
        targets.append(number)
    return sorted(set(targets))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code of the runner, 2 for bad input."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(PROG, (__doc__ or "").split("\n")[0])
    own = parser.add_argument_group("comparison")
    own.add_argument("--target", nargs="+", metavar="X", default=list(TARGETS), help=(
        f"maximum rank load over the mean; default: {' '.join(TARGETS)}"
    ))  # fmt: skip
    own.add_argument("--search-limit", metavar="N", help=(
        "search on the first N questions; default: on all that are evaluated"
    ))  # fmt: skip
    try:
        args = parse(parser, words)
        targets, limit = read_targets(args.target), args.search_limit
        search_limit = None if limit is None else whole_number("--search-limit", limit, least=1)
        for name, given in (("gamma", args.gamma), ("no-baseline", args.no_baseline)):
            if given is not None:
                raise UserError(f"--{name} has no place here: gamma is searched for, and "
                                "differences refer to the baseline")  # fmt: skip
        if args.mode not in (None, "all"):
            raise UserError(f"--mode {args.mode} has no place here: the comparison needs scores")
        del args.target, args.search_limit
        if args.policy is None and args.config is None:
            args.policy = list(POLICIES)
        plan = make_plan(args, GRID)
        plan = replace(plan, policies=(BASELINE, *base_policies(plan)))
        for line in describe(plan, dry_run=args.dry_run):
            print(line, flush=True)
        if args.dry_run:
            return 0
        return run(plan, targets, search_limit, shlex.join(["python", PROG, *words]))
    except UserError as error:
        print("error:", str(error).replace("\n", " "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was measured and answered is kept", file=sys.stderr)
        return 130


def run(plan: Plan, targets: Sequence[float], search_limit: int | None, command: str) -> int:
    """Compares on every model and data set and writes the outputs.

    Raises:
        UserError: nothing could be run.
    """
    import pandas as pd

    parts, codes = [], []
    for model in plan.models:
        for data in plan.data:
            table, code = compare(
                replace(plan, models=(model,), data=(data,)), targets, search_limit
            )
            parts.append(table)
            codes.append(code)
    joined = pd.concat(parts, ignore_index=True)
    write_outputs(joined, plan.settings.work_dir, command, plan.settings.seed)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
