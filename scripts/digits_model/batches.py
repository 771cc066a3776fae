"""Training batches: one picture, several questions that do not see each other.

A row is the prompt prefix with its image, followed by segments. Every segment is one
question with its answer; its tokens attend to the prefix and to earlier tokens of the same
segment only, and its positions start right after the prefix. The model therefore computes
for each segment exactly what it computes for a prompt with that one question, while
the 144 image tokens are computed once.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mm_capacity.data.digits import (
    ASKERS,
    CELL_PX,
    COLOUR_NAMES,
    EMPTY,
    GLYPH_PX,
    GRID,
    NOTHING,
    PLACES,
    Question,
    Scene,
    draw_scene,
)

from .architecture import PATCH_PX, SIDE_TOKENS

IGNORE = -100
YES_NO_CLAIM = " Please answer yes or no."
LETTERS = "ABCD"
MAX_SHIFT = CELL_PX - GLYPH_PX


def solution(question: Question) -> str:
    """What a solver reads aloud before it commits itself: ``3+4=7``, ``red``, ..."""
    if not question.aloud:
        return question.answer
    joint = " " if question.category == "comparison" else "="
    return f"{question.aloud}{joint}{question.answer}"


def given(target: str) -> str:
    """The part of a target that only the picture tells; what follows it, the text tells.

    ``3+4=`` of ``3+4=7 B``, ``3,7`` of ``3,7 smaller A``, ``red`` of ``red C``.
    """
    if "=" in target:
        return target[: target.index("=") + 1]
    return target.split(" ")[0] if "," in target else target[: target.rindex(" ")]


def as_mcq(rng: random.Random, question: Question) -> tuple[str, str]:
    """Prompt in the form VLMEvalKit gives multiple-choice questions, and the target text."""
    options = [question.answer, *question.wrong]
    rng.shuffle(options)
    listed = "".join(f"{k}. {v}\n" for k, v in zip(LETTERS, options, strict=False))
    prompt = (
        f"Question: {question.text}\nOptions:\n{listed}"
        "Please select the correct answer from the options above. \n"
    )
    return prompt, f"{solution(question)} {LETTERS[options.index(question.answer)]}"


def as_yes_no(rng: random.Random, question: Question) -> tuple[str, str]:
    """Prompt in the form of MME, and the target text."""
    true = rng.random() < 0.5
    shown = question.answer if true else rng.choice(question.wrong)
    prompt = question.claim.format(shown) + YES_NO_CLAIM
    word = "yes" if true else "no"
    return prompt, f"{solution(question)} {word}"


def read_aloud(rng: random.Random, scene: Scene) -> tuple[str, str]:
    """Dense supervision: digits and colours of some cells, in a stated order."""
    cells = rng.sample(range(GRID * GRID), 5)
    asked = ", ".join(PLACES[c] for c in cells)
    said = [scene.name(c) if scene.digits[c] != EMPTY else NOTHING for c in cells]
    return f"Read {asked}.", " ".join(said)


def find_letter(rng: random.Random) -> tuple[str, str]:
    """A list of options, and one of them followed by its letter."""
    pools = (
        [str(n) for n in range(10)],
        [str(n) for n in range(19)],
        list(COLOUR_NAMES),
        [f"{name} {n}" for name in COLOUR_NAMES for n in range(10)] + [NOTHING] * 10,
    )
    pool = rng.choice(pools)
    first = rng.choice(pool)
    # Half of the lists hold options that share a word, as real ones do.
    alike = [x for x in pool if set(x.split()) & set(first.split()) and x != first]
    near = rng.sample(alike, min(len(alike), 2)) if rng.random() < 0.5 else []
    others = [x for x in dict.fromkeys(pool) if x != first and x not in near]
    shown = [first, *near, *rng.sample(others, min(len(others), 3 - len(near)))]
    rng.shuffle(shown)
    listed = "".join(f"{k}. {v}\n" for k, v in zip(LETTERS, shown, strict=False))
    at = rng.randrange(len(shown))
    return f"Options:\n{listed}", f"{shown[at]} {LETTERS[at]}"


def warp_glyph(rng: random.Random, glyph: np.ndarray) -> np.ndarray:
    """Small rotation, stretch and contrast change, so that few training digits go further."""
    angle = math.radians(rng.uniform(-12, 12))
    stretch_x, stretch_y = rng.uniform(0.88, 1.12), rng.uniform(0.88, 1.12)
    shear = rng.uniform(-0.15, 0.15)
    cos, sin, mid = math.cos(angle), math.sin(angle), (glyph.shape[0] - 1) / 2
    a, b = cos / stretch_x, (sin + shear) / stretch_x
    d, e = -sin / stretch_y, cos / stretch_y
    matrix = (a, b, mid - a * mid - b * mid, d, e, mid - d * mid - e * mid)
    image = Image.fromarray(glyph).transform(
        glyph.shape[::-1], Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
    )
    scaled = np.asarray(image, np.float32) * rng.uniform(0.8, 1.15)
    return np.clip(scaled, 0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Batch:
    """One training step's input.

    Attributes:
        pixels: ``[B * 144, patch values]``, as the processor makes them; None for text only.
        input_ids: ``[B, S]``.
        labels: ``[B, S]``, IGNORE where nothing is learned; position i predicts i + 1.
        weights: ``[B, S]``, of the labels in the loss.
        positions: ``[3, B, S]`` rotary positions (time, height, width).
        mask: ``[B, 1, S, S]`` bool, True where attention is allowed.
        kind: ``[B, S]`` index into KINDS of the segment a token belongs to.
        cell_digit, cell_colour, cell: ``[B, 144]`` class of the cell under each image token.
        lookups: ``[2, B, S]`` what the words of a prompt refer to (LOOKUPS), IGNORE elsewhere.
    """

    pixels: Tensor | None
    input_ids: Tensor
    labels: Tensor
    weights: Tensor
    positions: Tensor
    mask: Tensor
    kind: Tensor
    cell_digit: Tensor
    cell_colour: Tensor
    cell: Tensor
    lookups: Tensor


LOOKUPS = {"digit": 11, "colour": 7}
"""What a named place in the prompt holds, and the number of classes."""
EMPHASIS = 2.0
"""Weight of the words that commit (letter, yes, no; a result): few among many that read aloud."""
OFTEN = {"digit": 1.0, "colour": 1.5, "count": 1.5, "sum": 1.5, "comparison": 1.0, "presence": 1.0}
"""Relative frequency of question kinds in training: what takes several steps comes more often."""

KINDS = (*(f"{form}/{name}" for form in ("mcq", "yn") for name in ASKERS), "read", "drill")


def patchify(image: Image.Image) -> Tensor:
    """``[144, 3 * 64]``: what the image processor computes for a picture of this very size."""
    pixels = torch.from_numpy(np.asarray(image, np.float32) / 127.5 - 1.0)
    n, p = SIDE_TOKENS, PATCH_PX
    return pixels.reshape(n, p, n, p, 3).permute(0, 2, 4, 1, 3).reshape(n * n, 3 * p * p)


class BatchMaker:
    """Makes batches from a seed."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, split: str = "train"):
        self.tokenizer = tokenizer
        self.split = split
        self.rng = random.Random(seed)
        encode = lambda text: tokenizer(text, add_special_tokens=False).input_ids  # noqa: E731
        self.encode = encode
        self.head = encode("<|im_start|>user\n<|vision_start|>")
        self.image = encode("<|image_pad|>") * SIDE_TOKENS**2
        self.tail = encode("<|vision_end|>")
        self.text_head = encode("<|im_start|>user\n")
        self.turn = encode("<|im_end|>\n<|im_start|>assistant\n")
        self.end = encode("<|im_end|>")
        self.places = [encode(f" {place}") for place in PLACES]

    def look_up(self, scene: Scene, ids: list[int]) -> list[list[int]]:
        """What the tokens of a prompt refer to in the picture; LOOKUPS by token."""
        found = [[IGNORE] * len(ids) for _ in LOOKUPS]
        digit, colour = found
        for i in range(len(ids)):
            for cell, place in enumerate(self.places):
                if ids[max(0, i + 1 - len(place)) : i + 1] == place:
                    digit[i] = scene.digits[cell] if scene.digits[cell] != EMPTY else 10
                    name = scene.colours[cell]
                    colour[i] = COLOUR_NAMES.index(name) if name else 6
        return found

    def _segments(self, scene: Scene, n: int, reading: int, weights: dict[str, float]):
        names = list(weights)
        out = [("read", *read_aloud(self.rng, scene)) for _ in range(reading)]
        while len(out) < n + reading:
            name = self.rng.choices(names, [weights[k] for k in names])[0]
            question = ASKERS[name](self.rng, scene)
            if question is None:
                continue
            form, make = self.rng.choice((("mcq", as_mcq), ("yn", as_yes_no)))
            out.append((f"{form}/{name}", *make(self.rng, question)))
        return out

    def drills(self, rows: int, options: int = 6, sums: int = 10, questions: int = 6) -> Batch:
        """A text-only batch of what has to be known by heart: option letters and sums.

        Args:
            rows: rows of segments.
            options: segments per row that find the letter of a stated option.
            sums: segments per row that finish a stated sum.
            questions: ordinary questions per row, of which what follows from the stated
                readings is learned (counts, sums, comparisons, letters, yes or no).
        """
        made = []
        for _ in range(rows):
            scene = draw_scene(self.rng, self.split)
            segments = self._segments(scene, questions, 0, OFTEN)
            segments += [("drill", *find_letter(self.rng)) for _ in range(options)]
            for _ in range(sums):
                a, b = self.rng.randrange(10), self.rng.randrange(10)
                segments.append(("drill", "", f"{a}+{b}={a + b}"))
            made.append((self.text_head, segments, scene))
        return self._pack(made, [], [], [], False)

    def make(
        self,
        rows: int,
        questions: int,
        *,
        reading: int = 1,
        with_image: bool = True,
        weights: dict[str, float] | None = None,
        max_shift: int = MAX_SHIFT,
    ) -> Batch:
        """One batch; see the module docstring.

        Args:
            rows: pictures.
            questions: questions per picture.
            reading: extra reading-aloud segments per picture.
            with_image: False leaves the pictures out: then only what follows from the
                text (matching a stated answer to its letter or claim) can be learned,
                and only that is.
            weights: relative frequency of the question kinds.
            max_shift: of the digits inside their cells, in pixels.
        """
        weights = weights or OFTEN
        made, pixels, digits, colours = [], [], [], []
        for _ in range(rows):
            warp = warp_glyph if self.split == "train" else None
            scene = draw_scene(self.rng, self.split, warp, max_shift)
            if with_image:
                pixels.append(patchify(scene.image))
                digits.append([d if d != EMPTY else 10 for d in scene.digits])
                colours.append([COLOUR_NAMES.index(c) if c else 6 for c in scene.colours])
                prefix = self.head + self.image + self.tail
            else:
                prefix = self.text_head
            segments = self._segments(scene, questions, reading, weights)
            made.append((prefix, segments, scene))
        return self._pack(made, pixels, digits, colours, with_image)

    def _pack(self, made, pixels, digits, colours, with_image) -> Batch:
        rows = []
        start = len(self.head) + SIDE_TOKENS + 1 if with_image else len(self.text_head)
        for prefix, segments, scene in made:
            ids, labels, pos = list(prefix), [IGNORE] * len(prefix), []
            seg, kind = [0] * len(prefix), [-1] * len(prefix)
            looked = [[IGNORE] * len(prefix) for _ in LOOKUPS]
            weights = [1.0] * len(prefix)
            if with_image:
                h = len(self.head)
                pos = [(i, i, i) for i in range(h)]
                pos += [
                    (h, h + i // SIDE_TOKENS, h + i % SIDE_TOKENS) for i in range(len(self.image))
                ]
                pos += [(h + SIDE_TOKENS,) * 3]
            else:
                pos = [(i, i, i) for i in range(len(prefix))]
            for n, (name, prompt, target) in enumerate(segments, 1):
                ask = self.encode(prompt) + self.turn
                answer = self.encode(target) + self.end
                n_given = len(self.encode(given(target)))
                n_told = 0 if with_image else n_given
                learn = [IGNORE] * n_told + answer[n_told:]
                ids += ask + answer
                # Labels are already shifted: the token before predicts the answer's first.
                labels += [IGNORE] * (len(ask) - 1) + learn + [IGNORE]
                weights += [1.0] * (len(ask) + len(answer))
                if name not in ("read", "drill"):
                    weights[-3] = EMPHASIS  # predicts the last word
                    if "=" in target:
                        weights[n_given - len(answer) - 1] = EMPHASIS  # predicts the result
                pos += [(start + i,) * 3 for i in range(len(ask) + len(answer))]
                seg += [n] * (len(ask) + len(answer))
                kind += [KINDS.index(name)] * (len(ask) + len(answer))
                unknown = [IGNORE] * len(ask)
                found = self.look_up(scene, ask) if with_image else [unknown] * len(LOOKUPS)
                for sofar, new in zip(looked, found, strict=True):
                    sofar += new + [IGNORE] * len(answer)
            rows.append((ids, labels, pos, seg, kind, looked, weights))
        size = max(len(r[0]) for r in rows)

        def pad(values, fill):
            return torch.tensor([list(v) + [fill] * (size - len(v)) for v in values])

        ids = pad([r[0] for r in rows], self.tokenizer.pad_token_id)
        seg = pad([r[3] for r in rows], -1)
        causal = torch.ones(size, size, dtype=torch.bool).tril()
        mask = causal & ((seg[:, :, None] == seg[:, None, :]) | (seg[:, None, :] == 0))
        # A padding row must attend to something, or softmax yields NaN.
        mask |= torch.eye(size, dtype=torch.bool)
        cell = torch.arange(SIDE_TOKENS**2)
        per = SIDE_TOKENS // GRID
        cell = (cell // SIDE_TOKENS // per) * GRID + (cell % SIDE_TOKENS) // per
        empty = torch.zeros(len(rows), 0, dtype=torch.long)
        return Batch(
            pixels=torch.cat(pixels) if with_image else None,
            input_ids=ids,
            labels=pad([r[1] for r in rows], IGNORE),
            weights=pad([r[6] for r in rows], 0.0),
            positions=pad([r[2] for r in rows], (0, 0, 0)).permute(2, 0, 1),
            mask=mask[:, None],
            kind=pad([r[4] for r in rows], -1),
            cell_digit=torch.tensor(digits)[:, cell] if with_image else empty,
            cell_colour=torch.tensor(colours)[:, cell] if with_image else empty,
            cell=cell.expand(len(rows), -1) if with_image else empty,
            lookups=torch.stack(
                [pad([r[5][i] for r in rows], IGNORE) for i in range(len(LOOKUPS))]
            ),
        )
