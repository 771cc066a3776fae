"""``--list``: what can be named, found without importing anything heavy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mm_capacity.evaluation.arguments import LISTS
from mm_capacity.evaluation.plan import EMBEDDED_DATA, EMBEDDED_MODEL, PAPER_MODEL
from mm_capacity.evaluation.suggest import check_known


def listing(what: str, lmu_data: str | None = None) -> Iterator[str]:
    """Lines of one listing.

    Args:
        what: one of :data:`LISTS`.
        lmu_data: folder of TSV files, for the listing of data; None for VLMEvalKit's own.

    Raises:
        UserError: there is no such listing.
    """
    check_known("listing", what, LISTS)
    if what == "policies":
        from mm_capacity.policies import POLICIES

        yield from POLICIES
    elif what == "plots":
        from mm_capacity.report import PLOTS

        yield from PLOTS
    elif what == "models":
        from vlm_adapters import ADAPTERS

        yield f"{EMBEDDED_MODEL}  embedded, no download"
        yield f"{PAPER_MODEL}  the default with other data"
        yield f"any path or hub id of a family that has an adapter: {', '.join(ADAPTERS)}"
        yield f"tiny:FAMILY  random weights, no download: {', '.join(ADAPTERS)}"
    else:
        for name in EMBEDDED_DATA:
            yield f"{name}  embedded, no download"
        root = Path(lmu_data or os.environ.get("LMUData") or "~/LMUData").expanduser()
        for path in sorted(root.glob("*.tsv")):
            yield f"{path.stem}  {path}"
        yield "any image data set of VLMEvalKit by its name (MMBench_DEV_EN, MME, ...), downloaded"
