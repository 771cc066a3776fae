"""Tables for the terminal and for documents, from the results in long form."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_capacity.evaluation.records import write_text

if TYPE_CHECKING:
    import pandas as pd

NOTHING = "-"
PLAIN_WIDTH = 180
NARROW_WIDTH = 120
"""On a terminal of fewer columns the LOAD_TITLES are left out; results.csv has them."""

LOAD_TITLES = ("max load", "rank", "no expert", "seconds")
RUN_KEYS = ["policy", "modality", "order", "gamma", "window"]


def number(value: Any, digits: int = 3, *, sign: bool = False) -> str:
    """A number as text; what is not a number becomes a dash."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:{'+' if sign else ''}.{digits}f}"


def with_error(value: Any, stderr: Any, digits: int = 3, *, sign: bool = False) -> str:
    """``value ± stderr``, without the part that is not a number."""
    text = number(value, digits, sign=sign)
    error = number(stderr, digits)
    return text if NOTHING in (text, error) else f"{text} ± {error}"


def share(value: Any) -> str:
    """A fraction in percent."""
    text = number(None if value is None else 100 * value, 1)
    return text if text == NOTHING else f"{text} %"


def digits_of(metric: str) -> int:
    """Decimals to show: MME's points are in hundreds, shares are below 1."""
    return 1 if metric.startswith(("mme", "vlmeval/")) else 3


def headline_metrics(results: pd.DataFrame) -> list[str]:
    """Metrics over all questions: those without a category, accuracy first."""
    names = [name for name in dict.fromkeys(results["metric"]) if "/" not in name]
    return sorted(names, key=lambda name: name != "accuracy")


def run_table(results: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """One row per run of one model on one data set.

    Args:
        results: rows of :func:`mm_capacity.evaluation.results.collect`, one model, one data set.

    Returns:
        Titles, and the cells as text.
    """
    metrics = headline_metrics(results)
    always = ("policy", "modality", "gamma")
    shown = [key for key in RUN_KEYS if key in always or _varies(results, key)]
    titles = list(shown)
    for metric in metrics:
        titles += ["accuracy", "difference"] if metric == "accuracy" else [metric.replace("_", " ")]
    titles += ["dropped image", "text", "straggler", *LOAD_TITLES]
    rows = []
    for _, run in results.groupby("run", sort=False):
        by_metric = run.set_index("metric")
        first = run.iloc[0]
        row = [_cell(first[key]) for key in shown]
        for metric in metrics:
            found, digits = by_metric.loc[[metric]], digits_of(metric)
            if metric == "accuracy":
                one = found.iloc[0]
                row.append(with_error(one["value"], one["stderr"], digits))
                row.append(with_error(one["delta"], one["delta_stderr"], digits, sign=True))
            else:
                row.append(_value_cell(found, digits))
        row += [
            share(first["drop_frac_image"]),
            share(first["drop_frac_text"]),
            f"{number(first['straggler_before'], 2)} → {number(first['straggler_after'], 2)}",
            # in the order of LOAD_TITLES
            number(first["max_expert_load"], 0),
            number(first["max_rank_load"], 0),
            number(first["zero_expert_tokens"], 0),
            number(first["seconds"], 1),
        ]
        rows.append(row)
    return titles, rows


def _varies(results: pd.DataFrame, key: str) -> bool:
    return len(set(results[key]) - {""}) > 1


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value or NOTHING
    return NOTHING if value is None or math.isnan(value) else f"{value:g}"


def print_table(results: pd.DataFrame) -> None:
    """Prints a table per model and data set."""
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    left_out = LOAD_TITLES if console.width < NARROW_WIDTH else ()
    for (model, data), part in results.groupby(["model", "data"], sort=False):
        titles, rows = run_table(part)
        n = int(part.loc[part["metric"] == "accuracy", "n"].max())
        table = Table(title=f"{model} on {data}, {n} questions", title_justify="left")
        kept = [i for i, title in enumerate(titles) if title not in left_out]
        for i in kept:
            words = titles[i] in RUN_KEYS and titles[i] != "gamma"
            table.add_column(titles[i], justify="left" if words else "right", no_wrap=words)
        for row in rows:
            table.add_row(*(row[i] for i in kept))
        console.print(table)


def pivot(results: pd.DataFrame, metric: str = "accuracy") -> pd.DataFrame:
    """Value and difference of one metric by gamma, one row per data set, policy and modality.

    Args:
        results: as for :func:`run_table`, any number of models and data sets.
        metric: which one.

    Returns:
        A frame of text, ready for CSV or Markdown; the baseline is its own row.
    """
    import pandas as pd

    rows = results[results["metric"] == metric]
    digits = digits_of(metric)
    gammas = sorted(rows["gamma"].dropna().unique())
    orders = ["order"] if _varies(rows, "order") else []
    keys = ["model", "data", "policy", "modality", *orders]
    table = []
    for key, part in rows.groupby(keys, sort=False):
        line: dict[str, str] = dict(zip(keys, key, strict=True))
        for gamma in gammas:
            found = part[part["gamma"] == gamma]
            line[f"gamma {gamma:g}"] = _value_cell(found, digits)
        if part["gamma"].isna().any():
            line["no gamma"] = _value_cell(part[part["gamma"].isna()], digits)
        table.append(line)
    columns = [*keys, "no gamma", *(f"gamma {gamma:g}" for gamma in gammas)]
    return pd.DataFrame(table, columns=columns).fillna("")


def run_frame(results: pd.DataFrame) -> pd.DataFrame:
    """:func:`run_table` over any number of models and data sets, as one frame of text."""
    import pandas as pd

    parts = []
    for (model, data), part in results.groupby(["model", "data"], sort=False):
        titles, rows = run_table(part)
        frame = pd.DataFrame(rows, columns=titles)
        frame.insert(0, "data", data)
        frame.insert(0, "model", model)
        parts.append(frame)
    return pd.concat(parts, ignore_index=True).fillna(NOTHING)


def _value_cell(found: pd.DataFrame, digits: int) -> str:
    if found.empty:
        return ""
    row = found.iloc[0]
    delta = with_error(row["delta"], row["delta_stderr"], digits, sign=True)
    if delta == NOTHING:
        return with_error(row["value"], row["stderr"], digits)
    return f"{number(row['value'], digits)} ({delta})"


def write_table(parts: Sequence[pd.DataFrame], stem: Path) -> None:
    """Writes tables of text as ``<stem>.csv`` (one below the other) and ``<stem>.md``."""
    import pandas as pd

    joined = pd.concat(parts, ignore_index=True).fillna("")
    write_text(stem.with_suffix(".csv"), joined.to_csv(index=False))
    write_text(stem.with_suffix(".md"), "\n".join(markdown(part) for part in parts))
    print(f"{stem}.csv, {stem}.md", flush=True)


def markdown(frame: pd.DataFrame) -> str:
    """A frame of text as a Markdown table."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    rule = "|" + " --- |" * len(frame.columns)
    body = [line(list(row)) for row in frame.itertuples(index=False)]
    return "\n".join([line(list(frame.columns)), rule, *body]) + "\n"
