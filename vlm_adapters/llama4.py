"""Llama 4, whose blocks send every token through every expert.

Router mathematics: top-k of the logits, then the sigmoid of each chosen logit; not normalised. The
weight multiplies what goes *into* the expert. Scores are the sigmoids of all logits. A shared
expert sees every token.
The seam is missing: the block multiplies a ``[E, T]`` table of weights (0 where not chosen) into E
copies of the tokens. While a policy runs, the block's forward is stood in for by one that hands
index and weights to an experts module of its own; without dropping it computes exactly what the
block does, with dropping only the kept assignments.
Token layout: image tokens by ``image_token_index``; tile separators, start and end are text.
Not supported: transformers 5.24.0 cannot run ``Llama4ForConditionalGeneration``: it reads a field
``image_outputs`` that its language model does not return. :meth:`Llama4Adapter.load` adds the empty
field to that output with a hook, and so does a policy while it runs.

Source: ``transformers/models/llama4/modeling_llama4.py`` (interface and formula).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .base import LoadedVLM, MoELayer, RouterChoice, UnsupportedModelError
from .generic import NativeAdapter
from .native_parts import check_not_quantised

BLOCK = "Llama4TextMoe"
EXPERTS = "Llama4TextExperts"


class ExpertsStandIn(nn.Module):
    """Llama 4's experts behind the usual call: ``(hidden_states, top_k_index, top_k_weights)``.

    Args:
        experts: the block's own experts module.
        skip_dropped: compute kept assignments only. Finding them makes the host wait for the
            device.
    """

    def __init__(self, experts: Any, skip_dropped: bool) -> None:
        super().__init__()
        self.own = experts
        self.num_experts: int = experts.num_experts
        self.skip_dropped = skip_dropped

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.skip_dropped:
            return self._kept_only(hidden_states, top_k_index, top_k_weights)
        tokens, experts = hidden_states.shape[0], self.num_experts
        table = top_k_weights.new_zeros(tokens, experts + 1)
        table = table.scatter_(1, top_k_index, top_k_weights)[:, :experts]
        rows = hidden_states.repeat(experts, 1) * table.transpose(0, 1).reshape(-1, 1)
        out = self.own(rows)
        return out.reshape(experts, -1, out.shape[-1]).sum(dim=0)

    def _kept_only(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        slot_rows = hidden.new_zeros(*index.shape, hidden.shape[-1])
        for expert in range(self.num_experts):
            token, slot = torch.where(index == expert)
            if len(token) == 0:
                continue
            rows = hidden[token] * weights[token, slot, None]
            gate, up = (rows @ self.own.gate_up_proj[expert]).chunk(2, dim=-1)
            slot_rows[token, slot] = (up * self.own.act_fn(gate)) @ self.own.down_proj[expert]
        return slot_rows.sum(dim=1)


class Llama4Adapter(NativeAdapter):
    """See the module docstring."""

    name: ClassVar[str] = "llama4"
    model_types: ClassVar[tuple[str, ...]] = ("llama4", "llama4_text")

    def moe_layers(self, model: nn.Module) -> list[MoELayer]:
        blocks: list[tuple[str, Any]] = [
            (n, m) for n, m in model.named_modules() if type(m).__name__ == BLOCK
        ]
        if not blocks:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no mixture-of-experts layer: looked for {BLOCK}"
            )
        layers: list[MoELayer] = []
        for name, block in blocks:
            if type(block.experts).__name__ != EXPERTS:
                raise self._unreachable(name, block.experts)
            check_not_quantised(name, block.experts)
            layers.append(
                MoELayer(
                    name=name,
                    index=len(layers),
                    block=block,
                    router=block.router,
                    experts=block.experts,
                    num_experts=block.num_experts,
                    top_k=block.top_k,
                )
            )
        return layers

    def read_scores(self, layer: MoELayer, router_output: Any, hidden: Tensor) -> RouterChoice:
        table, logits = router_output
        index = logits.topk(layer.top_k, dim=1).indices
        scores = logits.float().sigmoid()
        return RouterChoice(scores=scores, index=index, weights=table.gather(1, index))

    @contextmanager
    def seam(
        self, model: nn.Module, layers: list[MoELayer], *, skip_dropped: bool
    ) -> Iterator[list[MoELayer]]:
        stand_ins = [
            replace(layer, experts=ExpertsStandIn(layer.experts, skip_dropped)) for layer in layers
        ]
        with ExitStack() as stack:
            handle = add_missing_field(model)
            if handle is not None:
                stack.callback(handle.remove)
            for layer in stand_ins:
                # Placing a model on several devices may have given a block a forward of its own.
                stack.callback(_put_back, layer.block, vars(layer.block).get("forward"))
                layer.block.forward = MethodType(_forward_of(layer.experts), layer.block)
            yield stand_ins

    @classmethod
    def load(cls, path: str, **kwargs: Any) -> LoadedVLM:
        vlm = super().load(path, **kwargs)
        vlm.adapter.after_loading(vlm.model)
        return vlm

    def after_loading(self, model: nn.Module) -> None:
        add_missing_field(model)


def _forward_of(experts: nn.Module) -> Any:
    """The forward of a block that calls ``experts`` for the routed part."""

    def forward(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states = hidden_states.reshape(-1, block.hidden_dim)
        table, logits = block.router(hidden_states)
        index = logits.topk(block.top_k, dim=1).indices
        routed = experts(hidden_states, index, table.gather(1, index))
        out = block.shared_expert(hidden_states)
        out.add_(routed)
        return out, logits

    return forward


def _put_back(block: nn.Module, forward: Any) -> None:
    vars(block).pop("forward", None)
    if forward is not None:
        vars(block)["forward"] = forward


def add_missing_field(model: nn.Module) -> RemovableHandle | None:
    """Adds ``image_outputs`` to what the language model of the VLM returns, if it is missing.

    Returns:
        What takes the hook off again; None if there was nothing to add.
    """
    language_model = getattr(model, "language_model", None)
    if language_model is None or _fill_in in language_model._forward_hooks.values():
        return None
    return language_model.register_forward_hook(_fill_in)


def _fill_in(module: nn.Module, args: Any, output: Any) -> None:
    if not hasattr(output, "image_outputs"):
        output.image_outputs = None
