"""Trains the embedded model and writes it as an ordinary checkpoint folder.

    python scripts/train_digits_model.py --out mm_capacity/data/digits_model

Only training digits are ever seen; the numbers printed on the way are measured on
training digits too. See docs/embedded-model.md for what the model is good for.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from digits_model.architecture import build_model, build_processor
from digits_model.batches import IGNORE, KINDS, LOOKUPS, MAX_SHIFT, Batch, BatchMaker
from digits_model.tokenizer import build_tokenizer
from torch import Tensor, nn
from transformers import AutoTokenizer

AUX_LAYER = 1  # hidden states after the second decoder layer
LOOKUP_LAYERS = (2, 3)
CELL_CLASSES = (11, 7, 9)  # digit or none, colour or none, which cell


@dataclass(frozen=True)
class Stage:
    """One part of the training.

    Attributes:
        name: printed.
        steps: optimizer steps.
        rows: pictures per step (or texts, without pictures).
        questions, reading: segments per row; see :meth:`BatchMaker.make`.
        with_image: whether rows hold a picture.
        drills: text-only rows of drills beside them.
    """

    name: str
    steps: int
    rows: int
    questions: int
    reading: int
    with_image: bool = True
    drills: int = 0


def stages(scale: float) -> list[Stage]:
    """What is learned in which order; answers alone would not get off the ground.

    Seeing comes first and is cheap: only the vision tower and the first decoder layers run.
    Matching an answer to its letter needs no picture. Then reading aloud, then questions.
    """
    plan = [
        Stage("see", 480, rows=32, questions=0, reading=0),
        Stage("match", 450, rows=16, questions=5, reading=0, with_image=False),
        Stage("read", 400, rows=12, questions=2, reading=2),
        Stage("answer", 1500, rows=8, questions=6, reading=0, drills=4),
    ]
    return [replace(stage, steps=max(1, round(stage.steps * scale))) for stage in plan]


class CellHead(nn.Module):
    """Labels image tokens with digit, colour and number of their cell; thrown away at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, sum(CELL_CLASSES))

    def losses(self, hidden: Tensor, batch: Batch) -> list[Tensor]:
        """Cross-entropies of digit, colour and cell over all image tokens."""
        logits = self.out(self.norm(hidden)).split(CELL_CLASSES, dim=-1)
        labels = (batch.cell_digit, batch.cell_colour, batch.cell)
        return [
            F.cross_entropy(part, label.flatten())
            for part, label in zip(logits, labels, strict=True)
        ]


class LookupHead(nn.Module):
    """Labels words of the prompt with what they refer to (LOOKUPS); thrown away at the end.

    Without it, looking up a named place in the picture is learned from answers only, late.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, sum(LOOKUPS.values()))

    def losses(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Cross-entropies; a batch without such words has none of that kind."""
        logits = self.out(self.norm(hidden)).split(tuple(LOOKUPS.values()), dim=-1)
        return {
            f"find {name}": F.cross_entropy(
                part.flatten(0, 1), labels.flatten(), ignore_index=IGNORE
            )
            for name, part, labels in zip(LOOKUPS, logits, batch.lookups, strict=True)
            if bool((labels != IGNORE).any())
        }


class Taps:
    """Hooks that collect router logits and the hidden states of some layers."""

    def __init__(self, model: nn.Module) -> None:
        self.router_logits: list[Tensor] = []
        self.hidden: dict[int, Tensor] = {}
        for index, layer in enumerate(model.model.language_model.layers):
            layer.mlp.gate.register_forward_hook(self._router)
            layer.register_forward_hook(partial(self._layer, index))

    def _router(self, module, args, output) -> None:
        self.router_logits.append(output[0])

    def _layer(self, index, module, args, output) -> None:
        self.hidden[index] = output

    def clear(self) -> None:
        self.router_logits, self.hidden = [], {}


def forward(model: nn.Module, batch: Batch, layers: int | None = None) -> Tensor:
    """Logits ``[B, S, V]`` of a packed batch; with ``layers``, of the first decoder layers only."""
    inner = model.model
    embeds = inner.get_input_embeddings()(batch.input_ids)
    extra = {}
    if batch.pixels is not None:
        rows = batch.input_ids.shape[0]
        side = math.isqrt(batch.pixels.shape[0] // rows)
        grid = torch.tensor([[1, side, side]] * rows)
        seen = inner.visual(batch.pixels, grid_thw=grid)
        where = batch.input_ids == model.config.image_token_id
        embeds = embeds.masked_scatter(where[..., None], seen.pooler_output)
        extra = {"visual_pos_masks": where, "deepstack_visual_embeds": seen.deepstack_features}
    language, every = inner.language_model, inner.language_model.layers
    language.layers = every[:layers]
    try:
        out = language(
            inputs_embeds=embeds,
            position_ids=batch.positions,
            attention_mask=batch.mask,
            use_cache=False,
            **extra,
        )
    finally:
        language.layers = every
    return model.lm_head(out.last_hidden_state)


def answer_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of the answers, weighted by ``batch.weights``."""
    each = F.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="none"
    )
    weights = (batch.weights * (batch.labels != IGNORE)).flatten()
    return (each * weights).sum() / weights.sum()


def balance_loss(router_logits: list[Tensor], valid: Tensor, top_k: int) -> Tensor:
    """Load-balancing loss, mean over layers.

    Source: Switch Transformer (arXiv 2101.03961), equations 4-6, for top-k routing.
    """
    losses = []
    for logits in router_logits:
        probs = logits[valid].softmax(-1)
        chosen = F.one_hot(probs.topk(top_k).indices, probs.shape[-1]).sum(1).float()
        losses.append(probs.shape[-1] * (chosen.mean(0) / top_k * probs.mean(0)).sum())
    return torch.stack(losses).mean()


def straggler(router_logits: list[Tensor], valid: Tensor, top_k: int) -> list[float]:
    """max load / mean load of each layer over the batch."""
    out = []
    for logits in router_logits:
        load = torch.bincount(
            logits[valid].topk(top_k).indices.flatten(), minlength=logits.shape[-1]
        )
        out.append(round(float(load.max() / load.float().mean()), 2))
    return out


def answer_hits(logits: Tensor, batch: Batch) -> dict[str, tuple[int, int]]:
    """Segments whose whole answer is predicted (teacher forced): kind -> (right, all)."""
    learn = batch.labels != IGNORE
    wrong = learn & (logits.argmax(-1) != batch.labels)
    hits: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for row in range(batch.kind.shape[0]):
        ends = batch.labels[row].tolist()
        bad, count = False, 0
        for i, label in enumerate(ends):
            if label != IGNORE:
                bad |= bool(wrong[row, i])
                count += 1
            elif count:
                entry = hits[KINDS[int(batch.kind[row, i])]]
                entry[0] += not bad
                entry[1] += 1
                bad, count = False, 0
    return {k: (v[0], v[1]) for k, v in hits.items()}


def learning_rate(step: int, steps: int, peak: float, decay_from: float, warmup: int) -> float:
    """Linear warm-up, constant, then a cosine down to 3 % from the share ``decay_from`` on."""
    if step < warmup:
        return peak * (step + 1) / warmup
    start = max(warmup, int(steps * decay_from))
    if step < start:
        return peak
    done = (step - start) / max(1, steps - start)
    return peak * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done)))


def allowed_shift(step: int, stage: Stage) -> int:
    """How far digits may move, in pixels: first none, then more, all from halfway of "see" on.

    Digits that always lie the same way on the patch grid are learned at once; starting with
    shifted ones, nothing is learned for hundreds of steps.
    """
    if stage.name != "see":
        return MAX_SHIFT
    still, full = 0.15 * stage.steps, 0.5 * stage.steps
    return round(MAX_SHIFT * min(1.0, max(0.0, (step - still) / (full - still))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--scale", type=float, default=1.0, help="times the steps of every stage")
    parser.add_argument("--start-from", type=Path, help="weights of an earlier, stopped training")
    parser.add_argument("--first-stage", default="see", choices=[s.name for s in stages(1.0)])
    parser.add_argument("--answer-steps", type=int, help="instead of the last stage's own number")
    parser.add_argument("--match-steps", type=int, help="instead of that stage's own number")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--decay-from", type=float, default=0.6, help="share of the steps")
    parser.add_argument("--balance", type=float, default=0.002, help="load-balancing weight")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=100)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    # Token ids belong to the weights: go on with the tokenizer that they were trained with.
    start = args.start_from
    tokenizer = AutoTokenizer.from_pretrained(start) if start else build_tokenizer()
    model = build_model(tokenizer)
    if start is not None:
        model.load_state_dict(type(model).from_pretrained(start).state_dict())
    processor = build_processor(tokenizer)
    width = model.config.text_config.hidden_size
    head, lookups = CellHead(width), nn.ModuleList(LookupHead(width) for _ in LOOKUP_LAYERS)
    taps = Taps(model)
    top_k = model.config.text_config.num_experts_per_tok

    params = [*model.parameters(), *head.parameters(), *lookups.parameters()]
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.03},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98))
    maker = BatchMaker(tokenizer, seed=args.seed)
    began = time.perf_counter()
    seen: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def save() -> None:
        model.save_pretrained(args.out)
        processor.save_pretrained(args.out)

    plan = stages(args.scale)
    for name, steps in (("match", args.match_steps), ("answer", args.answer_steps)):
        plan = [replace(s, steps=steps) if s.name == name and steps else s for s in plan]
    plan = plan[[stage.name for stage in plan].index(args.first_stage) :]
    steps = sum(stage.steps for stage in plan)
    schedule = [stage for stage in plan for _ in range(stage.steps)]
    for step, stage in enumerate(schedule):
        lr = learning_rate(step, steps, args.lr, args.decay_from, args.warmup)
        for group in optimizer.param_groups:
            group["lr"] = lr
        batch = maker.make(
            stage.rows,
            stage.questions,
            reading=stage.reading,
            with_image=stage.with_image,
            max_shift=allowed_shift(step, stage),
        )
        answers = stage.questions + stage.reading > 0
        losses, total = {}, torch.zeros(())
        if stage.drills:
            drill = maker.drills(stage.drills)
            losses["drill"] = answer_loss(forward(model, drill), drill)
            total = total + losses["drill"]
        taps.clear()
        logits = forward(model, batch, layers=None if answers else AUX_LAYER + 1)
        valid = (batch.input_ids != tokenizer.pad_token_id).flatten()
        total = total + args.balance * balance_loss(taps.router_logits, valid, top_k)
        if answers:
            loss = answer_loss(logits, batch)
            losses["answer"] = loss
            total = total + loss
        if stage.with_image:
            where = batch.input_ids == model.config.image_token_id
            cells = head.losses(taps.hidden[AUX_LAYER][where], batch)
            losses.update(zip(("digit", "colour", "cell"), cells, strict=True))
            total = total + (0.3 if answers else 1.0) * torch.stack(cells).sum()
        if stage.with_image and answers:
            for layer, lookup in zip(LOOKUP_LAYERS, lookups, strict=True):
                found = lookup.losses(taps.hidden[layer], batch)
                losses.update(found)
                total = total + 0.3 * torch.stack(list(found.values())).sum()
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

        for kind, (right, n) in answer_hits(logits.detach(), batch).items():
            seen[kind][0] += right
            seen[kind][1] += n
        if step % 25 == 24:
            line = {
                "step": step + 1,
                "stage": stage.name,
                "minutes": round((time.perf_counter() - began) / 60, 1),
                "loss": {k: round(float(v.detach()), 3) for k, v in losses.items()},
                "lr": round(lr, 5),
                "straggler": straggler(taps.router_logits, valid, top_k),
                "right": {k: round(seen[k][0] / seen[k][1], 2) for k in KINDS if seen[k][1]},
            }
            print(json.dumps(line), flush=True)
            seen.clear()
        if (step + 1) % args.save_every == 0:
            save()
    save()
    print(json.dumps({"steps": steps, "minutes": round((time.perf_counter() - began) / 60, 1)}))


if __name__ == "__main__":
    main()
