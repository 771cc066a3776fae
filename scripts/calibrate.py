"""Calibrates a model for the policies that want it, and writes one small JSON file.

    python scripts/calibrate.py --out calibration.json [--model M] [--data D] [--limit N]
    python -m mm_capacity.run --policy macs modes naee --policy-arg calibration=calibration.json
    python -m mm_capacity.run --placement lpt --placement-file calibration.json --ep-size 4

With --skip-frac 0.25 0.5, MoDES' thresholds for these shares of skipped assignments are searched
for, and --policy modes --policy-arg calibration=calibration.json skip_frac=0.5 uses them.

Without --data the questions are about training scenes of the embedded kind, which no embedded
data set holds. What the entries mean is said in mm_capacity/calibration.py.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation.arguments import DTYPES, Parser, parse
from mm_capacity.evaluation.plan import EMBEDDED_DATA, EMBEDDED_MODEL, ModelChoice, Settings
from mm_capacity.evaluation.suggest import check_known
from mm_capacity.evaluation.values import whole_number

PROG = "scripts/calibrate.py"
DEFAULT_QUESTIONS = 64
DEFAULT_GRID_POINTS = 16


def build_parser() -> Parser:
    """The options."""
    parser = Parser(prog=PROG, description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", metavar="FILE", help="JSON file to write")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help=f"default: {EMBEDDED_MODEL}")
    parser.add_argument("--data", help="VLMEvalKit data set; default: embedded training scenes")
    parser.add_argument("--lmu-data", metavar="DIR", help="TSV folder; default: LMUData")
    parser.add_argument("--limit", default=DEFAULT_QUESTIONS, metavar="N", help=(
        f"questions; default {DEFAULT_QUESTIONS}"
    ))  # fmt: skip
    parser.add_argument("--no-alpha", action="store_true", help=(
        "leave out the importance of layers, which takes one more pass per layer"
    ))  # fmt: skip
    parser.add_argument("--skip-frac", nargs="+", default=[], metavar="X", help=(
        "search MoDES' thresholds for these shares of skipped assignments (0.5)"
    ))  # fmt: skip
    parser.add_argument("--grid-points", default=DEFAULT_GRID_POINTS, metavar="D", help=(
        "thresholds of each modality that the search chooses from; takes up to (D + 1) passes per "
        f"question and share; default {DEFAULT_GRID_POINTS}"
    ))  # fmt: skip
    parser.add_argument("--device", default="auto", metavar="DEV", help="auto | cpu | cuda")
    parser.add_argument("--dtype", default="auto", metavar="T", help=" | ".join(DTYPES))
    parser.add_argument("--seed", default=0, metavar="N", help="of the training scenes")
    parser.add_argument("--trust-remote-code", action="store_true", help=(
        "let a model's repository run its own code"
    ))  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (0, or 2 for bad input)."""
    try:
        return run(parse(build_parser(), argv), sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print("error:", str(error).replace("\n", " "), file=sys.stderr)
        return 2


def run(args: Any, argv: Sequence[str]) -> int:
    """Calibrates as the options say.

    Raises:
        UserError: bad input, or a model or data set that cannot be used.
    """
    if args.out is None:
        raise UserError("--out is missing: name the JSON file to write")
    out = Path(args.out).expanduser()
    if not out.parent.is_dir():
        raise UserError(f"--out {args.out!r}: the folder {str(out.parent)!r} does not exist")
    count = whole_number("--limit", args.limit, least=1)
    seed = whole_number("--seed", args.seed, least=0)
    points = whole_number("--grid-points", args.grid_points, least=2)
    wanted = [share_of("--skip-frac", value) for value in args.skip_frac]
    if wanted and args.no_alpha:
        raise UserError("--skip-frac cannot be used with --no-alpha: thresholds weigh alpha")
    if args.data in EMBEDDED_DATA:
        raise UserError(
            f"--data {args.data} is a test set: leave --data out to calibrate on training scenes"
        )
    settings = Settings(
        device=args.device,
        dtype=check_known("dtype", args.dtype, DTYPES),
        trust_remote_code=args.trust_remote_code,
    )
    from mm_capacity.calibration import calibrate, training_conversations, write_table
    from mm_capacity.evaluation.environment import git_commit, versions
    from mm_capacity.evaluation.models import ModelHandle, one_line
    from mm_capacity.thresholds import find_thresholds

    handle = ModelHandle(ModelChoice(args.model, args.model), settings)
    if args.data is None:
        asked: Iterator[Any] = training_conversations(count, seed)
    else:
        asked = data_conversations(handle, args.data, count, args.lmu_data)
    if wanted:
        asked = iter(kept := list(asked))  # they are asked again
    try:
        table = calibrate(
            handle.vlm,
            asked,
            with_alpha=not args.no_alpha,
            progress=lambda done: print(f"question {done} of {count}", flush=True),
        )
        if wanted:
            table["thresholds"] = find_thresholds(
                handle.vlm,
                kept,
                table["alpha"],
                wanted,
                points=points,
                progress=lambda done: print(f"thresholds: {done} of {len(kept)}", flush=True),
            )
    except ValueError as error:
        raise UserError(f"cannot calibrate {args.model!r}: {one_line(error)}") from error
    source = {
        "command": shlex.join(["python", PROG, *map(str, argv)]),
        "model": args.model,
        "model_digest": handle.digest,
        "data": args.data or "embedded training scenes",
        "seed": seed,
        "versions": versions(),
        "git_commit": git_commit(),
    }
    write_table({"source": source, **table}, out)
    print(f"{out}: {', '.join(table)}")
    return 0


def share_of(name: str, value: str) -> float:
    """A share as a number.

    Raises:
        UserError: not a number in [0, 1].
    """
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise UserError(f"{name} {value!r}: must be a number between 0 and 1 (0.5)")
    return number


def data_conversations(handle: Any, name: str, count: int, lmu_data: str | None) -> Iterator[Any]:
    """The first questions of a data set as the model is asked them; unusable ones are left out.

    Raises:
        UserError: the data set cannot be opened.
    """
    from mm_capacity.evaluation import datasets
    from mm_capacity.evaluation.prompts.base import Asked

    folder = Path(lmu_data).expanduser() if lmu_data else None
    data = datasets.open_dataset(name, limit=count, lmu_data=folder)
    print(f"warning: scores on {name} under this calibration are scores on questions it has seen")
    asked = Asked(data, handle.prompts)
    for index in data.frame["index"]:
        try:
            yield asked.messages(index)
        except datasets.BadQuestion as error:
            print(f"warning: {error}")


if __name__ == "__main__":
    sys.exit(main())
