"""The trace of a run in which experts have copies on several ranks.

Counts of experts are what they are without copies. Loads of ranks follow
:func:`mm_capacity.placement.counted_rank_loads`: in every step and layer the copies of an expert
share its assignments evenly. It is a measure only: no work is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .placement import Placement, counted_rank_loads
from .trace import Trace

if TYPE_CHECKING:
    import pandas as pd

SEVERAL_RANKS = -1


class ReplicatedTrace(Trace):
    """A trace that counts rank loads over the copies of experts.

    In :meth:`frame` the rank of an expert with several copies is -1.

    Args:
        placements: of each MoE layer.
        options: of :class:`~mm_capacity.trace.Trace`, except ``rank_of_expert`` and ``ranks``.
    """

    def __init__(self, placements: Sequence[Placement], **options: Any) -> None:
        self._placements = list(placements)
        ranks = self._placements[0].ranks
        super().__init__(
            rank_of_expert=[_rank_or_several(placement) for placement in placements],
            ranks=ranks,
            **options,
        )

    def layers(self) -> pd.DataFrame:
        """As :meth:`Trace.layers`, with the loads of ranks counted over copies."""
        import numpy as np

        frame = super().layers()
        if frame.empty:
            return frame
        counts = self.frame().groupby(["step", "layer", "expert"])[["assigned", "kept"]].sum()
        step, layer, expert = (counts.index.get_level_values(i).to_numpy() for i in range(3))
        for name, column in (("before", "assigned"), ("after", "kept")):
            greatest = np.zeros(len(frame), dtype=np.int64)
            for number, placement in enumerate(self._placements):
                rows = np.flatnonzero(frame["layer"] == number)
                # Steps of one layer are distinct, so a step's place in the sorted steps is its row.
                steps = frame["step"].to_numpy()[rows]
                order = np.argsort(steps)
                mine = layer == number
                loads = np.zeros((len(rows), placement.experts), dtype=np.int64)
                place = order[np.searchsorted(steps[order], step[mine])]
                loads[place, expert[mine]] = counts[column].to_numpy()[mine]
                by_rank = counted_rank_loads(torch.from_numpy(loads), placement)
                greatest[rows] = by_rank.amax(dim=1).numpy()
            frame[f"max_rank_load_{name}"] = greatest
            frame[f"rank_straggler_{name}"] = greatest / frame["mean_rank_load"]
        return frame


def _rank_or_several(placement: Placement) -> torch.Tensor:
    rank = torch.full((placement.experts,), SEVERAL_RANKS)
    rank[placement.expert_of_slot] = placement.rank_of_slot
    return torch.where(placement.copies > 1, SEVERAL_RANKS, rank)
