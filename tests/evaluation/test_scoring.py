"""Scores through real VLMEvalKit, against numbers computed here by hand."""

from __future__ import annotations

import math
import os
import random
import re
import ssl
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from mm_capacity.errors import UserError
from mm_capacity.evaluation.datasets import open_dataset
from mm_capacity.evaluation.scoring import (
    MME_COGNITION,
    MME_PERCEPTION,
    check_judge,
    score,
)
from mm_capacity.evaluation.vlmeval_process import import_vlmeval
from tests.tsv import (
    COPY_OFFSET,
    mmbench_rows,
    mme_rows,
    picture,
    right_answers,
    to_base64,
    write_mmbench,
    write_mme,
    write_tsv,
)

NAME = "MMBench_DEV_EN"


def by_name(result) -> dict:
    assert len({m.name for m in result.metrics}) == len(result.metrics)
    return {m.name: m for m in result.metrics}


def written(folder: Path, suffix: str) -> pd.DataFrame:
    """A file that VLMEvalKit left."""
    (path,) = folder.glob(f"*{suffix}")
    return pd.read_csv(path, sep="\t" if path.suffix == ".tsv" else ",", keep_default_na=False)


# --- how VLMEvalKit's matcher reads answers ---------------------------------------------------

DIGITS = {"A": "5", "B": "7", "C": "3", "D": "9"}
PLACES = {"A": "top left", "B": "center", "C": "top right", "D": "bottom left"}
NAMES = {"A": "red 5", "B": "red 7", "C": "blue 5", "D": "green 3"}
RELATIONS = {"A": "larger", "B": "smaller", "C": "equal"}

READ_AS = [
    ("B", DIGITS, "B"),
    ("5 B", DIGITS, "B"),
    ("5 A", DIGITS, "A"),
    ("5 A.", DIGITS, "A"),
    ("(A)", DIGITS, "A"),
    ("top left A", PLACES, "A"),
    ("bottom left A", PLACES, "A"),
    ("center A", PLACES, "A"),
    ("center B", PLACES, "B"),
    ("3+4=7 A", DIGITS, "A"),
    ("3+4=7 B", DIGITS, "B"),
    ("3 + 4 = 7 A", DIGITS, "A"),
    ("red 5 A", NAMES, "A"),
    ("red 5 C", NAMES, "C"),
    ("red 5 red 7 blue 5 A", NAMES, "A"),
    ("3>2 A", RELATIONS, "A"),
    ("3<5 smaller B", RELATIONS, "B"),
    # Without a letter of the question, the text of exactly one option decides.
    ("5", DIGITS, "A"),
    ("smaller D", RELATIONS, "B"),
    # Not read: two letters, a letter too far from the end, a small letter, nothing.
    ("A B", DIGITS, None),
    ("A 1 2 4 6", DIGITS, None),
    ("b", DIGITS, None),
    ("", DIGITS, None),
    ("5 7", DIGITS, None),
]


@pytest.mark.parametrize(("answer", "options", "letter"), READ_AS)
def test_multiple_choice_answers_are_read_as(answer, options, letter, tmp_path, monkeypatch):
    """Through the whole evaluation; VERBOSE would make the matcher refuse a long answer with A."""
    monkeypatch.setenv("VERBOSE", "0")
    row = mmbench_rows(1, circular=False)[0] | dict.fromkeys("ABCD", "") | options
    rows = [row | {"index": n, "answer": right} for n, right in enumerate(options)]
    data = open_dataset("MMStar", lmu_data=write_tsv(tmp_path / "MMStar.tsv", rows).parent)
    result = score(data, dict.fromkeys(range(len(options)), answer), tmp_path / "out")
    assert [right for n, right in enumerate(options) if result.correct[n]] == (
        [letter] if letter else []
    )


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        ("yes", "Yes"), ("No", "No"), ("5 no", "No"), ("5 yes", "Yes"), ("red yes", "Yes"),
        ("red no", "No"), ("3+4=7 yes", "Yes"), ("3+4=7 no", "No"), ("top left yes", "Yes"),
        ("3>2 no", "No"), ("red 5 no", "No"), ("5, no.", "No"), ("yes no", None), ("5no", None),
        ("", None), ("nothing", None),
    ],
)  # fmt: skip
def test_yes_no_answers_are_read_as(answer, word, tmp_path):
    rows = mme_rows(1, categories=("OCR",))
    data = open_dataset("MME", lmu_data=write_tsv(tmp_path / "MME.tsv", rows).parent)
    result = score(data, {0: answer, 1: answer}, tmp_path / "out")
    assert [row["answer"] for row in rows if result.correct[row["index"]]] == (
        [word] if word else []
    )


# --- MMBench -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def circular(tmp_path_factory):
    """12 base questions, some wrong in their base form, some in a copy only."""
    root = tmp_path_factory.mktemp("mmbench")
    rows = mmbench_rows(12)
    data = open_dataset(NAME, lmu_data=write_tsv(root / f"{NAME}.tsv", rows).parent)
    answers = right_answers(rows)
    wrong = {241, 244, 245 + COPY_OFFSET, 249 + 3 * COPY_OFFSET, 250 + 2 * COPY_OFFSET}
    for index in wrong:
        answers[index] = "ABCD"[("ABCD".index(answers[index]) + 1) % 4]
    result = score(data, answers, root / "out")
    return data, rows, wrong, result, root


def test_vanilla_accuracy_over_base_questions(circular):
    _, rows, wrong, result, _ = circular
    base = [row["index"] for row in rows if row["index"] < COPY_OFFSET]
    assert result.correct == {index: float(index not in wrong) for index in base}
    metric = by_name(result)["accuracy"]
    assert metric.value == pytest.approx(10 / 12) and metric.n == 12
    assert metric.stderr == pytest.approx(math.sqrt(10 / 12 * 2 / 12 / 11))


def test_circular_accuracy(circular):
    _, _, wrong, result, root = circular
    metric = by_name(result)["accuracy_circular"]
    lost = {index % COPY_OFFSET for index in wrong}
    assert {i for i, hit in result.hits["accuracy_circular"].items() if not hit} == lost
    assert metric.value == pytest.approx(7 / 12) and metric.n == 12
    # VLMEvalKit's own numbers, from its own files.
    assert written(root / "out", "_acc.csv")["Overall"].item() == pytest.approx(metric.value)
    own = written(root / "out", "_acc_all.csv").set_index("split")["Overall"]
    assert own["vanilla_0_dev"] == pytest.approx(10 / 12)
    assert own["circular_dev"] == pytest.approx(7 / 12)


def test_categories(circular):
    _, rows, wrong, result, root = circular
    metrics = by_name(result)
    own = written(root / "out", "_acc.csv")
    for category in ("object_localization", "ocr", "attribute_recognition"):
        hits = [
            row["index"] not in wrong
            for row in rows
            if row["category"] == category and row["index"] < COPY_OFFSET
        ]
        assert metrics[f"accuracy/{category}"].value == pytest.approx(np.mean(hits))
        assert metrics[f"accuracy/{category}"].category == category
        assert metrics[f"accuracy_circular/{category}"].value == pytest.approx(own[category].item())
    assert metrics["accuracy_circular/coarse_perception"].value == pytest.approx(own["CP"].item())
    assert result.metrics[0].name == "accuracy"


def test_words_survive_scoring(tmp_path):
    """A right "D" must stay right when option D is the word nan, and so must its text."""
    words = ["None", "NA", "null", "nan"]
    rows = mmbench_rows(4, options=dict.fromkeys(range(4), words))
    data = open_dataset(NAME, lmu_data=write_tsv(tmp_path / f"{NAME}.tsv", rows).parent)
    metrics = by_name(score(data, right_answers(rows), tmp_path / "out"))
    assert metrics["accuracy"].value == metrics["accuracy_circular"].value == 1
    table = written(tmp_path / "out", f"{NAME}.tsv")
    assert table["A"].tolist() == [row["A"] for row in rows]


@pytest.mark.parametrize(
    # VLMEvalKit finds option NA in the word nan too: two options fit, so it takes neither.
    ("word", "read"),
    [("None", True), ("NA", True), ("null", True), ("nan", False)],
)
def test_an_answer_that_is_such_a_word(word, read, tmp_path):
    words = ["None", "NA", "null", "nan"]
    (row,) = mmbench_rows(1, options={0: words}, circular=False)
    row["answer"] = "ABCD"[words.index(word)]
    data = open_dataset("MMStar", lmu_data=write_tsv(tmp_path / "MMStar.tsv", [row]).parent)
    assert score(data, {241: word}, tmp_path / "out").correct == {241: float(read)}


def test_absent_options_stay_absent(tmp_path):
    """With three options the letter D is none: only the text counts."""
    rows = mmbench_rows(2, options={0: ["lamp", "tree", "car"]}, circular=False)
    data = open_dataset("MMStar", lmu_data=write_tsv(tmp_path / "MMStar.tsv", rows).parent)
    result = score(data, {241: "D", 242: "D"}, tmp_path / "out")
    assert result.correct[241] == 0


def test_an_empty_answer_matches_nothing(tmp_path):
    """VLMEvalKit alone reads it back as the word nan, which holds the option "a"."""
    rows = mmbench_rows(1, options={0: ["a", "b", "c", "d"]}, circular=False)
    rows[0]["answer"] = "A"
    data = open_dataset("MMStar", lmu_data=write_tsv(tmp_path / "MMStar.tsv", rows).parent)
    assert score(data, {241: ""}, tmp_path / "out").correct == {241: 0.0}


@pytest.mark.parametrize("answer", ["=B", '"B"', "B\n", "\tB", "B\r\nB", "{B}", "'B", "été B"])
def test_awkward_answers_survive_the_prediction_file(answer, tmp_path):
    rows = mmbench_rows(1, circular=False)
    data = open_dataset("MMStar", lmu_data=write_tsv(tmp_path / "MMStar.tsv", rows).parent)
    score(data, {241: answer}, tmp_path / "out")
    table = pd.read_csv(tmp_path / "out" / "mm_capacity_MMStar.tsv", sep="\t")
    assert table["prediction"].tolist() == [answer]


def test_text_indices_with_leading_zeros(tmp_path):
    rows = [
        row | {"index": index}
        for row, index in zip(mmbench_rows(3, circular=False), ("01", "1", "2"), strict=True)
    ]
    data = open_dataset("MMStar", lmu_data=write_tsv(tmp_path / "MMStar.tsv", rows).parent)
    result = score(data, right_answers(rows), tmp_path / "out")
    assert result.correct == {"01": 1.0, "1": 1.0, "2": 1.0}


def test_empty_category_cells(tmp_path):
    rows = mmbench_rows(3, circular=False)
    rows[1]["category"] = ""
    data = open_dataset("MMStar", lmu_data=write_tsv(tmp_path / "MMStar.tsv", rows).parent)
    result = score(data, right_answers(rows), tmp_path / "out")
    assert by_name(result)["accuracy/none"].n == 1


# --- MME ---------------------------------------------------------------------------------------


def mme_by_hand(rows, answers) -> dict[str, float]:
    """MME's points, from its definition."""
    points = {}
    for category in {row["category"] for row in rows}:
        images: dict[str, list[bool]] = {}
        for row in rows:
            if row["category"] == category:
                images.setdefault(row["image_path"], []).append(
                    answers[row["index"]] == row["answer"]
                )
        single = [hit for hits in images.values() for hit in hits]
        both = [all(hits) for hits in images.values()]
        points[category] = 100 * sum(single) / len(single) + 100 * sum(both) / len(both)
    return points


@pytest.fixture(scope="module")
def mme(tmp_path_factory):
    root = tmp_path_factory.mktemp("mme")
    rows = mme_rows(30, categories=("OCR", "color", "numerical_calculation", "code_reasoning"))
    data = open_dataset("MME", lmu_data=write_tsv(root / "MME.tsv", rows).parent)
    rng = random.Random(0)
    answers = {row["index"]: rng.choice(["Yes", "No", row["answer"]]) for row in rows}
    return data, rows, answers, score(data, answers, root / "out"), root


def test_mme_points(mme):
    _, rows, answers, result, root = mme
    metrics, points = by_name(result), mme_by_hand(rows, answers)
    for category, value in points.items():
        assert metrics[f"mme/{category}"].value == pytest.approx(value)
    perception = points["OCR"] + points["color"]
    cognition = points["numerical_calculation"] + points["code_reasoning"]
    assert metrics["mme_perception"].value == pytest.approx(perception)
    assert metrics["mme_cognition"].value == pytest.approx(cognition)
    own = written(root / "out", "_score.csv").astype(float).iloc[0]
    assert own["perception"] == pytest.approx(perception)
    assert own["reasoning"] == pytest.approx(cognition)
    hits = {row["index"]: float(answers[row["index"]] == row["answer"]) for row in rows}
    assert result.correct == hits
    assert metrics["accuracy"].value == pytest.approx(np.mean(list(hits.values())))
    assert [m.name for m in result.metrics[:3]] == ["accuracy", "mme_perception", "mme_cognition"]


def test_mme_standard_error_is_that_of_resampled_images(mme):
    """The formula against a bootstrap over images within each category."""
    _, rows, answers, result, _ = mme
    metrics = by_name(result)
    scores: dict[str, list[float]] = {}
    for first in range(0, len(rows), 2):
        hits = [answers[r["index"]] == r["answer"] for r in rows[first : first + 2]]
        scores.setdefault(rows[first]["category"], []).append(100 * sum(hits) / 2 + 100 * all(hits))
    rng = np.random.default_rng(0)
    perception = sum(
        rng.choice(scores[c], (20_000, len(scores[c]))).mean(axis=1) for c in ("OCR", "color")
    )
    n = len(scores["OCR"])
    # The bootstrap divides by n, the formula by n - 1.
    expected = perception.std() * math.sqrt(n / (n - 1))
    assert metrics["mme_perception"].stderr == pytest.approx(expected, rel=0.08)


def test_accuracy_of_pairs_counts_images_as_draws(mme):
    _, rows, answers, result, _ = mme
    hits = np.array([answers[r["index"]] == r["answer"] for r in rows], float).reshape(-1, 2)
    expected = hits.mean(axis=1).std(ddof=1) / math.sqrt(len(hits))
    assert by_name(result)["accuracy"].stderr == pytest.approx(expected)


def test_limited_mme_scores(tmp_path):
    write_mme(tmp_path, n_images=9)
    data = open_dataset("MME", limit=7, lmu_data=tmp_path)
    answers = dict(zip(data.frame["index"], data.frame["answer"], strict=True))
    metrics = by_name(score(data, answers, tmp_path / "out"))
    assert metrics["mme_perception"].value == 400 and metrics["mme_cognition"].value == 200
    assert math.isnan(metrics["mme/OCR"].stderr), "one image tells no spread"


def test_no_cognition_without_its_categories(tmp_path):
    rows = mme_rows(2, categories=("OCR",))
    data = open_dataset("MME", lmu_data=write_tsv(tmp_path / "MME.tsv", rows).parent)
    metrics = by_name(score(data, right_answers(rows), tmp_path / "out"))
    assert "mme_perception" in metrics and "mme_cognition" not in metrics


def test_our_split_of_mme_is_vlmevalkits():
    """Every category alone: VLMEvalKit adds it to the sum that we say it belongs to."""
    import_vlmeval()
    from vlmeval.dataset.utils import yorn

    for category in MME_PERCEPTION | MME_COGNITION:
        table = pd.DataFrame(
            {"category": [category] * 2, "image_path": ["a", "a"], "score": [1, 1]}
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(yorn, "load", lambda _, table=table: table)
            own = yorn.MME_rating("").iloc[0]
        assert own["perception"] == (200 if category in MME_PERCEPTION else 0)
        assert own["reasoning"] == (200 if category in MME_COGNITION else 0)


# --- other kinds -------------------------------------------------------------------------------


def test_other_yes_no_data_keep_vlmevalkits_numbers(tmp_path):
    rows = mme_rows(4)
    data = open_dataset("POPE", lmu_data=write_tsv(tmp_path / "POPE.tsv", rows).parent)
    metrics = by_name(score(data, {row["index"]: "Yes" for row in rows}, tmp_path / "out"))
    assert data.style == "single" and metrics["accuracy"].value == 0.5
    assert metrics["vlmeval/Overall"].value == pytest.approx(100 * 2 / 3), "F1 of always yes"
    assert "mme_perception" not in metrics


def test_vqa_accuracy_is_vlmevalkits(tmp_path):
    gold = ["5", "None", "1.50", "red"]
    rows = [
        {"index": i, "image": to_base64(picture(i)), "question": "q", "answer": a}
        for i, a in enumerate(gold)
    ]
    root = write_tsv(tmp_path / "ChartQA_TEST.tsv", rows).parent
    data = open_dataset("ChartQA_TEST", lmu_data=root)
    result = score(data, {0: "5", 1: "None", 2: "1.5", 3: "blue"}, tmp_path / "out")
    metrics = by_name(result)
    assert result.correct == {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.0}
    assert metrics["accuracy"].value == pytest.approx(metrics["vlmeval/Overall"].value / 100)


def test_data_that_vlmevalkit_cannot_score(tmp_path):
    rows = [{"index": 0, "image": to_base64(picture(0)), "question": "q", "answer": "a"}]
    data = open_dataset("Own", lmu_data=write_tsv(tmp_path / "Own.tsv", rows).parent)
    with pytest.raises(UserError, match="Own: VLMEvalKit's scoring failed"):
        score(data, {0: "a"}, tmp_path / "out")


# --- what is left out --------------------------------------------------------------------------


def test_questions_without_answer_are_left_out_and_named(tmp_path):
    rows = mmbench_rows(4)
    rows[1]["image"] = "%%%%" * 30
    data = open_dataset(NAME, lmu_data=write_tsv(tmp_path / f"{NAME}.tsv", rows).parent)
    answers = {i: a for i, a in right_answers(rows).items() if i % COPY_OFFSET != 242}
    del answers[243 + COPY_OFFSET]
    result = score(data, answers, tmp_path / "out")
    assert sorted(result.correct) == [241, 244]
    assert {i % COPY_OFFSET for i in result.left_out} == {242, 243}
    assert len(result.left_out) == 8
    assert "no readable image" in result.left_out[242] or "base64" in result.left_out[242]
    assert result.left_out[243 + COPY_OFFSET] == "no answer"
    assert result.left_out[243] == f"belongs to question {243 + COPY_OFFSET}, which has no answer"
    assert by_name(result)["accuracy"].n == 2


def test_half_an_mme_pair_is_left_out(tmp_path):
    rows = mme_rows(6)
    data = open_dataset("MME", lmu_data=write_tsv(tmp_path / "MME.tsv", rows).parent)
    answers = right_answers(rows)
    del answers[0]
    result = score(data, answers, tmp_path / "out")
    assert set(result.left_out) == {0, 1} and 1 not in result.correct
    assert by_name(result)["mme/OCR"].n == 2


def test_an_mme_image_with_one_question_is_left_out(tmp_path):
    rows = mme_rows(6)[1:]
    data = open_dataset("MME", lmu_data=write_tsv(tmp_path / "MME.tsv", rows).parent)
    result = score(data, right_answers(rows), tmp_path / "out")
    assert result.left_out == {1: "the image has no second question"}


def test_nothing_to_score(tmp_path):
    data = open_dataset("MME", lmu_data=write_mme(tmp_path).parent)
    with pytest.raises(UserError, match="no question can be scored .question 0: no answer"):
        score(data, {}, tmp_path / "out")


def test_answers_by_text_index(tmp_path):
    """Records come back from JSON, where an index may have become a text."""
    rows = mmbench_rows(2, circular=False)
    data = open_dataset("MMStar", lmu_data=write_tsv(tmp_path / "MMStar.tsv", rows).parent)
    result = score(data, {str(i): a for i, a in right_answers(rows).items()}, tmp_path / "out")
    assert result.correct == {241: 1.0, 242: 1.0}


# --- files and process -------------------------------------------------------------------------


def test_new_answers_are_not_scored_with_old_verdicts(tmp_path):
    """VLMEvalKit keeps verdicts in files beside the predictions and takes them again."""
    for name, rows in ((NAME, mmbench_rows(3)), ("MME", mme_rows(3))):
        data = open_dataset(name, lmu_data=write_tsv(tmp_path / f"{name}.tsv", rows).parent)
        answers = right_answers(rows)
        values = [
            by_name(score(data, predictions, tmp_path / "out"))["accuracy"].value
            for predictions in (answers, dict.fromkeys(answers, "hm"), answers)
        ]
        assert values == [1.0, 0.0, 1.0]


def test_only_the_folder_is_written_to(tmp_path, monkeypatch):
    import tempfile

    import vlmeval

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    root = write_mmbench(tmp_path / "lmu").parent
    package = Path(vlmeval.__file__).parent

    def files(folder: Path) -> dict[str, int]:
        found = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return {str(p): p.stat().st_mtime_ns for p in found}

    def strays() -> set[str]:
        """What circular scoring leaves behind by itself: /tmp/<date and time>.<format>."""
        return {p.name for p in Path("/tmp").iterdir() if re.fullmatch(r"\d{14}\.\w+", p.name)}

    before = files(root), files(package), strays()
    data = open_dataset(NAME, lmu_data=root)
    for index in data.frame["index"]:
        data.messages(index)
    answers = dict(zip(data.frame["index"], data.frame["answer"], strict=True))
    score(data, answers, tmp_path / "out")
    assert (files(root), files(package), strays()) == before
    kept = {p.name for p in (tmp_path / "out").iterdir()}
    assert f"mm_capacity_{NAME}.tsv" in kept and f"mm_capacity_{NAME}_acc.csv" in kept
    left = [p for p in (tmp_path / "tmp").iterdir() if "score" in p.name]
    assert not left


def test_process_is_left_alone(circular, capfd):
    data, rows, _, _, root = circular
    environment, folder = dict(os.environ), os.getcwd()
    state = torch.get_rng_state()
    score(data, right_answers(rows), root / "again")
    assert torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), state)
    assert ssl._create_default_https_context is ssl.create_default_context
    assert (dict(os.environ), os.getcwd()) == (environment, folder)
    assert capfd.readouterr() == ("", "")
    with torch.no_grad():
        score(data, right_answers(rows), root / "again")
        assert not torch.is_grad_enabled()


def test_verdicts_are_saved_once_not_after_each_question(tmp_path, monkeypatch):
    """VLMEvalKit saves all verdicts after each one: minutes for a real data set."""
    import pickle

    saves: list[None] = []
    dump = pickle.dump
    monkeypatch.setattr(pickle, "dump", lambda *args: (saves.append(None), dump(*args)))
    for name in ("MMStar", NAME):
        rows = mmbench_rows(25, circular=False)
        data = open_dataset(name, lmu_data=write_tsv(tmp_path / f"{name}.tsv", rows).parent)
        saves.clear()
        score(data, right_answers(rows), tmp_path / "out")
        assert 0 < len(saves) < 5


# --- judges ------------------------------------------------------------------------------------


@pytest.fixture
def no_keys(monkeypatch):
    for name in ("OPENAI_API_KEY", "SiliconFlow_API_KEY", "LOCAL_LLM"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("judge", ["gpt-4o-mini", "chatgpt-0125", "qwen-72b"])
def test_judge_without_key(judge, no_keys, tmp_path):
    with pytest.raises(UserError) as caught:
        check_judge(judge)
    message = str(caught.value)
    assert judge in message and "OPENAI_API_KEY" in message and "exact_matching" in message
    data = open_dataset("MME", lmu_data=write_mme(tmp_path).parent)
    with pytest.raises(UserError, match="cannot be used"):
        score(data, {0: "Yes", 1: "No"}, tmp_path / "out", judge=judge)


class FakeJudge:
    """Stands for a judge behind an API."""

    def __init__(self, working: bool) -> None:
        self._working = working
        self.asked: list[str] = []

    def working(self) -> bool:
        return self._working

    def generate(self, prompt: str, **_) -> str:
        self.asked.append(prompt)
        return "C"


def judged(judge: FakeJudge, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "test")
    import_vlmeval()
    monkeypatch.setattr("vlmeval.dataset.image_mcq.build_judge", lambda **_: judge)
    rows = [row | {"answer": "C"} for row in mmbench_rows(2, circular=False)]
    data = open_dataset("MMStar", lmu_data=write_tsv(tmp_path / "MMStar.tsv", rows).parent)
    return score(data, {241: "the third one", 242: "A"}, tmp_path / "out", judge="gpt-4o-mini")


def test_judge_reads_what_the_matcher_cannot(tmp_path, monkeypatch):
    judge = FakeJudge(working=True)
    assert judged(judge, tmp_path, monkeypatch).correct == {241: 1.0, 242: 0.0}
    assert len(judge.asked) == 1 and "the third one" in judge.asked[0]


def test_silent_judge_is_an_error_not_a_fallback(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="does not answer"):
        judged(FakeJudge(working=False), tmp_path, monkeypatch)
