"""``python -m mm_capacity.inspect``: what a model or a family looks like to a capacity policy.

Exit code 0: all checks hold. 1: a check of the doctor failed. 2: bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from mm_capacity.errors import UserError
from mm_capacity.evaluation import devices

DESCRIPTION = (
    "Shows layers, experts, router, tokens and load of a vision-language MoE, and whether a "
    "capacity policy really acts on it."
)
EXIT_UNHEALTHY, EXIT_BAD_INPUT = 1, 2


class _Parser(argparse.ArgumentParser):
    """Mistakes become one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see python -m mm_capacity.inspect --help")


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = _Parser("python -m mm_capacity.inspect", description=DESCRIPTION, allow_abbrev=False)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--families", action="store_true", help="the families that transformers holds, and stop"
    )
    what.add_argument("--model", help="a folder, a hub id, or a name that the runner knows")
    what.add_argument("--tiny", metavar="FAMILY", help="random weights, no download")
    parser.add_argument("--data", help="take prompts from this data set instead of a test picture")
    parser.add_argument("--limit", type=int, help="prompts to take from --data (default 1)")
    parser.add_argument("--gamma", type=float, default=0.25, help="small gamma (default 0.25)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 or auto")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run the checkpoint's code"
    )
    parser.add_argument("--lmu-data", help="VLMEvalKit's data folder")
    return parser


def check(args: argparse.Namespace) -> None:
    """Checks what can be checked without loading anything.

    Raises:
        UserError: a value cannot work.
    """
    if args.limit is not None and args.data is None:
        raise UserError("--limit needs --data")
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit must be at least 1, got {args.limit}")
    if not 0 < args.gamma < float("inf"):
        raise UserError(f"--gamma must be a finite number above 0, got {args.gamma:g}")
    devices.check_name(args.device)
    if args.tiny is not None and args.device not in ("cpu", "auto"):
        raise UserError(f"--device {args.device} goes with --model: a tiny model is on the CPU")
    if args.dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise UserError(f"unknown dtype {args.dtype!r}: use auto, float32, bfloat16 or float16")
    if args.tiny is not None:
        from vlm_adapters.registry import ADAPTERS
        from vlm_adapters.tiny_families import FAMILIES

        known = sorted({*ADAPTERS, *FAMILIES} - {"native"})
        if args.tiny not in known:
            raise UserError(f"unknown family {args.tiny!r}; known: {', '.join(known)}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit code.
    """
    try:
        args = build_parser().parse_args(argv)
        check(args)
        if args.families:
            from mm_capacity.inspection.families import table

            for line in table():
                print(line)
            return 0
        return inspect_model(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def inspect_model(args: argparse.Namespace) -> int:
    """Prints everything about one model.

    Returns:
        The exit code.

    Raises:
        UserError: it cannot be loaded, or has nothing that a policy could cap.
    """
    from mm_capacity.inspection import model as show
    from mm_capacity.inspection.doctor import examine

    vlm = _load(args)
    for line in show.structure(vlm):
        print(line, flush=True)
    prompts = [_prepare(vlm, conversation) for conversation in _conversations(args, vlm)]
    print(show.tokens(vlm, prompts[0]))
    for line in show.load(vlm, prompts):
        print(line)
    print("doctor")
    healthy = True
    for finding in examine(vlm, prompts[0], args.gamma):
        healthy &= finding.ok
        detail = f": {finding.detail}" if finding.detail else ""
        print(f"  {'ok  ' if finding.ok else 'FAIL'}  {finding.name}{detail}", flush=True)
    print(f"verdict   {'healthy' if healthy else 'do not trust results of this model'}")
    return 0 if healthy else EXIT_UNHEALTHY


def _load(args: argparse.Namespace) -> Any:
    from vlm_adapters import load_model

    source = f"tiny:{args.tiny}"
    if args.tiny is None:
        from mm_capacity.evaluation.models import resolve_source

        source = resolve_source(args.model)
    try:
        vlm = load_model(
            source,
            dtype=args.dtype,
            device=devices.find(args.device),
            trust_remote_code=args.trust_remote_code,
        )
        if args.tiny is not None and args.dtype != "auto":
            from vlm_adapters.tiny_build import to_dtype

            to_dtype(vlm.model, _dtype(args.dtype))
        vlm.adapter.moe_layers(vlm.model)
    except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
        raise UserError(f"{args.model or args.tiny}: {' '.join(str(error).split())}") from error
    return vlm


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _conversations(args: argparse.Namespace, vlm: Any) -> Iterator[Any]:
    if args.data is None:
        from mm_capacity.inspection.model import default_conversation

        yield default_conversation(vlm)
        return
    from pathlib import Path

    from mm_capacity.evaluation.datasets import BadQuestion, open_dataset

    folder = Path(args.lmu_data).expanduser() if args.lmu_data else None
    data = open_dataset(args.data, limit=args.limit or 1, lmu_data=folder)
    for index in data.frame["index"]:
        try:
            yield data.messages(index)
        except BadQuestion as error:
            raise UserError(f"{args.data}: {error}") from error


def _prepare(vlm: Any, conversation: Any) -> dict[str, Any]:
    """Inputs of one prompt, floating point ones in the model's dtype."""
    try:
        inputs = vlm.prepare(conversation)
    except ValueError as error:
        raise UserError(f"the prompt cannot be prepared: {error}") from error
    dtype = next(vlm.model.parameters()).dtype
    return {
        key: value.to(dtype) if getattr(value, "is_floating_point", bool)() else value
        for key, value in inputs.items()
    }


if __name__ == "__main__":
    sys.exit(main())
