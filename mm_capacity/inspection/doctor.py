"""Does the method really act on this model? Checks that can fail, each with its finding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mm_capacity.attach import limit_capacity
from mm_capacity.inspection.footprint import differences, footprint
from mm_capacity.policies import make_policy
from vlm_adapters.modality import Modality


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        name: what was checked.
        ok: whether it holds.
        detail: numbers, or what went wrong.
    """

    name: str
    ok: bool
    detail: str


@torch.no_grad()
def examine(vlm: Any, inputs: Mapping[str, Any], gamma: float) -> Iterator[Finding]:
    """Examines a loaded model on one prompt.

    Args:
        vlm: from :func:`vlm_adapters.load_model`.
        inputs: from ``vlm.prepare``.
        gamma: a small capacity factor, at which assignments must be dropped.
    """
    before = run(vlm, inputs)
    checks: tuple[tuple[str, Callable[[], str | None]], ...] = (
        ("image tokens are tagged", functools.partial(_tagged, vlm, inputs)),
        ("router is read right", functools.partial(_router, vlm, inputs)),
        ("none is bit-identical", functools.partial(_none, vlm, inputs, before)),
        (
            f"gamma {gamma:g} drops and load <= C",
            functools.partial(_drops, vlm, inputs, before, gamma),
        ),
        ("nothing is left behind", functools.partial(_left_behind, vlm, inputs, before, gamma)),
    )
    for name, check in checks:
        try:
            yield Finding(name, True, check() or "")
        except Exception as error:  # a finding, whatever it is
            yield Finding(name, False, " ".join(str(error).split()) or type(error).__name__)


def run(vlm: Any, inputs: Mapping[str, Any]) -> Tensor:
    """Logits of one forward pass."""
    return vlm.adapter.entry(vlm.model)(**inputs).logits


def _tagged(vlm: Any, inputs: Mapping[str, Any]) -> str:
    tags = vlm.adapter.tag_tokens(inputs)
    image = int(((tags == Modality.IMAGE) | (tags == Modality.VIDEO)).sum())
    pixels = [name for name, value in inputs.items() if _holds_pixels(name, value)]
    if pixels and not image:
        raise AssertionError(f"the prompt holds {pixels[0]!r}, but no token is tagged as image")
    return f"{image} image, {int((tags == Modality.TEXT).sum())} text"


def _holds_pixels(name: str, value: Any) -> bool:
    return ("pixel" in name or "image" in name) and getattr(value, "is_floating_point", bool)()


def _router(vlm: Any, inputs: Mapping[str, Any]) -> str:
    from vlm_adapters.routers import check_choice

    wrong: list[str] = []
    seen: set[str] = set()

    def hook(layer: Any) -> Callable[..., None]:
        def read(module: Any, args: tuple, output: Any) -> None:
            hidden = args[0].reshape(-1, args[0].shape[-1])
            choice = vlm.adapter.read_scores(layer, output, hidden)
            problem = check_choice(module, choice.scores, choice.index, choice.weights)
            seen.add(layer.name)
            if problem:
                wrong.append(f"layer {layer.name!r}: {problem}")

        return read

    layers = vlm.adapter.moe_layers(vlm.model)
    handles = [layer.router.register_forward_hook(hook(layer)) for layer in layers]
    try:
        run(vlm, inputs)
    finally:
        for handle in handles:
            handle.remove()
    if wrong:
        raise AssertionError(wrong[0])
    return f"{len(seen)} of {len(layers)} layers ran"


def _none(vlm: Any, inputs: Mapping[str, Any], before: Tensor) -> None:
    with limit_capacity(vlm.model, make_policy("none"), adapter=vlm.adapter, check=True):
        inside = run(vlm, inputs)
    if not torch.equal(before, inside):
        raise AssertionError(f"logits differ by up to {(before - inside).abs().max():g}")


def _drops(vlm: Any, inputs: Mapping[str, Any], before: Tensor, gamma: float) -> str:
    policy = make_policy("token-drop", gamma=gamma, modality="image-first")
    with limit_capacity(vlm.model, policy, adapter=vlm.adapter, check=True) as trace:
        inside = run(vlm, inputs)
    dropped = trace.summary()["drop_frac"]
    if not dropped:
        raise AssertionError("no assignment was dropped")
    if not torch.isfinite(inside).all():
        raise AssertionError("logits are not finite")
    if torch.equal(before, inside):
        raise AssertionError("assignments were dropped, but the logits did not change")
    return f"{dropped:.1%} of the assignments dropped"


def _left_behind(vlm: Any, inputs: Mapping[str, Any], before: Tensor, gamma: float) -> None:
    state = footprint(vlm.model)
    with limit_capacity(vlm.model, make_policy("token-drop", gamma=gamma), adapter=vlm.adapter):
        run(vlm, inputs)
    changed = differences(state, footprint(vlm.model))
    if changed:
        raise AssertionError(f"changed: {', '.join(changed[:3])}")
    if not torch.equal(before, run(vlm, inputs)):
        raise AssertionError("the model answers differently afterwards")
