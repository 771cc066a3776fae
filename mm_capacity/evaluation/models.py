"""A model of the plan: what it is before it is loaded, and loading it once."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation.environment import folder_digest
from mm_capacity.evaluation.plan import (
    DEFAULT_EP_SIZE,
    EMBEDDED_MODEL,
    ModelChoice,
    Settings,
)
from mm_capacity.evaluation.prompts import prompts_for
from mm_capacity.evaluation.prompts.base import Prompts
from mm_capacity.evaluation.suggest import check_known, unknown

EMBEDDED_FOLDERS = {EMBEDDED_MODEL: Path(__file__).resolve().parents[1] / "data" / "digits_model"}
"""Models inside this package: name -> checkpoint folder."""


class ModelHandle:
    """One model of the plan; loaded when its weights are first needed.

    Args:
        choice: which model.
        settings: device, dtype and whether remote code may run.
    """

    def __init__(self, choice: ModelChoice, settings: Settings) -> None:
        self.choice = choice
        self.settings = settings
        self.source = resolve_source(choice.source)
        check_wrapper_class(choice)

    @property
    def requested_dtype(self) -> str:
        return self.choice.dtype or self.settings.dtype

    @cached_property
    def requested_device(self) -> str:
        """The device; "auto" becomes the accelerator if there is one, else the CPU.

        Raises:
            UserError: the device is not there.
        """
        import torch

        wanted = self.choice.device or self.settings.device
        if wanted == "auto":
            if torch.cuda.device_count() > 1:
                return "auto"  # several: let accelerate place the layers
            return "cuda" if torch.cuda.is_available() else "cpu"
        kind, _, number = wanted.partition(":")
        if kind == "cpu":
            return wanted
        backend = getattr(torch, kind, None)
        if backend is None or not backend.is_available():
            raise UserError(f"device {wanted!r} is not available here: use --device cpu")
        if number and int(number) >= backend.device_count():
            raise UserError(f"device {wanted!r} does not exist: there are {backend.device_count()}")
        return wanted

    @property
    def device_type(self) -> str:
        device = self.requested_device
        return "cuda" if device == "auto" else device.partition(":")[0]

    @cached_property
    def digest(self) -> str:
        """Names the weights: contents of the folder, or the hub's commit."""
        if self.source.startswith("tiny:"):
            return self.source
        folder = Path(self.source)
        if folder.is_dir():
            return folder_digest(folder)
        commit = cached_commit(self.source)
        if commit is None:
            config = self.vlm.model.config
            commit = cached_commit(self.source) or getattr(config, "_commit_hash", None)
            if commit is None:
                return hashlib.sha256(f"{self.source}\n{config}".encode()).hexdigest()[:16]
        return f"{self.source}@{commit}"

    @cached_property
    def vlm(self) -> Any:
        """The loaded model.

        Raises:
            UserError: it cannot be loaded, with the reason in one line.
        """
        from vlm_adapters import load_model

        options = self.prompts.load_options
        try:
            vlm = load_model(
                self.source,
                dtype=self.requested_dtype,
                device=self.requested_device,
                trust_remote_code=self.settings.trust_remote_code,
                **options,
            )
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise self._not_loaded(error) from error
        if options and self.source.startswith("tiny:"):
            vlm = replace(vlm, extra={**vlm.extra, **options})
        return vlm

    @cached_property
    def family(self) -> str:
        """Registry name of the model's adapter, told from its configuration alone.

        Raises:
            UserError: the configuration is not there, or no adapter takes it.
        """
        if self.source.startswith("tiny:"):
            return self.source.removeprefix("tiny:")
        from vlm_adapters.loading import read_config
        from vlm_adapters.registry import adapter_class_for

        try:
            return adapter_class_for(read_config(self.source)).name
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise self._not_loaded(error) from error

    @cached_property
    def prompts(self) -> Prompts:
        """How this family is asked.

        Raises:
            UserError: as :attr:`family`.
        """
        return prompts_for(self.family)

    def _not_loaded(self, error: Exception) -> UserError:
        return UserError(f"cannot load model {self.choice.name!r}: {one_line(error)}")

    @cached_property
    def ep_size(self) -> int:
        """R: as asked for, else the greatest number up to the default that divides E.

        Raises:
            UserError: the number asked for does not divide the experts of a layer.
        """
        experts = {layer.num_experts for layer in self.vlm.adapter.moe_layers(self.vlm.model)}
        wanted = self.settings.ep_size
        if wanted is not None:
            for count in sorted(experts):
                if count % wanted:
                    raise UserError(
                        f"--ep-size {wanted} does not divide the {count} experts of a layer of "
                        f"{self.choice.name!r}"
                    )
            return wanted
        sizes = range(DEFAULT_EP_SIZE, 0, -1)
        return next(size for size in sizes if all(count % size == 0 for count in experts))

    def release(self) -> None:
        """Lets go of the loaded model."""
        if self.__dict__.pop("vlm", None) is not None and self.device_type == "cuda":
            import torch

            torch.cuda.empty_cache()


def resolve_source(source: str) -> str:
    """What to load: an embedded model's folder, a path, a hub id, or ``tiny:FAMILY``.

    Raises:
        UserError: none of them, nor a name that VLMEvalKit knows.
    """
    if source in EMBEDDED_FOLDERS:
        folder = EMBEDDED_FOLDERS[source]
        if not (folder / "config.json").exists():
            raise UserError(f"the embedded model {source!r} is missing: no checkpoint in {folder}")
        return str(folder)
    if source.startswith("tiny:"):
        return source
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise UserError(f"{source!r} is not a checkpoint folder: it has no config.json")
        return str(path)
    if path.exists():
        raise UserError(f"{source!r} is a file: --model wants the checkpoint's folder")
    if source.startswith(("/", "./", "../", "~")):
        raise UserError(f"model folder {source!r} does not exist")
    return source if "/" in source else wrapped_source(source)


def wrapped_source(name: str) -> str:
    """The hub id behind one of VLMEvalKit's model names.

    Raises:
        UserError: no such name, or no mixture of experts behind it.
    """
    from mm_capacity.evaluation.vlmeval_models import find_wrapper, moe_model_names, resolve_model

    if find_wrapper(name) is None:
        raise unknown("model", name, [*EMBEDDED_FOLDERS, *moe_model_names()])
    return resolve_model(name)


def check_wrapper_class(choice: ModelChoice) -> None:
    """A config file's ``class`` of a model must be one of VLMEvalKit's.

    Raises:
        UserError: it is not.
    """
    if choice.wrapper_class is None:
        return
    from mm_capacity.evaluation.vlmeval_process import import_vlmeval

    import_vlmeval()
    import vlmeval.vlm

    classes = [name for name, value in vars(vlmeval.vlm).items() if isinstance(value, type)]
    check_known(f"class of model {choice.name!r}", choice.wrapper_class, classes)


def cached_commit(hub_id: str) -> str | None:
    """Commit of a hub model in the local cache, None when it is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(hub_id, "config.json")
    except HFValidationError:
        return None
    return Path(path).parent.name if isinstance(path, str) else None


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception's message without line breaks, cut to ``limit`` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
