"""Small tables in the formats of MMBench and MME, with real images, for tests without network."""

from __future__ import annotations

import base64
import csv
import io
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

MMBENCH_CATEGORIES = ("object_localization", "ocr", "attribute_recognition")
MME_CATEGORIES = ("OCR", "color", "numerical_calculation")
LETTERS = "ABCD"
COPY_OFFSET = 1_000_000


def picture(seed: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """A random RGB picture, unlike that of any other seed."""
    rng = random.Random(seed)
    return Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1]))


def to_base64(image: Image.Image, fmt: str = "PNG") -> str:
    """A picture as a cell of the image column."""
    buffer = io.BytesIO()
    image.save(buffer, format=fmt)
    return base64.b64encode(buffer.getvalue()).decode()


def mmbench_rows(
    n: int = 6,
    *,
    circular: bool = True,
    categories: Sequence[str] = MMBENCH_CATEGORIES,
    options: Mapping[int, Sequence[str]] | None = None,
    start: int = 241,
) -> list[dict[str, Any]]:
    """Rows of an MMBench table: base questions, then their circular copies.

    As in the official files a copy has the index ``base + k * 1e6``, rotated options, and the
    base question's index in place of the image; the split is "dev".

    Args:
        n: base questions.
        circular: add the copies, one per further option.
        categories: dealt out in turn.
        options: base number (0-based) -> its option texts; default four words.
        start: first index.
    """
    base, copies = [], []
    for number in range(n):
        rng = random.Random(number)
        texts = list(
            (options or {}).get(number) or (f"{w} {number}" for w in "lamp tree car sun".split())
        )
        right = rng.randrange(len(texts))
        index = start + number
        for turn in range(len(texts) if circular else 1):
            turned = texts[turn:] + texts[:turn]
            row = {
                "index": index + turn * COPY_OFFSET,
                "question": f"What is shown in picture {number}?",
                "hint": "A hint." if number % 3 == 0 else "",
                **dict.fromkeys(LETTERS, ""),
                **dict(zip(LETTERS, turned, strict=False)),
                "answer": LETTERS[(right - turn) % len(texts)],
                "category": categories[number % len(categories)],
                "image": to_base64(picture(number)) if turn == 0 else str(index),
                "source": "test",
                "l2-category": "finegrained_perception" if number % 2 else "coarse_perception",
                "comment": "",
                "split": "dev",
            }
            (copies if turn else base).append(row)
    return base + copies


def mme_rows(
    n_images: int = 6, *, categories: Sequence[str] = MME_CATEGORIES
) -> list[dict[str, Any]]:
    """Rows of an MME table: per image two questions, one answered Yes and one No.

    Sorted by category, as the official file is.
    """
    rows: list[dict[str, Any]] = []
    for category in categories:
        for number in range(n_images):
            if categories[number % len(categories)] != category:
                continue
            image = to_base64(picture(1000 + number))
            for answer in ("Yes", "No"):
                row = {
                    "index": len(rows),
                    "category": category,
                    "image_path": f"{category}/{number:04d}.png",
                    "question": f"Is it {answer} {number}? Please answer yes or no.",
                    "answer": answer,
                    "image": image,
                }
                rows.append(row)
    return rows


def write_tsv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Writes rows as the official tables are written: minimal quoting, UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_mmbench(root: Path, name: str = "MMBench_DEV_EN", **kwargs: Any) -> Path:
    """``root/NAME.tsv`` from :func:`mmbench_rows`."""
    return write_tsv(root / f"{name}.tsv", mmbench_rows(**kwargs))


def write_mme(root: Path, name: str = "MME", **kwargs: Any) -> Path:
    """``root/NAME.tsv`` from :func:`mme_rows`."""
    return write_tsv(root / f"{name}.tsv", mme_rows(**kwargs))


def right_answers(rows: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    """index -> answer of a solver that is always right."""
    return {row["index"]: row["answer"] for row in rows}
