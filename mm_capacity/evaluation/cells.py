"""Checks of a table's cells, before VLMEvalKit sees them.

VLMEvalKit evaluates cells of ``index``, ``image`` and ``image_path`` as Python, takes paths as
they come, and stops at the first reference that leads nowhere. Here an unusable table is an
error, an unusable image costs its question, and nothing is executed or opened.
"""

from __future__ import annotations

import ast
import os
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from mm_capacity.errors import UserError
from mm_capacity.evaluation.images import REFERENCE_CHARACTERS, BadImageError, check_inside

AnswerRule = Literal["letter", "yes-no", "Yes-No"]

# Only such texts may reach VLMEvalKit's eval of the index column.
HARMLESS_INDEX = re.compile(r"[\w.\-/:#@ ]{1,200}")
# Stands in for an image that cannot be used, so that the data set opens: such a question is
# never asked. Longer than what VLMEvalKit takes as a reference.
PLACEHOLDER = "-" * (REFERENCE_CHARACTERS + 1)


def check_columns(frame: pd.DataFrame, required: Sequence[str], where: str | Path) -> None:
    """Makes sure that a table has the columns that a data set needs.

    Raises:
        UserError: one is missing.
    """
    missing = [c for c in required if c not in frame]
    if "image" not in frame and "image_path" not in frame:
        missing.append("image")
    if missing:
        raise UserError(
            f"{where} has no column {', '.join(map(repr, missing))}; it has: "
            f"{', '.join(map(str, frame.columns))}"
        )


def checked_index(column: pd.Series, name: str) -> list[str]:
    """The index as texts.

    Raises:
        UserError: a cell is empty, occurs twice, or is no plain name.
    """
    if column.isna().any():
        row = int(column.isna().to_numpy().argmax()) + 2
        raise UserError(f"{name}: the index is empty in line {row} of the table")
    index = [str(x) for x in column]
    seen: set[str] = set()
    for value in index:
        if value in seen:
            raise UserError(f"{name}: the index {value!r} occurs more than once")
        seen.add(value)
        if not HARMLESS_INDEX.fullmatch(value):
            raise UserError(
                f"{name}: {value[:60]!r} cannot be an index: letters, digits and "
                "._-/:#@ are allowed"
            )
    return index


def checked_images(
    frame: pd.DataFrame, name: str, bad: dict[str, str], warnings: list[str]
) -> list[Any]:
    """Cells of the image column: base64, a list of base64, a valid reference, or None.

    Args:
        frame: with a checked index.
        name: data set name.
        bad: gets index -> reason for every image that cannot be used.
        warnings: gets a line if questions have no image.

    Raises:
        UserError: no question has an image.
    """
    cells: dict[str, Any] = {}
    for index, cell in zip(frame["index"], frame["image"], strict=True):
        if not isinstance(cell, str):
            cells[index] = None
            continue
        try:
            cells[index] = as_list(cell)
        except BadImageError as error:
            bad[index] = str(error)
            cells[index] = PLACEHOLDER
    for index, cell in cells.items():
        if cell is None or len(str(cell)) > REFERENCE_CHARACTERS:
            continue
        target = cells.get(cell) if isinstance(cell, str) else None
        if target is None or len(str(target)) <= REFERENCE_CHARACTERS:
            bad[index] = f"no image: {str(cell)!r} is no base64 and no question's index"
            cells[index] = PLACEHOLDER
        elif cell in bad:
            bad[index] = f"shares the image of question {cell}: {bad[cell]}"
    absent = sum(cell is None for cell in cells.values())
    if absent == len(cells):
        raise UserError(f"{name} has no images: its image column is empty")
    if absent:
        warnings.append(
            f"{name}: {absent} questions without an image are left out, as VLMEvalKit does"
        )
    return list(cells.values())


def check_answers(
    frame: pd.DataFrame, name: str, rule: AnswerRule | None, bad: dict[str, str]
) -> None:
    """Finds questions that cannot be scored: VLMEvalKit would count them as wrong, or as right.

    (An answer that it cannot read becomes the letter Z, so a table's answer "Z" would be hit by
    every such answer.)

    Args:
        frame: with a checked index.
        name: data set name.
        rule: what an answer must be; None checks nothing.
        bad: gets index -> reason for every question without text or usable answer.

    Raises:
        UserError: no question can be scored.
    """
    if rule is None:
        return
    letters = [c for c in frame.columns if len(str(c)) == 1 and str(c) in string.ascii_uppercase]
    found: dict[str, str] = {}
    for position, index in enumerate(frame["index"]):
        row = frame.iloc[position]
        if not _filled(row["question"]):
            found[index] = "its question is empty"
        elif why := _answer_problem(row, rule, letters):
            found[index] = why
    if len(found) == len(frame):
        index, why = next(iter(found.items()))
        raise UserError(f"{name}: no question can be scored (question {index}: {why})")
    for index, why in found.items():
        bad.setdefault(index, why)


def _answer_problem(row: pd.Series, rule: AnswerRule, letters: Sequence[str]) -> str | None:
    answer = row["answer"]
    if not _filled(answer):
        return "its answer is empty"
    if rule == "letter":
        options = [letter for letter in letters if _filled(row[letter])]
        # Several letters are for the data set's own matching.
        if len(answer) > 1 or answer in options:
            return None
        named = ", ".join(options) or "it has none"
        return f"its answer {answer!r} is not the letter of one of its options ({named})"
    if (answer if rule == "Yes-No" else answer.strip().capitalize()) in ("Yes", "No"):
        return None
    return f"its answer {answer[:60]!r} is neither Yes nor No"


def _filled(cell: Any) -> bool:
    return isinstance(cell, str) and bool(cell.strip())


def checked_paths(
    frame: pd.DataFrame, folders: Sequence[Path], roots: Sequence[Path], bad: dict[str, str]
) -> list[Any]:
    """Absolute image paths inside the allowed folders.

    Args:
        frame: with a checked index.
        folders: where a relative path may start, in this order.
        roots: folders that a file must lie in.
        bad: gets index -> reason for every path that leads elsewhere or, without an image in
            the table, to no file.

    Returns:
        For each row a path or a list of paths; "" for a bad one.
    """
    checked: list[Any] = []
    for index, cell in zip(frame["index"], frame["image_path"], strict=True):
        try:
            if not isinstance(cell, str):
                raise BadImageError("no image path")
            listed = as_list(cell)
            several = listed if isinstance(listed, list) else [listed]
            paths = [str(check_inside(_absolute(path, folders), roots)) for path in several]
            absent = [path for path in paths if not os.path.isfile(path)]
            if absent and "image" not in frame:
                raise BadImageError(f"no such image file: {absent[0]}")
            checked.append(paths if isinstance(listed, list) else paths[0])
        except BadImageError as error:
            bad.setdefault(index, str(error))
            checked.append("missing")
    return checked


def _absolute(path: str, folders: Sequence[Path]) -> Path:
    """Where a path leads from the first folder that has it; an absolute one stays as it is."""
    found = [folder / path for folder in folders]
    return next((p for p in found if os.path.exists(p)), found[0])


def as_list(cell: str) -> str | list[str]:
    """A cell that is a Python list of strings becomes that list; any other stays a text.

    Raises:
        BadImageError: it looks like a list but is none of strings.
    """
    if not (cell.startswith("[") and cell.endswith("]")):
        return cell
    try:
        value = ast.literal_eval(cell)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if not isinstance(value, list) or not value or not all(isinstance(x, str) for x in value):
        raise BadImageError("the cell begins like a list but is not a list of texts")
    return value
