"""Records to tables and plots. A new plot is one file and one line in PLOTS."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mm_capacity.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

PLOTS: dict[str, str] = {
    "accuracy_vs_gamma": "mm_capacity.report.accuracy_vs_gamma:plot",
    "expert_load": "mm_capacity.report.expert_load:plot",
}
"""Name (and file name) of a plot -> ``plot(results, target)``: the frame of
:func:`mm_capacity.evaluation.results.collect` and the file to write."""


def write_report(work_dir: Path, *, only: Collection[Path] | None = None) -> pd.DataFrame:
    """Writes results.csv and the plots of a work directory and prints its table.

    Args:
        work_dir: the work directory.
        only: run folders to show in the printed table; None for all.

    Returns:
        The results in the printed table.

    Raises:
        UserError: the directory holds no scored run.
    """
    from mm_capacity.evaluation.results import collect, write_csv
    from mm_capacity.report.ordering import ordering, print_ordering
    from mm_capacity.report.tables import print_table

    results = collect(work_dir)
    if results.empty:
        raise UserError(f"{str(work_dir)!r} holds no scored run")
    write_csv(results, work_dir / "results.csv")
    shown = results
    if only is not None:
        names = {str(path.relative_to(work_dir)) for path in only}
        shown = results[results["run"].isin(names)]
    print_table(shown)
    orders = ordering(work_dir, shown)
    if not orders.empty:
        orders.to_csv(work_dir / "ordering.csv", index=False, float_format="%.8g")
        print_ordering(orders)
    print(f"{work_dir / 'results.csv'}: {len(results)} rows", flush=True)
    for name in PLOTS:
        target = work_dir / f"{name}.png"
        draw(name, results, target)
        print(target, flush=True)
    return shown


def draw(name: str, results: pd.DataFrame, target: Path) -> None:
    """Draws one registered plot.

    Args:
        name: key of :data:`PLOTS`.
        results: from :func:`mm_capacity.evaluation.results.collect`.
        target: PNG file to write.
    """
    import matplotlib

    module, _, attribute = PLOTS[name].partition(":")
    before = matplotlib.get_backend()
    matplotlib.use("agg")  # files only: works without a display
    try:
        getattr(import_module(module), attribute)(results, target)
    finally:
        matplotlib.use(before)
