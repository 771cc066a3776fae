"""What a loaded model looks like to a capacity policy: layers, router, tokens, load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mm_capacity.attach import limit_capacity
from mm_capacity.experts import dispatches
from mm_capacity.inspection.doctor import run
from mm_capacity.policies import make_policy
from vlm_adapters.base import MoELayer
from vlm_adapters.modality import Modality

MOST_LAYERS_SHOWN = 12
QUESTION = "What is in this picture?"


def structure(vlm: Any) -> Iterator[str]:
    """Class, adapter, layers, experts, K, router and experts backend."""
    layers = vlm.adapter.moe_layers(vlm.model)
    yield f"model     {type(vlm.model).__name__} ({vlm.source or 'in memory'})"
    yield f"adapter   {vlm.adapter.name}"
    yield f"layers    {len(layers)}, {layers[0].name} to {layers[-1].name}"
    shapes = dict.fromkeys((layer.num_experts, layer.top_k) for layer in layers)
    yield "experts   " + "; ".join(f"E = {experts}, K = {top_k}" for experts, top_k in shapes)
    yield "router    " + "; ".join(dict.fromkeys(router_text(layer) for layer in layers))
    yield "backend   " + "; ".join(dict.fromkeys(backend(layer) for layer in layers))


def router_text(layer: MoELayer) -> str:
    """Router mathematics of a layer in words."""
    from vlm_adapters.base import UnsupportedModelError
    from vlm_adapters.routers import formula_of_class

    name = type(layer.router).__name__
    if not type(layer.router).__module__.startswith("transformers."):
        return f"{name}: read by its own adapter, see its docstring"
    try:
        text = f"{name}: {formula_of_class(type(layer.router))}"
    except UnsupportedModelError:
        return f"{name}: read by its own adapter"
    groups = getattr(layer.router, "num_group", None)
    if groups and groups > 1:
        text += f" ({layer.router.topk_group} of {groups} groups)"
    return text


def backend(layer: MoELayer) -> str:
    """Which function computes the experts."""
    name = type(layer.experts).__name__
    if dispatches(layer.experts):
        config: Any = layer.experts.config
        return f"{name} by {config._experts_implementation}"
    return f"{name} by its own forward"


def default_conversation(vlm: Any) -> list[dict[str, Any]]:
    """A picture and a question, or the question alone for a model without images."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": QUESTION}]
    if not getattr(vlm.adapter, "text_only", False):
        parts.insert(0, {"type": "image", "image": test_picture()})
    return [{"role": "user", "content": parts}]


def test_picture(size: int = 64) -> Any:
    """A picture with some structure: two colour ramps and a disc."""
    from PIL import Image, ImageDraw

    ramp = Image.linear_gradient("L").resize((size, size))
    turned = ramp.rotate(90)
    image = Image.merge("RGB", (ramp, turned, Image.new("L", (size, size), 90)))
    ImageDraw.Draw(image).ellipse([size // 4, size // 4, size // 2, size // 2], fill=(250, 240, 60))
    return image


def tokens(vlm: Any, inputs: Mapping[str, Any]) -> str:
    """Counts of the prompt's tokens by modality."""
    tags = vlm.adapter.tag_tokens(inputs)
    counts = {kind.name.lower(): int((tags == kind).sum()) for kind in Modality}
    return "tokens    " + ", ".join(
        f"{n} {kind}" for kind, n in counts.items() if n or kind == "text"
    )


@torch.no_grad()
def load(vlm: Any, prompts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Load by layer without a policy, over one forward pass per prompt."""
    with limit_capacity(vlm.model, make_policy("none"), adapter=vlm.adapter) as trace:
        for inputs in prompts:
            run(vlm, inputs)
    frame, by_modality = trace.layers(), trace.frame()
    yield "load      layer  mean load  greatest  straggler  " + "  ".join(
        f"to busiest: {kind}" for kind in ("image", "text")
    )
    shown = 0
    for layer, rows in frame.groupby("layer"):
        if shown == MOST_LAYERS_SHOWN:
            yield f"          ... {frame['layer'].nunique() - shown} more layers"
            break
        shown += 1
        mine = by_modality[by_modality["layer"] == layer]
        busiest = mine.groupby("expert")["assigned"].sum().idxmax()
        at = mine[mine["expert"] == busiest].groupby("modality")["assigned"].sum()
        image = int(at.get("image", 0)) + int(at.get("video", 0))
        yield (
            f"          {layer:5d}  {rows['mean_load'].mean():9.1f}  "
            f"{rows['max_load_before'].mean():8.1f}  {rows['straggler_before'].mean():9.2f}  "
            f"{image:17d}  {int(at.get('text', 0)):16d}"
        )
    summary = trace.summary()
    yield (
        f"          straggler factor: mean {summary['straggler_before']:.2f}, greatest layer "
        f"{summary['straggler_before_max_layer']:.2f}"
    )
