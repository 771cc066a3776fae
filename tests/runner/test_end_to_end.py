"""The whole command on a tiny random model, with VLMEvalKit's own data classes and scoring."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pandas as pd
import pytest

from mm_capacity import run as command_line
from mm_capacity.evaluation.records import find_runs
from tests.tsv import mme_rows, right_answers, write_mmbench, write_mme, write_tsv

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--model", "tiny:qwen3_vl_moe", "--max-new-tokens", "2", "--device", "cpu", "--check")


@pytest.fixture
def no_download(monkeypatch):
    from mm_capacity.evaluation.vlmeval_process import import_vlmeval

    import_vlmeval()

    def refuse(url, *args, **kwargs):
        raise OSError("no network in tests")

    monkeypatch.setattr("vlmeval.smp.download_file", refuse)


@pytest.fixture
def start(tmp_path, no_download, tiny_vlm, monkeypatch):
    monkeypatch.setattr("vlm_adapters.load_model", lambda *a, **k: tiny_vlm)
    lmu, work_dir = tmp_path / "lmu", tmp_path / "out"

    def start(*argv):
        return command_line.main(
            [*TINY, "--lmu-data", str(lmu), "--work-dir", str(work_dir), *argv]
        )

    start.lmu, start.work_dir = lmu, work_dir
    return start


def results_of(start):
    return pd.read_csv(start.work_dir / "results.csv")


def test_embedded_data(start, capsys):
    assert start("--limit", "4", "--gamma", "0.5", "--batch-size", "4") == 0
    results = results_of(start)
    assert set(results["data"]) == {"DIGITS_MCQ", "DIGITS_YN"}
    overall = results[results["metric"] == "accuracy"]
    assert overall["policy"].tolist() == ["none", "expanded-drop", "token-drop"] * 2
    assert (overall["n"] == 4).all()
    capped = overall[overall["policy"] != "none"]
    assert capped[["delta", "delta_stderr"]].notna().all(axis=None)
    assert (capped["straggler_after"] <= 0.6).all() and (capped["drop_frac_image"] > 0).all()
    assert "mme_perception" in set(results["metric"])
    for name in ("accuracy_vs_gamma.png", "expert_load.png"):
        assert (start.work_dir / name).stat().st_size > 1000
    out = capsys.readouterr().out
    assert "Plan: 6 runs" in out and "DIGITS_MCQ, 4 questions" in out
    for folder in find_runs(start.work_dir):
        assert folder.record()["status"] == "done"
        assert list(folder.score_folder.glob("*.tsv"))


def test_mmbench_and_mme_tables(start):
    write_mmbench(start.lmu, n=3)
    write_mme(start.lmu, n_images=3)
    content = (start.lmu / "MME.tsv").read_bytes()
    assert start("--data", "MMBench_DEV_EN", "MME", "--policy", "token-drop", "--gamma", "1") == 0
    results = results_of(start)
    metrics = set(results["metric"])
    assert {"accuracy", "accuracy_circular", "mme_perception", "mme_cognition"} <= metrics
    circular = results[results["metric"] == "accuracy_circular"]
    assert circular["delta"].notna().sum() == 1
    assert (start.lmu / "MME.tsv").read_bytes() == content
    record = next(f.record() for f in find_runs(start.work_dir) if f.record()["data"] == "MME")
    assert record["data_official"] is False
    assert any("not the official file" in text for text in record["warnings"])
    assert len(record["identity"]["data_digest"]) == 64
    assert not results["value"].isna().any()


def test_a_limit_keeps_pairs_together(start):
    write_mme(start.lmu, n_images=6)
    assert start("--data", "MME", "--limit", "5", "--gamma", "none") == 0
    (folder,) = find_runs(start.work_dir)
    asked = {row["index"] for row in folder.predictions()}
    rows = [row for row in mme_rows(6) if row["index"] in asked]
    images = [row["image_path"] for row in rows]
    assert len(asked) == 4 and all(images.count(image) == 2 for image in images)


def test_right_answers_score_full_marks(start, monkeypatch):
    """Answers go to the questions they belong to, through files and VLMEvalKit's matcher."""
    from mm_capacity.evaluation import single

    rows = mme_rows(3)
    write_tsv(start.lmu / "MME.tsv", rows)
    right = right_answers(rows)
    order = iter(right.values())
    real = single.answer

    def perfect(vlm, inputs, *args, **kwargs):
        answered = real(vlm, inputs, *args, **kwargs)
        answered.texts[:] = [next(order) for _ in answered.texts]
        return answered

    monkeypatch.setattr(single, "answer", perfect)
    assert start("--data", "MME", "--gamma", "none", "--batch-size", "4") == 0
    results = results_of(start).set_index("metric")
    assert results.loc["accuracy", "value"] == 1.0
    assert results.loc["mme_perception", "value"] == 400.0
    assert results.loc["mme_cognition", "value"] == 200.0


def test_a_corrupt_image_is_reported(start, capsys):
    rows = mme_rows(3)
    rows[0]["image"] = rows[1]["image"] = "A" * 400
    write_tsv(start.lmu / "MME.tsv", rows)
    assert start("--data", "MME", "--gamma", "none") == 1
    (folder,) = find_runs(start.work_dir)
    record = folder.record()
    assert record["status"] == "done-with-errors"
    assert [entry["index"] for entry in record["lost"]] == [0, 1]
    assert "2 question(s) lost" in capsys.readouterr().err
    assert results_of(start).set_index("metric").loc["accuracy", "n"] == 4


@pytest.mark.parametrize("data", [("MMBench_DEV_EN",), ("MME", "MMBench_DEV_EN")])
def test_without_table_and_network_one_line_says_what_to_do(start, capsys, data):
    assert start("--data", *data) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for name in data:
        assert f"{name}.tsv" in line
    assert str(start.lmu) in line and "DIGITS_MCQ" in line


def test_one_missing_table_does_not_stop_the_other(start, capsys):
    write_mme(start.lmu, n_images=3)
    assert start("--data", "MMBench_DEV_EN", "MME", "--gamma", "none") == 1
    assert "MMBench_DEV_EN" in capsys.readouterr().err
    assert set(results_of(start)["data"]) == {"MME"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: [r.pop("answer") for r in rows], "'answer'"),
        (lambda rows: rows.__delitem__(slice(1, None)) or rows[0].update(index=""), "index"),
    ],
)
def test_an_unusable_table_is_one_line(start, capsys, change, says):
    rows = mme_rows(3)
    change(rows)
    write_tsv(start.lmu / "MME.tsv", rows)
    assert start("--data", "MME") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and "MME" in line
    assert find_runs(start.work_dir) == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--data", "MMBench_DEV_ENN"), "'MMBench_DEV_EN'"),
        (("--model", "Qwen3-VL-30B-A3B-Instrukt"), "'Qwen3-VL-30B-A3B-Instruct'"),
        (("--model", "digits-mo"), "'digits-moe'"),
    ],
)
def test_unknown_names_suggest_the_right_one(start, capsys, argv, says):
    assert start(*argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_real_data_without_a_model_need_the_default_model(tmp_path, no_download, capsys):
    """Offline (as all tests are) the paper's model cannot be fetched: one line says so."""
    write_mme(tmp_path, n_images=3)
    argv = ["--data", "MME", "--lmu-data", str(tmp_path), "--work-dir", str(tmp_path / "out")]
    assert command_line.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "allenai/MolmoE-1B-0924" in line and "config.json" in line


@pytest.mark.parametrize(
    ("config", "code", "says"),
    [
        ({"data": {"MME": {"class": "ImageYORNDataset"}}}, 0, ""),
        ({"data": {"MME": {"class": "ImageMCQDataset"}}}, 2, "'ImageYORNDataset'"),
        ({"data": {"DIGITS_MCQ": {"class": "ImageYORNDataset"}}}, 2, "is 'ImageMCQDataset'"),
        ({"model": {"tiny": {"model_path": "tiny:qwen3_vl_moe", "class": "Qwen3VLChat"}}}, 0, ""),
        ({"model": {"tiny": {"model_path": "tiny:qwen3_vl_moe", "class": "Qwen3VLChats"}}}, 2,
         "'Qwen3VLChat'"),
    ],
)  # fmt: skip
def test_classes_of_a_config_file(start, tmp_path, capsys, config, code, says):
    write_mme(start.lmu, n_images=3)
    content = {
        "model": {"tiny": {"model_path": "tiny:qwen3_vl_moe"}},
        "data": {"MME": {}},
        "capacity": {"gamma": ["none"], "max_new_tokens": 1, "lmu_data": str(start.lmu)},
        **config,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    argv = ["--config", str(path), "--work-dir", str(start.work_dir)]
    assert command_line.main(argv) == code
    assert says in capsys.readouterr().err


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "runs", "has"),
    [
        ("modality_ablation", 4, ["text-first", "gamma 0.5"]),
        ("gamma_sweep", 2, ["straggler", "dropped image"]),
    ],
)
def test_scripts(start, capsys, name, runs, has):
    argv = [*TINY, "--data", "DIGITS_MCQ", "--limit", "2", "--work-dir", str(start.work_dir)]
    assert script(name).main([*argv, "--gamma", "0.5", "--policy", "token-drop"]) == 0
    assert f"Plan: {runs} runs" in capsys.readouterr().out
    table = pd.read_csv(start.work_dir / f"{name}.csv")
    text = (start.work_dir / f"{name}.md").read_text()
    assert len(table) == runs
    for word in has:
        assert word in text
    assert text.splitlines()[1].startswith("| ---")


def test_vlmeval_leaves_the_process_as_it_was(start):
    import ssl

    import torch

    assert start("--data", "DIGITS_MCQ", "--limit", "2", "--gamma", "none") == 0
    assert torch.is_grad_enabled()
    assert ssl._create_default_https_context is not ssl._create_unverified_context
