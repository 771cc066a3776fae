"""MolmoE as VLMEvalKit asks it: a style word, the question, options as ``A: text``.

The style words are names of the model's training sets: ``a_okvqa_mc:`` before any multiple-choice
question, ``vqa2:`` before any other, and words of their own for data sets the model was trained
on. Answers have at most 200 tokens, pictures at most 36 crops.

Also as there: on ScienceQA the options are left out (``science_qa:`` is followed by the question
alone); a question with several images gets the first one, except BLINK, whose images are put
side by side; the type of other data (captions, say) leaves the data set's own prompt.

Different: where the answer to an AI2D question without letters is none of its options, the
wrapper stops with an exception; here the answer stays as it is and scoring decides.

Source: VLMEvalKit, vlmeval/vlm/molmo.py (ms-vlmeval 0.0.20), behaviour only.
"""

from __future__ import annotations

import io
import string
from collections.abc import Mapping
from typing import Any, ClassVar

from mm_capacity.evaluation.prompts.base import Messages, Parts, Prompts, image_paths

MCQ_STYLE, OPEN_STYLE = "a_okvqa_mc:", "vqa2:"
DIAGRAM_STYLE, BARE_DIAGRAM_STYLE = "ai2_diagram:", "ai2_diagram_no_letter:"
DIAGRAMS = ("AI2D_TEST", "AI2D_TEST_NO_MASK")
TRAINED_STYLES = {
    "ChartQA_TEST": "chart_qa:",
    "ChartQA_VAL": "chart_qa:",
    "DocVQA_TEST": "doc_qa:",
    "DocVQA_VAL": "doc_qa:",
    "InfoVQA_TEST": "info_qa:",
    "InfoVQA_VAL": "info_qa:",
    "OCRVQA_TEST": "ocr_vqa:",
    "OCRVQA_TESTCORE": "ocr_vqa:",
    "ScienceQA_TEST": "science_qa:",
    "ScienceQA_VAL": "science_qa:",
    "TableVQABench": "tabwmp_da:",
    "TextVQA_VAL": "text_vqa:",
}
# Sets that mix both kinds of questions: what their column question_type says of the options.
MIXED = {
    "MMMU_DEV_VAL": "multiple-choice",
    "MMMU_TEST": "multiple-choice",
    "MathVista_MINI": "multi_choice",
}
JOINED_HEIGHT_PIXELS = 512


class MolmoEPrompts(Prompts):
    """See the module docstring."""

    name: ClassVar[str] = "molmoe"
    max_new_tokens: ClassVar[int | None] = 200
    load_options: ClassVar[Mapping[str, Any]] = {"max_crops": 36}

    def builds(self, dataset: Any) -> bool:
        wanted = getattr(dataset, "TYPE", None) in ("MCQ", "Y/N", "VQA")
        return wanted and not getattr(dataset, "force_use_dataset_prompt", False)

    def build(self, dataset: Any, line: Any) -> Parts:
        name = dataset.dataset_name
        parts = [{"type": "text", "value": prompt_text(name, dataset.TYPE, line)}]
        parts += [{"type": "image", "value": path} for path in image_paths(dataset, line)]
        if name.startswith("MMMU_"):
            from vlmeval.dataset import MMMUDataset

            return MMMUDataset.split_MMMU(parts)
        return parts

    def shape(self, messages: Messages, dataset_name: str) -> tuple[Messages, str | None]:
        if len(messages) != 1:
            return messages, None  # the processor says that it takes one turn
        parts = messages[0]["content"]
        texts = [part for part in parts if part["type"] == "text"]
        images = [part["image"] for part in parts if part["type"] == "image"]
        note = None
        if len(images) > 1:
            if dataset_name == "BLINK":
                images = [side_by_side(images)]
                what = "images of a question are put side by side"
            else:
                images, what = images[:1], "of several images of a question the first is used"
            note = f"MolmoE takes one image: {what}, as in VLMEvalKit"
        content = [{"type": "image", "image": image} for image in images] + texts
        return [{**messages[0], "content": content}], note

    def answer(self, text: str, dataset: Any, line: Any) -> str:
        if dataset.dataset_name not in DIAGRAMS or not asks_without_letters(line):
            return text
        letters = {str(option): letter for letter, option in reversed(options_of(line).items())}
        return letters.get(text, text)


def prompt_text(name: str, kind: str, line: Any) -> str:
    """The prompt of one question.

    Args:
        name: VLMEvalKit's name of the data set.
        kind: its TYPE.
        line: the question's row.
    """
    if name in DIAGRAMS:
        if asks_without_letters(line):
            lines = [line["question"], *options_of(line).values()]
            return f"{BARE_DIAGRAM_STYLE} " + "\n".join(str(text) for text in lines)
        return f"{DIAGRAM_STYLE} {with_options(line)}"
    if name in TRAINED_STYLES:
        return f"{TRAINED_STYLES[name]} {line['question']}"
    lettered = line["question_type"] == MIXED[name] if name in MIXED else kind == "MCQ"
    if lettered:
        return f"{MCQ_STYLE} {with_options(line)}"
    return f"{OPEN_STYLE} {line['question']}"


def with_options(line: Any) -> str:
    """Hint, question and lettered options, a line each."""
    hint = [] if is_missing(line.get("hint")) else [line["hint"]]
    options = [f"{letter}: {option}" for letter, option in options_of(line).items()]
    return "\n".join([*hint, line["question"], *options])


def options_of(line: Any) -> dict[str, Any]:
    """Letter -> option, of the options that a row has."""
    return {
        letter: line[letter]
        for letter in string.ascii_uppercase
        if letter in line and not is_missing(line[letter])
    }


def asks_without_letters(line: Any) -> bool:
    """Whether an AI2D question's options are letters in the picture, which need no other letter."""
    labels = [str(option).strip() for option in options_of(line).values()]
    return bool(line.get("abcLabel", False)) and all(
        len(label) == 1 and label.isalpha() for label in labels
    )


def is_missing(value: Any) -> bool:
    """Whether a table's cell is empty."""
    import pandas as pd

    return value is None or bool(pd.isna(value))


def side_by_side(images: list[Any]) -> Any:
    """One picture of several, left to right at equal height; JPEG-coded once, as in VLMEvalKit."""
    from PIL import Image

    height = JOINED_HEIGHT_PIXELS
    scaled = [image.resize((int(height / image.height * image.width), height)) for image in images]
    joined = Image.new("RGB", (sum(image.width for image in scaled), height))
    left = 0
    for image in scaled:
        joined.paste(image, (left, 0))
        left += image.width
    coded = io.BytesIO()
    joined.save(coded, format="JPEG")
    return Image.open(coded).convert("RGB")
