"""What happened to the load: counts by step, layer, expert and modality; no activations kept.

A *step* is one capacity window of one forward pass: the whole pass with ``window="batch"``,
one row of it with ``window="sequence"``. Padding is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vlm_adapters.modality import Modality

from .routing import Decision, Routing

if TYPE_CHECKING:
    import pandas as pd

MODALITIES = (Modality.TEXT, Modality.IMAGE, Modality.VIDEO)


class CapacityExceededError(AssertionError):
    """An expert (or rank) was left with more assignments than its capacity: a bug in a policy."""


@dataclass(frozen=True)
class _Counts:
    """Counts of one layer in one forward pass.

    Attributes:
        layer: MoE layer.
        first_step: number of the first of the W steps.
        loads: ``[3, W, E, 3]`` int64: assigned, kept, added; by step, expert, modality
            (MODALITIES). Added assignments are part of kept.
        tokens: ``[2, W, 3]`` int64: tokens, and tokens left without any expert.
    """

    layer: int
    first_step: int
    loads: Tensor
    tokens: Tensor


class Trace:
    """Counts of everything that ran inside one ``limit_capacity`` context.

    Args:
        names: name of each MoE layer.
        top_k: K of each MoE layer.
        rank_of_expert: for each MoE layer ``[E]`` int64.
        ranks: R.
        window: what counts as a step: ``"policy"`` (the policy's window), ``"batch"`` or
            ``"sequence"``.
        check: raise :class:`CapacityExceededError` as soon as a load exceeds C.
    """

    def __init__(
        self,
        names: Sequence[str],
        top_k: Sequence[int],
        rank_of_expert: Sequence[Tensor],
        ranks: int,
        window: str = "policy",
        check: bool = False,
    ) -> None:
        self.names = list(names)
        self.notes: list[str] = []
        self._top_k = list(top_k)
        self._rank_of_expert = list(rank_of_expert)
        self._ranks = ranks
        self._window = window
        self._check = check
        self._steps = 0
        self._steps_of_pass = 0
        self._records: list[_Counts] = []

    # -- recording -------------------------------------------------------------------

    def record(self, routing: Routing, decision: Decision) -> None:
        """Counts one layer of one forward pass."""
        if self._check:
            check_capacity(routing, decision, self.names[routing.layer])
        window, windows = self._step_of(routing, decision)
        valid = routing.modality != Modality.PAD
        cell = (window * len(MODALITIES) + routing.modality.clamp(max=len(MODALITIES) - 1)).long()
        size = windows * len(MODALITIES)
        loads = torch.stack(
            [
                _count(cell, routing.expert, valid, size, routing.experts),
                _count(cell, decision.expert, valid, size, routing.experts),
                _count(cell, _added(routing, decision), valid, size, routing.experts),
            ]
        ).view(3, windows, len(MODALITIES), routing.experts)
        alone = valid & (decision.expert >= routing.experts).all(1)
        tokens = torch.zeros(2, size, dtype=torch.int64, device=cell.device)
        tokens[0].scatter_add_(0, cell, valid.long())
        tokens[1].scatter_add_(0, cell, alone.long())
        self._records.append(
            _Counts(
                layer=routing.layer,
                first_step=self._steps,
                loads=loads.transpose(2, 3),
                tokens=tokens.view(2, windows, len(MODALITIES)),
            )
        )
        self._steps_of_pass = windows

    def end_pass(self) -> None:
        """Marks the end of a forward pass."""
        self._steps += self._steps_of_pass
        self._steps_of_pass = 0

    def _step_of(self, routing: Routing, decision: Decision) -> tuple[Tensor, int]:
        if self._window == "sequence":
            return routing.sequence, routing.sequences
        if self._window == "batch":
            return torch.zeros_like(routing.sequence), 1
        return decision.window, decision.windows

    def clear(self) -> None:
        """Forgets all counts; steps go on being numbered from where they were, notes stay."""
        self._records.clear()

    # -- reading ---------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """Number of finished steps."""
        return self._steps

    def frame(self) -> pd.DataFrame:
        """Counts of assignments in long form.

        Returns:
            Columns step, layer, expert, rank, modality ("text", "image", "video"), assigned,
            kept, added (by the policy, part of kept). Rows without any assignment are left out.
        """
        import numpy as np
        import pandas as pd

        columns: dict[str, list[Any]] = {
            k: []
            for k in ("step", "layer", "expert", "rank", "modality", "assigned", "kept", "added")
        }
        for record in self._records:
            loads = record.loads.cpu().numpy()
            step, expert, modality = np.nonzero(loads.sum(0))
            assigned, kept, added = loads[:, step, expert, modality]
            columns["step"].append(step + record.first_step)
            columns["layer"].append(np.full(len(step), record.layer))
            columns["expert"].append(expert)
            columns["rank"].append(self._rank_of_expert[record.layer].cpu().numpy()[expert])
            columns["modality"].append(modality)
            for name, values in (("assigned", assigned), ("kept", kept), ("added", added)):
                columns[name].append(values)
        joined = {
            name: np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
            for name, parts in columns.items()
        }
        labels = np.array([m.name.lower() for m in MODALITIES])
        joined["modality"] = labels[joined["modality"]]
        return pd.DataFrame(joined)

    def layers(self) -> pd.DataFrame:
        """One row per step and layer.

        Returns:
            Columns step, layer, tokens, tokens_image (video included), assigned, kept, added and
            the same three for image tokens, zero_expert_tokens, zero_expert_image_tokens,
            mean_load (K T / E), mean_rank_load (K T / R), and each _before and _after the policy:
            max_load, max_rank_load, straggler (max_load over mean_load), rank_straggler.
        """
        import numpy as np
        import pandas as pd

        parts = []
        for record in self._records:
            loads, tokens = record.loads.cpu().numpy(), record.tokens.cpu().numpy()
            rank = self._rank_of_expert[record.layer].cpu().numpy()
            by_expert = loads.sum(-1)  # [3, W, E]
            by_rank = by_expert @ np.eye(self._ranks, dtype=by_expert.dtype)[rank]  # [3, W, R]
            image = loads[..., 1:].sum((-1, -2))  # [3, W]
            count = tokens[0].sum(-1)  # [W]
            assignments = self._top_k[record.layer] * count
            columns = {
                "step": record.first_step + np.arange(loads.shape[1]),
                "layer": np.full(loads.shape[1], record.layer),
                "tokens": count,
                "tokens_image": tokens[0, :, 1:].sum(-1),
                "assigned": by_expert[0].sum(-1),
                "kept": by_expert[1].sum(-1),
                "added": by_expert[2].sum(-1),
                "assigned_image": image[0],
                "kept_image": image[1],
                "added_image": image[2],
                "zero_expert_tokens": tokens[1].sum(-1),
                "zero_expert_image_tokens": tokens[1, :, 1:].sum(-1),
                "mean_load": assignments / loads.shape[2],
                "max_load_before": by_expert[0].max(-1),
                "max_load_after": by_expert[1].max(-1),
                "max_rank_load_before": by_rank[0].max(-1),
                "max_rank_load_after": by_rank[1].max(-1),
                "mean_rank_load": assignments / self._ranks,
            }
            parts.append(pd.DataFrame(columns))
        if not parts:
            return pd.DataFrame()
        frame = pd.concat(parts, ignore_index=True)
        frame = frame[frame["tokens"] > 0].reset_index(drop=True)
        for when in ("before", "after"):
            frame[f"straggler_{when}"] = frame[f"max_load_{when}"] / frame["mean_load"]
            frame[f"rank_straggler_{when}"] = (
                frame[f"max_rank_load_{when}"] / frame["mean_rank_load"]
            )
        return frame

    def summary(self) -> dict[str, Any]:
        """One number per question that is asked of a run: :func:`summarize` of the layers."""
        return summarize(self.layers(), len(self.names))


def summarize(frame: pd.DataFrame, layers: int) -> dict[str, Any]:
    """One number per question that is asked of a run.

    Args:
        frame: from :meth:`Trace.layers`; also of several contexts, one below the other.
        layers: number of MoE layers.

    Returns:
        steps, layers, tokens (summed over steps), straggler_before / straggler_after and
        rank_straggler_before / _after (mean over steps and layers),
        straggler_before_max_layer (the layer mean that is greatest), drop_frac_image,
        drop_frac_text and drop_frac (share of the router's assignments that were dropped;
        None without such assignments), added (assignments that the policy added),
        zero_expert_tokens ((token, layer) pairs without a routed expert),
        zero_expert_frac, max_expert_load and max_rank_load (greatest kept load, in
        assignments), kept (assignments).
    """
    if frame.empty:
        return {"steps": 0, "layers": layers}
    dropped = frame["assigned"] - (frame["kept"] - frame["added"])
    dropped_image = frame["assigned_image"] - (frame["kept_image"] - frame["added_image"])
    image, everything = frame["assigned_image"].sum(), frame["assigned"].sum()

    def share(part: Any, whole: Any) -> float | None:
        return float(part / whole) if whole else None

    by_layer = frame.groupby("layer")["straggler_before"].mean()
    return {
        "steps": int(frame["step"].nunique()),
        "layers": layers,
        "tokens": int(frame.groupby("step")["tokens"].first().sum()),
        "straggler_before": float(frame["straggler_before"].mean()),
        "straggler_after": float(frame["straggler_after"].mean()),
        "straggler_before_max_layer": float(by_layer.max()),
        "rank_straggler_before": float(frame["rank_straggler_before"].mean()),
        "rank_straggler_after": float(frame["rank_straggler_after"].mean()),
        "drop_frac": share(dropped.sum(), everything),
        "drop_frac_image": share(dropped_image.sum(), image),
        "drop_frac_text": share(
            (dropped - dropped_image).sum(),
            everything - image,
        ),
        "added": int(frame["added"].sum()),
        "kept": int(frame["kept"].sum()),
        "zero_expert_tokens": int(frame["zero_expert_tokens"].sum()),
        "zero_expert_frac": share(frame["zero_expert_tokens"].sum(), frame["tokens"].sum()),
        "max_expert_load": int(frame["max_load_after"].max()),
        "max_rank_load": int(frame["max_rank_load_after"].max()),
    }


def _count(cell: Tensor, expert: Tensor, valid: Tensor, size: int, experts: int) -> Tensor:
    """Assignments by cell and expert: ``[size, E]`` int64; ids >= E and padding are left out."""
    key = cell[:, None] * (experts + 1) + expert.clamp(max=experts)
    key = torch.where(valid[:, None], key, experts)
    total = torch.zeros(size * (experts + 1), dtype=torch.int64, device=key.device)
    total.scatter_add_(0, key.reshape(-1), torch.ones_like(key.reshape(-1)))
    return total.view(size, experts + 1)[:, :experts]


def _added(routing: Routing, decision: Decision) -> Tensor:
    """Experts that a decision gave to a token although the router had not: ``[T, K']``, else E."""
    picked = (decision.expert[:, :, None] == routing.expert[:, None, :]).any(-1)
    return decision.expert.masked_fill(picked, routing.experts)


def check_capacity(routing: Routing, decision: Decision, name: str) -> None:
    """Asserts load <= C for every window and expert (or rank) of one layer.

    Raises:
        CapacityExceededError: names layer, window, expert or rank, load and C.
    """
    if decision.capacity is None:
        return
    # Padding counts here: it is work too, whatever the capacity was computed from.
    everything = torch.ones_like(routing.modality, dtype=torch.bool)
    load = _count(decision.window, decision.expert, everything, decision.windows, routing.experts)
    unit = "expert"
    if decision.capacity_scope == "device":
        unit = "rank"
        by_rank = load.new_zeros(decision.windows, routing.ranks)
        load = by_rank.index_add_(1, routing.rank_of_expert, load)
    over = load > decision.capacity[:, None]
    if bool(over.any()):
        window, which = (int(i) for i in over.nonzero()[0])
        raise CapacityExceededError(
            f"layer {name!r}, window {window}: {unit} {which} keeps {int(load[window, which])} "
            f"assignments, capacity is {int(decision.capacity[window])}"
        )
