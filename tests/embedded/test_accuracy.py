"""The embedded model on its data, in full: it can answer, and what is dropped first matters."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from mm_capacity.run import main

GRID = [
    *("--policy", "token-drop", "--modality", "image-first", "text-first"),
    *("--gamma", "none", "0.5", "--check"),
]
BASELINE = {"DIGITS_MCQ": 0.85, "DIGITS_YN": 0.90}


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("accuracy")
    assert main([*GRID, "--work-dir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def accuracy(work_dir) -> pd.DataFrame:
    """A row per run: data, modality ("" for the baseline), value, stderr, delta, delta_stderr."""
    table = pd.read_csv(work_dir / "results.csv")
    table = table[table["metric"] == "accuracy"].fillna({"modality": ""})
    return table.set_index(["data", "modality"])


@pytest.mark.parametrize("data", BASELINE)
def test_the_untouched_model_answers_held_out_digits(accuracy, data):
    row = accuracy.loc[(data, "")]
    assert row["n"] >= 400
    assert row["value"] >= BASELINE[data]


def test_some_layer_is_as_uneven_as_real_models_are(work_dir):
    """Straggler factor of a layer: mean over the questions of a data set."""
    files = (work_dir / "digits-moe").glob("*/none-*/layers.parquet")
    layers = pd.concat(pd.read_parquet(f).assign(data=f.parts[-3]) for f in files)
    factors = layers.groupby(["data", "layer"])["straggler_before"].mean()
    assert factors.max() >= 2.5


@pytest.mark.parametrize("data", BASELINE)
def test_image_first_beats_text_first(accuracy, data):
    """By more than two standard errors of the two differences to the baseline, added up."""
    image, text = (accuracy.loc[(data, f"{modality}-first")] for modality in ("image", "text"))
    assert image["value"] - text["value"] > 2 * (image["delta_stderr"] + text["delta_stderr"])
