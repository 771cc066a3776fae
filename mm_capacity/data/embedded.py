"""The embedded data sets: questions about coloured handwritten digits, in VLMEvalKit's formats.

DIGITS_MCQ has the columns of an MMBench table, DIGITS_YN those of an MME table: per image one
question whose answer is yes and one whose answer is no, under category names that VLMEvalKit's
MME rating knows, so that perception and cognition come out. Both are drawn from held-out digits
and are the same on every machine.
"""

from __future__ import annotations

import base64
import hashlib
import io
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pandas as pd
from PIL import Image

from mm_capacity.data.digits import ASKERS, Question, Scene, draw_scene

MCQ_PER_SKILL = 70
YN_IMAGES_PER_SKILL = 35
MCQ_SEED = 910_000_000
YN_SEED = 920_000_000
LETTERS = "ABCD"
YN_SUFFIX = " Please answer yes or no."

# MMBench's upper level, by skill.
L2_CATEGORY = {"sum": "reasoning", "comparison": "reasoning"}
# MME's category names, by skill; the last two count as cognition, the others as perception.
# Source: vlmeval/dataset/utils/yorn.py, MME_rating.
MME_CATEGORY = {
    "digit": "OCR",
    "colour": "color",
    "count": "count",
    "presence": "existence",
    "sum": "numerical_calculation",
    "comparison": "commonsense_reasoning",
}


@dataclass(frozen=True)
class EmbeddedSet:
    """One embedded data set.

    Attributes:
        kind: VLMEvalKit's TYPE of it.
        build: makes the table.
        about: one line for listings.
    """

    kind: str
    build: Callable[[], pd.DataFrame]
    about: str


def mcq_options(rng: random.Random, question: Question, position: int) -> tuple[list[str], str]:
    """Puts a question's answers in order.

    Args:
        rng: shuffles the wrong answers.
        question: with two or three wrong answers.
        position: where the right answer goes, 0-based.

    Returns:
        The option texts from A on, and the letter of the right one.
    """
    options = list(question.wrong)
    rng.shuffle(options)
    options.insert(position, question.answer)
    return options, LETTERS[position]


@cache
def digits_mcq() -> pd.DataFrame:
    """DIGITS_MCQ: as many questions per skill, the right letter equally often at each place.

    Returns:
        A table with the columns of an MMBench file.
    """
    rows: list[dict[str, Any]] = []
    for skill in ASKERS:
        turns: Counter[int] = Counter()
        for _ in range(MCQ_PER_SKILL):
            rng, scene, question = _draw(MCQ_SEED + len(rows), skill)
            n_options = 1 + len(question.wrong)
            options, letter = mcq_options(rng, question, turns[n_options] % n_options)
            turns[n_options] += 1
            row = {
                "index": len(rows),
                "image": to_base64(scene.image),
                "question": question.text,
                "hint": None,
                **{name: None for name in LETTERS},
                **dict(zip(LETTERS, options, strict=False)),
                "answer": letter,
                "category": skill,
                "l2-category": L2_CATEGORY.get(skill, "perception"),
                "split": "test",
            }
            rows.append(row)
    return pd.DataFrame(rows)


@cache
def digits_yn() -> pd.DataFrame:
    """DIGITS_YN: per image one question to be answered yes and one to be answered no.

    Returns:
        A table with the columns of an MME file; the two questions of an image share
        ``category`` and ``image_path``.
    """
    rows: list[dict[str, Any]] = []
    for skill in ASKERS:
        category = MME_CATEGORY[skill]
        for number in range(YN_IMAGES_PER_SKILL):
            rng, scene, question = _draw(YN_SEED + len(rows), skill)
            pair = [("Yes", question.answer), ("No", rng.choice(question.wrong))]
            rng.shuffle(pair)
            image = to_base64(scene.image)
            for answer, candidate in pair:
                row = {
                    "index": len(rows),
                    "category": category,
                    "image_path": f"{category}/{number:04d}.png",
                    "image": image,
                    "question": question.claim.format(candidate) + YN_SUFFIX,
                    "answer": answer,
                }
                rows.append(row)
    return pd.DataFrame(rows)


EMBEDDED: dict[str, EmbeddedSet] = {
    "DIGITS_MCQ": EmbeddedSet(
        "MCQ", digits_mcq, "420 multiple-choice questions about coloured handwritten digits"
    ),
    "DIGITS_YN": EmbeddedSet(
        "Y/N", digits_yn, "420 yes/no questions about coloured handwritten digits, in pairs"
    ),
}


def content_digest(frame: pd.DataFrame) -> str:
    """SHA-256 of a table's texts and pixels; compressed bytes differ between zlib versions."""
    sha = hashlib.sha256()
    texts = frame.drop(columns="image").astype(object).where(frame.notna(), "")
    for cells, image in zip(texts.itertuples(index=False), frame["image"], strict=True):
        sha.update("\t".join(map(str, cells)).encode() + b"\n")
        with Image.open(io.BytesIO(base64.b64decode(image))) as picture:
            sha.update(picture.tobytes())
    return sha.hexdigest()


def to_base64(image: Image.Image) -> str:
    """A picture as a cell of VLMEvalKit's image column: PNG, loss-free."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _draw(seed: int, skill: str) -> tuple[random.Random, Scene, Question]:
    """A scene with held-out digits about which the skill can be asked."""
    rng = random.Random(seed)
    while True:
        scene = draw_scene(rng, "test")
        question = ASKERS[skill](rng, scene)
        if question is not None:
            return rng, scene, question
