"""Runs are kept, resumed, reused, never mixed; what fails costs itself only."""

from __future__ import annotations

import json
import signal

import pandas as pd
import pytest

from mm_capacity import run as command_line
from mm_capacity.evaluation import datasets, generate, scoring, single
from mm_capacity.evaluation.models import ModelHandle
from mm_capacity.evaluation.records import RunFolder, find_runs
from tests.runner.fakes import World

MODEL = "tiny:qwen3_vl_moe"


@pytest.fixture
def world(monkeypatch, tiny_vlm):
    world = World()
    monkeypatch.setattr(datasets, "open_dataset", world.open_dataset)
    monkeypatch.setattr(scoring, "score", world.score)
    monkeypatch.setattr("vlm_adapters.load_model", lambda *a, **k: tiny_vlm)
    monkeypatch.setattr("mm_capacity.report.PLOTS", {})
    return world


@pytest.fixture
def start(world, tmp_path):
    """Runs the command line on the first fake data set, token-drop at 0.5 and the baseline."""

    def start(*argv, data=("SET_A",), policy=("token-drop",), gamma=("0.5",)):
        return command_line.main(
            [
                *("--model", MODEL, "--data", *data, "--policy", *policy, "--gamma", *gamma),
                *("--work-dir", str(tmp_path), "--max-new-tokens", "2", "--device", "cpu", *argv),
            ]
        )

    return start


def folders(tmp_path):
    return {f.record()["policy"]["name"]: f for f in find_runs(tmp_path)}


def contents(folder):
    """What a run leaves that must not depend on interruptions."""
    trace = pd.read_parquet(folder.loads.trace)
    answers = [(r["index"], r["prediction"], r["batch"]) for r in folder.predictions()]
    record = folder.record()
    return trace.to_csv(), answers, folder.score(), record["load"], record["status"]


@pytest.fixture
def calls(monkeypatch):
    """Counts batches that are answered; ``calls.at[n]`` runs before the n-th one."""

    class Calls:
        def __init__(self):
            self.count = 0
            self.at = {}

    calls = Calls()
    real = generate.answer

    def answer(*args, **kwargs):
        calls.count += 1
        calls.at.get(calls.count, lambda: None)()
        return real(*args, **kwargs)

    monkeypatch.setattr(single, "answer", answer)
    return calls


def test_a_run_leaves_a_complete_record(start, tmp_path):
    assert start() == 0
    folder = folders(tmp_path)["token-drop"]
    record = folder.record()
    assert record["status"] == "done"
    assert record["questions"] == record["answered"] == 4
    assert set(record["versions"]) == {"torch", "transformers", "vlmeval"}
    assert record["device"] == "cpu" and record["seed"] == 0 and record["started"]
    assert record["warnings"] == ["SET_A is made up"]
    assert record["arguments"]["batch_size"] == 1 and record["arguments"]["fresh"] is False
    assert record["policy"]["repr"].startswith("TokenDrop(")
    assert record["ep_size"] == 4
    assert 0 < record["load"]["drop_frac"] < 1
    assert folder.path.name.startswith("token-drop_image-first_gamma0.5-")
    assert not folder.loads.chunks.exists()
    assert (folder.score_folder / "fake_score.csv").exists()
    steps = pd.read_parquet(folder.loads.trace)["step"].unique()
    assert sorted(steps) == list(range(4))


def test_results_are_paired_with_the_baseline(start, tmp_path):
    start()
    results = pd.read_csv(tmp_path / "results.csv")
    assert results["policy"].tolist() == ["none", "token-drop"]
    base, capped = (folders(tmp_path)[p].score()["hits"]["accuracy"] for p in results["policy"])
    change = pd.Series([b[1] - a[1] for a, b in zip(base, capped, strict=True)])
    assert results.loc[1, "delta"] == pytest.approx(change.mean())
    assert results.loc[1, "delta_stderr"] == pytest.approx(change.std() / 4**0.5)
    assert pd.isna(results.loc[0, "delta"])
    assert results.loc[1, "straggler_after"] < results.loc[1, "straggler_before"]


def test_a_finished_run_is_reused_and_fresh_redoes_it(start, calls, tmp_path, world):
    start()
    first = calls.count
    before = {p: f.run_file.read_text() for p, f in folders(tmp_path).items()}
    assert start() == 0
    assert calls.count == first and len(world.scored) == 2
    assert before == {p: f.run_file.read_text() for p, f in folders(tmp_path).items()}
    assert start("--fresh") == 0
    assert calls.count == 2 * first


def test_the_model_is_not_loaded_when_everything_is_finished(start, monkeypatch):
    start()
    monkeypatch.setattr(ModelHandle, "vlm", property(lambda self: pytest.fail("loaded")))
    assert start() == 0


@pytest.fixture
def interruptible():
    """SIGINT interrupts, also where the test run was started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("batch_size", ["1", "2"])
def test_an_interrupted_run_goes_on_and_ends_as_an_uninterrupted_one(
    start, calls, tmp_path, capsys, batch_size, interruptible
):
    more = ("--batch-size", batch_size)
    start(*more)
    expected = {p: contents(f) for p, f in folders(tmp_path).items()}
    total = calls.count
    calls.count, calls.at = 0, {total: lambda: signal.raise_signal(signal.SIGINT)}
    assert start(*more, "--fresh") == 130
    assert "resumes" in capsys.readouterr().err.splitlines()[-1]
    status = {p: f.record()["status"] for p, f in folders(tmp_path).items()}
    assert status == {"none": "done", "token-drop": "interrupted"}
    assert folders(tmp_path)["token-drop"].predictions()
    calls.count, calls.at = 0, {}
    assert start(*more) == 0
    assert calls.count == 1  # the batch that was in flight
    assert {p: contents(f) for p, f in folders(tmp_path).items()} == expected
    assert len(folders(tmp_path)["token-drop"].record()["resumed"]) == 1


def test_a_killed_run_with_a_torn_line_goes_on(start, calls, tmp_path):
    start()
    folder = folders(tmp_path)["token-drop"]
    expected = contents(folder)
    # What a kill in the middle of the last line leaves behind:
    content = folder.predictions_file.read_bytes()
    folder.predictions_file.write_bytes(content[:-7])
    folder.update(status="running", answers_complete=False)
    folder.score_file.unlink()
    calls.count = 0
    assert start() == 0
    assert calls.count == 1
    assert contents(folder) == expected


OTHER_SETTINGS = [
    ("--seed", "1"),
    ("--limit", "3"),
    ("--batch-size", "2"),
    ("--max-new-tokens", "3"),
    ("--dtype", "bfloat16"),
    ("--ep-size", "2"),
    ("--policy-arg", "rounding=floor"),
]


def test_another_setting_is_another_folder(start, tmp_path):
    start()
    for other in OTHER_SETTINGS:
        before = {f.path: f.run_file.read_text() for f in find_runs(tmp_path)}
        start(*other, "--no-baseline")
        assert len(find_runs(tmp_path)) == len(before) + 1, other
        assert {path: RunFolder(path).run_file.read_text() for path in before} == before


def test_results_show_the_setting_that_was_run_last(start, tmp_path):
    start()
    start("--limit", "3")
    results = pd.read_csv(tmp_path / "results.csv")
    assert results["n"].tolist() == [3, 3]
    start()
    assert pd.read_csv(tmp_path / "results.csv")["n"].tolist() == [4, 4]
    start(gamma=("1.0",))
    assert len(pd.read_csv(tmp_path / "results.csv")) == 3


def test_a_corrupt_image_costs_its_question_and_the_status_says_so(start, world, tmp_path, capsys):
    world.bad["SET_A"] = {20: "no image at all"}
    assert start("--batch-size", "2") == 1
    folder = folders(tmp_path)["token-drop"]
    record = folder.record()
    assert record["status"] == "done-with-errors"
    assert record["lost"] == [{"index": 20, "reason": "no image at all"}]
    assert record["answered"] == 3
    assert "no image at all" in capsys.readouterr().err
    assert sorted(world.scored[-1]) == [0, 10, 30]
    assert pd.read_csv(tmp_path / "results.csv")["n"].tolist() == [3, 3]
    assert start("--batch-size", "2") == 1  # reused, and still not complete


def test_a_question_that_the_processor_refuses_is_lost_alone(start, world, tiny_vlm, monkeypatch):
    real = type(tiny_vlm).prepare_batch

    def prepare_batch(self, conversations):
        if any("question 10" in c[0]["content"][1]["text"] for c in conversations):
            raise ValueError("too thin to tile")
        return real(self, conversations)

    monkeypatch.setattr(type(tiny_vlm), "prepare_batch", prepare_batch)
    monkeypatch.setattr(type(tiny_vlm), "prepare", lambda self, c: prepare_batch(self, [c]))
    assert start("--batch-size", "2") == 1
    assert sorted(world.scored[-1]) == [0, 20, 30]


def test_all_questions_lost_is_a_failed_run(start, world, tmp_path):
    world.bad["SET_A"] = {index: "broken" for index in range(0, 40, 10)}
    assert start() == 1
    assert folders(tmp_path)["none"].record()["status"] == "failed"


def test_a_failed_run_is_recorded_and_the_others_go_on(start, calls, tmp_path, capsys):
    def crash():
        raise RuntimeError("out of memory")

    calls.at = {6: crash}
    assert start(data=("SET_A", "SET_B")) == 1
    statuses = {
        str(f.path.relative_to(tmp_path)): f.record()["status"] for f in find_runs(tmp_path)
    }
    assert sorted(statuses.values()) == ["done", "done", "done", "failed"]
    failed = next(f for f in find_runs(tmp_path) if f.record()["status"] == "failed")
    assert "RuntimeError: out of memory" in failed.record()["error"]
    assert "Traceback" in (failed.path / "error.txt").read_text()
    assert "out of memory" in capsys.readouterr().err
    calls.at = {}
    assert start(data=("SET_A", "SET_B")) == 0
    assert not (failed.path / "error.txt").exists()


def test_a_data_set_that_cannot_be_opened_fails_alone(start, world, tmp_path, capsys):
    world.missing = {"SET_B"}
    assert start(data=("SET_B", "SET_A")) == 1
    assert "SET_B.tsv is missing" in capsys.readouterr().err
    assert len(find_runs(tmp_path)) == 2


def test_nothing_that_can_be_run_is_exit_code_2(start, world, tmp_path, capsys):
    world.missing = {"SET_A", "SET_B"}
    assert start(data=("SET_A", "SET_B")) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert find_runs(tmp_path) == []


def test_an_unknown_data_set_stops_everything(start, tmp_path, capsys):
    assert start(data=("SET_A", "SET_C")) == 2
    assert "'SET_C'" in capsys.readouterr().err
    assert find_runs(tmp_path) == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--ep-size", "3"), "does not divide the 8 experts"),
        (("--policy-arg", "rounding=round"), "rounding"),
        (("--device", "cuda:7"), "cuda:7"),
    ],
)
def test_what_the_model_cannot_do_is_exit_code_2(start, tmp_path, capsys, argv, says):
    assert start(*argv) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1
    assert find_runs(tmp_path) == []


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "README.md"])
def test_an_unknown_model_is_exit_code_2(world, tmp_path, capsys, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("")
    out = tmp_path / "out"
    assert command_line.main(["--model", name, "--data", "SET_A", "--work-dir", str(out)]) == 2
    assert name in capsys.readouterr().err
    assert find_runs(out) == []


def test_an_unwritable_work_directory(start, tmp_path, capsys, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert start() == 2
    assert "cannot be written: Permission denied" in capsys.readouterr().err


def test_infer_then_eval(start, tmp_path, world, monkeypatch, calls):
    assert start("--mode", "eval") == 1
    assert start("--mode", "infer") == 0
    assert world.scored == []
    assert {f.record()["status"] for f in find_runs(tmp_path)} == {"inferred"}
    asked = calls.count
    monkeypatch.setattr(ModelHandle, "vlm", property(lambda self: pytest.fail("loaded")))
    assert start("--mode", "eval") == 0
    assert calls.count == asked and len(world.scored) == 2
    assert {f.record()["status"] for f in find_runs(tmp_path)} == {"done"}


def test_another_judge_scores_again_without_asking_again(start, world, calls, monkeypatch):
    monkeypatch.setattr(scoring, "check_judge", lambda judge: None)
    start()
    asked = calls.count
    assert start("--judge", "gpt-4o") == 0
    assert calls.count == asked and len(world.scored) == 4


def test_a_run_that_another_process_works_on_is_refused(start, tmp_path, capsys):
    start()
    folder = folders(tmp_path)["token-drop"]
    before = folder.run_file.read_text()
    with RunFolder(folder.path).lock():
        assert start("--fresh") == 2
    assert "in use by" in capsys.readouterr().err
    assert folder.run_file.read_text() == before


def test_prepared_inputs_are_kept_across_policies(start, world):
    assert start(gamma=("0.5", "1.0")) == 0
    assert world.opened[0].asked == [0, 10, 20, 30]


def test_the_cache_is_bounded(tiny_vlm, world):
    from tests.runner.fakes import handle_of

    data = world.open_dataset("SET_A")
    batches = generate.split_batches(data.frame, 1)
    one = generate.Preparer(handle_of(tiny_vlm), data, batches)[0].n_bytes
    preparer = generate.Preparer(handle_of(tiny_vlm), data, batches, cache_bytes=int(2.5 * one))
    data.asked.clear()
    for _ in range(2):
        for number in range(len(batches)):
            assert preparer[number].indices == batches[number]
    assert data.asked == [0, 10, 20, 30, 20, 30]


def test_batched_answers_equal_single_ones(start, tmp_path):
    """Left padding and per-question windows: a batch changes nothing but the speed."""
    start("--batch-size", "1", "--window", "sequence")
    one = {p: f.predictions() for p, f in folders(tmp_path).items()}
    one_load = {p: f.record()["load"] for p, f in folders(tmp_path).items()}
    for folder in find_runs(tmp_path):
        folder.clear()
    start("--batch-size", "4")
    for policy, folder in folders(tmp_path).items():
        answers = [(r["index"], r["prediction"]) for r in folder.predictions()]
        assert answers == [(r["index"], r["prediction"]) for r in one[policy]]
        load = folder.record()["load"]
        assert load["drop_frac"] == pytest.approx(one_load[policy]["drop_frac"], abs=0.02)


def test_check_fails_a_run_whose_policy_breaks_its_cap(start, tmp_path, monkeypatch):
    from mm_capacity.policies.token_drop import TokenDrop
    from mm_capacity.routing import Decision

    real = TokenDrop.decide

    def broken(self, routing):
        d = real(self, routing)
        return Decision(routing.expert, routing.weights, d.window, d.windows, d.capacity)

    monkeypatch.setattr(TokenDrop, "decide", broken)
    assert start("--check") == 1
    assert "CapacityExceededError" in folders(tmp_path)["token-drop"].record()["error"]


def test_expert_choice_is_said_in_the_record(start, tmp_path, capsys):
    assert start("--ep-size", "1", policy=("expanded-drop",)) == 0
    warnings = folders(tmp_path)["expanded-drop"].record()["warnings"]
    assert any("expert-choice" in text for text in warnings)
    assert capsys.readouterr().out.count("expert-choice") == 1


def test_files_named_by_a_policy_belong_to_its_identity(tmp_path):
    from dataclasses import dataclass

    from mm_capacity.evaluation.identity import policy_files

    @dataclass
    class Calibrated:
        table: object

    file = tmp_path / "table.json"
    file.write_text("{}")
    before = policy_files(Calibrated(str(file)))
    file.write_text("[]")
    after = policy_files(Calibrated(str(file)))
    assert set(before) == {"table"} and before != after
    assert policy_files(Calibrated("uniform")) == {}
    assert policy_files(Calibrated({"of": {"calibration": str(file)}})) == {
        "table.of.calibration": after["table"]
    }


def test_run_json_is_plain_json(start, tmp_path):
    start()
    for folder in find_runs(tmp_path):
        json.loads(
            folder.run_file.read_text(), parse_constant=lambda name: pytest.fail(f"holds {name}")
        )


def test_a_setting_without_scores_hides_no_results(start, tmp_path, capsys):
    """A wrong option must not make the finished results disappear from the report."""
    from mm_capacity.report import write_report

    start()
    before = (tmp_path / "results.csv").read_text()
    assert start("--limit", "2", "--mode", "eval") == 1
    assert "run --mode infer (or all) first" in capsys.readouterr().err
    assert start("--limit", "3", "--mode", "infer") == 0
    write_report(tmp_path)
    assert (tmp_path / "results.csv").read_text() == before


def test_a_file_in_place_of_a_folder(start, tmp_path, capsys):
    (tmp_path / "tiny_qwen3_vl_moe").write_text("mine")
    assert start() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: run folder") and "tiny_qwen3_vl_moe" in line
    assert (tmp_path / "tiny_qwen3_vl_moe").read_text() == "mine"


def test_a_report_that_cannot_be_written_loses_no_run(start, tmp_path, capsys):
    from mm_capacity.report.__main__ import main as report

    (tmp_path / "results.csv").mkdir()
    assert start() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("failed: the report cannot be written") and "results.csv" in line
    assert all(f.record()["status"] == "done" for f in find_runs(tmp_path))
    assert report([str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    (tmp_path / "results.csv").rmdir()
    assert report([str(tmp_path)]) == 0
