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
from pathlib import Path

import torch
import torch.nn.functional as F
from digits_model.architecture import build_model, build_processor
from digits_model.batches import IGNORE, KINDS, Batch, BatchMaker
from digits_model.tokenizer import build_tokenizer
from torch import Tensor, nn

AUX_LAYER = 1  # hidden states after the second decoder layer
DIGIT_CLASSES, COLOUR_CLASSES = 11, 7


class CellHead(nn.Module):
    """Labels image tokens with the digit and colour of their cell; thrown away at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, DIGIT_CLASSES + COLOUR_CLASSES)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.out(self.norm(hidden)).split((DIGIT_CLASSES, COLOUR_CLASSES), dim=-1)


class Taps:
    """Hooks that collect router logits and the hidden states of one layer."""

    def __init__(self, model: nn.Module) -> None:
        self.router_logits: list[Tensor] = []
        self.hidden: Tensor | None = None
        layers = model.model.language_model.layers
        for layer in layers:
            layer.mlp.gate.register_forward_hook(self._router)
        layers[AUX_LAYER].register_forward_hook(self._layer)

    def _router(self, module, args, output) -> None:
        self.router_logits.append(output[0])

    def _layer(self, module, args, output) -> None:
        self.hidden = output

    def clear(self) -> None:
        self.router_logits, self.hidden = [], None


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Logits ``[B, S, V]`` of a packed batch."""
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
    out = inner.language_model(
        inputs_embeds=embeds,
        position_ids=batch.positions,
        attention_mask=batch.mask,
        use_cache=False,
        **extra,
    )
    return model.lm_head(out.last_hidden_state)


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


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """Linear warm-up, constant, then a cosine over the last 40 % down to 3 %."""
    if step < warmup:
        return peak * (step + 1) / warmup
    decay_from = int(steps * 0.6)
    if step < decay_from:
        return peak
    done = (step - decay_from) / max(1, steps - decay_from)
    return peak * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--rows", type=int, default=12, help="pictures per step")
    parser.add_argument("--questions", type=int, default=5, help="questions per picture")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--balance", type=float, default=0.002, help="load-balancing weight")
    parser.add_argument("--text-steps", type=int, default=200, help="first steps, without pictures")
    parser.add_argument("--reading-steps", type=int, default=600, help="next: mostly reading aloud")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=100)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    processor = build_processor(tokenizer)
    head = CellHead(model.config.text_config.hidden_size)
    taps = Taps(model)
    top_k = model.config.text_config.num_experts_per_tok

    params = [*model.parameters(), *head.parameters()]
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

    for step in range(args.steps):
        lr = learning_rate(step, args.steps, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        with_image = step >= args.text_steps
        if with_image:
            # Reading comes first, questions on top of it later.
            if step < args.text_steps + args.reading_steps:
                batch = maker.make(args.rows * 3 // 2, 2, reading=2)
            else:
                batch = maker.make(args.rows, args.questions)
        else:
            batch = maker.make(2 * args.rows, args.questions, reading=0, with_image=False)
        taps.clear()
        logits = forward(model, batch)
        valid = (batch.input_ids != tokenizer.pad_token_id).flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
        total = loss + args.balance * balance_loss(taps.router_logits, valid, top_k)
        cell_loss = 0.0
        if with_image:
            where = batch.input_ids == model.config.image_token_id
            digit, colour = head(taps.hidden[where])
            cell = F.cross_entropy(digit, batch.cell_digit.flatten())
            cell = cell + F.cross_entropy(colour, batch.cell_colour.flatten())
            cell_loss = float(cell.detach())
            total = total + 0.5 * cell
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
                "minutes": round((time.perf_counter() - began) / 60, 1),
                "loss": round(float(loss.detach()), 3),
                "cell": round(cell_loss, 3),
                "lr": round(lr, 5),
                "straggler": straggler(taps.router_logits, valid, top_k),
                "right": {k: round(seen[k][0] / seen[k][1], 2) for k in KINDS if seen[k][1]},
            }
            print(json.dumps(line), flush=True)
            seen.clear()
        if (step + 1) % args.save_every == 0:
            save()
    save()
    print(
        json.dumps({"steps": args.steps, "minutes": round((time.perf_counter() - began) / 60, 1)})
    )


if __name__ == "__main__":
    main()
