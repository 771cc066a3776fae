"""Lines or a bar; the time left counts only questions that still need an answer."""

from __future__ import annotations

import pytest

from mm_capacity.evaluation import progress as module
from mm_capacity.evaluation.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_time_left(clock):
    progress = Progress(total=40, style="lines")
    assert progress.left() == "unknown time"
    clock[0] = 10.0
    progress.advance(10)
    assert progress.left() == "30 s"
    progress.skip(20)
    assert progress.to_do == 10 and progress.left() == "10 s"
    clock[0] = 3000.0
    assert progress.left() == "50 min"


def test_lines_come_at_intervals(clock, capsys):
    progress = Progress(total=100, style="auto")  # captured output is no terminal
    with progress.running():
        progress.begin("model data policy")
        for second in range(1, 91):
            clock[0] = float(second)
            progress.advance(1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "30 of 100" in lines[0] and "70 s left" in lines[0]


def test_off_says_nothing(capsys):
    progress = Progress(total=2, style="off")
    progress.advance(1)
    progress.say("done")
    assert capsys.readouterr().out == ""


def test_the_bar_shows_what_is_said(capsys):
    progress = Progress(total=2, style="bar")
    with progress.running():
        progress.begin("a run")
        progress.skip(1)
        progress.advance(1)
        progress.say("[1/1] a run: done")
    assert "[1/1] a run: done" in capsys.readouterr().out
