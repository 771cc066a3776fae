"""Which policy is better at the same load? Every policy tuned to equal maximum rank load.

    python scripts/compare_at_equal_load.py --target 1.1 1.25 1.5 2 [options of the runner]

For each policy its own parameter (gamma, a threshold, a share) is searched, on some of the
questions, for the greatest maximum rank load that does not exceed the target: a multiple of the
mean rank load K T / R, averaged over questions and layers. Then the runner evaluates it on all
questions, and the table shows the load that all of them come to. equal_load.csv, equal_load.md and
equal_load.png in the work directory show score, load, assignments and tokens without an expert side
by side; a policy that cannot meet a target says so. With --place-by, placements of the experts are
rows as well: they drop nothing and have no parameter, so they have a load and no target.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from equal_load.knobs import Found, Measured, find_knob, knob_of, turned
from equal_load.loads import Loads
from equal_load.outputs import write_outputs
from equal_load.table import NO_PARAMETER, Row, make_table

from mm_capacity.errors import UserError
from mm_capacity.evaluation.arguments import build_parser, parse
from mm_capacity.evaluation.options import make_plan
from mm_capacity.evaluation.placement_options import placement_options
from mm_capacity.evaluation.plan import BASELINE, Plan, PolicyChoice, describe
from mm_capacity.evaluation.values import whole_number
from mm_capacity.policies import POLICIES

PROG = "scripts/compare_at_equal_load.py"
TARGETS = ("1.1", "1.25", "1.5", "2.0")
GRID = {"modality": ["uniform", "image-first"], "gamma": ["1.0"]}
SEARCH_LIMIT = 96


def base_policies(plan: Plan) -> list[PolicyChoice]:
    """The policies of a plan without gamma, which is searched for; each once, no baseline."""
    kept = {
        PolicyChoice(p.name, tuple((k, v) for k, v in p.options if k != "gamma")): None
        for p in plan.policies
        if p.name != BASELINE.name
    }
    return list(kept)


def placed_baselines(file: str | None, replicas: int | None, ranks: int) -> list[PolicyChoice]:
    """The placements that a calibration file allows, as policies that drop nothing.

    Raises:
        UserError: the number of replicas does not fit the ranks.
    """
    if file is None:
        return []
    kinds: list[dict[str, Any]] = [{"placement": "lpt"}, {"placement": "replicated"}]
    if replicas is not None:
        kinds[1]["replicas"] = replicas
    return [
        PolicyChoice(BASELINE.name, tuple(placement_options(given, ranks).items()))
        for given in ({**kind, "placement_file": file} for kind in kinds)
    ]


def search(loads: Loads, choices: Sequence[PolicyChoice], targets: Sequence[float]) -> list[Row]:
    """A row for every policy and target; one for a policy without a parameter."""
    rows: list[Row] = []
    for choice in choices:
        refused = loads.refusal(choice)
        if refused is not None:
            rows.append(Row(choice, Found(None, None, f"refused: {refused}")))
            continue
        knob = knob_of(choice)
        if knob is None:
            rows.append(Row(choice, Found(None, loads.of(choice), NO_PARAMETER)))
            continue

        def load_at(value: float, choice: PolicyChoice = choice, knob: Any = knob) -> float:
            return loads.of(turned(choice, knob, value))

        measured = Measured(load_at)
        for target in targets:
            found = find_knob(knob, target, measured)
            tuned = choice if found.value is None else turned(choice, knob, found.value)
            rows.append(Row(tuned, found, target, knob))
    return rows


def compare(
    plan: Plan,
    targets: Sequence[float],
    search_limit: int | None,
    place_by: str | None,
    replicas: int | None,
) -> tuple[Any, int]:
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
        mark_current,
        open_all,
        run_plan,
    )

    settings, baseline = plan.settings, plan.policies[0]
    handle = ModelHandle(plan.models[0], settings)
    choices = [*base_policies(plan), *placed_baselines(place_by, replicas, handle.ep_size)]
    for choice in choices:
        build_policy(choice)
    make_work_dir(settings.work_dir)
    opened = open_all(plan, Outcome())
    loads = Loads(plan, handle, opened[0][1], search_limit)
    rows = [Row(baseline, Found(None, loads.of(baseline), "baseline"))]
    rows += search(loads, choices, targets)
    handle.release()
    wanted = dict.fromkeys(row.choice for row in rows if row.is_evaluated)
    outcome = run_plan(replace(plan, policies=tuple(wanted)))
    for failure in outcome.failures:
        print(f"failed: {failure}", file=sys.stderr)
    scored = [run for run in outcome.runs if run.is_scored]
    for run in scored:  # results.csv and reports go by the baseline's setting, not a placement's
        if run.policy_choice == baseline:
            mark_current(run)
    table = pd.DataFrame(
        make_table(rows, scored, baseline, len(loads.questions), settings.work_dir)
    )
    table.insert(0, "model", plan.models[0].name)
    table.insert(1, "data", plan.data[0].name)
    return table, outcome.exit_code


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
    own.add_argument("--search-limit", metavar="N", default=SEARCH_LIMIT, help=(
        f"search on N questions, evenly spaced over all; default: {SEARCH_LIMIT}"
    ))  # fmt: skip
    own.add_argument("--place-by", metavar="FILE", help=(
        "calibration file: adds rows for the placements lpt and replicated, without a policy"
    ))  # fmt: skip
    own.add_argument("--place-replicas", metavar="r", help=(
        "copies of experts in the row replicated; default: R, one more a rank"
    ))  # fmt: skip
    try:
        args = parse(parser, words)
        targets = read_targets(args.target)
        search_limit = whole_number("--search-limit", args.search_limit, least=1)
        place_by, replicas = args.place_by, args.place_replicas
        if replicas is not None:
            replicas = whole_number("--place-replicas", replicas, least=1)
            if place_by is None:
                raise UserError("--place-replicas goes with --place-by")
        for name, given in (("gamma", args.gamma), ("no-baseline", args.no_baseline)):
            if given is not None:
                raise UserError(f"--{name} has no place here: gamma is searched for, and "
                                "differences refer to the baseline")  # fmt: skip
        if args.mode not in (None, "all"):
            raise UserError(f"--mode {args.mode} has no place here: the comparison needs scores")
        del args.target, args.search_limit, args.place_by, args.place_replicas
        if args.policy is None and args.config is None:
            args.policy = list(POLICIES)
        plan = make_plan(args, GRID)
        plan = replace(plan, policies=(plan.policies[0], *base_policies(plan)))
        for line in describe(plan, dry_run=args.dry_run):
            print(line, flush=True)
        if args.dry_run:
            return 0
        command = shlex.join(["python", PROG, *words])
        return run(plan, targets, search_limit, place_by, replicas, command)
    except UserError as error:
        print("error:", str(error).replace("\n", " "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was measured and answered is kept", file=sys.stderr)
        return 130


def run(
    plan: Plan,
    targets: Sequence[float],
    search_limit: int,
    place_by: str | None,
    replicas: int | None,
    command: str,
) -> int:
    """Compares on every model and data set and writes the outputs.

    Raises:
        UserError: nothing could be run.
    """
    import pandas as pd

    parts, codes = [], []
    for model in plan.models:
        for data in plan.data:
            one = replace(plan, models=(model,), data=(data,))
            table, code = compare(one, targets, search_limit, place_by, replicas)
            parts.append(table)
            codes.append(code)
    joined = pd.concat(parts, ignore_index=True)
    write_outputs(joined, plan.settings.work_dir, command, plan.settings.seed)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
