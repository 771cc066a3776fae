"""VLMEvalKit's class for a data set name, and what its code expects of the data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd

from mm_capacity.data.embedded import EMBEDDED
from mm_capacity.errors import UserError
from mm_capacity.evaluation.cells import AnswerRule
from mm_capacity.evaluation.suggest import unknown
from mm_capacity.evaluation.units import Style, is_circular_name
from mm_capacity.evaluation.vlmeval_process import first_line

PLAIN_NAME = re.compile(r"[\w\-+@][\w.\-+@]*")


def find_class(name: str, root: Path) -> type:
    """VLMEvalKit's class for a name: its registered one, or its custom one for a table at hand.

    Raises:
        UserError: the name is unknown, or not one image data set.
    """
    from vlmeval.dataset import DATASET_CLASSES, DATASET_COLLECTION, supported_video_datasets

    for cls in DATASET_CLASSES:
        if name not in cls.supported_datasets():
            continue
        if cls in DATASET_COLLECTION:
            parts = getattr(cls, "DATASET_SETS", {}).get(name, [])
            raise UserError(f"{name} is a collection: name its parts ({', '.join(parts)})")
        _need_images(name, cls)
        return cls
    if name in supported_video_datasets:
        raise UserError(f"{name} is a video data set: only image data sets can be run")
    if PLAIN_NAME.fullmatch(name) and (root / f"{name}.tsv").is_file():
        return _custom_class(root / f"{name}.tsv")
    raise unknown("data set", name, image_dataset_names())


def _custom_class(path: Path) -> type:
    # VLMEvalKit's rule for a table of unknown name (vlmeval/dataset/__init__.py, build_dataset).
    from vlmeval.dataset import CustomMCQDataset, CustomVQADataset

    columns = read_header(path)
    return CustomMCQDataset if {"A", "B"} <= columns else CustomVQADataset


def read_header(path: Path) -> set[str]:
    """Column names of a table."""
    try:
        return set(pd.read_csv(path, sep="\t", nrows=0).columns)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not a tab-separated table ({first_line(error)})") from error


def _need_images(name: str, cls: Any) -> None:
    kind = getattr(cls, "MODALITY", "IMAGE")
    if kind != "IMAGE":
        raise UserError(f"{name} is a {kind.lower()} data set: only image data sets can be run")


def image_dataset_names() -> list[str]:
    """Every image data set that VLMEvalKit knows by name, and the embedded ones."""
    from vlmeval.dataset import IMAGE_DATASET

    names = {name for cls in IMAGE_DATASET for name in cls.supported_datasets()}
    return sorted(names | set(EMBEDDED))


def embedded_class(name: str) -> type:
    """VLMEvalKit's data set class for an embedded data set."""
    from vlmeval.dataset import ImageMCQDataset, ImageYORNDataset
    from vlmeval.dataset.utils.yorn import MME_rating
    from vlmeval.smp import dump, get_intermediate_file_path

    class DigitsMCQ(ImageMCQDataset):
        DATASET_URL = {name: ""}
        DATASET_MD5: dict[str, str] = {}

    class DigitsYN(ImageYORNDataset):
        DATASET_URL = {name: ""}
        DATASET_MD5: dict[str, str] = {}
        rated_in_pairs = True

        def evaluate(self, eval_file: str, **judge_kwargs: Any) -> pd.DataFrame:
            # VLMEvalKit rates a set as MME by its name only: ask for the rating itself.
            super().evaluate(eval_file, **judge_kwargs)
            rating = MME_rating(get_intermediate_file_path(eval_file, "_auxmatch"))
            dump(rating, get_intermediate_file_path(eval_file, "_score", "csv"))
            return rating

    return DigitsMCQ if EMBEDDED[name].kind == "MCQ" else DigitsYN


def required_columns(cls: Any, name: str) -> list[str]:
    """Columns without which a class can neither ask nor score."""
    from vlmeval.dataset import ImageMCQDataset, ImageYORNDataset

    columns = ["index", "question"]
    if issubclass(cls, ImageMCQDataset) and cls.build_prompt is ImageMCQDataset.build_prompt:
        columns += ["A", "B", "answer"]
    elif issubclass(cls, ImageYORNDataset):
        columns += ["answer"]
        if rated_as_mme(cls, name):
            columns += ["category", "image_path"]
    return columns


def answer_rule(cls: Any, name: str) -> AnswerRule | None:
    """What an answer must be so that VLMEvalKit's own scoring can compare with it.

    Returns:
        "letter" (of one of the options), "yes-no", "Yes-No" (spelled exactly so), or None where
        a class scores in its own way.
    """
    from vlmeval.dataset import ImageMCQDataset, ImageYORNDataset

    if issubclass(cls, ImageYORNDataset):
        return "Yes-No" if rated_as_mme(cls, name) else "yes-no"
    if not issubclass(cls, ImageMCQDataset) or "MMMU" in name:  # MMMU has open questions
        return None
    own = ("build_prompt", "evaluate", "evaluate_heuristic")
    plain = all(getattr(cls, method) is getattr(ImageMCQDataset, method) for method in own)
    return "letter" if plain else None


def rated_as_mme(cls: Any, name: str) -> bool:
    """Whether VLMEvalKit rates by pairs of questions: it goes by the name."""
    from vlmeval.dataset import ImageYORNDataset

    return issubclass(cls, ImageYORNDataset) and ("MME" in name or hasattr(cls, "rated_in_pairs"))


def style_of(dataset: Any, name: str) -> Style:
    """How the questions of an opened data set belong together.

    Raises:
        UserError: the index cannot name circular copies.
    """
    from vlmeval.dataset import ImageMCQDataset

    if rated_as_mme(type(dataset), name):
        return "pairs"
    if isinstance(dataset, ImageMCQDataset) and is_circular_name(name):
        if not all(isinstance(index, int) for index in dataset.data["index"].tolist()):
            raise UserError(
                f"{name} is scored circularly by VLMEvalKit and needs whole numbers as index"
            )
        return "circular"
    return "single"


def is_custom(cls: Any) -> bool:
    """Whether a class is VLMEvalKit's for tables of unknown name."""
    from vlmeval.dataset import CUSTOM_DATASET

    return cls in CUSTOM_DATASET
