"""VLMEvalKit's own model object, asked under a capacity policy.

The wrapper writes the prompt, runs the processor, calls ``generate`` and cleans the answer up, so
all of that is as in VLMEvalKit's published numbers. Here its mixture of experts is found, decoding
is made greedy, and the forward passes of the first questions are watched.
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation.vlmeval_models import WrapperChoice, way_out
from mm_capacity.evaluation.vlmeval_process import first_line, preserved_process
from mm_capacity.evaluation.wrappers_find import Found, find_moe
from mm_capacity.evaluation.wrappers_greedy import Decoding, plain
from mm_capacity.evaluation.wrappers_loading import Loading
from mm_capacity.evaluation.wrappers_passes import PassWatch


@dataclass
class WrappedVLM:
    """A wrapper, in place of :class:`vlm_adapters.base.LoadedVLM`.

    Attributes:
        wrapper: VLMEvalKit's model object.
        choice: which one, and with which arguments.
        found: the mixture of experts in it.
        loading: how it was loaded.
        decoding: makes it greedy.
        watch: forward passes of the first questions.
        printed: what the wrapper printed with its last answer.
    """

    wrapper: Any
    choice: WrapperChoice
    found: Found
    loading: Loading
    decoding: Decoding
    watch: PassWatch
    extra: dict[str, Any] = field(default_factory=dict)
    printed: str = ""

    @property
    def model(self) -> Any:
        return self.found.model

    @property
    def adapter(self) -> Any:
        return self.found.adapter

    def respond(
        self, inputs: Mapping[str, Any], *, max_new_tokens: int | None, use_cache: bool
    ) -> list[str]:
        """The answer to one question, as the wrapper gives it.

        Args:
            inputs: from :class:`~mm_capacity.evaluation.wrappers_questions.WrapperPreparer`.
            max_new_tokens: longest answer in tokens, None for the wrapper's own.
            use_cache: False switches the KV cache off; True leaves it to the wrapper.

        Raises:
            UserError: the wrapper needs a package that is not installed, or answers with
                something else than text.
            Exception: what the model raised, also where the wrapper would have kept it silent.
        """
        message = copy.deepcopy(inputs["message"])  # some wrappers write into it
        ask = generate_of(self.wrapper)
        try:
            with (
                quiet() as printed,
                self.decoding.greedy(
                    max_new_tokens=max_new_tokens, use_cache=None if use_cache else False
                ),
                self.watch.question(),
            ):
                text = ask(message, dataset=inputs["dataset"])
        except ImportError as error:
            raise self._refused(missing_package(error)) from error
        if self.decoding.error is not None:
            raise self.decoding.error
        self.printed = printed.getvalue()
        if not isinstance(text, str):
            raise self._refused(f"answered with {type(text).__name__} instead of text")
        return [text]

    def prepare(self, messages: Any) -> Any:
        """A wrapper writes its prompts itself.

        Raises:
            UserError: always; other callers of a model want the checkpoint.
        """
        raise self._refused(f"writes its prompts itself; here pass --model {self.choice.source}")

    def check_tagged(self, inputs: Mapping[str, Any], frame: Any) -> None:
        """The policy must have seen the answer's forward passes, with image tokens in them.

        Args:
            inputs: as for :meth:`respond`.
            frame: load counts of the answer (``trace.frame()``).

        Raises:
            UserError: it has not.
        """
        if not len(frame):
            said = " ".join(self.printed.split())[-200:]
            raise self._refused(
                f"answered without a prefill of the model in {self.found.path!r}, which is the "
                "one under the policy" + (f"; it printed: {said}" if said else "")
            )
        images = sum(part["type"] == "image" for part in inputs["message"])
        if images and not frame["modality"].isin(["image", "video"]).any():
            raise self._refused(
                f"was given {images} image(s), but no token of its prompt is tagged as image"
            )

    def record(self) -> dict[str, Any]:
        """For run.json; grows with the first questions."""
        return {
            "name": self.choice.name,
            "class": self.choice.class_name,
            "arguments": {key: plain(value) for key, value in self.choice.arguments.items()},
            "changed_arguments": dict(self.choice.changed),
            "changed_loading": list(self.loading.changes),
            "model_at": self.found.path,
            "model_class": type(self.model).__name__,
            "adapter": self.adapter.name,
            "decoding": self.decoding.record(),
            "passes": self.watch.record(),
        }

    def notes(self) -> list[str]:
        """What the record's warnings should say, one line each."""
        changed = [f"{key}: {was} -> False" for key, was in self.choice.changed.items()]
        changed += self.loading.changes
        start = [f"the wrapper was built with changes: {'; '.join(changed)}"] if changed else []
        return [*start, *self.decoding.notes(), *self.watch.notes()]

    def _refused(self, reason: str) -> UserError:
        return UserError(f"{self.choice.name}: VLMEvalKit's {self.choice.class_name} {reason}")


def build(choice: WrapperChoice, *, device: str, dtype: str, trust_remote_code: bool) -> WrappedVLM:
    """Builds a wrapper and finds its mixture of experts.

    Args:
        choice: which wrapper.
        device: where its model goes: "cpu", "cuda", "cuda:1" or "auto".
        dtype: "auto" for the wrapper's own, or a torch dtype's name.
        trust_remote_code: run code that the checkpoint brings along, where the wrapper asks.

    Raises:
        UserError: it cannot be built or has no model that a policy can act on; one line.
    """
    for package, install in choice.packages:
        if not installed(package):
            raise _not_built(choice, f"needs the package {package} (pip install {install})")
    loading = Loading(device, dtype, trust_remote_code)
    try:
        with quiet(hide_warnings=True), loading.applied():
            wrapper = choice.wrapper(**choice.arguments)
    except Exception as error:
        raise _not_built(choice, reason_of(error, trust_remote_code)) from error
    found = find_moe(wrapper, choice.name)
    found.adapter.after_loading(found.model)
    _check_placed(choice, found, device, dtype)
    _move_inputs(wrapper, found, loading)
    decoding = Decoding(wrapper, found.generators())
    decoding.scan()
    watch = PassWatch(found.adapter.entry(found.model))
    return WrappedVLM(wrapper, choice, found, loading, decoding, watch)


def _not_built(choice: WrapperChoice, reason: str) -> UserError:
    return UserError(
        f"{choice.name}: VLMEvalKit's {choice.class_name} {reason}; what works: {way_out(choice)}"
    )


def _check_placed(choice: WrapperChoice, found: Found, device: str, dtype: str) -> None:
    """A wrapper may move or cast its model after loading it."""
    parameter = next(found.model.parameters())
    kind = device.partition(":")[0]
    if kind != "auto" and parameter.device.type != kind:
        raise _not_built(choice, f"puts its model on {parameter.device} itself, not on {device}")
    if dtype != "auto" and str(parameter.dtype) != f"torch.{dtype}":
        raise _not_built(choice, f"casts its model to {parameter.dtype} itself, not to {dtype}")


def _move_inputs(wrapper: Any, found: Found, loading: Loading) -> None:
    """Some wrappers keep the device of their inputs as text, whatever their model's is."""
    import torch

    asked = getattr(wrapper, "device", None)
    there = next(found.model.parameters()).device
    if isinstance(asked, (str, torch.device)) and torch.device(asked) != there:
        if torch.device(asked).type == there.type and torch.device(asked).index is None:
            if there.index == 0:
                return
        wrapper.device = str(there)
        loading.changes[f"device of inputs: {asked} -> {there}"] = None


def reason_of(error: Exception, trust_remote_code: bool) -> str:
    """Why a constructor failed, in words that follow the wrapper's name."""
    import traceback

    import torch

    if isinstance(error, ImportError):
        return missing_package(error)
    text = first_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    code = (frames[-1].line or "") if frames else ""
    gpu = any(word in f"{text} {code}".lower() for word in ("cuda", "gpu", "nvidia"))
    if gpu and not torch.cuda.is_available():
        return f"needs a CUDA device and there is none here ({text})"
    if "trust_remote_code" in str(error) and not trust_remote_code:
        return "needs the checkpoint's own code, which is run only with --trust-remote-code"
    return f"cannot be built: {text}"


def missing_package(error: ImportError) -> str:
    """The same for an import that failed."""
    name = (error.name or "").partition(".")[0]
    return f"needs the package {name} ({first_line(error)})" if name else f"fails: {error}"


def installed(package: str) -> bool:
    """Whether a package can be imported."""
    from importlib.util import find_spec

    return find_spec(package) is not None


def generate_of(wrapper: Any) -> Any:
    """``generate_inner`` where ``generate`` only checks and reads paths out of the texts.

    VLMEvalKit's ``generate`` looks whether a text names a file or an address; texts of a data
    set are none here.
    """
    own = getattr(type(wrapper), "generate", None)
    home = getattr(own, "__module__", "")
    if home == "vlmeval.vlm.base" and hasattr(wrapper, "generate_inner"):
        return wrapper.generate_inner
    return wrapper.generate


@contextlib.contextmanager
def quiet(*, hide_warnings: bool = False) -> Iterator[io.StringIO]:
    """The process stays as it is, and what is printed is kept off the terminal."""
    with preserved_process(), contextlib.redirect_stdout(io.StringIO()) as printed:
        if hide_warnings:
            warnings.simplefilter("ignore")
        yield printed
