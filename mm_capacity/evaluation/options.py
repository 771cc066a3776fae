"""Options and config file to a :class:`~mm_capacity.evaluation.plan.Plan`, one line per mistake.

Imports nothing heavy, so that help, listing, dry runs and mistakes come back at once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation import config_file, devices
from mm_capacity.evaluation.arguments import DTYPES, MODES, PROGRESS
from mm_capacity.evaluation.placement_options import placement_options
from mm_capacity.evaluation.plan import (
    BASELINE,
    EMBEDDED_BATCH_SIZE,
    EMBEDDED_DATA,
    EMBEDDED_MODEL,
    MODALITIES,
    ORDERS,
    PAPER_MODEL,
    WINDOWS,
    DataChoice,
    ModelChoice,
    Plan,
    PolicyChoice,
    Settings,
    policy_grid,
)
from mm_capacity.evaluation.policy_options import policy_fields
from mm_capacity.evaluation.suggest import check_known
from mm_capacity.evaluation.values import (
    as_list,
    check_work_dir,
    flag,
    folder,
    parse_gamma,
    unique_names,
    whole_number,
)

FULL_GRID: dict[str, list[Any]] = {"modality": list(MODALITIES), "gamma": ["0.5", "1.0", "1.5"]}
SMALL_GRID: dict[str, list[Any]] = {"modality": ["image-first"], "gamma": ["0.5", "1.0"]}
DEFAULT_POLICIES = ["token-drop", "expanded-drop"]


def make_plan(args: argparse.Namespace, grid: Mapping[str, Sequence[Any]] | None = None) -> Plan:
    """Turns parsed options (and their config file) into a plan.

    Args:
        args: from :func:`parse`.
        grid: default values of ``modality`` and ``gamma``; None for the runner's own rule
            (the full grid without ``--model``, ``--data`` and ``--config``, else a small one).

    Raises:
        UserError: a value that cannot work; the line names it and what would.
    """
    options = {key: value for key, value in vars(args).items() if value is not None}
    models: tuple[ModelChoice, ...] | None = None
    data: tuple[DataChoice, ...] | None = None
    if args.config is not None:
        models, data, from_file = _read_config(args, options)
        options = {**from_file, **options}

    if data is None and "data" in options:
        names = unique_names("--data", options["data"])
        data = tuple(DataChoice(name, name) for name in names)
    given = models is not None or data is not None or "model" in options or "model_path" in options
    data = data or tuple(DataChoice(name, name) for name in EMBEDDED_DATA)
    models = models or _models(options, embedded=all(d.embedded for d in data))

    models, data = _flags_win(args, models, data)

    embedded = all(m.embedded for m in models) and all(d.embedded for d in data)
    settings = _settings(options, default_batch=EMBEDDED_BATCH_SIZE if embedded else 1)
    for choice in models:
        check_known("dtype", choice.dtype or settings.dtype, DTYPES)
        devices.check_name(choice.device or settings.device)
    if settings.jobs > len(data):
        raise UserError(
            f"--jobs {settings.jobs}: each process works on data sets of its own, and there "
            f"{'is 1' if len(data) == 1 else f'are {len(data)}'}; give at most {len(data)}"
        )
    if settings.fresh and settings.mode == "eval":
        raise UserError("--fresh with --mode eval would score nothing: use --mode all")
    policies = _policies(options, grid or (SMALL_GRID if given else FULL_GRID), settings)
    return Plan(models, data, policies, settings)


def _flags_win(
    args: argparse.Namespace, models: tuple[ModelChoice, ...], data: tuple[DataChoice, ...]
) -> tuple[tuple[ModelChoice, ...], tuple[DataChoice, ...]]:
    """What a flag says goes for every model and data set, whatever the config file says."""
    models = tuple(
        replace(
            choice,
            max_new_tokens=choice.max_new_tokens if args.max_new_tokens is None else None,
            dtype=choice.dtype if args.dtype is None else None,
            device=choice.device if args.device is None else None,
        )
        for choice in models
    )
    if args.limit is not None:
        data = tuple(replace(choice, limit=None) for choice in data)
    return models, data


def _settings(options: Mapping[str, Any], *, default_batch: int) -> Settings:
    def number(name: str, *, least: int = 1) -> int | None:
        flag_name = "--" + name.replace("_", "-")
        value = options.get(name)
        return None if value is None else whole_number(flag_name, value, least=least)

    def text(name: str, default: str) -> str:
        value = options.get(name, default)
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"--{name.replace('_', '-')} must be text, got {value!r}")
        return value

    dtype, device = text("dtype", "auto"), text("device", "auto")
    check_known("dtype", dtype, DTYPES)
    devices.check_name(device)
    return Settings(
        work_dir=check_work_dir(options.get("work_dir", "outputs")),
        device=device,
        dtype=dtype,
        batch_size=number("batch_size") or default_batch,
        ep_size=number("ep_size"),
        max_new_tokens=number("max_new_tokens"),
        limit=number("limit"),
        seed=number("seed", least=0) or 0,
        mode=check_known("mode", text("mode", "all"), MODES),
        judge=text("judge", "exact_matching"),
        fresh=flag("fresh", options),
        check=flag("check", options),
        use_cache=not flag("no_cache", options),
        trust_remote_code=flag("trust_remote_code", options),
        lmu_data=folder("--lmu-data", options["lmu_data"]) if "lmu_data" in options else None,
        progress=check_known("progress display", text("progress", "auto"), PROGRESS),
        jobs=number("jobs") or 1,
    )


def _read_config(
    args: argparse.Namespace, options: Mapping[str, Any]
) -> tuple[tuple[ModelChoice, ...] | None, tuple[DataChoice, ...] | None, dict[str, Any]]:
    for taken in ("model", "model_path", "data"):
        if taken in options:
            name = "--" + taken.replace("_", "-")
            raise UserError(f"{name} cannot be used with --config: the file names models and data")
    content = config_file.read_config(Path(args.config))
    models = config_file.model_choices(content["model"]) if "model" in content else None
    data = config_file.data_choices(content["data"]) if "data" in content else None
    hidden = {"config", "model", "model_path", "data", "dry_run", "list"}
    section = config_file.capacity_options(
        content.get("capacity", {}), sorted(set(vars(args)) - hidden)
    )
    if all([flag("fresh", section), flag("resume", section)]):  # both are looked at
        raise UserError("config: 'fresh' and 'resume' contradict each other: give one of them")
    if "fresh" in options or "resume" in options:  # a flag overrides its opposite in the file
        section = {k: v for k, v in section.items() if k not in ("fresh", "resume")}
    return models, data, section


def _models(options: Mapping[str, Any], *, embedded: bool) -> tuple[ModelChoice, ...]:
    path = options.get("model_path")
    if "model" not in options:
        if path is not None:
            return (ModelChoice(_shown(path), path),)
        name = EMBEDDED_MODEL if embedded else PAPER_MODEL
        return (ModelChoice(name, name),)
    names = unique_names("--model", options["model"])
    if path is not None:
        if len(names) > 1:
            raise UserError(f"--model-path goes with one --model, got {len(names)}")
        return (ModelChoice(names[0], path, local_copy=True),)
    shown = [_shown(name) for name in names]
    if len(set(shown)) < len(shown):
        shown = names
    return tuple(ModelChoice(s, name) for s, name in zip(shown, names, strict=True))


def _shown(source: str) -> str:
    """A path is shown by its last part, anything else as it is."""
    path = Path(source).expanduser()
    return path.resolve().name or source if path.exists() else source


def _policies(
    options: Mapping[str, Any], grid: Mapping[str, Sequence[Any]], settings: Settings
) -> tuple[PolicyChoice, ...]:
    from mm_capacity.policies import POLICIES

    names = as_list("policy", options.get("policy", DEFAULT_POLICIES))
    for name in names:
        check_known("policy", name, POLICIES)
    gammas = [parse_gamma(value) for value in as_list("gamma", options.get("gamma", grid["gamma"]))]
    modalities = as_list("modality", options.get("modality", grid["modality"]))
    orders = as_list("order", options.get("order", ["score"]))
    window = options.get("window", "batch" if settings.batch_size == 1 else "sequence")
    for value in modalities:
        check_known("modality", value, MODALITIES)
    for value in orders:
        check_known("order", value, ORDERS)
    check_known("window", window, WINDOWS)
    extra = _policy_args(options.get("policy_arg"), [n for n in names if n != BASELINE.name])
    return policy_grid(
        names,
        gammas,
        {"modality": modalities, "order": orders},
        fixed={"window": window, **({"seed": settings.seed} if settings.seed else {}), **extra},
        baseline=not flag("no_baseline", options),
        placement=placement_options(options, settings.ep_size),
    )


def _policy_args(given: Any, names: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` words, or a dict from a config file, to options."""
    if given is None:
        return {}
    if isinstance(given, Mapping):
        parsed = dict(given)
    else:
        parsed = {}
        for word in as_list("policy_arg", given):
            if not isinstance(word, str):
                raise UserError(f"--policy-arg wants KEY=VALUE, got {word!r}")
            key, equals, text = word.partition("=")
            if not equals:
                raise UserError(f"--policy-arg wants KEY=VALUE, got {word!r}")
            try:
                parsed[key] = json.loads(text)
            except json.JSONDecodeError:
                parsed[key] = text
    known = set().union(*(policy_fields(name) for name in names)) if names else set()
    for key in parsed:
        if key in ("gamma", "modality", "order", "window", "seed"):
            raise UserError(f"--policy-arg {key}: use --{key}")
        check_known(f"option of policy {', '.join(names) or BASELINE.name}", key, known)
    return parsed
