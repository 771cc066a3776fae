"""``with limit_capacity(model, policy) as trace``: runs a model under a capacity policy.

Only PyTorch hooks and transformers' experts registry are used, and all of it is undone when
the context is left, also through an exception:

- a pre-hook on the model reads the modality of every token from its inputs;
- a hook on every router reads its scores;
- a pre-hook on every experts module hands on what the policy left of the router's choice.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vlm_adapters.base import Adapter, MoELayer, RouterChoice, UnsupportedModelError
from vlm_adapters.registry import adapter_for

from .experts import knows_no_expert, skipping_dropped
from .placement import Placement, contiguous, placements_of
from .replicas import ReplicatedTrace
from .routing import Routing
from .trace import Trace

TOKEN_RANKS = ("sequence", "slice")
TRACE_WINDOWS = ("policy", "batch", "sequence")


@dataclass
class _Pass:
    """What the hooks share during one forward pass."""

    modality: Tensor  # [T] uint8
    sequence: Tensor  # [T] int64
    sequences: int
    decode: bool
    choices: dict[int, tuple[RouterChoice, Tensor]] = field(default_factory=dict)
    covered: set[int] = field(default_factory=set)
    # Rows of the flattened tokens that enter a layer; a layer that is missing gets all of them.
    rows: dict[int, Tensor] = field(default_factory=dict)


@contextmanager
def limit_capacity(
    model: nn.Module,
    policy: Any,
    *,
    adapter: Adapter | None = None,
    ep_size: int = 1,
    placement: Sequence[Placement] | None = None,
    token_rank: str = "sequence",
    trace_window: str = "policy",
    check: bool = False,
    skip_dropped: bool = True,
) -> Iterator[Trace]:
    """Runs every forward pass of ``model`` inside the context under ``policy``.

    Args:
        model: a vision-language MoE of transformers, the module that is called with
            ``input_ids`` (``vlm.model``).
        policy: from :func:`mm_capacity.policies.make_policy`.
        adapter: the model's adapter; found from its configuration if None.
        ep_size: R, number of expert-parallel ranks to reckon with.
        placement: where the experts of each MoE layer live, one item per layer. None: as the
            policy says (:mod:`mm_capacity.policies.placed`), else contiguously, expert e on rank
            e * R // E. With copies of experts, rank loads in the trace are an even share
            (:mod:`mm_capacity.replicas`), and policies that need one rank per expert are refused.
        token_rank: which rank holds a token: ``"sequence"`` (batch row i on rank i mod R) or
            ``"slice"`` (contiguous slices of the flattened batch).
        trace_window: what the trace counts as one step: ``"policy"`` (the policy's window),
            ``"batch"`` or ``"sequence"``.
        check: assert load <= C in every layer of every pass and check the values of
            everything the router returns. Makes the host wait for the device.
        skip_dropped: compute kept assignments only (:mod:`mm_capacity.experts`); with False the
            model's own experts implementation runs, which must know the id E.

    Yields:
        The trace, readable during and after the context.

    Raises:
        UnsupportedModelError: no MoE layer, a layer that cannot be covered, or ``ep_size``
            does not divide the experts.
        ValueError: an option is unknown, the placement fits neither model nor policy, or the
            model runs under a policy already.
        RuntimeError: a forward pass went around the hooks.
    """
    _check_choice("token_rank", token_rank, TOKEN_RANKS)
    _check_choice("trace_window", trace_window, TRACE_WINDOWS)
    adapter = adapter or adapter_for(model)
    layers = adapter.moe_layers(model)
    _check_free(model, layers)
    skip_dropped = skip_dropped and policy.name != "none"
    with ExitStack() as stack:
        layers = stack.enter_context(adapter.seam(model, layers, skip_dropped=skip_dropped))
        _check_layers(layers, ep_size)
        placements = placements_of(
            policy, [layer.num_experts for layer in layers], ep_size, placement
        )
        run = _Run(
            adapter.entry(model),
            policy,
            adapter,
            layers,
            placements,
            token_rank,
            trace_window,
            check,
        )
        if skip_dropped:
            own = stack.enter_context(skipping_dropped([layer.experts for layer in layers]))
            if own:
                run.trace.notes.append(
                    f"experts of {', '.join(own)} run their own forward: dropped assignments "
                    "are left out of the result, but not necessarily out of the work"
                )
        elif policy.name != "none":
            _check_implementation(layers)
        for handle in run.install():
            stack.callback(handle.remove)
        yield run.trace


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _check_free(model: nn.Module, layers: Sequence[MoELayer]) -> None:
    for layer in layers:
        # The hooks of a context are told by where they come from.
        for hook in layer.router._forward_hooks.values():
            if getattr(hook, "__module__", "") == __name__:
                raise ValueError(
                    f"{type(model).__name__} runs under a capacity policy already: leave that "
                    "context first, two policies cannot share a model"
                )


def _check_implementation(layers: Sequence[MoELayer]) -> None:
    for layer in layers:
        if not knows_no_expert(layer.experts):
            config: Any = layer.experts.config
            raise ValueError(
                f"skip_dropped=False leaves the experts of layer {layer.name!r} to "
                f"{config._experts_implementation!r}, which does not know the id of a dropped "
                "assignment: use the experts implementation 'eager', or skip_dropped=True"
            )


def _check_layers(layers: Sequence[MoELayer], ep_size: int) -> None:
    if isinstance(ep_size, bool) or not isinstance(ep_size, int) or ep_size < 1:
        raise ValueError(f"ep_size must be a positive integer, got {ep_size!r}")
    for layer in layers:
        if layer.num_experts % ep_size:
            raise UnsupportedModelError(
                f"ep_size {ep_size} does not divide the {layer.num_experts} experts of "
                f"layer {layer.name!r}"
            )
        if any(p.is_meta for p in layer.experts.parameters()):
            raise UnsupportedModelError(
                f"experts of layer {layer.name!r} are on the meta device: load the weights first"
            )


class _Run:
    """The hooks of one context."""

    def __init__(
        self,
        model: nn.Module,
        policy: Any,
        adapter: Adapter,
        layers: list[MoELayer],
        placements: list[Placement],
        token_rank: str,
        trace_window: str,
        check: bool,
    ) -> None:
        self.model, self.policy, self.adapter, self.layers = model, policy, adapter, layers
        self.ranks, self.token_rank, self.check = placements[0].ranks, token_rank, check
        self.signature = inspect.signature(type(model).forward)
        self.current: _Pass | None = None
        # With copies nobody reads these (see placements_of); contiguous ranks stand in.
        self.rank_of_expert = [
            (contiguous(p.experts, p.ranks) if p.replicas else p).rank_of_expert for p in placements
        ]
        options: dict[str, Any] = {
            "names": [layer.name for layer in layers],
            "top_k": [layer.top_k for layer in layers],
            "window": trace_window,
            "check": check,
        }
        if any(p.replicas for p in placements):
            self.trace: Trace = ReplicatedTrace(placements, **options)
        else:
            self.trace = Trace(rank_of_expert=self.rank_of_expert, ranks=self.ranks, **options)

    def install(self) -> Iterator[Any]:
        yield self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        yield self.model.register_forward_hook(self._end, with_kwargs=True)
        for layer in self.layers:
            yield layer.router.register_forward_hook(_bind(self._read_router, layer))
            # First in line: anything else that rewrites the experts' inputs (expert
            # parallelism sends them away) must see what the policy left.
            yield layer.experts.register_forward_pre_hook(
                _bind(self._rewrite, layer), with_kwargs=True, prepend=True
            )

    # -- hooks -----------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        inputs = self._named(args, kwargs)
        tags = self.adapter.tag_tokens(inputs)
        batch, length = tags.shape
        sequence = torch.arange(batch, device=tags.device).repeat_interleave(length)
        self.current = _Pass(
            modality=tags.reshape(-1),
            sequence=sequence,
            sequences=batch,
            decode=length == 1,
        )
        for layer in self.layers:
            mask = self.adapter.layer_tokens(layer, inputs)
            if mask is not None:
                self.current.rows[layer.index] = mask.reshape(-1).nonzero().squeeze(1)

    def _named(self, args: tuple, kwargs: dict[str, Any]) -> Mapping[str, Any]:
        if not args:
            return kwargs
        bound = self.signature.bind_partial(self.model, *args, **kwargs).arguments
        extra = bound.pop("kwargs", {})
        return {**bound, **extra}

    def _end(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        current, self.current = self.current, None
        if current is None or self._passes_through(current):
            return
        missing = [
            layer.name
            for layer in self.layers
            if layer.index not in current.covered
            and (layer.index not in current.rows or len(current.rows[layer.index]))
        ]
        if missing:
            raise RuntimeError(
                f"{len(missing)} of {len(self.layers)} MoE layers were not covered in a forward "
                f"pass, first {missing[0]!r}: their experts ran without the policy or not at all"
            )
        self.trace.end_pass()

    def _passes_through(self, current: _Pass) -> bool:
        return current.decode and self.policy.phase != "all"

    def _read_router(self, layer: MoELayer, module: nn.Module, args: tuple, output: Any) -> None:
        current = self._running(layer)
        if self._passes_through(current):
            return
        hidden = args[0].reshape(-1, args[0].shape[-1])
        choice = self.adapter.read_scores(layer, output, hidden)
        current.choices[layer.index] = (choice, hidden)

    def _rewrite(
        self, layer: MoELayer, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        current = self._running(layer)
        if self._passes_through(current):
            return None
        if layer.index not in current.choices:
            raise RuntimeError(
                f"experts of layer {layer.name!r} ran before its router "
                f"{type(layer.router).__name__}"
            )
        choice, hidden = current.choices.pop(layer.index)
        given = self._expert_arguments(layer, args, kwargs)
        routing = self._routing(layer, current, choice, given, hidden)
        with torch.no_grad():
            decision = self.policy.decide(routing)
            self.trace.record(routing, decision)
        current.covered.add(layer.index)
        if decision.expert is routing.expert and decision.weights is routing.weights:
            return None
        _, index_name, weights_name = layer.arguments
        changed = {
            index_name: decision.expert,
            weights_name: decision.weights.to(given[weights_name].dtype),
        }
        if kwargs:
            return args[:1], {**kwargs, **changed}
        return (args[0], *changed.values(), *args[3:]), kwargs

    # -- parts -----------------------------------------------------------------------

    def _running(self, layer: MoELayer) -> _Pass:
        if self.current is None:
            raise RuntimeError(
                f"layer {layer.name!r} ran outside of {type(self.model).__name__}.forward, so the "
                "modality of its tokens is unknown: call the module that was given to "
                "limit_capacity, not a part of it"
            )
        return self.current

    @staticmethod
    def _expert_arguments(layer: MoELayer, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        names = layer.arguments
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        missing = [name for name in names if name not in given]
        if missing:
            raise UnsupportedModelError(
                f"experts of layer {layer.name!r} were called without {', '.join(missing)}"
            )
        return given

    def _routing(
        self,
        layer: MoELayer,
        current: _Pass,
        choice: RouterChoice,
        given: dict[str, Any],
        hidden: Tensor,
    ) -> Routing:
        index, weights = (given[name] for name in layer.arguments[1:])
        modality, sequence = current.modality, current.sequence
        if layer.index in current.rows:
            rows = current.rows[layer.index]
            modality, sequence = modality[rows], sequence[rows]
        tokens = modality.shape[0]
        if index.dim() != 2 or index.shape[0] != tokens:
            raise UnsupportedModelError(
                f"layer {layer.name!r} routes {list(index.shape)} assignments, but the inputs hold "
                f"{tokens} tokens: this family hides or adds tokens and needs an adapter of its own"
            )
        device = index.device
        if self.rank_of_expert[layer.index].device != device:
            self.rank_of_expert[layer.index] = self.rank_of_expert[layer.index].to(device)
        sequence = sequence.to(device)
        if self.token_rank == "sequence":
            rank_of_token = sequence % self.ranks
        else:
            rank_of_token = torch.arange(tokens, device=device) * self.ranks // tokens
        return Routing(
            scores=choice.scores,
            expert=index if index.dtype == torch.int64 else index.long(),
            weights=weights,
            modality=modality.to(device),
            sequence=sequence,
            sequences=current.sequences,
            rank_of_expert=self.rank_of_expert[layer.index],
            rank_of_token=rank_of_token,
            ranks=self.ranks,
            layer=layer.index,
            layers=len(self.layers),
            hidden=hidden if getattr(self.policy, "needs_hidden", False) else None,
            allowed=choice.allowed,
            validate=self.check,
        )


def _bind(method: Any, layer: MoELayer) -> Any:
    """A hook that knows its layer."""

    def hook(*args: Any) -> Any:
        return method(layer, *args)

    return hook
