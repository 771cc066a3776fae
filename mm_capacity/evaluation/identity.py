"""What names a run, and what its record says from the start."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_capacity.evaluation import environment
from mm_capacity.evaluation.models import ModelHandle
from mm_capacity.evaluation.plan import DataChoice, Plan
from mm_capacity.evaluation.records import FORMAT

if TYPE_CHECKING:
    from mm_capacity.evaluation.single import Run

POLICY_KEYS = ("policy", "policy_files")


def identity_of(
    plan: Plan, handle: ModelHandle, choice: DataChoice, data: Any, policy: Any
) -> dict[str, Any]:
    """Everything that can change an answer; its hash names the run's folder.

    The runs of one data set differ in the entries POLICY_KEYS only, so the hash of the rest
    tells which runs may be compared.
    """
    settings = plan.settings
    wrapper = {} if handle.wrapper is None else {"wrapper": handle.wrapper.identity}
    return {
        "format": FORMAT,
        "model": handle.digest,
        "data": choice.dataset,
        "data_digest": data.digest or frame_digest(data.frame),
        "policy": repr(policy),
        "policy_files": policy_files(policy),
        "limit": plan.limit(choice),
        "batch_size": settings.batch_size,
        "ep_size": settings.ep_size or "auto",
        "trace_window": plan.trace_window,
        "prompts": handle.prompts.name,
        **wrapper,
        "max_new_tokens": handle.new_tokens(plan, choice),
        "use_cache": settings.use_cache,
        "dtype": handle.requested_dtype,
        "device": handle.device_type,
        "seed": settings.seed,
        "versions": environment.versions(),
    }


def frame_digest(frame: Any) -> str:
    """Digest of the questions, for data that did not come from a table file."""
    return hashlib.sha256(frame.to_csv(index=False).encode()).hexdigest()


def policy_files(policy: Any) -> dict[str, str]:
    """Digests of the files that a policy's options name (calibration tables), nested ones too."""
    named = {option.name: getattr(policy, option.name) for option in fields(policy)}
    return {
        name: environment.file_digest(Path(value).expanduser())
        for name, value in _leaves(named)
        if isinstance(value, str) and len(value) < 4096 and Path(value).expanduser().is_file()
    }


def _leaves(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def opening_record(run: Run, ep_size: int) -> dict[str, Any]:
    """What run.json says from the start.

    Args:
        run: the run; its model is loaded.
        ep_size: R.
    """
    handle, data = run.handle, run.data
    parameters = next(handle.vlm.model.parameters())
    wrapper = {} if handle.wrapper is None else {"wrapper": handle.vlm.record()}
    return {
        "format": FORMAT,
        "hash": run.hash,
        "setting": run.setting_hash,
        "identity": run.identity,
        "model": handle.choice.name,
        "model_source": handle.choice.source,
        **wrapper,
        "data": run.choice.name,
        "data_official": data.official,
        "policy": {
            "name": run.policy_choice.name,
            "options": dict(run.policy_choice.options),
            "repr": repr(run.policy),
            "scope": getattr(run.policy, "scope", None),
        },
        "ep_size": ep_size,
        "arguments": {
            k: str(v) if isinstance(v, Path) else v for k, v in vars(run.plan.settings).items()
        },
        "versions": run.identity["versions"],
        "git_commit": environment.git_commit(),
        "device": str(parameters.device),
        "dtype": str(parameters.dtype).removeprefix("torch."),
        "machine": environment.machine(parameters.device),
        "seed": run.plan.settings.seed,
        "questions": len(run.indices),
        "warnings": list(data.warnings),
        "answers_complete": False,
    }
