"""One call for existing code: ``layers, undo = apply_capacity_aware_moe_patch(model, config)``.

Takes the configuration of the reference code and enters :func:`mm_capacity.limit_capacity` until
``undo()`` leaves it. Serves vision-language and text-only MoEs alike.

Source of the fields: CASE-Lab-UMD/Capacity-Aware-MoE, ``capacity_aware/capacity_patch.py``. What
differs from that code, on purpose: a dropped assignment stays dropped; ``first`` and ``last`` keep
the first and the last tokens, where that code has capped by score before it looks at them; padding
is not counted; weights of survivors are not renormalised; decode steps pass through untouched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import nn

from vlm_adapters.registry import adapter_for

from .attach import limit_capacity
from .policies import make_policy
from .policies.base import Policy, integer, one_of

REQUIRED = object()
FIELDS: dict[str, Any] = {
    "expert_capacity": REQUIRED,
    "strategy": "score",
    "rounds": 1,
    "capacity_scope": "expert",
    "capacity_devices": None,
}
"""Fields of the configuration and their defaults."""

ORDER_OF_STRATEGY = {"score": "score", "first": "order", "last": "reverse", "random": "random"}
STRATEGIES = (*ORDER_OF_STRATEGY, "overselect")
SCOPES = ("expert", "device")
_MARK = "_capacity_aware_moe_patch"


class Patched(NamedTuple):
    """What :func:`apply_capacity_aware_moe_patch` did.

    Attributes:
        layers: number of MoE layers under the cap.
        undo: takes everything back; calling it again does nothing.
    """

    layers: int
    undo: Callable[[], None]


def apply_capacity_aware_moe_patch(model: nn.Module, config: Mapping[str, Any] | Any) -> Patched:
    """Runs every forward pass of ``model`` under an expert capacity, until it is undone.

    Args:
        model: a mixture-of-experts model of transformers.
        config: a dictionary, or an object with these attributes:

            - ``expert_capacity``: gamma; None leaves the model alone (0 layers);
            - ``strategy``: who stays: ``score`` (default), ``first`` or ``last`` (tokens),
              ``random`` (the same choice every time), or ``overselect``: by score among the
              router's top-(K * rounds), of which a token keeps at most K;
            - ``rounds``: of ``overselect``; 1 (default) adds no candidates;
            - ``capacity_scope``: ``expert`` (default) or ``device``: the experts of a rank
              share its capacity;
            - ``capacity_devices``: R, the ranks of scope ``device``.

    Returns:
        Number of layers, and the function that undoes it.

    Raises:
        ValueError: an unknown, missing or unusable field, or a model that is patched already.
        UnsupportedModelError: no MoE layer, one that cannot be covered, or ranks that do not
            divide its experts.
    """
    fields = read_fields(config)
    policy = policy_of(fields)
    if policy is None:
        return Patched(0, ExitStack().close)
    ranks = fields["capacity_devices"] if fields["capacity_scope"] == "device" else 1
    adapter = adapter_for(model)
    layers = adapter.moe_layers(model)
    for layer in layers:
        if _MARK in vars(layer.block):
            raise ValueError(
                f"model {type(model).__name__} is patched already (layer {layer.name!r}): call "
                "the undo() of the first patch before patching again"
            )
    with ExitStack() as stack:
        trace = stack.enter_context(limit_capacity(model, policy, adapter=adapter, ep_size=ranks))
        # Nobody reads this trace, and a patched model may run for days.
        handle = adapter.entry(model).register_forward_hook(lambda *_: trace.clear())
        stack.callback(handle.remove)
        for layer in layers:
            setattr(layer.block, _MARK, True)
            stack.callback(vars(layer.block).pop, _MARK, None)
        return Patched(len(layers), stack.pop_all().close)


def read_fields(config: Mapping[str, Any] | Any) -> dict[str, Any]:
    """The fields of a configuration, defaults filled in, each value checked.

    Raises:
        ValueError: an unknown or missing field, or a value that cannot be used.
    """
    if isinstance(config, Mapping):
        given = dict(config)
    else:
        names = [name for name in dir(config) if not name.startswith("_")]
        values = {name: getattr(config, name) for name in names}
        given = {name: value for name, value in values.items() if not callable(value)}
    known = ", ".join(FIELDS)
    for name in given:
        if name not in FIELDS:
            raise ValueError(f"config has an unknown field {name!r}; known: {known}")
    fields = {**FIELDS, **given}
    if fields["expert_capacity"] is REQUIRED:
        raise ValueError(f"config must have the field 'expert_capacity'; known: {known}")
    one_of("strategy", fields["strategy"], STRATEGIES)
    integer("rounds", fields["rounds"], 1)
    one_of("capacity_scope", fields["capacity_scope"], SCOPES)
    if fields["capacity_scope"] == "device" or fields["capacity_devices"] is not None:
        integer("capacity_devices", fields["capacity_devices"], 1)
    return fields


def policy_of(fields: Mapping[str, Any]) -> Policy | None:
    """The policy that checked fields ask for; None without a capacity.

    Raises:
        ValueError: ``expert_capacity`` is no capacity factor.
    """
    gamma, strategy, rounds = (fields[k] for k in ("expert_capacity", "strategy", "rounds"))
    if gamma is None:
        return None
    try:
        if strategy == "overselect":
            return make_policy(
                "expanded-drop",
                gamma=gamma,
                scope=fields["capacity_scope"],
                overflow="expand-global",
                rounds=rounds,
                at_most_top_k=True,
            )
        policy = make_policy(
            "token-drop",
            gamma=gamma,
            scope=fields["capacity_scope"],
            order=ORDER_OF_STRATEGY[strategy],
        )
    except ValueError as error:
        raise ValueError(f"expert_capacity {gamma!r} cannot be used: {error}") from None
    if rounds > 1:
        warnings.warn(
            f"rounds={rounds} has no effect with strategy {strategy!r}: only 'overselect' widens "
            "the candidates",
            stacklevel=3,
        )
    return policy
