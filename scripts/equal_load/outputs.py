"""equal_load.csv, equal_load.md and equal_load.png."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from equal_load.table import NO_PARAMETER

ABOUT = (
    "Load: maximum over ranks of the kept assignments, over K T / R, mean over questions and MoE "
    "layers, on all questions; searched: the same on the questions that the search looked at. "
    "Difference: paired, to the run without capacity. Errors are standard errors. Placements move "
    "experts and drop nothing; copies of an expert share its assignments evenly.\n"
)


def write_outputs(table: Any, work_dir: Path, command: str, seed: int) -> None:
    """Writes the three files.

    Args:
        table: rows of all models and data sets (a pandas frame).
        work_dir: where to.
        command: what made them.
        seed: of the runner.
    """
    from mm_capacity.evaluation.environment import git_commit, versions
    from mm_capacity.evaluation.records import write_text
    from mm_capacity.evaluation.results import write_csv
    from mm_capacity.report.tables import markdown

    write_csv(table, work_dir / "equal_load.csv")
    software = ", ".join(f"{name} {number}" for name, number in versions().items())
    text = [
        "# Policies at equal maximum rank load\n",
        f"Command: `{command}`  \nSeed: {seed}  \nVersions: {software}  \n"
        f"Commit: {git_commit() or 'unknown'}\n",
        ABOUT,
    ]
    for (model, data), part in table.groupby(["model", "data"], sort=False):
        text += [f"## {model} on {data}, {part['n'].max():.0f} questions\n", markdown(_shown(part))]
    write_text(work_dir / "equal_load.md", "\n".join(text))
    plot(table, work_dir / "equal_load.png")
    for ending in ("csv", "md", "png"):
        print(work_dir / f"equal_load.{ending}", flush=True)


def _shown(part: Any) -> Any:
    import pandas as pd

    from mm_capacity.report.tables import number, share, with_error

    rows = [
        {
            "policy": f"{row['policy']} {row['options']}".strip(),
            "target": number(row["target"], 2),
            "setting": f"{row['knob']}={row['value']:g}" if row["value"] == row["value"] else "-",
            "load": number(row["load"]),
            "searched": number(row["load_searched"]),
            "accuracy": with_error(row["accuracy"], row["stderr"]),
            "difference": with_error(row["delta"], row["delta_stderr"], sign=True),
            "assignments": f"{number(row['assignments'], 0)} ({share(row['assignments_frac'])})",
            "no expert": number(row["zero_expert_tokens"], 0),
            "status": row["status"],
        }
        for _, row in part.astype({"value": float, "target": float}).iterrows()
    ]
    return pd.DataFrame(rows)


def plot(table: Any, target: Path) -> None:
    """Accuracy against maximum rank load, a panel per model and data set, a line per policy.

    Error bars are the standard errors of the paired difference to the run without capacity.
    """
    import matplotlib

    before = matplotlib.get_backend()
    matplotlib.use("agg")  # files only: works without a display
    try:
        import matplotlib.pyplot as plt

        panels = list(table.groupby(["model", "data"], sort=False))
        figure, axes = plt.subplots(
            1, len(panels), figsize=(6.4 * len(panels), 5), squeeze=False, layout="constrained"
        )
        for axis, ((model, data), part) in zip(axes.flat, panels, strict=True):
            _panel(axis, part[part["accuracy"].notna()])
            axis.set(title=f"{model}\n{data}", xlabel="maximum rank load / mean rank load")
            axis.set_ylabel("accuracy (± standard error of the paired difference)")
            axis.grid(alpha=0.25)
            axis.legend(fontsize=7)
        figure.savefig(target, dpi=150)
        plt.close(figure)
    finally:
        matplotlib.use(before)


def _panel(axis: Any, known: Any) -> None:
    from mm_capacity.report.style import BASELINE_COLOUR, LINES, MARKERS

    for _, row in known[known["status"] == "baseline"].iterrows():
        axis.axhline(row["accuracy"], color=BASELINE_COLOUR, lw=1)
        axis.plot(row["load"], row["accuracy"], "*", color=BASELINE_COLOUR, ms=10,
                  label="no capacity")  # fmt: skip
    lines = known[known["status"] != "baseline"].groupby(["policy", "options"], sort=False)
    for i, ((name, options), runs) in enumerate(lines):
        runs = runs.sort_values("load")
        fixed = runs["status"].str.startswith(NO_PARAMETER).any()
        axis.errorbar(
            runs["load"], runs["accuracy"], yerr=runs["delta_stderr"].fillna(0),
            color=f"C{i % 10}", linestyle=LINES[i // 10 % len(LINES)],
            marker="X" if fixed else MARKERS[i % len(MARKERS)], ms=7 if fixed else 4,
            capsize=2, lw=1.2, label=f"{name} {options}".strip(),
        )  # fmt: skip
