"""What people get wrong: one line that names the value, exit code 2, nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mm_capacity.errors import UserError
from mm_capacity.evaluation.arguments import build_parser, parse
from mm_capacity.evaluation.config_file import read_config
from mm_capacity.evaluation.options import make_plan
from mm_capacity.evaluation.suggest import check_known
from mm_capacity.evaluation.tsv import read_tsv
from mm_capacity.run import main
from tests.tsv import LETTERS, mmbench_rows, mme_rows, write_tsv

ROOT = Path(__file__).resolve().parents[2]
NUL = "a\0b"


def plan_of(*argv):
    return make_plan(parse(build_parser("run", ""), list(argv)))


def message_of(call, *args):
    with pytest.raises(UserError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


# -- the command line ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--gamma", "-inf"], "--gamma '-inf' cannot be used"),
        (["--gamma", "0.5", "-inf"], "unknown option '-inf'"),
        (["--gamma"], "expected at least one argument"),
        (["--gamma", "--limit", "3"], "argument --gamma: expected at least one argument"),
        (["--work-dir", ""], "work directory '' cannot be used"),
        (["--work-dir", " "], "work directory ' ' cannot be used"),
        (["--work-dir", NUL], "cannot be used: give the path of a folder"),
        (["--work-dir", "~nobody-of-this-name/x"], "work directory '~nobody-of-this-name/x'"),
        (["--lmu-data", ""], "--lmu-data '' cannot be used"),
        (["--seed", str(2**63)], "--seed must be a whole number of at most"),
        (["--limit", "9" * 30], "--limit must be a whole number of at most"),
        (["--judge", ""], "--judge must be text, got ''"),
        (["--window", "token"], "unknown window 'token'. Known: batch, rank, sequence"),
        (["--policy", "none", "--policy-arg", "rounds=2"], "option of policy none 'rounds'"),
        (["--policy-arg", "rouds=2"], "did you mean 'rounds'?"),
    ],
)
def test_values_of_options(argv, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in message_of(plan_of, *argv)
    assert not list(tmp_path.iterdir())


def test_the_largest_seed_is_one_that_torch_takes():
    import torch

    seed = plan_of("--seed", str(2**63 - 1)).settings.seed
    assert torch.Generator().manual_seed(seed).initial_seed() == 2**63 - 1


@pytest.mark.parametrize("value", [["token-drop"], {"a": 1}, 3, None, True])
def test_a_value_that_is_no_name_is_an_unknown_name(value):
    assert "unknown policy" in message_of(check_known, "policy", value, {"token-drop": 1})


def test_exit_code_and_stream(capsys):
    assert main(["--gamma", "-inf"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: --gamma '-inf'")
    assert len(said.err.splitlines()) == 1


# -- config files --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"capacity": {"lmu_data": 5}}, "--lmu-data 5 cannot be used"),
        ({"capacity": {"work_dir": 5}}, "work directory 5 cannot be used"),
        ({"capacity": {"work_dir": NUL}}, "cannot be used: give the path of a folder"),
        ({"capacity": {"judge": 5}}, "--judge must be text, got 5"),
        ({"capacity": {"mode": ["all"]}}, "--mode must be text, got ['all']"),
        ({"capacity": {"device": ["cpu"]}}, "--device must be text, got ['cpu']"),
        ({"capacity": {"policy": [["none"]]}}, "unknown policy ['none']"),
        ({"capacity": {"policy_arg": 3}}, "--policy-arg wants KEY=VALUE, got 3"),
        ({"capacity": {"policy_arg": ["rounds=2", 5]}}, "--policy-arg wants KEY=VALUE, got 5"),
        ({"capacity": {"seed": 1e30}}, "--seed must be a whole number of at most"),
        ({"capacity": {"fresh": True, "resume": True}}, "contradict each other"),
        ({"capacity": {"resume": "yes"}}, "'resume' must be true or false, got 'yes'"),
        ({"capacity": {"ep_size": 2, "ep-size": 4}}, "'ep_size' is twice in section 'capacity'"),
        ({"model": {"": {"model_path": "x"}}}, "config section 'model' has an empty name"),
        ({"data": {" ": {}}}, "config section 'data' has an empty name"),
        ('{"capacity": {"seed": 1, "seed": 2}}', "the key 'seed' is there twice"),
        ('{"capacity": {"gamma": [NaN]}}', "gamma nan cannot be used"),
        ("[" * 100_000, "is nested too deeply"),
        (b"\xff\xfe{}", "cannot read config file"),
    ],
)
def test_config_files(content, says, tmp_path):
    file = tmp_path / "c.json"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    assert says in message_of(plan_of, "--config", str(file))


def test_a_config_file_may_begin_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "c.json"
    file.write_text('{"capacity": {"limit": 3}}', encoding="utf-8-sig")
    assert read_config(file) == {"capacity": {"limit": 3}}


def test_a_config_path_that_is_no_path():
    assert "cannot read config file" in message_of(plan_of, "--config", NUL)


# -- other commands ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["mm_capacity.report"], "required: WORKDIR"),
        (["mm_capacity.report", "no-such-folder"], "'no-such-folder' is not a directory"),
        (["mm_capacity.report", ".", "--nope"], "--nope"),
        (["mm_capacity.inspect", "--tiny", "aria", "--device", "gpu"], "unknown device 'gpu'"),
        (["mm_capacity.inspect", "--tiny", "aria", "--device", "cuda"], "goes with --model"),
        (["mm_capacity.inspect", "--tiny", "aria", "--gamma", "inf"], "finite number above 0"),
    ],
)
def test_other_commands(argv, says):
    done = subprocess.run(
        [sys.executable, "-m", *argv],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ") and says in done.stderr


def test_a_device_that_is_not_there(monkeypatch, capsys):
    import torch

    from mm_capacity import inspect

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert inspect.main(["--model", "digits-moe", "--device", "cuda:1"]) == 2
    assert "device 'cuda:1' is not available here" in capsys.readouterr().err


# -- the judge -----------------------------------------------------------------------


@pytest.mark.parametrize(("judge", "near"), [("exact", None), ("exact_match", "exact_matching")])
def test_an_unknown_judge(judge, near, monkeypatch):
    from mm_capacity.evaluation.judges import check_judge

    for name in ("OPENAI_API_KEY", "SiliconFlow_API_KEY", "LOCAL_LLM"):
        monkeypatch.delenv(name, raising=False)
    message = message_of(check_judge, judge)
    assert f"unknown judge {judge!r}" in message and "gpt-4o-mini" in message
    assert "exact_matching" in message and "no API key is set" in message
    if near:
        assert f"did you mean {near!r}?" in message


def test_the_short_names_are_vlmevalkits():
    """Read from its source: asking for each would need keys."""
    import ast
    import inspect

    from mm_capacity.evaluation.judges import LOCAL_JUDGE, SHORT_NAMES
    from mm_capacity.evaluation.vlmeval_process import import_vlmeval

    import_vlmeval()
    from vlmeval.dataset.utils import judge_util

    tree = ast.parse(inspect.getsource(judge_util.build_judge))
    tables = [n for n in ast.walk(tree) if isinstance(n, ast.Dict) and len(n.keys) > 5]
    names = {key.value for key in tables[0].keys}
    assert names == {LOCAL_JUDGE, *SHORT_NAMES}


# -- tables --------------------------------------------------------------------------


def test_the_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "T.tsv"
    path.write_bytes(b"index\tquestion\n1\tgood\n2\tb\xe4d\n3\tgood\n")
    assert f"{path} is not UTF-8 text (line 3)" in message_of(read_tsv, path)


def opened(tmp_path, name, rows):
    from mm_capacity.evaluation.datasets import open_dataset

    return open_dataset(name, lmu_data=write_tsv(tmp_path / f"{name}.tsv", rows).parent)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"answer": "Z"}, "its answer 'Z' is not the letter of one of its options (A, B, C, D)"),
        ({"answer": "b"}, "its answer 'b' is not the letter"),
        ({"answer": "D", "D": ""}, "'D' is not the letter of one of its options (A, B, C)"),
        ({"answer": ""}, "its answer is empty"),
        ({"question": ""}, "its question is empty"),
        (dict.fromkeys(LETTERS, ""), "(it has none)"),
    ],
)
def test_a_question_that_cannot_be_scored_is_lost_alone(change, says, tmp_path):
    rows = mmbench_rows(3, circular=False)
    rows[1] |= change
    data = opened(tmp_path, "MMStar", rows)
    assert list(data.bad) == [rows[1]["index"]]
    assert says in data.bad[rows[1]["index"]]


def test_answers_that_none_can_give_are_refused(tmp_path):
    """VLMEvalKit reads an answer that matches nothing as Z: a table of Z would score 100 %."""
    rows = [row | {"answer": "Z"} for row in mmbench_rows(2, circular=False)]
    message = message_of(opened, tmp_path, "MMStar", rows)
    assert "MMStar: no question can be scored (question 241: its answer 'Z'" in message


@pytest.mark.parametrize("answer", ["Maybe", "yes", ""])
def test_mme_answers_are_yes_or_no(answer, tmp_path):
    rows = mme_rows(3)
    rows[2]["answer"] = answer
    assert list(opened(tmp_path, "MME", rows).bad) == [2]


def test_other_yes_no_data_may_write_it_small(tmp_path):
    rows = mme_rows(3)
    rows[0]["answer"], rows[1]["answer"] = "yes", "perhaps"
    assert list(opened(tmp_path, "POPE", rows).bad) == [1]


def test_words_for_nothing_are_options(tmp_path):
    words = ("None", "NA", "null", "nan")
    data = opened(tmp_path, "MMStar", mmbench_rows(2, circular=False, options={0: words, 1: words}))
    assert not data.bad
    assert data.frame[list(LETTERS)].iloc[0].tolist() != [None] * 4
    text = data.messages(241)[0]["content"][-1]["text"]
    assert all(f"{letter}. {word}" in text for letter, word in zip(LETTERS, words, strict=True))
