"""The options of the command line, as argparse sees them: names and help texts, no values."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from mm_capacity.errors import UserError
from mm_capacity.evaluation.plan import (
    EMBEDDED_BATCH_SIZE,
    EMBEDDED_DATA,
    EMBEDDED_MODEL,
    MODALITIES,
    ORDERS,
    PAPER_MODEL,
    WINDOWS,
)
from mm_capacity.evaluation.suggest import unknown

MODES = ("infer", "eval", "all")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LISTS = ("policies", "models", "data", "plots")
PLACEMENTS = ("contiguous", "lpt", "replicated")
PROGRESS = ("auto", "bar", "lines", "off")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are UserErrors."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def build_parser(prog: str, description: str) -> Parser:
    """The options of the runner; every default is None, so that "not given" can be told."""
    parser = Parser(prog=prog, description=description, allow_abbrev=False)
    parser.set_defaults(dry_run=False)
    what = parser.add_argument_group("what to run")
    what.add_argument("--model", nargs="+", metavar="M", help=(
        f"{EMBEDDED_MODEL} (embedded), a path or hub id of a MoE VLM, or a VLMEvalKit name; "
        f"default: {EMBEDDED_MODEL}, or {PAPER_MODEL} with other data"
    ))  # fmt: skip
    what.add_argument("--model-path", metavar="PATH", help="local copy of the one --model")
    what.add_argument("--data", nargs="+", metavar="D", help=(
        f"VLMEvalKit image data sets; default: {' '.join(EMBEDDED_DATA)} (embedded)"
    ))  # fmt: skip
    what.add_argument("--lmu-data", metavar="DIR", help="TSV folder; default: LMUData")
    what.add_argument("--limit", metavar="N", help=(
        "N questions, spread over the categories (pairs and circular copies stay together)"
    ))  # fmt: skip
    what.add_argument("--config", metavar="FILE", help="VLMEvalKit's JSON: model, data, capacity")

    grid = parser.add_argument_group("capacity policies (every combination is one run)")
    grid.add_argument("--policy", nargs="+", metavar="P", help="default: token-drop expanded-drop")
    grid.add_argument("--gamma", nargs="+", metavar="G", help="capacity factors; none = baseline")
    grid.add_argument("--modality", nargs="+", metavar="X", help=" | ".join(MODALITIES))
    grid.add_argument("--order", nargs="+", metavar="X", help=" | ".join(ORDERS))
    grid.add_argument("--window", metavar="X", help=(
        f"{' | '.join(WINDOWS)}; default: batch, with a batch size above 1 sequence"
    ))  # fmt: skip
    grid.add_argument("--policy-arg", nargs="+", metavar="KEY=VALUE", help=(
        "further options of the policies, values in JSON: originals_first=true"
    ))  # fmt: skip
    grid.add_argument("--ep-size", metavar="R", help="expert-parallel ranks of the bookkeeping")
    grid.add_argument("--placement", metavar="X", help=(
        f"where experts live: {' | '.join(PLACEMENTS)}; default: contiguous"
    ))  # fmt: skip
    grid.add_argument("--placement-file", metavar="FILE", help=(
        "calibration file whose expert loads lpt and replicated place by"
    ))  # fmt: skip
    grid.add_argument("--replicas", metavar="r", help=(
        "copies of experts that replicated adds in each layer; default: R, one more a rank"
    ))  # fmt: skip
    grid.add_argument("--no-baseline", action="store_true", default=None, help=(
        "leave out the run without capacity that differences refer to"
    ))  # fmt: skip

    how = parser.add_argument_group("how to run")
    how.add_argument("--batch-size", metavar="N", help=(
        f"questions per forward pass; default 1, {EMBEDDED_BATCH_SIZE} for embedded model and data"
    ))  # fmt: skip
    how.add_argument("--max-new-tokens", metavar="N", help="longest answer")
    how.add_argument("--device", metavar="DEV", help="auto | cpu | cuda | cuda:N")
    how.add_argument("--dtype", metavar="T", help=" | ".join(DTYPES))
    how.add_argument("--seed", metavar="N", help="default 0")
    how.add_argument("--check", action="store_true", default=None, help=(
        "assert load <= C in every layer of every forward pass"
    ))  # fmt: skip
    how.add_argument("--no-cache", action="store_true", default=None, help=(
        "no KV cache: every new token is a pass of the whole sequence, under the policy"
    ))  # fmt: skip
    how.add_argument("--trust-remote-code", action="store_true", default=None, help=(
        "let a model's repository run its own code"
    ))  # fmt: skip
    how.add_argument("--jobs", metavar="N", help=(
        "processes that share the data sets and the CPU threads; default 1"
    ))  # fmt: skip

    records = parser.add_argument_group("records")
    records.add_argument("--work-dir", metavar="DIR", help="default: outputs")
    again = records.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", default=None, help=(
        "reuse finished runs, go on with unfinished ones (default)"
    ))  # fmt: skip
    again.add_argument("--fresh", action="store_true", default=None, help="redo the planned runs")
    records.add_argument("--mode", metavar="X", help="infer | eval | all (default)")
    records.add_argument("--judge", metavar="J", help="default: exact_matching")
    records.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    records.add_argument("--list", metavar="X", help=" | ".join(LISTS))
    records.add_argument("--progress", metavar="X", help=" | ".join(PROGRESS))
    return parser


def parse(parser: Parser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses, and suggests an option for one that does not exist.

    Raises:
        UserError: anything that argparse would refuse.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        args, rest = parser.parse_known_args(words)
    except UserError as error:
        raise _with_cause(str(error), words) from None
    if rest:
        options = [o for action in parser._actions for o in action.option_strings]
        flag = next((word.split("=")[0] for word in rest if word.startswith("-")), None)
        if flag is None:
            raise UserError(f"unexpected argument {rest[0]!r}: options start with --")
        raise unknown("option", flag, options)
    return args


def _with_cause(message: str, words: Sequence[str]) -> UserError:
    """argparse takes a word like -inf for an option, and says only that a value is missing."""
    missing = re.match(r"argument (?:\S+/)?(--[\w-]+): expected ", message)
    if missing is None or missing[1] not in words:
        return UserError(message)
    after = words[words.index(missing[1]) + 1 :][:1]
    if not after or not re.match(r"-[^-]", after[0]):
        return UserError(message)
    return UserError(f"{missing[1]} {after[0]!r} cannot be used: it reads as an option, no value")
