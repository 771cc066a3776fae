"""What the terminal shows while a sweep runs: a bar on a terminal, lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LINE_EVERY_S = 30.0


def forgiving_streams() -> None:
    """Lets a terminal without Unicode show "?" for what it has not, instead of stopping a run."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


class Progress:
    """Counts questions and estimates the time left.

    Args:
        total: questions of the whole sweep.
        style: "bar", "lines", "off", or "auto" (a bar if standard output is a terminal).
    """

    def __init__(self, total: int, style: str = "auto") -> None:
        if style == "auto":
            style = "bar" if sys.stdout.isatty() else "lines"
        self.style = style
        self.total = total
        self.asked = 0
        self.label = ""
        self._start = self._last_line = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    @property
    def to_do(self) -> int:
        """Questions that are still to be answered."""
        return max(self.total - self.asked, 0)

    @contextmanager
    def running(self) -> Iterator[Progress]:
        """Shows the bar inside the ``with`` block."""
        if self.style != "bar":
            yield self
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar
        from rich.table import Column

        def whole() -> Column:
            return Column(no_wrap=True, min_width=7)

        # On a narrow terminal the name of the run gives way, not the time left.
        columns = (
            BarColumn(bar_width=16),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=11)),
            TimeElapsedColumn(table_column=whole()),
            TextColumn("left"),
            TimeRemainingColumn(table_column=whole()),
            TextColumn("{task.description}", table_column=Column(no_wrap=True, ratio=1)),
        )
        with Bar(*columns) as self._bar:
            self._task = self._bar.add_task("", total=self.total)
            try:
                yield self
            finally:
                self._bar = None

    def begin(self, label: str) -> None:
        """Names the run that is now in progress."""
        self.label = label
        if self._bar is not None:
            self._bar.update(self._task, description=label)

    def skip(self, questions: int) -> None:
        """These questions need no answer (they have one): they leave the total."""
        self.total -= questions
        if self._bar is not None:
            self._bar.update(self._task, total=self.total)

    def advance(self, questions: int) -> None:
        """These questions have been answered."""
        self.asked += questions
        if self._bar is not None:
            self._bar.advance(self._task, questions)
        elif self.style == "lines" and time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.say(f"  {self.label}: {self.asked} of {self.total} questions, {self.left()} left")

    def left(self) -> str:
        """Time left, in words."""
        if not self.asked:
            return "unknown time"
        elapsed = time.monotonic() - self._start
        seconds = elapsed / self.asked * self.to_do
        return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"

    def say(self, line: str) -> None:
        """Prints a line, above the bar where there is one."""
        if self.style == "off":
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)
