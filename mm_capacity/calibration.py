"""Calibration on a model and some questions: the tables that ``calibration=`` of a policy reads.

One file serves all of them; each policy takes the entries that it knows:

- ``alpha`` (MoDES): for each MoE layer, the mean KL divergence between the model's output and its
  output with that layer's experts skipped. Source: arXiv 2511.15690 (MoDES). Its code compares the
  positions of the answer; here all text tokens count, since a question comes without its answer.
- ``thresholds`` (MoDES): pairs of thresholds for wanted shares of skipped assignments, see
  :mod:`mm_capacity.thresholds`.
- ``modality`` (MACS): for each expert +1 visual, -1 text, 0 shared; ``neighbours``: the experts
  that are most similar to it. Source: arXiv 2605.05225 (MACS); the bounds are ours, and: two
  experts are alike when the router scores the calibration tokens alike (cosine).
- ``beta`` (NAEE): median of second over first router weight. Source: arXiv 2402.14800.
- ``load``, ``load_text``, ``load_image``: assignments of each expert, for placements.

Calibrate on questions that are not evaluated; the embedded ones have training scenes for it.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from vlm_adapters.modality import Modality

from .attach import limit_capacity
from .policies.base import Policy, apply_keep
from .policies.macs_load import modality_of_experts, neighbours
from .policies.modes import mean_kl
from .policies.naee import median_ratio
from .routing import Decision, Routing, unchanged

TRAINING_SEED = 930_000_000
KL_POSITIONS = 64  # logits of so many positions are compared at once, in float64


@dataclass(frozen=True, kw_only=True)
class Observe(Policy):
    """Changes nothing and shows every routing to ``see``."""

    name: ClassVar[str] = "none"  # the model's own experts run, bit by bit
    see: Callable[[Routing], None]

    def decide(self, routing: Routing) -> Decision:
        routing.check()
        self.see(routing)
        return unchanged(routing)


@dataclass(frozen=True, kw_only=True)
class SkipLayer(Policy):
    """Skips all routed experts of one MoE layer."""

    name: ClassVar[str] = "skip-layer"
    layer: int

    def decide(self, routing: Routing) -> Decision:
        routing.check()
        if routing.layer != self.layer:
            return unchanged(routing)
        nothing = torch.zeros_like(routing.expert, dtype=torch.bool)
        expert, weights = apply_keep(routing, routing.expert, routing.weights, nothing)
        return Decision(expert, weights, torch.zeros_like(routing.sequence), 1)


@dataclass
class _Layer:
    """What is summed up for one MoE layer; E experts."""

    text: Tensor  # [E] int64 assignments
    image: Tensor  # [E]
    gram: Tensor  # [E, E] float64, inner products of the experts' scores over the tokens
    top_two: list[Tensor] = field(default_factory=list)  # [T, 2] greatest weights


class Observer:
    """Counts over the calibration questions; give :meth:`see` to :class:`Observe`."""

    def __init__(self) -> None:
        self.layers: dict[int, _Layer] = {}

    def see(self, routing: Routing) -> None:
        """Adds one layer of one forward pass; padding is left out."""
        experts = routing.experts
        if routing.layer not in self.layers:
            self.layers[routing.layer] = _Layer(
                torch.zeros(experts, dtype=torch.int64),
                torch.zeros(experts, dtype=torch.int64),
                torch.zeros(experts, experts, dtype=torch.float64),
            )
        layer = self.layers[routing.layer]
        text = routing.valid & ~routing.visual
        for total, rows in ((layer.text, text), (layer.image, routing.visual)):
            total += torch.bincount(routing.expert[rows].flatten(), minlength=experts).cpu()
        scores = routing.scores[routing.valid].double()
        layer.gram += (scores.T @ scores).cpu()
        if routing.top_k > 1:
            weights = routing.weights[routing.valid].float()
            layer.top_two.append(weights.topk(2, dim=1).values.cpu())

    def tables(self, *, margin: float = 0.25, most_similar: int = 32) -> dict[str, Any]:
        """The entries that need no second pass.

        Args:
            margin: of :func:`mm_capacity.policies.macs_load.modality_of_experts`.
            most_similar: length of each expert's list of neighbours.

        Returns:
            ``modality``, ``neighbours``, ``load``, ``load_text``, ``load_image``, and ``beta``
            for models with K > 1, each a list with one item per MoE layer.
        """
        layers = [self.layers[number] for number in sorted(self.layers)]
        table: dict[str, Any] = {
            "modality": [modality_of_experts(x.image, x.text, margin).tolist() for x in layers],
            "neighbours": [neighbours(_vectors(x.gram))[:, :most_similar].tolist() for x in layers],
            "load": [(x.text + x.image).tolist() for x in layers],
            "load_text": [x.text.tolist() for x in layers],
            "load_image": [x.image.tolist() for x in layers],
        }
        if all(x.top_two for x in layers):
            table["beta"] = [round(median_ratio(torch.cat(x.top_two)), 6) for x in layers]
        return table


def _vectors(gram: Tensor) -> Tensor:
    """Vectors ``[E, E]`` whose inner products are those of a Gram matrix ``[E, E]``."""
    values, directions = torch.linalg.eigh(gram)
    return directions * values.clamp(min=0).sqrt()


def calibrate(
    vlm: Any,
    conversations: Iterable[Sequence[Mapping[str, Any]]],
    *,
    with_alpha: bool = True,
    margin: float = 0.25,
    most_similar: int = 32,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Runs a model over calibration questions, one at a time.

    Costs one forward pass per question, and with ``with_alpha`` L more.

    Args:
        vlm: from :func:`vlm_adapters.load_model`.
        conversations: chat messages of each question, as ``vlm.prepare`` takes them.
        with_alpha: also compute ``alpha``.
        margin: see :meth:`Observer.tables`.
        most_similar: see :meth:`Observer.tables`.
        progress: called with the number of questions done.

    Returns:
        The tables, and ``questions`` and ``tokens`` that they come from; see the module.

    Raises:
        ValueError: there is no question, or the model's output cannot be compared by position.
    """
    observer = Observer()
    layers = vlm.adapter.moe_layers(vlm.model)
    totals = torch.zeros(len(layers), dtype=torch.float64)
    positions = questions = tokens = 0
    with torch.no_grad():
        for conversation in conversations:
            inputs = vlm.prepare(conversation)
            reference = _logits(vlm, inputs, Observe(see=observer.see))
            tags = vlm.adapter.tag_tokens(inputs)
            questions, tokens = questions + 1, tokens + tags.numel()
            if with_alpha:
                if reference.shape[:2] != tags.shape:
                    raise ValueError(
                        f"logits must have shape {[*tags.shape, 'V']} for alpha, got "
                        f"{list(reference.shape)}: calibrate without it"
                    )
                text = (tags == Modality.TEXT).to(reference.device)
                count = int(text.sum())
                positions += count
                kept = reference[text]
                del reference
                for number in range(len(layers) if count else 0):
                    changed = _logits(vlm, inputs, SkipLayer(layer=number))[text]
                    totals[number] += kl_by_parts(kept, changed) * count
            progress(questions)
    if not questions:
        raise ValueError("conversations must hold at least one question, got none")
    table = observer.tables(margin=margin, most_similar=most_similar)
    if with_alpha:
        if not positions:
            raise ValueError("conversations must hold text for alpha, got images only")
        table["alpha"] = (totals / positions).tolist()
    return {"questions": questions, "tokens": tokens, **table}


def _logits(vlm: Any, inputs: Mapping[str, Any], policy: Policy) -> Tensor:
    with limit_capacity(vlm.model, policy, adapter=vlm.adapter):
        return vlm.model(**inputs).logits


def kl_by_parts(reference: Tensor, changed: Tensor) -> float:
    """:func:`mean_kl` of ``[N, V]`` logits, a few positions at a time."""
    parts = zip(reference.split(KL_POSITIONS), changed.split(KL_POSITIONS), strict=True)
    # Rounding may push the divergence of equal outputs just below 0.
    return max(0.0, sum(mean_kl(p, q) * len(p) for p, q in parts) / len(reference))


def training_conversations(count: int, seed: int = 0) -> Iterator[list[dict[str, Any]]]:
    """Questions of the embedded kind about training scenes: no digit of the test sets in them.

    Multiple-choice and yes/no questions in turn, over all skills.

    Args:
        count: how many.
        seed: another seed, other questions.
    """
    from .data.digits import ASKERS, draw_scene
    from .data.embedded import LETTERS, YN_SUFFIX, mcq_options

    skills = list(ASKERS)
    made = 0
    while made < count:
        rng = random.Random(TRAINING_SEED + 1_000_000 * seed + made)
        question = None
        while question is None:
            scene = draw_scene(rng, "train")
            question = ASKERS[skills[made // 2 % len(skills)]](rng, scene)
        if made % 2 == 0:
            options, _ = mcq_options(rng, question, rng.randrange(1 + len(question.wrong)))
            listed = "".join(f"{k}. {v}\n" for k, v in zip(LETTERS, options, strict=False))
            text = (
                f"Question: {question.text}\nOptions:\n{listed}"
                "Please select the correct answer from the options above. \n"
            )
        else:
            shown = rng.choice([question.answer, rng.choice(question.wrong)])
            text = question.claim.format(shown) + YN_SUFFIX
        parts = [{"type": "image", "image": scene.image}, {"type": "text", "text": text}]
        yield [{"role": "user", "content": parts}]
        made += 1


def write_table(table: Mapping[str, Any], path: Path) -> None:
    """Writes a calibration table as JSON, one entry a line; it appears as a whole or not at all."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    os.replace(partial, path)
