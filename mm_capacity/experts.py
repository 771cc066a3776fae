"""An experts function that leaves dropped assignments out of the work.

transformers lets a registered function stand in for the forward of every experts module
(``ALL_EXPERTS_FUNCTIONS``). Its own ``grouped_mm`` and ``batched_mm`` compute a row for every
assignment and know the id E (NO_EXPERT) only under expert parallelism; this one gathers the
kept assignments only, so a smaller gamma costs less time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SKIP_DROPPED = "capacity_skip_dropped"
# By id, while a context is open: how often a module or a configuration is in one, and the
# implementation that the configuration named before.
_MODULES: Counter[int] = Counter()
_CONFIGS: Counter[int] = Counter()
_BEFORE: dict[int, Any] = {}


def skip_dropped_experts(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Routed experts over the kept assignments.

    Args:
        module: an experts module made with transformers' ``use_experts_implementation``
            (parameters ``gate_up_proj`` or ``up_proj``, and ``down_proj``).
        hidden_states: ``[T, D]``.
        top_k_index: ``[T, K']`` int64; ids >= E are dropped assignments.
        top_k_weights: ``[T, K']``.

    Returns:
        ``[T, D]``: for each token the weighted sum over its kept experts, zero if it has none.
    """
    experts, (tokens, slots) = module.num_experts, top_k_index.shape
    flat = top_k_index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    # One extra bin for dropped assignments; scatter_add_ instead of bincount, which waits
    # for the device.
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat.clamp(max=experts), torch.ones_like(flat))
    ends = counts[:experts].cumsum(0)
    if flat.device.type == "cpu":
        order = order[: int(ends[-1])]
        dropped = None
    else:
        # Shortening would make the host wait; the grouped product skips the tail by itself.
        dropped = (torch.arange(order.numel(), device=order.device) >= ends[-1])[:, None]
    out = hidden_states.new_zeros(tokens, hidden_states.shape[-1])
    if order.numel() == 0:
        return out
    token = torch.div(order, slots, rounding_mode="floor")
    expert = flat[order].clamp(max=experts - 1)

    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _grouped_linear(module, name, hidden_states[token], ends, expert)
    if dropped is not None:
        # Rows that the product skipped hold whatever was in memory, possibly NaN.
        inner = inner.masked_fill(dropped, 0.0)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    rows = _grouped_linear(module, "down_proj", inner, ends, expert)
    if dropped is not None:
        rows = rows.masked_fill(dropped, 0.0)
    if module.has_post_expert_norm:
        rows = module.post_expert_norm(rows)
    weights = top_k_weights.reshape(-1)[order]
    rows = rows * weights[:, None]
    if dropped is None:
        # On a CPU index_add_ adds in row order, always the same; half precision adds in float32.
        sums = out.to(torch.promote_types(out.dtype, torch.float32))
        return sums.index_add_(0, token, rows.to(sums.dtype)).to(hidden_states.dtype)
    rows = rows.masked_fill(dropped, 0.0)
    # Every assignment has its own row, so the sum over slots adds in a fixed order:
    # index_add_ on a GPU would not.
    slot_rows = rows.new_zeros(tokens * slots, rows.shape[-1])
    slot_rows[order] = rows
    return slot_rows.view(tokens, slots, -1).sum(1).to(hidden_states.dtype)


def _grouped_linear(module: Any, name: str, rows: Tensor, ends: Tensor, expert: Tensor) -> Tensor:
    """``rows`` (sorted by expert) times each expert's matrix, plus its bias.

    Args:
        module: the experts module.
        name: parameter name; ``[E, out, in]``, or ``[E, in, out]`` if ``module.is_transposed``.
        rows: ``[n, in]``.
        ends: ``[E]`` int64, where each expert's rows end.
        expert: ``[n]`` int64, expert of each row.
    """
    weight = getattr(module, name)
    weight = weight if module.is_transposed else weight.transpose(1, 2)
    out = _grouped_mm(rows.to(weight.dtype), weight, ends)
    if module.has_bias:
        out = out + getattr(module, f"{name}_bias")[expert]
    return out


def _grouped_mm(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if rows.device.type != "cpu":
        return F.grouped_mm(rows, weight, offs=ends.to(torch.int32))
    # On a CPU one product per expert is what the grouped kernel does as well, without its
    # alignment demands.
    parts, start = [], 0
    for index, end in enumerate(ends.tolist()):
        if end > start:
            parts.append(torch.mm(rows[start:end], weight[index]))
        start = end
    return torch.cat(parts)


@contextmanager
def skipping_dropped(experts_modules: Sequence[nn.Module]) -> Iterator[list[str]]:
    """Makes experts modules use :func:`skip_dropped_experts`; undone on exit.

    Modules that transformers does not dispatch through its registry (no ``config`` or no
    ``has_gate``) keep their own forward, which must skip the id E itself.

    Yields:
        The class names of the modules that keep their own forward.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

    own = [m for m in experts_modules if not dispatches(m)]
    ours: list[Any] = [m for m in experts_modules if dispatches(m)]
    if ours and SKIP_DROPPED not in ALL_EXPERTS_FUNCTIONS:
        ExpertsInterface.register(SKIP_DROPPED, _dispatch)
    for module in ours:
        _MODULES[id(module)] += 1
        config = module.config
        if not _CONFIGS[id(config)]:
            _BEFORE[id(config)] = config._experts_implementation_internal
            config._experts_implementation_internal = SKIP_DROPPED
        _CONFIGS[id(config)] += 1
    try:
        yield sorted({type(m).__name__ for m in own})
    finally:
        for module in ours:
            _MODULES[id(module)] -= 1
            _CONFIGS[id(module.config)] -= 1
            if not _CONFIGS[id(module.config)]:
                module.config._experts_implementation_internal = _BEFORE.pop(id(module.config))
        # Contexts may overlap, and need not be left in the reverse order.
        for count in (_MODULES, _CONFIGS):
            for key in [key for key, number in count.items() if not number]:
                del count[key]
        if ours and not _CONFIGS:
            ExpertsInterface._global_mapping.pop(SKIP_DROPPED, None)


def _dispatch(module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Our function for the modules in a context, what was set before for any other.

    Models that were made from one configuration object share its experts implementation.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if _MODULES[id(module)]:
        return skip_dropped_experts(module, *args, **kwargs)
    own = type(module).forward.__wrapped__
    before = _BEFORE.get(id(module.config), "eager")  # a copy made while a context was open
    return ALL_EXPERTS_FUNCTIONS.get_interface(before, own)(module, *args, **kwargs)


def knows_no_expert(experts: nn.Module) -> bool:
    """Whether a module's own implementation leaves the id E (NO_EXPERT) out of its result.

    transformers' ``grouped_mm`` and ``batched_mm`` do so under expert parallelism only.
    """
    config: Any = getattr(experts, "config", None)
    if not dispatches(experts) or getattr(experts, "_is_expert_parallel", False):
        return True
    return config._experts_implementation not in ("grouped_mm", "batched_mm")


def dispatches(experts: nn.Module) -> bool:
    """Whether transformers dispatches this module's forward through its experts registry."""
    return hasattr(experts, "has_gate") and hasattr(
        getattr(experts, "config", None), "_experts_implementation_internal"
    )
