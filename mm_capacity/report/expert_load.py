"""Load by layer and expert, image and text apart, before and after the policy.

Load is in units of the mean load of the layer: 1 everywhere would be perfect balance, and the
greatest value of a layer (image and text together) is its straggler factor over the whole run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_capacity.evaluation.loads import LoadFiles

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 6
PANELS = (
    ("image", "assigned", "image, before"),
    ("image", "kept", "image, after"),
    ("text", "assigned", "text, before"),
    ("text", "kept", "text, after"),
)


def plot(results: pd.DataFrame, target: Path) -> None:
    """Draws the figure: a row per policy at its smallest gamma, over all data of the first model.

    Args:
        results: from :func:`mm_capacity.evaluation.results.collect`.
        target: PNG file to write; the run folders are looked for beside it.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    rows = chosen_runs(results)
    figure, axes = plt.subplots(
        len(rows),
        len(PANELS),
        figsize=(3.6 * len(PANELS), 0.6 + 2.1 * len(rows)),
        squeeze=False,
        layout="constrained",
    )
    grids = []
    for _, runs in rows:
        counts = _counts(target.parent, runs)
        grids.append([_grid(counts, modality, column) for modality, column, _ in PANELS])
    top = max(float(grid.max()) for line in grids for grid in line)
    shown: Any = None
    for line, ((label, _), row_axes) in zip(grids, zip(rows, axes, strict=True), strict=True):
        for grid, panel, axis in zip(line, PANELS, row_axes, strict=True):
            shown = axis.imshow(
                grid, aspect="auto", vmin=0, vmax=top, cmap="viridis", interpolation="nearest"
            )
            axis.set_title(panel[2], fontsize=8)
            axis.tick_params(labelsize=6)
            axis.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        row_axes[0].set_ylabel(f"{label}\nlayer", fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("expert", fontsize=7)
    bar = figure.colorbar(shown, ax=axes, shrink=0.8, pad=0.01)
    bar.set_label("load / mean load", fontsize=8)
    model = results["model"].iloc[0]
    figure.suptitle(f"{model}: load by layer and expert, all questions", fontsize=9)
    figure.savefig(target, dpi=150)
    plt.close(figure)


def chosen_runs(results: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """Which runs to show: a label, and the runs (one per data set) that are added up."""
    first = results[(results["model"] == results["model"].iloc[0])]
    capped = first[first["policy"] != "none"]
    part = capped if len(capped) else first
    rows = []
    for key, runs in part.groupby(["policy", "modality"], sort=False):
        gamma = runs["gamma"].min()
        smallest = runs if gamma != gamma else runs[runs["gamma"] == gamma]
        one_each = smallest.drop_duplicates("data")["run"].tolist()
        label = " ".join(word for word in key if word)
        rows.append((label if gamma != gamma else f"{label}\ngamma {gamma:g}", one_each))
    return rows[:MAX_ROWS]


def _counts(work_dir: Path, runs: list[str]) -> pd.DataFrame:
    import pandas as pd

    parts = [LoadFiles(work_dir / run).expert_counts() for run in runs]
    keys = ["layer", "expert", "modality"]
    return pd.concat(parts).groupby(keys, as_index=False)[["assigned", "kept"]].sum()


def _grid(counts: pd.DataFrame, modality: str, column: str) -> Any:
    """``[L, E]`` load in units of the layer's mean load; video counts as image."""
    import numpy as np

    layers, experts = int(counts["layer"].max()) + 1, int(counts["expert"].max()) + 1
    wanted = counts["modality"].isin(["image", "video"] if modality == "image" else [modality])
    grid = np.zeros((layers, experts))
    part = counts[wanted]
    np.add.at(grid, (part["layer"], part["expert"]), part[column])
    mean = counts.groupby("layer")["assigned"].sum().reindex(range(layers)).to_numpy() / experts
    return grid / mean[:, None]
