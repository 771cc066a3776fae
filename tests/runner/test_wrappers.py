"""The whole command through VLMEvalKit's own wrapper classes, on a checkpoint folder at hand.

Patched is only what needs a GPU: ``Qwen3VLChat`` wants to see GPU memory before it loads.
"""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch

from mm_capacity import make_policy
from mm_capacity import run as command_line
from mm_capacity.errors import UserError
from mm_capacity.evaluation import wrappers
from mm_capacity.evaluation.generate import answer
from mm_capacity.evaluation.model_sources import EMBEDDED_FOLDERS
from mm_capacity.evaluation.models import ModelHandle
from mm_capacity.evaluation.plan import DataChoice, ModelChoice, Plan, Settings
from mm_capacity.evaluation.records import find_runs
from mm_capacity.evaluation.vlmeval_models import wrapper_choice
from mm_capacity.evaluation.vlmeval_process import import_vlmeval
from tests.evaluation import tiny_checkpoints
from tests.pictures import picture
from tests.tsv import write_mmbench

NAME = "Qwen3-VL-30B-A3B-Instruct"
FOLDER = str(EMBEDDED_FOLDERS["digits-moe"])
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@pytest.fixture
def asked(monkeypatch):
    """Makes Qwen3VLChat believe in a GPU, and collects what it is asked."""
    import_vlmeval()
    from vlmeval.vlm.qwen3_vl import model as module

    monkeypatch.setattr(module, "get_gpu_memory", lambda: [80_000])
    own, seen = module.Qwen3VLChat.generate_inner, []

    def generate_inner(self, message, dataset=None):
        seen.append(([dict(part) for part in message], dataset))
        return own(self, message, dataset=dataset)

    # As a function of its class, so that it is found where VLMEvalKit's is.
    monkeypatch.setattr(module.Qwen3VLChat, "generate_inner", generate_inner)
    return seen


@pytest.fixture
def start(tmp_path):
    def start(*argv):
        common = ("--device", "cpu", "--work-dir", str(tmp_path / "out"), "--check")
        return command_line.main([*argv, *common])

    start.work_dir = tmp_path / "out"
    return start


def records(start):
    found = [folder.record() for folder in find_runs(start.work_dir)]
    return {(record["model"], record["policy"]["name"]): record for record in found}


def predictions(start, model, policy="none"):
    for folder in find_runs(start.work_dir):
        record = folder.record()
        if (record["model"], record["policy"]["name"]) == (model, policy):
            return {row["index"]: row["prediction"] for row in folder.predictions()}
    raise AssertionError(f"no run of {model} under {policy}")


QUICK = ("--data", "DIGITS_MCQ", "--limit", "3", "--gamma", "0.5", "--policy", "token-drop")


def test_a_wrapper_by_name(start, asked, monkeypatch, capsys):
    argv = ("--model", NAME, "--model-path", FOLDER, *QUICK)
    assert start(*argv) == 0
    assert len(asked) == 6
    message, dataset = asked[0]
    assert dataset == "DIGITS_MCQ" and [part["type"] for part in message] == ["image", "text"]
    found = records(start)
    baseline, capped = found[NAME, "none"], found[NAME, "token-drop"]
    assert baseline["status"] == capped["status"] == "done"
    wrapper = baseline["wrapper"]
    assert (wrapper["class"], wrapper["model_at"]) == ("Qwen3VLChat", "model")
    assert wrapper["changed_arguments"] == {"use_vllm": True}
    assert "attn_implementation: flash_attention_2 -> sdpa" in wrapper["changed_loading"]
    former = wrapper["decoding"]["former"]
    assert former["wrapper.generate_kwargs.temperature"] == 0.7
    assert former["wrapper.generate_kwargs.top_p"] == 0.8
    assert wrapper["passes"]["kv_cache"] is True and wrapper["passes"]["questions_watched"] == 3
    assert any("set to greedy" in text for text in baseline["warnings"])
    assert baseline["load"]["drop_frac"] == 0 < capped["load"]["drop_frac_image"]
    assert capped["load"]["drop_frac_image"] > capped["load"]["drop_frac_text"]

    # Same words and pixels as the checkpoint by itself gets: same answers.
    assert start("--model", FOLDER, "--batch-size", "1", *QUICK) == 0
    for policy in ("none", "token-drop"):
        assert predictions(start, NAME, policy) == predictions(start, "digits_model", policy)
    results = pd.read_csv(start.work_dir / "results.csv")
    assert set(results["model"]) == {NAME, "digits_model"}
    alone = records(start)["digits_model", "none"]
    assert alone["hash"] != baseline["hash"] and "wrapper" not in alone

    # Finished runs are reused, and nothing is built for them.
    capsys.readouterr()
    monkeypatch.setattr(wrappers, "build", lambda *a, **k: pytest.fail("built"))
    assert start(*argv) == 0
    assert capsys.readouterr().out.count("(reused)") == 2


def test_an_unfinished_run_goes_on(start, asked):
    argv = ("--model", NAME, "--model-path", FOLDER, *QUICK[:4], "--gamma", "none")
    assert start(*argv) == 0
    before = predictions(start, NAME)
    (folder,) = find_runs(start.work_dir)
    path = folder.path / "predictions.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    asked.clear()
    assert start(*argv) == 0
    assert len(asked) == 1 and predictions(start, NAME) == before


def test_prompts_are_the_wrappers_own(start, asked, tmp_path):
    """A config file's class, with its constructor's defaults: there it has prompts of its own."""
    write_mmbench(tmp_path / "lmu", n=2)
    config = {
        "model": {"mine": {"class": "Qwen3VLChat", "model_path": FOLDER}},
        "data": {"MMBench_DEV_EN": {}},
        "capacity": {"gamma": ["none"], "lmu_data": str(tmp_path / "lmu"), "mode": "infer"},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert start("--config", str(path), "--no-cache", "--max-new-tokens", "2") == 0
    message, dataset = asked[0]
    assert dataset == "MMBench_DEV_EN"
    handle = ModelHandle(ModelChoice("mine", FOLDER, "Qwen3VLChat"), Settings(device="cpu"))
    text = next(part["value"] for part in message if part["type"] == "text")
    assert handle.wrapper.arguments == {"model_path": FOLDER}
    wrapper = handle.vlm.wrapper
    assert wrapper.use_custom_prompt("MMBench_DEV_EN")
    from mm_capacity.evaluation.datasets import open_dataset

    data = open_dataset("MMBench_DEV_EN", lmu_data=tmp_path / "lmu")
    line = data.dataset.data.iloc[0]
    wrapper.set_dump_image(lambda line: "picture.png")
    own = wrapper.build_prompt(line, dataset="MMBench_DEV_EN")
    assert text in [part["value"] for part in own if part["type"] == "text"]
    assert text not in [part["value"] for part in data.dataset.build_prompt(line)]
    record = records(start)["mine", "none"]
    assert record["identity"]["wrapper"] == {"class": "Qwen3VLChat", "arguments": {}}
    assert record["wrapper"]["passes"]["kv_cache"] is False
    assert any("without a KV cache" in text for text in record["warnings"])


def test_the_plan_alone_builds_nothing(start, capsys, monkeypatch):
    monkeypatch.setattr(wrappers, "build", lambda *a, **k: pytest.fail("built"))
    assert start("--model", NAME, "--data", "MME", "--dry-run") == 0
    assert f"model   {NAME}" in capsys.readouterr().out
    assert not start.work_dir.exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--model", "GPT4o"), "behind an API"),
        (("--model", "GPT4o", "--model-path", FOLDER), "behind an API"),
        (("--model", "Qwen3-VL-8B-Instruct"), "is no mixture of experts"),
        (("--model", NAME, "--model-path", FOLDER, "--batch-size", "2"), "one question at a time"),
        (("--model", "Qwen3.5-35B-A3B_api"), "behind an API"),
    ],
)
def test_what_cannot_run_is_one_line(start, capsys, argv, says):
    assert start(*argv, *QUICK) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and argv[1] in line


@no_gpu
def test_without_a_gpu_the_wrapper_says_what_works(start, capsys):
    assert start("--model", NAME, "--model-path", FOLDER, *QUICK) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "Qwen3VLChat needs a CUDA device and there is none here" in line
    assert f"what works: --model {FOLDER} without the wrapper" in line


def test_a_dense_checkpoint_under_a_name(start, asked, tmp_path, capsys):
    from transformers import AutoProcessor, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 438,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
            "patch_size": 8, "spatial_merge_size": 1, "temporal_patch_size": 1,
            "out_hidden_size": 16, "num_position_embeddings": 144, "deepstack_visual_indexes": [],
        },
    )  # fmt: skip
    folder = tmp_path / "dense"
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    AutoProcessor.from_pretrained(FOLDER).save_pretrained(folder)
    assert start("--model", NAME, "--model-path", str(folder), *QUICK) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "holds no mixture of experts" in line and "Qwen3VLForConditionalGeneration" in line


# -- which models go through a wrapper -------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "wrapper"),
    [
        (ModelChoice(NAME, FOLDER, local_copy=True), "Qwen3VLChat"),
        (ModelChoice(NAME, NAME), "Qwen3VLChat"),
        (ModelChoice("Aria", "org/aria", local_copy=True), "Aria"),
        (ModelChoice("mine", FOLDER, "Qwen3VLChat", local_copy=True), "Qwen3VLChat"),
        (ModelChoice(NAME, FOLDER), None),  # --model FOLDER, which happens to have that name
        (ModelChoice("mine", FOLDER, local_copy=True), None),
        (ModelChoice("org/model", "org/model"), None),
        (ModelChoice("digits-moe", "digits-moe"), None),
        (ModelChoice("deepseek_vl2_tiny", "deepseek_vl2_tiny"), None),  # runs as a port
        (ModelChoice("molmoE-1B-0924", FOLDER, local_copy=True), None),
    ],
)
def test_which_models_go_through_a_wrapper(choice, wrapper):
    handle = ModelHandle(choice, Settings(device="cpu"))
    assert getattr(handle.wrapper, "class_name", None) == wrapper


def test_longest_answer_is_the_wrappers_unless_one_is_given():
    real, own = DataChoice("MME", "MME"), DataChoice("DIGITS_YN", "DIGITS_YN")
    for given, of_real, of_own in ((None, None, 16), (7, 7, 7)):
        settings = Settings(max_new_tokens=given)
        handle = ModelHandle(ModelChoice(NAME, NAME), settings)
        plan = Plan((handle.choice,), (real, own), (), settings)
        assert (handle.new_tokens(plan, real), handle.new_tokens(plan, own)) == (of_real, of_own)


def test_arguments_of_the_wrapper_are_part_of_the_identity(monkeypatch):
    import functools

    from vlmeval.config import supported_VLM

    before = wrapper_choice(NAME).identity
    changed = functools.partial(supported_VLM[NAME].func, **supported_VLM[NAME].keywords)
    changed.keywords["system_prompt"] = "Think."
    monkeypatch.setitem(supported_VLM, NAME, changed)
    after = wrapper_choice(NAME).identity
    assert after["arguments"].pop("system_prompt") == "'Think.'" and before == after


# -- other wrapper classes on tiny checkpoints -----------------------------------------


@pytest.mark.parametrize(
    ("name", "make", "changes"),
    [
        ("GLM4_5V", tiny_checkpoints.glm, ["trust_remote_code", "device_map", "device of inputs"]),
        ("Aria", tiny_checkpoints.aria, ["trust_remote_code", "device_map", "class"]),
        (
            "Llama-4-Scout-17B-16E-Instruct",
            tiny_checkpoints.llama4,
            ["device_map", "attn_implementation", "device of inputs"],
        ),
    ],
)
def test_other_wrappers_run(tmp_path, name, make, changes):
    choice = wrapper_choice(name, folder=str(make(tmp_path / "checkpoint")))
    vlm = wrappers.build(choice, device="cpu", dtype="auto", trust_remote_code=False)
    picture(3).save(tmp_path / "a.jpg")
    message = [
        {"type": "image", "value": str(tmp_path / "a.jpg")},
        {"type": "text", "value": "What is in this picture?"},
    ]
    question = {"message": message, "dataset": "MMBench_DEV_EN"}
    policy = make_policy("token-drop", gamma=0.5, modality="image-first", order="score")
    plain = answer(vlm, question, make_policy("none"), max_new_tokens=4, check=True)
    capped = answer(vlm, question, policy, max_new_tokens=4, check=True)
    assert {"image", "text"} == set(plain.loads["modality"])
    assert plain.loads["kept"].sum() == plain.loads["assigned"].sum()
    assert capped.loads["kept"].sum() < capped.loads["assigned"].sum()
    record = vlm.record()
    assert record["passes"]["kv_cache"] is True and record["decoding"]["enforced_in_generate"]
    assert [p[0] for p in record["passes"]["first_question"][1:]] == [1, 1, 1]
    assert [change.partition(":")[0] for change in record["changed_loading"]] == changes


def test_an_error_that_a_wrapper_would_swallow_comes_out(tmp_path):
    """GLMThinking answers 'Failed to obtain answer.' whatever goes wrong."""
    choice = wrapper_choice("GLM4_5V", folder=str(tiny_checkpoints.glm(tmp_path / "checkpoint")))
    vlm = wrappers.build(choice, device="cpu", dtype="float32", trust_remote_code=False)
    picture(3).save(tmp_path / "a.jpg")
    message = [{"type": "image", "value": str(tmp_path / "a.jpg")}]
    question = {"message": message, "dataset": "MME"}
    handle = vlm.model.lm_head.register_forward_pre_hook(lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        answer(vlm, question, make_policy("none"), max_new_tokens=2)
    handle.remove()
    missing = {**question, "message": [{"type": "image", "value": str(tmp_path / "b.jpg")}]}
    with pytest.raises(UserError, match=r"without a prefill of the model .* it printed: .*b\.jpg"):
        answer(vlm, missing, make_policy("none"), max_new_tokens=2)
