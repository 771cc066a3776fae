"""Accuracy against gamma, a panel for each model and data set, a line for each policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_capacity.report.style import BASELINE_COLOUR, LINES, MARKERS, colour_of

if TYPE_CHECKING:
    import pandas as pd


def plot(results: pd.DataFrame, target: Path) -> None:
    """Draws the figure.

    Args:
        results: from :func:`mm_capacity.evaluation.results.collect`.
        target: PNG file to write.
    """
    import matplotlib.pyplot as plt

    rows = results[results["metric"] == "accuracy"]
    panels = list(rows.groupby(["model", "data"], sort=False))
    columns = min(len(panels), 3)
    height = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        height, columns, figsize=(5.2 * columns, 4.2 * height), squeeze=False, layout="constrained"
    )
    policies = [name for name in dict.fromkeys(rows["policy"]) if name != "none"]
    for axis, ((model, data), part) in zip(axes.flat, panels, strict=False):
        _panel(axis, part, policies)
        axis.set(title=f"{model}\n{data}, n = {part['n'].max()}", xlabel="capacity factor gamma")
        axis.set_ylabel("accuracy (± standard error)")
        axis.grid(alpha=0.25)
        axis.legend(fontsize=7)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.savefig(target, dpi=150)
    plt.close(figure)


def _panel(axis: Any, part: pd.DataFrame, policies: list[str]) -> None:
    for _, run in part[part["policy"] == "none"].iterrows():
        axis.axhline(run["value"], color=BASELINE_COLOUR, lw=1, label="no capacity")
        if run["stderr"] == run["stderr"]:  # not NaN
            low, high = run["value"] - run["stderr"], run["value"] + run["stderr"]
            axis.axhspan(low, high, color=BASELINE_COLOUR, alpha=0.12, lw=0)
    capped = part[part["gamma"].notna()]
    keys = ["policy", "modality", "order", "window"]
    several = [key for key in keys[2:] if capped[key].nunique() > 1]
    for number, (key, runs) in enumerate(capped.groupby(keys, sort=False)):
        names = dict(zip(keys, key, strict=True))
        style = policies.index(names["policy"])
        runs = runs.sort_values("gamma")
        axis.errorbar(
            runs["gamma"],
            runs["value"],
            yerr=runs["stderr"].fillna(0),
            color=colour_of(names["modality"]),
            linestyle=LINES[style % len(LINES)],
            marker=MARKERS[(number if several else style) % len(MARKERS)],
            markersize=4,
            capsize=2,
            lw=1.3,
            label=" ".join(names[k] for k in ("policy", "modality", *several) if names[k]),
        )
