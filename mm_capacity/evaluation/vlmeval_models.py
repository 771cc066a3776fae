"""VLMEvalKit's model names: which wrapper and checkpoint stand behind one, and can it run here."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation.suggest import check_known, unknown
from mm_capacity.evaluation.vlmeval_process import import_vlmeval

# Hub ids of mixture-of-experts VLMs among VLMEvalKit's models: a size with active parameters
# ("30B-A3B"), or one of the families that do not write it.
MOE_CHECKPOINT = re.compile(
    r"-\d+B-A\d+B|-A\d+B-|MolmoE|deepseek-vl2|DeepSeek-OCR|GLM-4\.[56]V|Llama-4-|rhymes-ai/Aria",
    re.IGNORECASE,
)
EXAMPLES = ("Qwen3-VL-30B-A3B-Instruct", "molmoE-1B-0924", "deepseek_vl2_tiny")

PORTED = {"molmo": "molmoe", "DeepSeekVL2": "deepseek_vl2"}
"""Wrappers that need the checkpoint's own code or package: these families run as ports, asked in
the wrapper's words (:mod:`mm_capacity.evaluation.prompts`)."""

SERVER_FLAGS = ("use_vllm", "use_lmdeploy")
"""Arguments that put the model into a server, out of the reach of hooks."""

PACKAGES = {
    "Qwen3VLChat": (("qwen_vl_utils", "qwen-vl-utils"), ("qwen_omni_utils", "qwen-omni-utils")),
}
"""Wrapper -> (module, distribution) that it imports when asked, for its VL and omni models."""


@dataclass(frozen=True)
class WrapperChoice:
    """A wrapper to be built.

    Attributes:
        name: as the user named it.
        wrapper: VLMEvalKit's class.
        arguments: of its constructor.
        changed: flags that VLMEvalKit sets and that are switched off here -> their value there.
        hub_id: the checkpoint behind the name, if it has one.
        local: whether ``arguments`` point to a local copy.
    """

    name: str
    wrapper: Any
    arguments: Mapping[str, Any]
    changed: Mapping[str, Any] = field(default_factory=dict)
    hub_id: str | None = None
    local: bool = False

    @property
    def class_name(self) -> str:
        return getattr(self.wrapper, "__name__", str(self.wrapper))

    @property
    def source(self) -> str:
        """Folder or hub id of the checkpoint."""
        return str(self.arguments["model_path"])

    @property
    def packages(self) -> tuple[tuple[str, str], ...]:
        """Packages that asking it needs."""
        needed = PACKAGES.get(self.class_name, ())
        return needed[1:] if "omni" in self.source.lower() else needed[:1]

    @property
    def identity(self) -> dict[str, Any]:
        """What of it can change an answer; the weights have their own digest."""
        rest = {key: repr(value) for key, value in self.arguments.items() if key != "model_path"}
        return {"class": self.class_name, "arguments": dict(sorted(rest.items()))}


def find_wrapper(name: str) -> dict[str, Any] | None:
    """What VLMEvalKit has under a model name.

    Args:
        name: exactly as in VLMEvalKit's ``supported_VLM``.

    Returns:
        None if it has nothing; otherwise ``name``, ``wrapper`` (class name), ``hub_id`` (None
        for a model behind an API) and ``moe`` (whether that checkpoint is known to be a
        mixture of experts).
    """
    import_vlmeval()
    from vlmeval.config import supported_VLM

    if name not in supported_VLM:
        return None
    entry = supported_VLM[name]
    wrapper = getattr(entry, "func", entry)
    hub_id = getattr(entry, "keywords", {}).get("model_path")
    return {
        "name": name,
        "wrapper": getattr(wrapper, "__name__", str(wrapper)),
        "hub_id": hub_id,
        "moe": bool(hub_id and MOE_CHECKPOINT.search(hub_id)),
    }


def moe_model_names() -> list[str]:
    """VLMEvalKit's model names around mixture-of-experts checkpoints."""
    import_vlmeval()
    from vlmeval.config import supported_VLM

    found = (find_wrapper(name) for name in supported_VLM)
    return sorted(entry["name"] for entry in found if entry and entry["moe"])


def resolve_model(name: str) -> str:
    """The hub id behind a VLMEvalKit model name.

    Raises:
        UserError: no such name, or no mixture-of-experts checkpoint behind it.
    """
    entry = find_wrapper(name)
    if entry is None:
        raise unknown("model", name, moe_model_names())
    if not entry["moe"]:
        what = (
            f"around {entry['hub_id']}, which is no mixture of experts known here"
            if entry["hub_id"]
            else "behind an API and cannot be run here"
        )
        raise UserError(
            f"{name} is VLMEvalKit's {entry['wrapper']} {what}; mixtures of experts are, among "
            f"others, {', '.join(EXAMPLES)}"
        )
    return entry["hub_id"]


def wrapper_choice(
    name: str, *, folder: str | None = None, wrapper_class: str | None = None
) -> WrapperChoice | None:
    """The wrapper behind a model name.

    Args:
        name: VLMEvalKit's; with ``wrapper_class`` any.
        folder: a local copy of the weights, or another checkpoint of the same family.
        wrapper_class: a class of VLMEvalKit (from a config file), which goes before the name.

    Returns:
        None for the families that run as ports, and for a name with a folder that is none of
        VLMEvalKit's: then it is the user's own name for that folder.

    Raises:
        UserError: no such name or class, or none that can be run here.
    """
    entry = find_wrapper(name)
    if entry is None and wrapper_class is None:
        if folder is not None:
            return None
        raise unknown("model", name, moe_model_names())
    wrapper, keywords = _wrapper_of(name, wrapper_class)
    class_name = getattr(wrapper, "__name__", str(wrapper))
    if class_name in PORTED:
        return None
    if str(getattr(wrapper, "__module__", "")).startswith("vlmeval.api"):
        raise UserError(
            f"{name} is VLMEvalKit's {class_name} behind an API and cannot be run here; mixtures "
            f"of experts that can are, among others, {', '.join(EXAMPLES)}"
        )
    hub_id = keywords.get("model_path")
    if folder is None:
        resolve_model(name)
    if "model_path" not in inspect.signature(wrapper).parameters:
        raise UserError(
            f"{name}: VLMEvalKit's {class_name} takes no 'model_path', so its checkpoint cannot "
            "be named; pass the checkpoint itself with --model PATH_OR_HUB_ID"
        )
    changed = {flag: keywords[flag] for flag in SERVER_FLAGS if keywords.get(flag)}
    arguments = {**keywords, **dict.fromkeys(changed, False)}
    if folder is not None:
        arguments["model_path"] = folder
    return WrapperChoice(name, wrapper, arguments, changed, hub_id, folder is not None)


def _wrapper_of(name: str, wrapper_class: str | None) -> tuple[Any, dict[str, Any]]:
    """The class, and the arguments that VLMEvalKit has for it under that name."""
    import vlmeval.vlm
    from vlmeval.config import supported_VLM

    entry = supported_VLM.get(name)
    wrapper = getattr(entry, "func", entry)
    keywords = dict(entry.keywords) if isinstance(entry, functools.partial) else {}
    if wrapper_class is None:
        return wrapper, keywords
    check_wrapper_class(name, wrapper_class)
    asked = getattr(vlmeval.vlm, wrapper_class)
    return asked, keywords if asked is wrapper else {}


def check_wrapper_class(name: str, wrapper_class: str) -> None:
    """A config file's ``class`` of a model must be one of VLMEvalKit's.

    Raises:
        UserError: it is not.
    """
    import_vlmeval()
    import vlmeval.vlm

    classes = [key for key, value in vars(vlmeval.vlm).items() if isinstance(value, type)]
    check_known(f"class of model {name!r}", wrapper_class, classes)


def way_out(choice: WrapperChoice) -> str:
    """What to do when a wrapper cannot be used."""
    return (
        f"--model {choice.source} without the wrapper: same checkpoint, the data set's own "
        "prompt through the processor's chat template"
    )
