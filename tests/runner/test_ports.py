"""The whole command on saved checkpoint folders of the ported families."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from mm_capacity import run as command_line
from mm_capacity.evaluation import single
from mm_capacity.evaluation.models import ModelHandle, resolve_source
from mm_capacity.evaluation.plan import ModelChoice, Settings
from mm_capacity.evaluation.records import find_runs
from tests.tsv import write_mmbench
from vlm_adapters import load_model

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {"paper_molmoe_mme": 7, "paper_molmoe_mmbench": 3}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Checkpoint folders of random tiny models, laid out as on the hub."""
    folders = {}

    def folder_of(family):
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            vlm = load_model(f"tiny:{family}")
            vlm.model.save_pretrained(folders[family])
            vlm.processor.save_pretrained(folders[family])
        return folders[family]

    return folder_of


@pytest.fixture
def seen(monkeypatch):
    """Prompts as text, and the keyword arguments of every batch."""
    seen = []
    real = single.answer

    def answer(vlm, inputs, policy, **options):
        text = vlm.processor.tokenizer.decode(inputs["input_ids"][0])
        seen.append((text, options, dict(vlm.extra)))
        return real(vlm, inputs, policy, **options)

    monkeypatch.setattr(single, "answer", answer)
    return seen


@pytest.mark.parametrize(
    ("family", "name", "prompt"),
    [
        (
            "molmoe",
            "molmoE-1B-0924",
            " User: a_okvqa_mc: A hint.\nWhat is shown in picture 0?\nA: ",
        ),
        (
            "deepseek_vl2",
            "deepseek_vl2_tiny",
            "\nHint: A hint.\nQuestion: What is shown in picture 0?\nOptions:\nA. ",
        ),
    ],
)
def test_a_saved_checkpoint(folder_of, seen, tmp_path, family, name, prompt):
    write_mmbench(tmp_path, n=1)
    argv = [
        *("--model", name, "--model-path", str(folder_of(family)), "--device", "cpu"),
        *("--data", "MMBench_DEV_EN", "--lmu-data", str(tmp_path), "--limit", "4"),
        *("--policy", "token-drop", "--gamma", "0.5", "--max-new-tokens", "2", "--check"),
        *("--work-dir", str(tmp_path / "out")),
    ]
    assert command_line.main(argv) == 0
    results = pd.read_csv(tmp_path / "out" / "results.csv")
    overall = results[results["metric"] == "accuracy"].set_index("policy")
    assert set(overall.index) == {"none", "token-drop"}
    assert set(results["model"]) == {name}
    assert overall.loc["token-drop", "drop_frac_image"] > 0
    assert overall.loc["token-drop", "straggler_after"] < overall.loc["none", "straggler_after"]
    texts = [text for text, _, _ in seen]
    assert any(prompt in text for text in texts)
    assert {extra.get("max_crops") for _, _, extra in seen} == {36 if family == "molmoe" else None}
    for folder in find_runs(tmp_path / "out"):
        identity = folder.record()["identity"]
        assert identity["prompts"] == family and identity["use_cache"] is True
        assert len(folder.predictions()) == 4


def test_without_cache(folder_of, seen, tmp_path):
    write_mmbench(tmp_path, n=1, circular=False)
    argv = [
        *("--model", str(folder_of("deepseek_vl2")), "--device", "cpu", "--no-cache"),
        *("--data", "MMBench_DEV_EN", "--lmu-data", str(tmp_path), "--max-new-tokens", "2"),
        *("--policy", "token-drop", "--gamma", "0.5", "--policy-arg", "phase=all"),
        *("--work-dir", str(tmp_path / "out"), "--no-baseline"),
    ]
    assert command_line.main(argv) == 0
    assert [options["use_cache"] for _, options, _ in seen] == [False]
    (folder,) = find_runs(tmp_path / "out")
    assert folder.record()["identity"]["use_cache"] is False
    assert folder.record()["policy"]["options"]["phase"] == "all"


@pytest.mark.parametrize(
    ("family", "tokens"), [("molmoe", 200), ("deepseek_vl2", 2048), ("qwen3_vl_moe", None)]
)
def test_a_family_is_told_without_loading_weights(family, tokens, folder_of):
    source = f"tiny:{family}" if tokens is None else str(folder_of(family))
    handle = ModelHandle(ModelChoice("m", source), Settings())
    assert handle.family == family and handle.prompts.max_new_tokens == tokens
    assert "vlm" not in vars(handle)


@pytest.mark.parametrize(
    ("name", "hub_id"),
    [
        ("molmoE-1B-0924", "allenai/MolmoE-1B-0924"),
        ("deepseek_vl2_tiny", "deepseek-ai/deepseek-vl2-tiny"),
        ("deepseek_vl2_small", "deepseek-ai/deepseek-vl2-small"),
        ("deepseek_vl2", "deepseek-ai/deepseek-vl2"),
    ],
)
def test_without_network_one_line_says_which_files_are_needed(tmp_path, capsys, name, hub_id):
    assert resolve_source(name) == hub_id
    write_mmbench(tmp_path, n=1)
    argv = ["--model", name, "--data", "MMBench_DEV_EN", "--lmu-data", str(tmp_path)]
    assert command_line.main([*argv, "--work-dir", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for word in (name, hub_id, "tokenizer.json", "processor_config.json", "safetensors"):
        assert word in line


@pytest.mark.parametrize("config", CONFIGS)
def test_paper_configurations(config, capsys):
    path = ROOT / "configs" / f"{config}.json"
    assert command_line.main(["--config", str(path), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"Plan: {CONFIGS[config]} runs" in out and "no KV cache" in out
    assert "phase=all" in out and "count_padding=True" in out and "overflow=expand-global" in out
    assert json.loads(path.read_text())["model"]["molmoE-1B-0924"]["class"] == "molmo"
