"""DeepSeek-VL2 as VLMEvalKit asks it: the data set's own prompt, each image as ``<image>`` and
a line break in its place. Answers have at most 2048 tokens and lose full stops at their end.

MMMU_DEV_VAL is asked differently: all images come first, numbered references stand where they
were, the first image is doubled in size, and the wording is that of the model's authors.

Different: the wrapper encodes a prompt in chunks of 512 tokens, which would be the capacity's
windows; here it is one pass. Without a policy both give the same answers.

Source: VLMEvalKit, vlmeval/vlm/deepseek_vl2.py (ms-vlmeval 0.0.20), behaviour only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mm_capacity.evaluation.prompts.base import Messages, Prompts

MARKER = "<image>"
NUMBERED = "MMMU_DEV_VAL"
REWORDED = {
    "Please select the correct answer from the options above.": (
        "Answer with the option's letter from the given choices directly. "
        "Answer the question using a single word or phrase.\n"
    ),
    "Question:": "",
    "Options:\n": "",
}


class DeepseekVL2Prompts(Prompts):
    """See the module docstring."""

    name: ClassVar[str] = "deepseek_vl2"
    max_new_tokens: ClassVar[int | None] = 2048

    def shape(self, messages: Messages, dataset_name: str) -> tuple[Messages, str | None]:
        numbered = dataset_name == NUMBERED
        write = numbered_content if numbered else plain_content
        shaped = []
        for message in messages:
            images = [part["image"] for part in message["content"] if part["type"] == "image"]
            content = write(message["content"])
            shaped.append({"role": message["role"], "content": content, "images": images})
        if numbered:
            double_first_image(shaped)
        return shaped, None

    def answer(self, text: str, dataset: Any, line: Any) -> str:
        return text.rstrip(".")


def plain_content(parts: Sequence[Mapping[str, Any]]) -> str:
    """Texts as they are, a marker and a line break for each image."""
    return "".join(part["text"] if part["type"] == "text" else f"{MARKER}\n" for part in parts)


def numbered_content(parts: Sequence[Mapping[str, Any]]) -> str:
    """All markers first, then the text with ``<image 1>``, ``<image 2>``, ... in it."""
    text, images = "", 0
    for part in parts:
        if part["type"] == "text":
            text += part["text"]
        else:
            images += 1
            text += f"<image {images}>"
    for old, new in REWORDED.items():
        text = text.replace(old, new)
    return MARKER * images + "\n" + text


def double_first_image(messages: Messages) -> None:
    """Doubles width and height of the conversation's first image."""
    from PIL import Image

    for message in messages:
        if message["images"]:
            first = message["images"][0]
            size = (2 * first.width, 2 * first.height)
            message["images"][0] = first.resize(size, Image.Resampling.BILINEAR)
            return
