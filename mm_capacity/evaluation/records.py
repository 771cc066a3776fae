"""One run on disk: a folder that survives a kill at any moment.

    run.json            written at the start, finished at the end; replaced atomically
    predictions.jsonl   one line per question, appended and flushed
    trace/              load counts of one batch each, until the run is complete
    trace.parquet       the load counts of all batches, layers.parquet the load of every layer
    score.json          metrics, and what each question scored
    score/              VLMEvalKit's own prediction and score files
    run.lock            held while a process works in the folder

A batch counts as answered when its load counts and the lines of all its questions are there.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation.loads import LoadFiles

FORMAT = 1
"""Raise it when a change of this package changes answers or the layout above."""

CURRENT_FILE = "current"
"""In the folder of a (model, data): hash of the setting that results are shown for."""

FINISHED = ("done", "done-with-errors")
ANSWERED = (*FINISHED, "inferred")


def slug(text: str) -> str:
    """``text`` as a folder name: letters, digits and ``._-`` only, never hidden, never empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._") or "unnamed"


def digest(identity: Mapping[str, Any]) -> str:
    """Ten hex digits that change with anything in ``identity``."""
    text = json.dumps(identity, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def now() -> str:
    """Time in UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def write_text(path: Path, text: str) -> None:
    """Replaces a file as a whole: a reader, or a kill, sees the old or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


class RunFolder:
    """The folder of one run.

    Args:
        path: the folder; need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run_file(self) -> Path:
        return self.path / "run.json"

    @property
    def predictions_file(self) -> Path:
        return self.path / "predictions.jsonl"

    @property
    def loads(self) -> LoadFiles:
        return LoadFiles(self.path)

    @property
    def score_file(self) -> Path:
        return self.path / "score.json"

    @property
    def score_folder(self) -> Path:
        return self.path / "score"

    def record(self) -> dict[str, Any]:
        """Contents of run.json, empty when there is none.

        Raises:
            UserError: it cannot be read as JSON.
        """
        if not self.run_file.exists():
            return {}
        return _read_json(self.run_file)

    def update(self, **changes: Any) -> dict[str, Any]:
        """Changes entries of run.json and returns all of them."""
        record = {**self.record(), **changes}
        write_text(self.run_file, json.dumps(record, indent=2, default=str) + "\n")
        return record

    def begin(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Writes run.json at the start of a run, or at its continuation.

        Raises:
            UserError: the folder holds a run of other settings.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        before = self.record()
        if before and before.get("hash") != record["hash"]:
            raise UserError(
                f"{self.run_file} belongs to other settings (hash {before.get('hash')!r}, not "
                f"{record['hash']!r}): move the folder away or use --fresh"
            )
        resumed = [*before.get("resumed", []), now()] if before else []
        started = before.get("started", now())
        (self.path / "error.txt").unlink(missing_ok=True)
        return self.update(
            **record, status="running", started=started, resumed=resumed, finished=None, error=None
        )

    def clear(self) -> None:
        """Removes the run's files, and nothing else (a locked folder keeps its lock)."""
        loads = self.loads
        files = (self.run_file, self.predictions_file, self.score_file, loads.trace, loads.layers)
        for file in (*files, self.path / "error.txt"):
            file.unlink(missing_ok=True)
        for folder in (loads.chunks, self.score_folder):
            shutil.rmtree(folder, ignore_errors=True)

    def predictions(self) -> list[dict[str, Any]]:
        """Lines of predictions.jsonl; a torn last line is left out.

        Raises:
            UserError: another line is not JSON.
        """
        if not self.predictions_file.exists():
            return []
        rows = []
        lines = self.predictions_file.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                if number == len(lines) - 1:  # a kill can also leave zeros before the newline
                    break
                raise UserError(
                    f"{self.predictions_file}, line {number} is not JSON: redo the run with --fresh"
                ) from error
        return rows

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends lines to predictions.jsonl and hands them to the operating system."""
        with self.predictions_file.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()

    def keep_complete(self, batches: Sequence[Sequence[Any]]) -> set[int]:
        """Drops what a kill left of a batch and returns the numbers of the complete ones.

        Args:
            batches: the indices of the questions of every batch.
        """
        by_index = {row["index"]: row for row in self.predictions()}
        complete = {
            number
            for number, indices in enumerate(batches)
            if all(index in by_index for index in indices)
            and (self.loads.has(number) or all("error" in by_index[i] for i in indices))
        }
        kept = [by_index[index] for number in sorted(complete) for index in batches[number]]
        if self.predictions_file.exists():
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in kept)
            write_text(self.predictions_file, "".join(lines))
        return complete

    def score(self) -> dict[str, Any]:
        """Contents of score.json, empty when there is none."""
        return _read_json(self.score_file) if self.score_file.exists() else {}

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other processes out; a lock whose process is gone is taken over.

        Raises:
            UserError: another process holds it, or the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            opened = (self.path / "run.lock").open("a+")
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"run folder {self.path} cannot be used: {reason}") from error
        with opened as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise UserError(
                    f"{self.path} is in use by {holder}: wait for it, or choose another --work-dir"
                ) from error
            file.truncate(0)
            file.write(f"process {os.getpid()}\n")
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}): redo the run with --fresh") from error


def find_runs(work_dir: Path) -> list[RunFolder]:
    """Every run below a work directory, in the order of their paths."""
    return [RunFolder(file.parent) for file in sorted(work_dir.glob("*/*/*/run.json"))]
