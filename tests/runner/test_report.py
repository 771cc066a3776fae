"""results.csv, tables and plots from records alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from mm_capacity.evaluation.records import CURRENT_FILE, RunFolder
from mm_capacity.evaluation.results import COLUMNS, collect
from mm_capacity.report import PLOTS, __main__, draw
from mm_capacity.report.ordering import ordering, print_ordering
from mm_capacity.report.tables import markdown, number, pivot, run_frame, with_error

ROOT = Path(__file__).resolve().parents[2]
GAMMAS = (0.5, 1.0)
LAYER_COUNT, EXPERTS = 2, 4


def add_run(work_dir, data, policy, gamma=None, modality=None, setting="s", right=(1, 1, 0)):
    name = f"{policy}-{gamma}-{modality}-{setting}"
    folder = RunFolder(work_dir / "model" / data / name)
    options = {"gamma": gamma, "modality": modality, "order": "score", "window": "sequence"}
    folder.begin(
        {
            "hash": name,
            "setting": setting,
            "model": "model",
            "data": data,
            "policy": {
                "name": policy,
                "options": {k: v for k, v in options.items() if policy != "none"},
                "scope": None if policy == "none" else "expert",
            },
            "ep_size": 4,
        }
    )
    load = {
        "drop_frac_image": None if policy == "none" else 0.5,
        "drop_frac_text": 0.0,
        "straggler_before": 2.5,
        "straggler_after": gamma or 2.5,
        "max_expert_load": 7,
        "max_rank_load": 20,
        "zero_expert_tokens": 3,
    }
    folder.update(status="done", load=load, seconds=1.25)
    metric = {"name": "accuracy", "value": np.mean(right), "stderr": None, "n": 3}
    score = {
        "judge": "exact_matching",
        "metrics": [metric, {**metric, "name": "mme_perception", "value": 1358.1, "stderr": 9.5}],
        "hits": {"accuracy": [[i, float(r)] for i, r in enumerate(right)]},
        "questions": [[i, i, ["c"]] for i in range(3)],
        "members": {"mme_perception": ["c"]},
    }
    folder.score_file.write_text(json.dumps(score))
    rows = [
        (0, layer, expert, expert, modality_, 4 - expert, (4 - expert) // 2, 0)
        for layer in range(LAYER_COUNT)
        for expert in range(EXPERTS)
        for modality_ in ("image", "text")
    ]
    columns = ["step", "layer", "expert", "rank", "modality", "assigned", "kept", "added"]
    pd.DataFrame(rows, columns=columns).to_parquet(folder.loads.trace)
    (folder.path.parent / CURRENT_FILE).write_text("s\n")
    return folder


@pytest.fixture
def work_dir(tmp_path):
    for data in ("A", "B"):
        add_run(tmp_path, data, "none")
        for gamma in GAMMAS:
            for modality in ("uniform", "image-first"):
                add_run(tmp_path, data, "token-drop", gamma, modality, right=(0, 1, 1))
        add_run(tmp_path, data, "naee")
    return tmp_path


def test_results_in_long_form(work_dir):
    results = collect(work_dir)
    assert list(results.columns) == COLUMNS
    assert len(results) == 2 * 6 * 2
    assert results["policy"].iloc[0] == "none"
    row = results[(results["policy"] == "token-drop") & (results["metric"] == "accuracy")].iloc[0]
    assert row["delta"] == 0.0
    assert row["delta_stderr"] == pytest.approx(np.std([-1, 0, 1], ddof=1) / 3**0.5)
    assert (row["ep_size"], row["window"], row["scope"]) == (4, "sequence", "expert")


def test_runs_of_another_setting_are_left_out(work_dir):
    before = len(collect(work_dir))
    add_run(work_dir, "A", "none", setting="another")
    assert len(collect(work_dir)) == before


def test_unfinished_runs_are_left_out(work_dir):
    before = len(collect(work_dir))
    add_run(work_dir, "A", "macs").update(status="running")
    assert len(collect(work_dir)) == before


def test_the_report_command_and_no_nan_as_a_number(work_dir, capsys):
    assert __main__.main([str(work_dir)]) == 0
    out = capsys.readouterr().out
    text = (work_dir / "results.csv").read_text()
    assert "nan" not in out.lower() and "nan" not in text.lower() and "None" not in out
    read = pd.read_csv(work_dir / "results.csv")
    assert list(read.columns) == COLUMNS
    assert set(read["policy"]) == {"none", "token-drop", "naee"}
    assert "model on A, 3 questions" in out and "image-first" in out
    for name in PLOTS:
        with Image.open(work_dir / f"{name}.png") as image:
            pixels = np.asarray(image.convert("L"))
        assert pixels.std() > 5 and min(image.size) > 200


def test_the_report_command_says_what_is_missing(tmp_path, capsys):
    assert __main__.main([str(tmp_path)]) == 2
    assert "no scored run" in capsys.readouterr().err
    assert __main__.main([str(tmp_path / "nowhere")]) == 2


def test_a_terminal_without_unicode_gets_its_table_all_the_same(work_dir):
    done = subprocess.run(
        [sys.executable, "-m", "mm_capacity.report", str(work_dir)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout and done.stdout.isascii() and "expert_load.png" in done.stdout


@pytest.mark.parametrize("name", PLOTS)
def test_plots_of_a_baseline_alone(tmp_path, name):
    add_run(tmp_path, "A", "none")
    draw(name, collect(tmp_path), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_drawing_leaves_matplotlib_as_it_was(work_dir):
    import matplotlib

    before = matplotlib.get_backend()
    draw("accuracy_vs_gamma", collect(work_dir), work_dir / "x.png")
    assert matplotlib.get_backend() == before


def test_a_plot_is_one_file_and_one_line(work_dir, monkeypatch):
    module = work_dir / "my_plot.py"
    module.write_text("def plot(results, target):\n    target.write_text(str(len(results)))\n")
    monkeypatch.syspath_prepend(str(work_dir))
    monkeypatch.setitem(PLOTS, "mine", "my_plot:plot")
    draw("mine", collect(work_dir), work_dir / "mine.png")
    assert (work_dir / "mine.png").read_text() == "24"


def test_load_is_shown_relative_to_the_mean(work_dir):
    from mm_capacity.report.expert_load import _counts, _grid, chosen_runs

    rows = chosen_runs(collect(work_dir))
    labels = [label for label, _ in rows]
    assert "token-drop image-first\ngamma 0.5" in labels and "naee" in labels
    assert all(len(runs) == 2 for _, runs in rows)
    counts = _counts(work_dir, rows[0][1])
    image, text = (_grid(counts, m, "assigned") for m in ("image", "text"))
    assert image.shape == (LAYER_COUNT, EXPERTS)
    assert (image + text).mean(axis=1) == pytest.approx(1.0)
    assert (image + text)[0, 0] == pytest.approx(8 / 5)


def test_pivot_and_markdown(work_dir):
    table = pivot(collect(work_dir))
    assert list(table.columns) == [
        "model", "data", "policy", "modality", "no gamma", "gamma 0.5", "gamma 1",
    ]  # fmt: skip
    line = table[(table["modality"] == "image-first") & (table["data"] == "A")].iloc[0]
    assert line["gamma 0.5"] == "0.667 (+0.000 ± 0.577)" and line["no gamma"] == ""
    base = table[(table["policy"] == "none") & (table["data"] == "A")].iloc[0]
    assert base["no gamma"] == "0.667"
    lines = markdown(table.replace("A", "A|B")).splitlines()
    assert len(lines) == 2 + len(table) and "A\\|B" in lines[2]


def test_run_frame(work_dir):
    frame = run_frame(collect(work_dir))
    assert len(frame) == 12
    assert "2.50 → 0.50" in set(frame["straggler"])
    assert not frame.astype(str).apply(lambda c: c.str.contains("nan")).any(axis=None)


@pytest.mark.parametrize(
    ("value", "text"), [(0.5, "0.500"), (None, "-"), (float("nan"), "-"), (float("inf"), "-")]
)
def test_numbers_as_text(value, text):
    assert number(value) == text


def test_errors_are_left_out_when_unknown():
    assert with_error(0.5, float("nan")) == "0.500"
    assert with_error(-0.25, 0.1, sign=True) == "-0.250 ± 0.100"
    assert with_error(float("nan"), 0.1) == "-"


def test_ordering_is_paired_by_question(tmp_path, capsys):
    add_run(tmp_path, "DATA", "none")
    for modality, right in (("image-first", (1, 1, 0)), ("text-first", (0, 1, 0))):
        add_run(tmp_path, "DATA", "token-drop", 0.5, modality, right=right)
    (line,) = ordering(tmp_path, collect(tmp_path)).to_dict("records")
    assert (line["better"], line["worse"], line["gamma"]) == ("image-first", "text-first", 0.5)
    each = np.array([1, 0, 0])
    assert line["difference"] == pytest.approx(each.mean())
    assert line["stderr"] == pytest.approx(each.std(ddof=1) / np.sqrt(3))
    print_ordering(ordering(tmp_path, collect(tmp_path)))
    assert (
        "token-drop, gamma 0.5: image-first - text-first +0.333 ± 0.333" in capsys.readouterr().out
    )
