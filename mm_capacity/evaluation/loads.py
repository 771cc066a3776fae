"""Load statistics of a run, kept batch by batch so that a resumed run has all of them.

Every batch leaves two small parquet files; when the run is complete they become

    trace.parquet    step, layer, expert, rank, modality, assigned, kept, added
    layers.parquet   batch, step, layer, tokens, mean_load, max_load_before, ...

A step is one window of one forward pass; steps are numbered through the whole run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

SMALL_TYPES = {
    "step": "int32", "layer": "int16", "expert": "int16", "rank": "int16",
    "assigned": "int32", "kept": "int32", "added": "int32",
}  # fmt: skip


class LoadFiles:
    """The files of one run.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.trace = folder / "trace.parquet"
        self.layers = folder / "layers.parquet"
        self.chunks = folder / "trace"

    def _chunk(self, kind: str, batch: int) -> Path:
        return self.chunks / f"{batch:06d}.{kind}.parquet"

    def has(self, batch: int) -> bool:
        """Whether both files of a batch are there."""
        return self._chunk("layers", batch).exists()

    def save(self, batch: int, loads: pd.DataFrame, layers: pd.DataFrame) -> None:
        """Writes the counts of one batch; they appear as a whole or not at all.

        Args:
            batch: number of the batch.
            loads: ``trace.frame()``.
            layers: ``trace.layers()``.
        """
        self.chunks.mkdir(exist_ok=True)
        small = {name: kind for name, kind in SMALL_TYPES.items() if name in loads}
        _write(loads.astype(small), self._chunk("loads", batch))
        _write(layers, self._chunk("layers", batch))  # last: it is the mark of completeness

    def merge(self, batches: Sequence[int]) -> pd.DataFrame:
        """Joins the files of the batches, one batch in memory at a time.

        Args:
            batches: numbers of the batches that have counts, in order.

        Returns:
            Contents of layers.parquet.
        """
        import pandas as pd

        parts = []
        first_step = 0
        with _Joined(self.trace) as joined:
            for batch in batches:
                layers = pd.read_parquet(self._chunk("layers", batch))
                loads = pd.read_parquet(self._chunk("loads", batch))
                loads["step"] += first_step
                layers["step"] += first_step
                layers.insert(0, "batch", batch)
                joined.add(loads.astype({"step": "int32"}))
                parts.append(layers)
                if len(layers):
                    first_step = int(layers["step"].max()) + 1
        layers = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
        _write(layers, self.layers)
        return layers

    def drop_chunks(self) -> None:
        """Removes the files of the single batches."""
        for file in self.chunks.glob("*.parquet*"):
            file.unlink()
        self.chunks.rmdir()

    def split(self) -> None:
        """The reverse of :meth:`merge`, to go on with a run whose answers were damaged."""
        import pandas as pd

        if self.chunks.exists() or not (self.trace.exists() and self.layers.exists()):
            return
        all_loads, all_layers = pd.read_parquet(self.trace), pd.read_parquet(self.layers)
        if "batch" not in all_layers:
            return
        for batch, layers in all_layers.groupby("batch"):
            first, last = layers["step"].min(), layers["step"].max()
            loads = all_loads[all_loads["step"].between(first, last)]
            self.save(
                int(batch),
                loads.assign(step=loads["step"] - first),
                layers.drop(columns="batch").assign(step=layers["step"] - first),
            )

    def expert_counts(self) -> pd.DataFrame:
        """Assignments of every (layer, expert, modality) over the whole run.

        Returns:
            layer, expert, modality, assigned, kept.
        """
        import pandas as pd

        keys = ["layer", "expert", "modality"]
        parts = []
        for part in self._row_groups([*keys, "assigned", "kept"]):
            parts.append(part.groupby(keys, observed=True)[["assigned", "kept"]].sum())
        total = pd.concat(parts).groupby(level=keys, observed=True).sum()
        return total.astype("int64").reset_index()

    def _row_groups(self, columns: Sequence[str]) -> Iterator[pd.DataFrame]:
        import pyarrow.parquet as pq

        file = pq.ParquetFile(self.trace)
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=columns).to_pandas()


class _Joined:
    """Writes one parquet file from many frames; it appears when all are in."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self._partial = target.with_name(target.name + ".partial")
        self._writer: Any = None

    def __enter__(self) -> _Joined:
        return self

    def add(self, frame: pd.DataFrame) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._partial, table.schema, compression="zstd")
        self._writer.write_table(table)

    def __exit__(self, kind: Any, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
            if kind is None:
                os.replace(self._partial, self.target)


def _write(frame: pd.DataFrame, path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    frame.to_parquet(partial, index=False, compression="zstd")
    os.replace(partial, path)


def summarize(layers: pd.DataFrame, layer_names: Sequence[str] = ()) -> dict[str, Any]:
    """The summary of a run, by the same rules as ``trace.summary()`` of a single context.

    Args:
        layers: contents of layers.parquet.
        layer_names: names of the MoE layers.
    """
    from mm_capacity import trace

    return trace.summarize(layers, len(layer_names))
