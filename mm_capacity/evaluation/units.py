"""Questions that belong together: an MME image's pair, an MMBench question's circular copies.

They are asked together, left out together, and count as one draw for a standard error.
"""

from __future__ import annotations

from typing import Any, Literal

import pandas as pd

Style = Literal["single", "pairs", "circular"]

# Circular copies of question i have the index i + k * 1e6 (VLMEvalKit, mcq_circular_eval).
COPY_OFFSET = 1_000_000
# VLMEvalKit scores a multiple-choice set circularly if its name holds one of these.
CIRCULAR_NAMES = ("mmbench", "ccbench", "circular", "mmcr")


def is_circular_name(name: str) -> bool:
    """Whether VLMEvalKit's multiple-choice scoring is circular for this data set."""
    return any(part in name.lower() for part in CIRCULAR_NAMES)


def unit_keys(frame: pd.DataFrame, style: Style) -> list[Any]:
    """For each row the unit that it belongs to."""
    if style == "pairs":
        return list(zip(frame["category"], frame["image_path"], strict=True))
    if style == "circular":
        if "g_index" in frame:
            return [int(x) for x in frame["g_index"]]
        return [int(x) % COPY_OFFSET for x in frame["index"]]
    return list(frame["index"])


def select_first(frame: pd.DataFrame, style: Style, limit: int) -> list[int]:
    """Rows of at most ``limit`` questions: whole units, spread over the categories.

    Units are taken in turn, the first of every category in file order, then the second of
    every category, and so on; the first one that does not fit ends the selection. At least one
    unit is taken, even if it alone has more questions than ``limit``.

    Args:
        frame: all questions.
        style: how questions belong together.
        limit: most questions wanted, at least 1.

    Returns:
        Positions in ``frame``, ascending: file order is kept.
    """
    rows: dict[Any, list[int]] = {}
    for position, key in enumerate(unit_keys(frame, style)):
        rows.setdefault(key, []).append(position)
    categories = list(frame["category"]) if "category" in frame else [None] * len(frame)
    taken_before: dict[Any, int] = {}
    turns: list[tuple[int, int, Any]] = []
    for number, (key, positions) in enumerate(rows.items()):
        category = categories[positions[0]]
        turn = taken_before.get(category, 0)
        taken_before[category] = turn + 1
        turns.append((turn, number, key))
    chosen: list[int] = []
    for _, _, key in sorted(turns, key=lambda t: t[:2]):
        if chosen and len(chosen) + len(rows[key]) > limit:
            break
        chosen += rows[key]
    return sorted(chosen)
