"""Arguments and config files become a plan, or one line that says what would work."""

from __future__ import annotations

import json

import pytest

from mm_capacity.errors import UserError
from mm_capacity.evaluation.arguments import build_parser, parse
from mm_capacity.evaluation.options import make_plan
from mm_capacity.evaluation.plan import BASELINE, describe
from mm_capacity.evaluation.values import parse_gamma


def plan_of(*argv, grid=None):
    return make_plan(parse(build_parser("run", ""), list(argv)), grid)


def error_of(*argv):
    with pytest.raises(UserError) as caught:
        plan_of(*argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def described(plan):
    return {(p.name, p.get("modality"), p.get("gamma")) for p in plan.policies if p.name != "none"}


def test_no_arguments_give_the_embedded_model_data_and_the_full_grid():
    plan = plan_of()
    assert [m.name for m in plan.models] == ["digits-moe"]
    assert [d.name for d in plan.data] == ["DIGITS_MCQ", "DIGITS_YN"]
    assert plan.policies[0] == BASELINE
    assert described(plan) == {
        (policy, modality, gamma)
        for policy in ("token-drop", "expanded-drop")
        for modality in ("uniform", "image-first", "text-first")
        for gamma in (0.5, 1.0, 1.5)
    }
    assert len(plan.policies) == 19 and plan.runs == 38
    assert plan.settings.batch_size == 32
    assert plan.new_tokens(plan.models[0], plan.data[0]) == 16
    assert {p.get("window") for p in plan.policies[1:]} == {"sequence"}


@pytest.mark.parametrize(
    "argv", [["--data", "DIGITS_MCQ"], ["--model", "x/y"], ["--model-path", "/tmp/none"]]
)
def test_data_or_model_alone_give_a_small_grid(argv):
    plan = plan_of(*argv)
    assert plan.policies[0] == BASELINE
    assert described(plan) == {
        (policy, "image-first", gamma)
        for policy in ("token-drop", "expanded-drop")
        for gamma in (0.5, 1.0)
    }


def test_the_default_model_depends_on_the_data():
    assert plan_of("--data", "DIGITS_YN").models[0].name == "digits-moe"
    real = plan_of("--data", "MMBench_DEV_EN", "MME")
    assert real.models[0].name == "allenai/MolmoE-1B-0924"
    assert real.settings.batch_size == 1
    assert real.new_tokens(real.models[0], real.data[0]) == 512
    assert real.policies[1].get("window") == "batch"


def test_a_model_without_data_is_asked_the_embedded_questions():
    plan = plan_of("--model", "some/model")
    assert [d.name for d in plan.data] == ["DIGITS_MCQ", "DIGITS_YN"]
    assert plan.settings.batch_size == 1


def test_gamma_none_is_the_baseline():
    assert plan_of("--gamma", "none").policies == (BASELINE,)
    assert plan_of("--policy", "none").policies == (BASELINE,)
    plan = plan_of("--gamma", "0.5", "none", "0.5", "--policy", "token-drop", "--data", "MME")
    assert [p.name for p in plan.policies] == ["none", "token-drop"]


def test_no_baseline():
    plan = plan_of("--no-baseline", "--policy", "token-drop", "--gamma", "1", "--data", "MME")
    assert [p.name for p in plan.policies] == ["token-drop"]
    asked_for = plan_of("--no-baseline", "--gamma", "none")
    assert asked_for.policies == (BASELINE,)


@pytest.mark.parametrize(
    "text", ["0", "-1", "-0.5", "nan", "inf", "1e999", "abc", "0,5", "", "1 2"]
)
def test_bad_gamma_is_named(text):
    message = error_of("--gamma", text)
    assert repr(text) in message and "above 0" in message


@pytest.mark.parametrize("value", [True, [], None, {}])
def test_bad_gamma_values_of_a_config_file(value):
    with pytest.raises(UserError):
        parse_gamma(value)


KNOWN = ("--policy", "--modality", "--order", "--window", "--mode", "--dtype", "--device")


@pytest.mark.parametrize(
    ("argv", "suggestion"),
    [
        (["--policy", "token-dro"], "'token-drop'"),
        (["--policy", "Token-Drop"], "'token-drop'"),
        (["--modality", "image_first"], "'image-first'"),
        (["--order", "scores"], "'score'"),
        (["--window", "sequences"], "'sequence'"),
        (["--mode", "al"], "'all'"),
        (["--dtype", "bf16"], "float16"),
        (["--gama", "1"], "'--gamma'"),
        (["--workdir", "x"], "'--work-dir'"),
        (["--device", "gpu"], "cuda"),
    ],
)
def test_unknown_words_suggest_the_right_one(argv, suggestion):
    message = error_of(*argv)
    assert suggestion in message and repr(argv[1] if argv[0] in KNOWN else argv[0]) in message


@pytest.mark.parametrize("flag", ["--batch-size", "--limit", "--max-new-tokens", "--ep-size"])
@pytest.mark.parametrize("value", ["0", "-3", "1.5", "x", "nan"])
def test_counts_must_be_whole_and_positive(flag, value):
    assert flag in error_of(flag, value)


def test_seed_may_be_zero_and_reaches_the_policies():
    assert plan_of("--seed", "0").settings.seed == 0
    plan = plan_of("--seed", "7", "--order", "random")
    assert all(p.get("seed") == 7 for p in plan.policies[1:])
    assert "--seed" in error_of("--seed", "-1")


def test_policies_without_an_axis_appear_once():
    plan = plan_of("--policy", "none", "token-drop", "--gamma", "1", "2", "--modality", "uniform")
    assert len(plan.policies) == 3
    assert BASELINE.options == ()


def test_policy_arguments():
    plan = plan_of("--policy-arg", "originals_first=true", "scope=device", "--gamma", "1")
    named = {p.name: p for p in plan.policies}
    assert named["expanded-drop"].get("originals_first") is True
    assert named["token-drop"].get("originals_first") is None
    assert named["token-drop"].get("scope") == "device"
    assert "'originals_first'" in error_of("--policy-arg", "original_first=true")
    assert "KEY=VALUE" in error_of("--policy-arg", "scope")
    assert "--gamma" in error_of("--policy-arg", "gamma=1")


def test_batches_share_no_window_unless_asked():
    assert plan_of("--batch-size", "4").policies[1].get("window") == "sequence"
    assert plan_of("--batch-size", "4").trace_window == "sequence"
    both = plan_of("--batch-size", "4", "--window", "batch")
    assert both.policies[1].get("window") == "batch" and both.trace_window == "batch"
    assert plan_of("--batch-size", "1", "--window", "batch").trace_window == "sequence"


def test_slugs_name_what_differs():
    plan = plan_of("--order", "reverse", "--gamma", "0.5", "--modality", "text-first")
    assert plan.policies[1].slug == "token-drop_text-first_reverse_gamma0.5"
    assert BASELINE.slug == "none"


def test_model_paths_are_shown_by_their_last_part(tmp_path):
    for parent in ("a", "b"):
        (tmp_path / parent / "model").mkdir(parents=True)
    one, other = str(tmp_path / "a" / "model"), str(tmp_path / "b" / "model")
    assert plan_of("--model", one).models[0].name == "model"
    assert [m.name for m in plan_of("--model", one, other).models] == [one, other]
    named = plan_of("--model", "some/name", "--model-path", one).models[0]
    assert (named.name, named.source) == ("some/name", one)
    assert "--model-path" in error_of("--model", "a/b", "c/d", "--model-path", one)


def test_the_work_directory_must_be_usable(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert str(file) in error_of("--work-dir", str(file))
    assert str(file) in error_of("--work-dir", str(file / "below"))
    assert plan_of("--work-dir", str(tmp_path / "new" / "one")).runs
    assert not (tmp_path / "new").exists()


def test_fresh_and_resume_exclude_each_other():
    assert "not allowed" in error_of("--fresh", "--resume")
    assert "--mode all" in error_of("--fresh", "--mode", "eval")


def write(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


CONFIG = {
    "model": {"mine": {"class": "Qwen3VLChat", "model_path": "org/model", "max_new_tokens": 9}},
    "data": {"Short": {"class": "ImageMCQDataset", "dataset": "MMBench_DEV_EN", "limit": 5}},
    "capacity": {"gamma": [0.5, "none"], "policy": "token-drop", "ep-size": 8, "check": True},
}


def test_a_config_file(tmp_path):
    plan = plan_of("--config", write(tmp_path, CONFIG))
    (model,), (data,) = plan.models, plan.data
    assert (model.name, model.source, model.wrapper_class) == ("mine", "org/model", "Qwen3VLChat")
    assert (data.name, data.dataset, plan.limit(data)) == ("Short", "MMBench_DEV_EN", 5)
    assert plan.new_tokens(model, data) == 9
    assert [p.name for p in plan.policies] == ["none", "token-drop"]
    assert plan.settings.ep_size == 8 and plan.settings.check


def test_flags_win_over_the_config_file(tmp_path):
    path = write(tmp_path, {**CONFIG, "capacity": {**CONFIG["capacity"], "fresh": True}})
    plan = plan_of("--config", path, "--gamma", "2", "--resume")
    assert [p.get("gamma") for p in plan.policies] == [None, 2.0]
    assert not plan.settings.fresh
    assert plan_of("--config", path).settings.fresh


def test_flags_win_over_entries_of_single_models_and_data(tmp_path):
    path = write(tmp_path, CONFIG)
    plan = plan_of("--config", path, "--limit", "3", "--max-new-tokens", "4", "--dtype", "float32")
    (model,), (data,) = plan.models, plan.data
    assert plan.limit(data) == 3 and plan.new_tokens(model, data) == 4
    assert (model.dtype, plan.settings.dtype) == (None, "float32")


@pytest.mark.parametrize("gamma", [None, "none"])
def test_null_in_a_config_file_is_the_baseline(tmp_path, gamma):
    plan = plan_of("--config", write(tmp_path, {"capacity": {"gamma": [gamma]}}))
    assert plan.policies == (BASELINE,)


@pytest.mark.parametrize(
    ("change", "wrong", "right"),
    [
        ({"modle": {}}, "'modle'", "'model'"),
        ({"model": {"m": {"clas": "X"}}}, "'clas'", "'class'"),
        ({"data": {"d": {"datset": "X"}}}, "'datset'", "'dataset'"),
        ({"capacity": {"gama": [1]}}, "'gama'", "'gamma'"),
        ({"capacity": {"work-dri": "x"}}, "'work_dri'", "'work_dir'"),
        ({"capacity": {"policy": ["tokn-drop"]}}, "'tokn-drop'", "'token-drop'"),
    ],
)
def test_unknown_config_keys_suggest_the_right_one(tmp_path, change, wrong, right):
    message = error_of("--config", write(tmp_path, change))
    assert wrong in message and right in message


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "1",
        {"model": []},
        {"model": {}},
        {"model": {"m": 1}},
        {"model": {"m": {"model_path": 3}}},
        {"model": {"m": {"max_new_tokens": 0}}},
        {"model": {"m": {"device": "gpu"}}},
        {"model": {"m": {"dtype": "int8"}}},
        {"data": {"d": {"limit": "all"}}},
        {"capacity": {"gamma": [0]}},
        {"capacity": {"gamma": []}},
        {"capacity": {"gamma": "NaN"}},
        {"capacity": {"check": "yes"}},
        {"capacity": {"batch_size": 2.5}},
        {"capacity": {"batch_size": True}},
        {"capacity": {"config": "other.json"}},
    ],
)
def test_a_config_file_that_cannot_work(tmp_path, content):
    error_of("--config", write(tmp_path, content))


def test_config_and_model_exclude_each_other(tmp_path):
    path = write(tmp_path, CONFIG)
    for flag in ("--model", "--data", "--model-path"):
        assert flag in error_of("--config", path, flag, "x")
    assert "nowhere.json" in error_of("--config", "nowhere.json")


def test_the_plan_in_words():
    text = "\n".join(describe(plan_of("--limit", "7"), dry_run=True))
    assert "38 runs" in text and "7 questions" in text and "gamma=1.5" in text
    assert "Dry run" in text


def test_scripts_bring_their_own_grid():
    plan = plan_of(grid={"modality": ["uniform"], "gamma": ["3"]})
    assert described(plan) == {("token-drop", "uniform", 3.0), ("expanded-drop", "uniform", 3.0)}
