"""``--placement``, ``--placement-file`` and ``--replicas``: where experts live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation.arguments import PLACEMENTS
from mm_capacity.evaluation.suggest import check_known
from mm_capacity.evaluation.values import whole_number


def placement_options(options: Mapping[str, Any], ep_size: int | None) -> dict[str, Any]:
    """Where experts live, as options of every policy; none when they are placed contiguously.

    Args:
        options: of the command line or the config file.
        ep_size: R, None when it was not given.

    Raises:
        UserError: an option is missing, or given where it has no meaning.
    """
    kind = check_known("placement", options.get("placement", "contiguous"), PLACEMENTS)
    file, replicas = options.get("placement_file"), options.get("replicas")
    if replicas is not None and kind != "replicated":
        raise UserError(f"--replicas goes with --placement replicated, got {kind}")
    if kind == "contiguous":
        if file is not None:
            raise UserError("--placement-file goes with --placement lpt or replicated")
        return {}
    if ep_size is None:
        raise UserError(f"--placement {kind} needs --ep-size, the number of ranks to place on")
    if file is None:
        raise UserError(
            f"--placement {kind} needs --placement-file, which scripts/calibrate.py writes"
        )
    placed = {"placement": kind, "placement_file": str(file)}
    if kind == "lpt":
        return placed
    count = ep_size if replicas is None else whole_number("--replicas", replicas, least=1)
    if count % ep_size:
        raise UserError(
            f"--replicas {count} must be a multiple of --ep-size {ep_size}: ranks hold equally "
            "many experts"
        )
    return {**placed, "replicas": count}
