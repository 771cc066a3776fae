"""A model of the plan: what it is before it is loaded, and loading it once."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation import devices
from mm_capacity.evaluation.environment import folder_digest
from mm_capacity.evaluation.generate import Preparer
from mm_capacity.evaluation.model_sources import resolve_source, wrapper_of
from mm_capacity.evaluation.plan import (
    DEFAULT_EP_SIZE,
    DataChoice,
    ModelChoice,
    Plan,
    Settings,
)
from mm_capacity.evaluation.prompts import prompts_for
from mm_capacity.evaluation.prompts.base import Asked, Prompts

if TYPE_CHECKING:
    pass


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
        self.wrapper = wrapper_of(choice, self.source)
        if self.wrapper is not None and settings.batch_size > 1:
            raise UserError(
                f"{choice.name!r} is asked through VLMEvalKit's {self.wrapper.class_name}, one "
                f"question at a time: --batch-size {settings.batch_size} needs the checkpoint "
                f"itself (--model {self.wrapper.source})"
            )

    @property
    def requested_dtype(self) -> str:
        return self.choice.dtype or self.settings.dtype

    @cached_property
    def requested_device(self) -> str:
        """The device; "auto" becomes the accelerator if there is one, else the CPU.

        Raises:
            UserError: the device is not there.
        """
        return devices.find(self.choice.device or self.settings.device)

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
        """The loaded model, or VLMEvalKit's wrapper around it.

        Raises:
            UserError: it cannot be loaded, with the reason in one line.
        """
        if self.wrapper is not None:
            from mm_capacity.evaluation.wrappers import build

            return build(
                self.wrapper,
                device=self.requested_device,
                dtype=self.requested_dtype,
                trust_remote_code=self.settings.trust_remote_code,
            )
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
        check_chat_template(vlm, self.choice.name)
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
        if self.wrapper is not None:
            from mm_capacity.evaluation.wrappers_questions import WrapperPrompts

            return WrapperPrompts()
        return prompts_for(self.family)

    def preparer(self, data: Any, batches: Any) -> Preparer:
        """Makes the model's inputs of a data set's questions.

        Args:
            data: the opened data set.
            batches: indices of the questions of each batch.
        """
        asked = Asked(data, self.prompts)
        if self.wrapper is not None:
            from mm_capacity.evaluation.wrappers_questions import WrapperPreparer

            return WrapperPreparer(self, asked, batches)
        return Preparer(self, asked, batches)

    def new_tokens(self, plan: Plan, data: DataChoice) -> int | None:
        """Longest answer in tokens; None for what VLMEvalKit's wrapper has."""
        if self.wrapper is not None and not data.embedded:
            given = (self.choice.max_new_tokens, self.settings.max_new_tokens)
            return next((tokens for tokens in given if tokens is not None), None)
        return plan.new_tokens(self.choice, data, self.prompts.max_new_tokens)

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


def check_chat_template(vlm: Any, name: str) -> None:
    """A native model is asked through its processor's chat template, so there must be one.

    Raises:
        UserError: there is none.
    """
    from vlm_adapters.generic import NativeAdapter

    if not isinstance(vlm.adapter, NativeAdapter):
        return
    template = getattr(vlm.processor, "chat_template", "")  # stand-ins of tiny models have none
    if template is None or (isinstance(template, dict) and "default" not in template):
        raise UserError(
            f"model {name!r}: its {type(vlm.processor).__name__} has no chat template, so nothing "
            "says how to put a question to it: take an instruction-tuned checkpoint, or add "
            "chat_template.jinja to a local copy"
        )


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
