"""Pictures of coloured handwritten digits in a 3 x 3 grid, and questions about them.

The digits are the real ones of scikit-learn's ``load_digits`` (8 x 8 pixels, UCI
"Optical Recognition of Handwritten Digits" test set), enlarged, tinted and placed
with random shifts. Train and test digits are disjoint (:func:`digit_split`).
Everything random comes from ``random.Random(seed)``, whose stream is the same on
every Python version, so a seed names one picture and one question for good.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from PIL import Image

GRID = 3
CELL_PX = 32
IMAGE_PX = GRID * CELL_PX
GLYPH_PX = 24
EMPTY = -1
NOTHING = "none"
TEST_FRACTION = 0.3
SPLIT_SEED = 20250305

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (235, 60, 60),
    "green": (70, 215, 80),
    "blue": (80, 120, 255),
    "yellow": (245, 225, 70),
    "white": (245, 245, 245),
    "purple": (200, 90, 235),
}
COLOUR_NAMES = tuple(COLOURS)
PLACES = (
    "top left", "top middle", "top right",
    "middle left", "center", "middle right",
    "bottom left", "bottom middle", "bottom right",
)  # fmt: skip


@cache
def load_glyphs() -> tuple[np.ndarray, np.ndarray]:
    """The digits of scikit-learn, enlarged.

    Returns:
        ``[N, GLYPH_PX, GLYPH_PX]`` uint8 intensities and ``[N]`` int labels 0-9.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = np.round(digits.images * (255 / 16)).astype(np.uint8)
    big = [
        np.asarray(Image.fromarray(g).resize((GLYPH_PX, GLYPH_PX), Image.Resampling.BICUBIC))
        for g in small
    ]
    return np.stack(big), digits.target.astype(int)


@cache
def digit_split() -> dict[str, dict[int, list[int]]]:
    """Disjoint indices into :func:`load_glyphs`: ``split -> digit -> indices``.

    Every digit class gives TEST_FRACTION of its examples to the test split.
    """
    _, labels = load_glyphs()
    rng = random.Random(SPLIT_SEED)
    split: dict[str, dict[int, list[int]]] = {"train": {}, "test": {}}
    for digit in range(10):
        indices = [int(i) for i in np.flatnonzero(labels == digit)]
        rng.shuffle(indices)
        n_test = round(len(indices) * TEST_FRACTION)
        split["test"][digit] = sorted(indices[:n_test])
        split["train"][digit] = sorted(indices[n_test:])
    return split


@dataclass(frozen=True)
class Scene:
    """One picture: for each of the nine cells a digit (or EMPTY) and a colour.

    Attributes:
        digits: nine digits, row by row; EMPTY where a cell has none.
        colours: nine colour names; "" where a cell is empty.
        image: the RGB picture, IMAGE_PX x IMAGE_PX.
    """

    digits: tuple[int, ...]
    colours: tuple[str, ...]
    image: Image.Image

    @property
    def filled(self) -> list[int]:
        """Cells that hold a digit."""
        return [c for c in range(GRID * GRID) if self.digits[c] != EMPTY]

    def name(self, cell: int) -> str:
        """ "red 5"."""
        return f"{self.colours[cell]} {self.digits[cell]}"


def draw_scene(
    rng: random.Random,
    split: str,
    warp: Callable[[random.Random, np.ndarray], np.ndarray] | None = None,
    max_shift: int = CELL_PX - GLYPH_PX,
) -> Scene:
    """Draws a random scene with digits of one split.

    Args:
        rng: the only source of randomness.
        split: "train" or "test".
        warp: optional change of a glyph (training augmentation).
        max_shift: in pixels, how far a digit may move inside its cell; by default anywhere.
    """
    glyphs, _ = load_glyphs()
    pools = digit_split()[split]
    # One or two empty cells, so that presence and counts are real questions; few
    # colours per picture, so that counts above one happen.
    empty = set(rng.sample(range(GRID * GRID), rng.choice((0, 1, 1, 2))))
    palette = rng.sample(COLOUR_NAMES, rng.choice((3, 4, 5, 6)))
    background = np.array([rng.randint(0, 40) for _ in range(3)], np.float32)
    canvas = np.empty((IMAGE_PX, IMAGE_PX, 3), np.float32)
    canvas[:] = background
    digits, colours = [], []
    for cell in range(GRID * GRID):
        if cell in empty:
            digits.append(EMPTY)
            colours.append("")
            continue
        digit, colour = rng.randrange(10), rng.choice(palette)
        glyph = glyphs[rng.choice(pools[digit])]
        if warp is not None:
            glyph = warp(rng, glyph)
        margin = (CELL_PX - GLYPH_PX - max_shift) // 2
        y = (cell // GRID) * CELL_PX + margin + rng.randint(0, max_shift)
        x = (cell % GRID) * CELL_PX + margin + rng.randint(0, max_shift)
        tint = np.array([c + rng.randint(-12, 12) for c in COLOURS[colour]], np.float32)
        ink = (glyph.astype(np.float32) / 255)[..., None]
        area = canvas[y : y + GLYPH_PX, x : x + GLYPH_PX]
        area += ink * (tint - area)
        digits.append(digit)
        colours.append(colour)
    pixels = np.clip(np.round(canvas), 0, 255).astype(np.uint8)
    return Scene(tuple(digits), tuple(colours), Image.fromarray(pixels))


@dataclass(frozen=True)
class Question:
    """One question about a scene, before it takes a multiple-choice or yes/no form.

    Attributes:
        category: the skill asked for.
        text: the question, without options.
        answer: the right answer.
        wrong: other answers of the same kind, all false, two or three of them.
        claim: template of the yes/no form, with ``{}`` for an answer.
        aloud: what a solver reads off the picture on the way, "" if nothing but the answer.
    """

    category: str
    text: str
    answer: str
    wrong: tuple[str, ...]
    claim: str
    aloud: str = ""


def _others(rng: random.Random, pool: list[str], answer: str, first: list[str]) -> tuple[str, ...]:
    """Up to three wrong answers: two plausible ones from the picture, the rest from elsewhere.

    Where the picture holds the whole pool there is nothing else, and two wrong answers remain.
    """
    near = [x for x in dict.fromkeys(first) if x != answer]
    rng.shuffle(near)
    far = [x for x in pool if x != answer and x not in near]
    rng.shuffle(far)
    return tuple((near[:2] + far)[:3])


def ask_digit(rng: random.Random, scene: Scene) -> Question:
    """Reads the digit at a place."""
    cell = rng.choice(scene.filled)
    answer = str(scene.digits[cell])
    seen = [str(scene.digits[c]) for c in scene.filled]
    place = PLACES[cell]
    return Question(
        "digit",
        f"Which digit is at the {place}?",
        answer,
        _others(rng, [str(d) for d in range(10)], answer, seen),
        f"Is the digit at the {place} a {{}}?",
    )


def ask_colour(rng: random.Random, scene: Scene) -> Question:
    """Reads the colour at a place."""
    cell = rng.choice(scene.filled)
    answer, place = scene.colours[cell], PLACES[cell]
    return Question(
        "colour",
        f"What colour is the digit at the {place}?",
        answer,
        _others(rng, list(COLOUR_NAMES), answer, [scene.colours[c] for c in scene.filled]),
        f"Is the digit at the {place} {{}}?",
    )


def ask_count(rng: random.Random, scene: Scene) -> Question:
    """Counts one colour over three places."""
    cells = rng.sample(range(GRID * GRID), 3)
    seen = [scene.colours[c] for c in cells]
    present = [colour for colour in seen if colour]
    # Mostly a colour that is there: "0" must not be the easy guess.
    colour = rng.choice(present if present and rng.random() < 0.8 else COLOUR_NAMES)
    listed = ", ".join(PLACES[c] for c in cells)
    answer = str(seen.count(colour))
    return Question(
        "count",
        f"How many of {listed} are {colour}?",
        answer,
        _others(rng, ["0", "1", "2", "3"], answer, []),
        f"Are {{}} of {listed} {colour}?",
        ",".join(name or NOTHING for name in seen),
    )


def ask_sum(rng: random.Random, scene: Scene) -> Question:
    """Adds two digits."""
    a, b = rng.sample(scene.filled, 2)
    total = scene.digits[a] + scene.digits[b]
    near = [str(k) for k in (total - 2, total - 1, total + 1, total + 2) if k >= 0]
    return Question(
        "sum",
        f"What is {PLACES[a]} plus {PLACES[b]}?",
        str(total),
        _others(rng, [str(k) for k in range(19)], str(total), near),
        f"Is {PLACES[a]} plus {PLACES[b]} {{}}?",
        f"{scene.digits[a]}+{scene.digits[b]}",
    )


def ask_compare(rng: random.Random, scene: Scene) -> Question:
    """Compares two digits; three options, as MMBench too has questions with fewer than four."""
    a, b = rng.sample(scene.filled, 2)
    x, y = scene.digits[a], scene.digits[b]
    answer = "larger" if x > y else "smaller" if x < y else "equal"
    return Question(
        "comparison",
        f"Compared to the {PLACES[b]}, the digit at the {PLACES[a]} is?",
        answer,
        _others(rng, ["larger", "smaller", "equal"], answer, []),
        f"Compared to the {PLACES[b]}, is the digit at the {PLACES[a]} {{}}?",
        f"{x},{y}",
    )


def ask_presence(rng: random.Random, scene: Scene) -> Question:
    """Tells what is at a place, if anything."""
    empty = [c for c in range(GRID * GRID) if scene.digits[c] == EMPTY]
    cell = rng.choice(empty if empty and rng.random() < 0.35 else scene.filled)
    answer = str(scene.digits[cell]) if cell in scene.filled else NOTHING
    near = [str(scene.digits[c]) for c in scene.filled]
    if answer != NOTHING and rng.random() < 0.6:
        near = [NOTHING]
    return Question(
        "presence",
        f"What is at the {PLACES[cell]}?",
        answer,
        _others(rng, [str(digit) for digit in range(10)], answer, near),
        f"Is {{}} at the {PLACES[cell]}?",
    )


ASKERS: dict[str, Callable[[random.Random, Scene], Question | None]] = {
    "digit": ask_digit,
    "colour": ask_colour,
    "count": ask_count,
    "sum": ask_sum,
    "comparison": ask_compare,
    "presence": ask_presence,
}
