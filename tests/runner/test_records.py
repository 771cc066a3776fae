"""Run folders survive kills, torn lines, other settings and a second process."""

from __future__ import annotations

import json
import subprocess
import sys

import pandas as pd
import pytest

from mm_capacity.errors import UserError
from mm_capacity.evaluation.records import RunFolder, digest, find_runs, slug, write_text

BATCHES = [[0, 1], [2, 3], ["x", 5]]
LOADS = pd.DataFrame(
    [(0, 0, 0, 0, "image", 3, 2, 0)],
    columns=["step", "layer", "expert", "rank", "modality", "assigned", "kept", "added"],
)
LAYERS = pd.DataFrame({"step": [0], "layer": [0], "tokens": [3]})


def row(index, batch):
    return {"index": index, "prediction": f"answer to {index}\nß", "batch": batch, "seconds": 0.1}


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "model" / "data" / "run")
    folder.begin({"hash": "abc"})
    return folder


def fill(folder, *numbers):
    for number in numbers:
        folder.loads.save(number, LOADS, LAYERS)
        folder.append([row(index, number) for index in BATCHES[number]])


def test_predictions_come_back_as_written(folder):
    fill(folder, 0, 2)
    rows = folder.predictions()
    assert [r["index"] for r in rows] == [0, 1, "x", 5]
    assert rows[0] == row(0, 0)


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_torn_last_line_costs_its_batch_only(folder, cut):
    fill(folder, 0, 1, 2)
    content = folder.predictions_file.read_bytes()
    folder.predictions_file.write_bytes(content[:-cut])
    assert [r["index"] for r in folder.predictions()] == [0, 1, 2, 3, "x"]
    assert folder.keep_complete(BATCHES) == {0, 1}
    assert [r["index"] for r in folder.predictions()] == [0, 1, 2, 3]
    fill(folder, 2)
    assert folder.keep_complete(BATCHES) == {0, 1, 2}
    assert len(folder.predictions_file.read_text("utf-8").splitlines()) == 6


def test_a_last_line_of_zeros_is_torn_too(folder):
    fill(folder, 0)
    with folder.predictions_file.open("ab") as file:
        file.write(b"\0" * 100 + b"\n")
    assert len(folder.predictions()) == 2


def test_a_broken_line_in_the_middle_is_an_error(folder):
    fill(folder, 0)
    content = folder.predictions_file.read_text("utf-8")
    folder.predictions_file.write_text("{broken\n" + content, "utf-8")
    with pytest.raises(UserError, match=r"line 1 .*--fresh"):
        folder.predictions()


def test_answers_without_load_counts_are_asked_again(folder):
    fill(folder, 0)
    folder.append([row(index, 1) for index in BATCHES[1]])
    assert folder.keep_complete(BATCHES) == {0}


def test_lost_questions_need_no_load_counts(folder):
    folder.append([{**row(index, 0), "prediction": None, "error": "?"} for index in BATCHES[0]])
    assert folder.keep_complete(BATCHES) == {0}


def test_other_settings_are_never_mixed_in(folder):
    folder.begin({"hash": "abc"})
    with pytest.raises(UserError, match="other settings"):
        folder.begin({"hash": "def"})
    assert folder.record()["hash"] == "abc"


def test_a_resumed_run_keeps_its_start(folder):
    started = folder.record()["started"]
    record = folder.begin({"hash": "abc"})
    assert record["started"] == started and len(record["resumed"]) == 1


def test_clear_removes_the_run_and_nothing_else(folder):
    fill(folder, 0)
    (folder.path / "notes of the user.txt").write_text("keep")
    folder.clear()
    assert [p.name for p in folder.path.iterdir()] == ["notes of the user.txt"]


def test_a_second_lock_is_refused_and_a_stale_one_taken_over(folder):
    with folder.lock(), pytest.raises(UserError, match="in use by process"):
        RunFolder(folder.path).lock().__enter__()
    (folder.path / "run.lock").write_text("process 999999\n")
    with folder.lock():
        pass


def test_a_lock_of_another_process_holds_until_it_dies(folder):
    code = (
        "import sys; from pathlib import Path\n"
        "from mm_capacity.evaluation.records import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).lock():\n"
        "    print('locked', flush=True); sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=f"in use by process {other.pid}"), folder.lock():
            pass
    finally:
        other.kill()
        other.communicate()
    with folder.lock():
        pass


def test_write_text_leaves_the_old_file_when_writing_fails(tmp_path):
    path = tmp_path / "run.json"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "old"


def test_a_damaged_record_is_named(folder):
    folder.run_file.write_text("{")
    with pytest.raises(UserError, match=r"run\.json .*--fresh"):
        folder.record()


@pytest.mark.parametrize("text", ["Qwen/Qwen3-VL", "../..", "..", "", "a b:c", ".hidden", "tiny:x"])
def test_slugs_are_one_plain_folder_name(tmp_path, text):
    name = slug(text)
    assert name and "/" not in name and not name.startswith(".")
    assert (tmp_path / name).resolve().parent == tmp_path.resolve()


def test_the_digest_changes_with_every_entry():
    identity = {"model": "m", "gamma": 0.5, "versions": {"torch": "2"}}
    changed = [
        {**identity, "gamma": 0.25},
        {**identity, "versions": {"torch": "3"}},
        {**identity, "extra": None},
    ]
    digests = {digest(i) for i in (identity, *changed)}
    assert len(digests) == 4
    assert digest(dict(reversed(identity.items()))) == digest(identity)


def test_runs_are_found_by_their_record(folder, tmp_path):
    (tmp_path / "model" / "data" / "no-run").mkdir()
    assert [f.path for f in find_runs(tmp_path)] == [folder.path]
    assert json.loads(folder.run_file.read_text())["status"] == "running"
