"""Pictures and questions: disjoint splits, reproducible, and true."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from mm_capacity.data.digits import (
    ASKERS,
    CELL_PX,
    COLOUR_NAMES,
    COLOURS,
    EMPTY,
    IMAGE_PX,
    PLACES,
    digit_split,
    draw_scene,
    load_glyphs,
)


def test_train_and_test_digits_are_disjoint():
    split = digit_split()
    train = {i for pool in split["train"].values() for i in pool}
    test = {i for pool in split["test"].values() for i in pool}
    glyphs, labels = load_glyphs()
    assert not train & test
    assert train | test == set(range(len(labels)))
    for name in split:
        assert all(labels[i] == d for d, pool in split[name].items() for i in pool)
        assert min(len(pool) for pool in split[name].values()) > 40
    # Disjoint as pictures too, not only as indices.
    drawn = {glyphs[i].tobytes() for i in train} & {glyphs[i].tobytes() for i in test}
    assert not drawn


def test_a_seed_names_one_scene():
    one, two = (draw_scene(random.Random(5), "test") for _ in range(2))
    other = draw_scene(random.Random(6), "test")
    assert one.digits == two.digits
    assert one.image.tobytes() == two.image.tobytes()
    assert one.image.tobytes() != other.image.tobytes()
    assert one.image.size == (IMAGE_PX, IMAGE_PX)


@pytest.mark.parametrize("seed", range(20))
def test_the_picture_shows_what_the_scene_says(seed):
    scene = draw_scene(random.Random(seed), "test")
    pixels = np.asarray(scene.image, np.float32)
    for cell in range(9):
        y, x = cell // 3 * CELL_PX, cell % 3 * CELL_PX
        area = pixels[y : y + CELL_PX, x : x + CELL_PX].reshape(-1, 3)
        if scene.digits[cell] == EMPTY:
            assert np.ptp(area, axis=0).max() == 0
            continue
        brightest = area[area.sum(1).argmax()]
        nearest = min(COLOURS, key=lambda k: np.abs(brightest - COLOURS[k]).sum())
        assert nearest == scene.colours[cell]


def recompute(scene, question) -> str:
    """The answer, worked out from the words of the question alone."""
    by_place = dict(zip(PLACES, zip(scene.digits, scene.colours, strict=True), strict=True))
    text = question.text
    if match := re.fullmatch(r"Which digit is at the (.+)\?", text):
        return str(by_place[match[1]][0])
    if match := re.fullmatch(r"What colour is the digit at the (.+)\?", text):
        return by_place[match[1]][1]
    if match := re.fullmatch(r"How many of (.+), (.+), (.+) are (\w+)\?", text):
        return str(sum(by_place[place][1] == match[4] for place in match.groups()[:3]))
    if match := re.fullmatch(r"What is (.+) plus (.+)\?", text):
        return str(by_place[match[1]][0] + by_place[match[2]][0])
    if match := re.fullmatch(r"Compared to the (.+), the digit at the (.+) is\?", text):
        base, digit = by_place[match[1]][0], by_place[match[2]][0]
        return "equal" if digit == base else "larger" if digit > base else "smaller"
    match = re.fullmatch(r"What is at the (.+)\?", text)
    assert match
    digit, _ = by_place[match[1]]
    return str(digit) if digit != EMPTY else "none"


@pytest.mark.parametrize("name", ASKERS)
def test_answers_are_true_and_the_others_false(name):
    rng = random.Random(11)
    asked = 0
    while asked < 150:
        scene = draw_scene(rng, "test")
        question = ASKERS[name](rng, scene)
        if question is None:
            continue
        asked += 1
        assert recompute(scene, question) == question.answer
        assert question.answer not in question.wrong
        assert len(set(question.wrong)) == len(question.wrong)
        assert len(question.wrong) in ((2,) if name == "comparison" else (2, 3))
        assert "{}" in question.claim
        assert EMPTY not in (scene.digits[c] for c in scene.filled)


def test_colours_are_distinct_words():
    assert len(COLOUR_NAMES) == len(set(COLOUR_NAMES)) == 6
