"""Expert-capacity policies for vision-language mixture-of-experts models.

    from mm_capacity import limit_capacity, make_policy, POLICIES

Importing the package imports neither torch nor transformers: names load when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .policies import POLICIES, make_policy

if TYPE_CHECKING:
    from .attach import limit_capacity
    from .patch import apply_capacity_aware_moe_patch
    from .trace import Trace

__version__ = "0.1.0"
__all__ = [
    "POLICIES",
    "Trace",
    "__version__",
    "apply_capacity_aware_moe_patch",
    "limit_capacity",
    "make_policy",
]

_LAZY = {
    "Trace": "trace",
    "apply_capacity_aware_moe_patch": "patch",
    "limit_capacity": "attach",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
