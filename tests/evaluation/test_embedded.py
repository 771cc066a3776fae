"""The embedded data sets: format, balance, truth, and VLMEvalKit's prompts for them."""

from __future__ import annotations

import base64
import io
from collections import Counter

import pytest
from PIL import Image

from mm_capacity.data import digits, embedded
from mm_capacity.data.digits import ASKERS, draw_scene
from mm_capacity.data.embedded import EMBEDDED, content_digest, digits_mcq, digits_yn
from mm_capacity.evaluation.datasets import open_dataset
from mm_capacity.evaluation.scoring import MME_COGNITION, MME_PERCEPTION

LETTERS = "ABCD"


@pytest.fixture(scope="module")
def mcq():
    return open_dataset("DIGITS_MCQ")


@pytest.fixture(scope="module")
def yn():
    return open_dataset("DIGITS_YN")


def options(row) -> dict[str, str]:
    return {letter: row[letter] for letter in LETTERS if isinstance(row[letter], str)}


def test_mcq_has_the_columns_of_mmbench():
    table = digits_mcq()
    columns = "index image question hint A B C D answer category l2-category split"
    assert list(table.columns) == columns.split()
    assert len(table) == 420
    assert table["index"].is_unique
    assert table["hint"].isna().all()
    assert table["category"].value_counts().to_dict() == dict.fromkeys(ASKERS, 70)


def test_mcq_letters_are_spread_evenly_in_every_skill():
    for skill, rows in digits_mcq().groupby("category"):
        by_size: dict[int, Counter] = {}
        for _, row in rows.iterrows():
            by_size.setdefault(len(options(row)), Counter())[row["answer"]] += 1
        for n_options, letters in by_size.items():
            assert set(letters) <= set(LETTERS[:n_options]), skill
            counts = [letters[letter] for letter in LETTERS[:n_options]]
            assert max(counts) - min(counts) <= 1, skill
        assert set(by_size) <= ({3} if skill == "comparison" else {3, 4})


def test_mcq_options_differ_and_hold_the_answer():
    for _, row in digits_mcq().iterrows():
        texts = options(row)
        assert len(set(texts.values())) == len(texts)
        assert row["answer"] in texts


def test_yn_has_the_columns_of_mme_and_a_yes_and_a_no_per_image():
    table = digits_yn()
    assert list(table.columns) == "index category image_path image question answer".split()
    assert len(table) == 420
    groups = table.groupby(["category", "image_path"])
    assert len(groups) == 210
    for _, pair in groups:
        assert sorted(pair["answer"]) == ["No", "Yes"]
        assert pair["image"].nunique() == 1
    assert set(table["category"]) <= MME_PERCEPTION | MME_COGNITION
    assert set(table["category"]) & MME_PERCEPTION and set(table["category"]) & MME_COGNITION
    # Neither answer comes first more often than chance would have it.
    assert 150 < table.iloc[::2]["answer"].eq("Yes").sum() * 2 < 270


def at(scene: digits.Scene, cell: int) -> str:
    """What is in a cell."""
    return str(scene.digits[cell]) if scene.digits[cell] >= 0 else "none"


def truth(question: str, scene: digits.Scene) -> str:
    """Answers a question from the scene's labels, by reading its words."""
    words = question.removesuffix("?").split()
    cell = {place: number for number, place in enumerate(digits.PLACES)}
    if question.startswith("Which digit is at the "):
        return str(scene.digits[cell[" ".join(words[5:])]])
    if question.startswith("What colour is the digit at the "):
        return scene.colours[cell[" ".join(words[7:])]]
    if question.startswith("How many of "):
        places, colour = question.removeprefix("How many of ").removesuffix("?").split(" are ")
        return str(sum(scene.colours[cell[p]] == colour for p in places.split(", ")))
    if question.startswith("What is at the "):
        return at(scene, cell[" ".join(words[4:])])
    if " plus " in question:
        a, b = question.removeprefix("What is ").removesuffix("?").split(" plus ")
        return str(scene.digits[cell[a]] + scene.digits[cell[b]])
    b, a = (
        question.removeprefix("Compared to the ").removesuffix(" is?").split(", the digit at the ")
    )
    x, y = scene.digits[cell[a]], scene.digits[cell[b]]
    return "larger" if x > y else "smaller" if x < y else "equal"


def test_answers_are_true_and_alone_true():
    for _, row in digits_mcq().iterrows():
        scene = redrawn(embedded.MCQ_SEED + row["index"], row["category"], row["image"])
        texts = options(row)
        right = texts[row["answer"]]
        assert truth(row["question"], scene) == right


def redrawn(seed: int, skill: str, cell: str) -> digits.Scene:
    """The scene behind a row; its pixels must be those of the row."""
    import random

    rng = random.Random(seed)
    while True:
        scene = draw_scene(rng, "test")
        if ASKERS[skill](rng, scene) is not None:
            break
    with Image.open(io.BytesIO(base64.b64decode(cell))) as image:
        assert image.tobytes() == scene.image.tobytes()
    return scene


def test_yn_claims_are_true_exactly_when_the_answer_is_yes():
    """Takes each claim apart again, independent of how the wrong candidate was chosen."""
    skills = {category: skill for skill, category in embedded.MME_CATEGORY.items()}
    for first in range(0, 420, 2):
        rows = [digits_yn().iloc[first + k] for k in (0, 1)]
        skill = skills[rows[0]["category"]]
        scene = redrawn(embedded.YN_SEED + first, skill, rows[0]["image"])
        for row in rows:
            claim = row["question"].removesuffix(embedded.YN_SUFFIX)
            assert claim != row["question"]
            assert claimed(skill, claim, scene) == (row["answer"] == "Yes"), claim


def claimed(skill: str, claim: str, scene: digits.Scene) -> bool:
    body = claim.removesuffix("?")
    cell = {place: number for number, place in enumerate(digits.PLACES)}
    places = sorted(digits.PLACES, key=len, reverse=True)
    if skill == "presence":
        what, place = body.removeprefix("Is ").split(" at the ")
        return at(scene, cell[place]) == what
    if skill == "count":
        n, rest = body.removeprefix("Are ").split(" of ")
        listed, colour = rest.rsplit(" ", 1)
        return sum(scene.colours[cell[p]] == colour for p in listed.split(", ")) == int(n)
    if skill == "sum":
        a, rest = body.removeprefix("Is ").split(" plus ")
        b = next(p for p in places if rest.startswith(p + " "))
        return scene.digits[cell[a]] + scene.digits[cell[b]] == int(rest.split()[-1])
    if skill == "comparison":
        b, rest = body.removeprefix("Compared to the ").split(", is the digit at the ")
        a, relation = rest.rsplit(" ", 1)
        x, y = scene.digits[cell[a]], scene.digits[cell[b]]
        return relation == ("larger" if x > y else "smaller" if x < y else "equal")
    rest = body.removeprefix("Is the digit at the ")
    place = next(p for p in places if rest.startswith(p + " "))
    value = rest.removeprefix(place + " ")
    if skill == "digit":
        return scene.digits[cell[place]] == int(value.removeprefix("a "))
    return scene.colours[cell[place]] == value


def test_test_digits_are_not_training_digits():
    split = digits.digit_split()
    for digit in range(10):
        assert not set(split["train"][digit]) & set(split["test"][digit])


def test_generation_is_deterministic():
    assert digits_mcq.__wrapped__().equals(digits_mcq())
    assert digits_yn.__wrapped__().equals(digits_yn())


def test_digest_sees_texts_and_pixels():
    table = digits_yn().head(4)
    digest = content_digest(table)
    other_text = table.assign(answer=["Yes", *table["answer"].iloc[1:]])
    if other_text.equals(table):
        other_text = table.assign(answer=["No", *table["answer"].iloc[1:]])
    other_image = table.assign(image=list(digits_yn()["image"].iloc[4:8]))
    assert len({digest, content_digest(other_text), content_digest(other_image)}) == 3
    assert content_digest(table.copy()) == digest


def test_opened_as_vlmevalkit_data_sets(mcq, yn):
    from vlmeval.dataset import ImageMCQDataset, ImageYORNDataset

    assert isinstance(mcq.dataset, ImageMCQDataset) and mcq.kind == "MCQ"
    assert isinstance(yn.dataset, ImageYORNDataset) and yn.kind == "Y/N"
    assert (mcq.style, yn.style) == ("single", "pairs")
    for data in (mcq, yn):
        assert data.bad == {} and data.warnings == [] and data.official is None
        assert len(data) == 420 and len(data.digest) == 64
        assert data.digest == content_digest(EMBEDDED[data.name].build())


def test_names_are_not_left_in_vlmevalkit(mcq):
    from vlmeval.dataset import DATASET_CLASSES, SUPPORTED_DATASETS

    assert "DIGITS_MCQ" not in SUPPORTED_DATASETS
    assert all("DIGITS_MCQ" not in cls.supported_datasets() for cls in DATASET_CLASSES)


def test_prompts_are_those_the_model_is_trained_on(mcq, yn):
    row = next(r for _, r in mcq.frame.iterrows() if r["category"] == "comparison")
    image, text = mcq.messages(row["index"])[0]["content"]
    assert text["text"] == (
        f"Question: {row['question']}\nOptions:\nA. {row['A']}\nB. {row['B']}\nC. {row['C']}\n"
        "Please select the correct answer from the options above. \n"
    )
    assert image["type"] == "image" and image["image"].size == (96, 96)
    row = mcq.frame.iloc[0]
    assert mcq.messages(row["index"])[0]["content"][1]["text"] == (
        f"Question: {row['question']}\nOptions:\nA. {row['A']}\nB. {row['B']}\nC. {row['C']}\n"
        f"D. {row['D']}\nPlease select the correct answer from the options above. \n"
    )
    row = yn.frame.iloc[0]
    (message,) = yn.messages(row["index"])
    assert message["role"] == "user"
    assert message["content"][1] == {"type": "text", "text": row["question"]}
    assert row["question"].endswith("? Please answer yes or no.")


def test_images_reach_the_model_unchanged(mcq):
    row = digits_mcq().iloc[7]
    image = mcq.messages(row["index"])[0]["content"][0]["image"]
    scene = redrawn(embedded.MCQ_SEED + 7, row["category"], row["image"])
    assert image.mode == "RGB" and image.tobytes() == scene.image.tobytes()


def test_limit_goes_round_the_skills():
    data = open_dataset("DIGITS_MCQ", limit=12)
    assert data.frame["category"].value_counts().to_dict() == dict.fromkeys(ASKERS, 2)
    pairs = open_dataset("DIGITS_YN", limit=13)
    assert len(pairs) == 12
    assert pairs.frame.groupby("image_path").size().eq(2).all()
