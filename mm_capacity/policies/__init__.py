"""The policies by name. Listing them imports nothing heavy; making one imports its file only."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mm_capacity.policies.base import Policy

POLICIES: dict[str, str] = {
    "none": "mm_capacity.policies.none:NoCapacity",
    "token-drop": "mm_capacity.policies.token_drop:TokenDrop",
    "expanded-drop": "mm_capacity.policies.expanded_drop:ExpandedDrop",
    "expert-drop": "mm_capacity.policies.expert_drop:ExpertDrop",
    "macs": "mm_capacity.policies.macs:MACS",
    "modes": "mm_capacity.policies.modes:MoDES",
    "naee": "mm_capacity.policies.naee:NAEE",
    "visual-top-k": "mm_capacity.policies.visual_top_k:VisualTopK",
    "top-p": "mm_capacity.policies.top_p:TopP",
    "random-drop": "mm_capacity.policies.random_drop:RandomDrop",
    "rank-tail": "mm_capacity.policies.rank_tail:RankTail",
}

PLACEMENT_FIELDS = ("placement", "placement_file", "replicas")
"""Arguments that every policy takes beside its own, see mm_capacity/policies/placed.py."""


def policy_class(name: str) -> type[Policy]:
    """The class of a registered policy.

    Raises:
        ValueError: unknown name; the message lists what is known.
    """
    if name not in POLICIES:
        close = difflib.get_close_matches(str(name), POLICIES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown policy {name!r}{hint}; known: {', '.join(POLICIES)}")
    module, _, attribute = POLICIES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def policy_fields(name: str) -> dict[str, Any]:
    """Argument names and defaults of a policy; an argument without default maps to MISSING.

    Raises:
        ValueError: unknown name.
    """
    fields = {}
    for field in dataclasses.fields(policy_class(name)):
        factory = field.default_factory
        fields[field.name] = field.default if factory is dataclasses.MISSING else factory()
    return fields


def make_policy(name: str, **arguments: Any) -> Policy:
    """Makes a policy.

    Args:
        name: a key of :data:`POLICIES`.
        **arguments: its parameters, see ``docs/policies.md``; with ``placement`` (and
            ``placement_file``, ``replicas``) it also says where experts live.

    Raises:
        ValueError: unknown policy, unknown or missing argument, or a value out of range.
    """
    known = policy_fields(name)
    cls = policy_class(name)
    if any(field in arguments for field in PLACEMENT_FIELDS):
        from mm_capacity.policies.placed import placed

        cls = placed(cls)
        needed = dict.fromkeys(("placement", "placement_file"), dataclasses.MISSING)
        known = {**known, **needed, "replicas": 0}
    for argument in arguments:
        if argument not in known:
            raise ValueError(
                f"policy {name!r} has no argument {argument!r}; known: {', '.join(known)}"
            )
    for argument, default in known.items():
        if default is dataclasses.MISSING and argument not in arguments:
            raise ValueError(f"policy {name!r} needs the argument {argument!r}")
    return cls(**arguments)
