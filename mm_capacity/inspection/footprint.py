"""Everything that a context could leave behind on a model."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def footprint(model: nn.Module) -> dict[str, Any]:
    """Hooks, attributes, forward functions, configuration and registries, to be compared.

    Attributes that a forward pass itself sets (position deltas and the like) are there from the
    first pass on: run the model once before.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    state: dict[str, Any] = {"registry": sorted(ALL_EXPERTS_FUNCTIONS)}
    for name, module in model.named_modules():
        hooks = [len(getattr(module, kind)) for kind in HOOKS]
        forward = getattr(module.forward, "__func__", module.forward)
        implementation = getattr(
            getattr(module, "config", None), "_experts_implementation_internal", None
        )
        state[name] = (hooks, sorted(vars(module)), forward, implementation)
    config: Any = getattr(model, "config", None)
    state["config"] = copy.deepcopy(config.to_dict()) if config is not None else None
    return state


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what differs between two footprints."""
    return [
        name or "model"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]
