"""Where a wrapper keeps its mixture of experts.

A wrapper is any Python object: the model may be an attribute, sit in a dictionary or in another
plain object, or be part of a larger module that no adapter knows.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mm_capacity.errors import UserError

DEPTH = 4
MOST_PARTS = 2000
MOST_ITEMS = 64
SERVERS = ("vllm", "lmdeploy", "sglang", "openai")


@dataclass(frozen=True)
class Found:
    """A mixture of experts inside a wrapper.

    Attributes:
        path: where, as an attribute path from the wrapper.
        model: the module that is called with the token ids.
        adapter: its adapter.
        root: the outermost module around it that the wrapper holds.
    """

    path: str
    model: Any
    adapter: Any
    root: Any

    def generators(self) -> list[Any]:
        """Modules from the root down to the model whose ``generate`` decodes.

        A ``generate`` of a family's own (an omni model's, say) hands other arguments on, so
        transformers' own is preferred.
        """
        from transformers import GenerationMixin

        inside = [m for m in self.root.modules() if any(c is self.model for c in m.modules())]
        below = [m for m in self.model.modules() if m is not self.model]
        own = [
            module
            for module in [*inside, *below]
            if getattr(type(module), "generate", None) is GenerationMixin.generate
        ]
        if own:
            return own
        return [module for module in inside if callable(getattr(module, "generate", None))]


def find_moe(wrapper: Any, name: str) -> Found:
    """The one mixture of experts that a wrapper runs.

    Args:
        wrapper: VLMEvalKit's model object.
        name: for messages.

    Raises:
        UserError: no module, none with experts, more than one, or one whose image tokens cannot
            be told from text.
    """
    found: list[Found] = []
    dense: list[str] = []
    blind: list[str] = []
    for path, module in modules_of(wrapper):
        if any(module is part for known in found for part in known.root.modules()):
            continue
        inside, reason = _inside(path, module)
        if inside is None:
            dense.append(f"{path} is a {type(module).__name__} ({reason})")
        elif getattr(inside.adapter, "text_only", False):
            blind.append(f"{inside.path} ({type(inside.model).__name__})")
        else:
            found.append(inside)
    kind = type(wrapper).__name__
    if len(found) == 1:
        return found[0]
    if found:
        paths = ", ".join(one.path for one in found)
        raise UserError(f"{name}: {kind} holds {len(found)} mixtures of experts ({paths}), not one")
    if blind:
        raise UserError(
            f"{name}: {kind} hands images to the language model {blind[0]} as embeddings, so image "
            "tokens cannot be told from text; pass a checkpoint in transformers' own format by "
            "its folder or hub id"
        )
    if dense:
        raise UserError(
            f"{name}: {kind} holds no mixture of experts: {'; '.join(dense[:2])}; capacity "
            "policies need one"
        )
    raise UserError(f"{name}: {kind} holds no torch module{_instead(wrapper)}")


def _inside(path: str, root: Any) -> tuple[Found | None, str]:
    """The outermost part of a module that an adapter takes, and why others were not taken."""
    from vlm_adapters.base import UnsupportedModelError
    from vlm_adapters.registry import adapter_for

    text_only: Found | None = None
    reason = "no part of it has a transformers configuration"
    for name, module in root.named_modules():
        if getattr(module, "config", None) is None or not _is_model(module):
            continue
        try:
            adapter = adapter_for(module)
        except UnsupportedModelError as error:
            reason = reason if name else str(error)
            continue
        one = Found(f"{path}.{name}" if name else path, module, adapter, root)
        if not getattr(adapter, "text_only", False):
            return one, ""
        text_only = text_only or one
    return text_only, reason


def _is_model(module: Any) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def modules_of(wrapper: Any) -> Iterator[tuple[str, Any]]:
    """(path, module) of every outermost torch module that a wrapper holds."""
    from torch import nn

    if isinstance(wrapper, nn.Module):
        yield "wrapper", wrapper
        return
    for path, holder in plain_parts(wrapper):
        items = holder.items() if isinstance(holder, dict) else vars(holder).items()
        for key, value in items:
            if isinstance(value, nn.Module):
                yield f"{path}.{key}".removeprefix("wrapper."), value
            elif isinstance(value, (list, tuple)):
                for number, item in enumerate(value[:MOST_ITEMS]):
                    if isinstance(item, nn.Module):
                        yield f"{path}.{key}.{number}".removeprefix("wrapper."), item


def plain_parts(wrapper: Any) -> Iterator[tuple[str, Any]]:
    """(path, part) of a wrapper, its plain objects, dictionaries and generation configurations.

    Modules are not entered, nor what transformers makes (processors, tokenizers), nor functions
    and classes.
    """
    queue: list[tuple[str, Any, int]] = [("wrapper", wrapper, 0)]
    seen: set[int] = set()
    while queue and len(seen) < MOST_PARTS:
        path, part, depth = queue.pop(0)
        if id(part) in seen or (depth and not _is_plain(part)):
            continue
        seen.add(id(part))
        yield path, part
        if depth == DEPTH:
            continue
        inside: list[tuple[Any, Any]] = list(
            part.items() if isinstance(part, dict) else vars(part).items()
        )
        for key, value in inside[:MOST_PARTS]:
            if isinstance(value, (list, tuple)):
                for number, item in enumerate(value[:MOST_ITEMS]):
                    queue.append((f"{path}.{key}.{number}", item, depth + 1))
            else:
                queue.append((f"{path}.{key}", value, depth + 1))


def _is_plain(value: Any) -> bool:
    from torch import nn

    if isinstance(value, dict):
        return True
    # Modules are looked at elsewhere; classes, functions and Python modules hold no settings.
    if isinstance(value, (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType)):
        return False
    if not hasattr(value, "__dict__"):
        return False
    home = type(value).__module__.partition(".")[0]
    if home == "transformers":
        return type(value).__name__ == "GenerationConfig"
    return home not in {"torch", "numpy", "pandas", "tokenizers", "PIL", "logging", *SERVERS}


def _instead(wrapper: Any) -> str:
    """What answers in place of a module, if it can be told."""
    for name, value in vars(wrapper).items():
        home = type(value).__module__.partition(".")[0]
        if home in SERVERS:
            return f" but {home}'s {type(value).__name__} in {name!r}, which hooks cannot reach"
    return ": what answers runs outside of this process or was never loaded"
