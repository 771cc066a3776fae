"""Recognises the parts of a native MoE block: its experts, its router, its configuration."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from .base import UnsupportedModelError
from .registry import config_value

# Index and weights, as the experts modules call them.
EXPERTS_ARGUMENTS = (("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))
ROUTER_NAMES = ("router", "gate")
EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def experts_arguments(module: nn.Module) -> tuple[str, str, str] | None:
    """Names of an experts module's arguments: hidden states, index, weights; None if it is none."""
    if not isinstance(getattr(module, "num_experts", None), int):
        return None
    names = list(inspect.signature(type(module).forward).parameters)[1:4]
    if len(names) == 3 and tuple(names[1:]) in EXPERTS_ARGUMENTS:
        return names[0], names[1], names[2]
    return None


def router_top_k(name: str, module: Any) -> int | None:
    """K of a router, None if a module is not one."""
    if isinstance(getattr(module, "top_k", None), int):
        return module.top_k
    # Some routers keep only their configuration.
    value = getattr(getattr(module, "config", None), "top_k_experts", None)
    return value if name in ROUTER_NAMES and isinstance(value, int) else None


def find_router(block: nn.Module, experts: nn.Module) -> tuple[nn.Module, int] | None:
    """The child of a block that routes, and its K."""
    for name, child in block.named_children():
        top_k = router_top_k(name, child)
        if child is not experts and top_k is not None:
            return child, top_k
    return None


def expert_count(config: Any) -> int:
    """E of a configuration (object or dictionary), 0 without experts."""
    counts = [config_value(config, key) for key in EXPERT_COUNT_KEYS]
    return max((count for count in counts if isinstance(count, int)), default=0)


def check_not_quantised(name: str, experts: nn.Module) -> None:
    """Refuses experts whose matrices are not plain floating point numbers.

    Quantised matrices are parameters in some backends and buffers in others.

    Raises:
        UnsupportedModelError: they are not.
    """
    for tensor in (*experts.parameters(), *experts.buffers()):
        if tensor.dim() > 1 and (not tensor.is_floating_point() or tensor.element_size() < 2):
            raise UnsupportedModelError(
                f"experts of layer {name!r} ({type(experts).__name__}) are quantised "
                f"({str(tensor.dtype).removeprefix('torch.')}), which the seam does not reach: "
                "load the model dequantised, in bfloat16 or float32"
            )
