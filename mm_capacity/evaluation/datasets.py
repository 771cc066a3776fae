"""Opens a data set for the runner: questions as chat messages, whatever VLMEvalKit has.

``open_dataset("MMBench_DEV_EN")`` reads the table from LMUData, or lets VLMEvalKit download it;
``open_dataset("DIGITS_MCQ")`` needs neither. Prompts are VLMEvalKit's own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from mm_capacity.data.embedded import EMBEDDED, content_digest
from mm_capacity.errors import UserError
from mm_capacity.evaluation.classes import embedded_class, find_class, style_of
from mm_capacity.evaluation.images import BadImageError, check_inside, open_rgb, probe
from mm_capacity.evaluation.sources import Source, build, hub_folders
from mm_capacity.evaluation.tsv import words_kept
from mm_capacity.evaluation.units import Style, select_first
from mm_capacity.evaluation.vlmeval_process import import_vlmeval, vlmeval_session

COMMON_DATASETS = (
    "MMBench_DEV_EN",
    "MMBench_DEV_EN_V11",
    "MME",
    "SEEDBench_IMG",
    "MMStar",
    "AI2D_TEST",
    "ScienceQA_VAL",
    "ScienceQA_TEST",
    "RealWorldQA",
    "CCBench",
    "POPE",
    "HallusionBench",
    "TextVQA_VAL",
    "ChartQA_TEST",
)


def known_datasets() -> list[str]:
    """Embedded data sets and common ones, for listings; any VLMEvalKit image data set works."""
    return [*EMBEDDED, *COMMON_DATASETS]


class BadQuestion(Exception):
    """A question that cannot be asked.

    Attributes:
        index: its index.
        reason: why, for the record.
    """

    def __init__(self, index: Any, reason: str) -> None:
        super().__init__(f"question {index}: {reason}")
        self.index = index
        self.reason = reason


@dataclass
class EvalData:
    """An opened data set.

    Attributes:
        name: its name.
        kind: VLMEvalKit's TYPE: "MCQ", "Y/N", "VQA", ...
        frame: the questions to be asked, without images; the column ``index`` is unique.
        digest: SHA-256 of the table file; of texts and pixels for an embedded data set; "" if
            VLMEvalKit's class fetched the data in its own way.
        official: whether the file's checksum is the official one; None: nothing to compare.
        warnings: one line each, for the user and the record.
        bad: index -> why the question cannot be asked. Filled when opened as far as it shows
            without decoding all pixels, and by :meth:`messages`.
        dataset: VLMEvalKit's data set object, limited to the same questions.
        style: how questions belong together.
        root: LMUData as VLMEvalKit sees it.
    """

    name: str
    kind: str
    frame: pd.DataFrame
    digest: str
    official: bool | None
    warnings: list[str]
    bad: dict[Any, str]
    dataset: Any
    style: Style
    root: Path
    _folder: Any = field(repr=False, default=None)
    _positions: dict[str, int] = field(repr=False, default_factory=dict)

    def __len__(self) -> int:
        return len(self.frame)

    def messages(
        self, index: Any, build: Callable[[Any, Any], list[dict[str, Any]]] | None = None
    ) -> list[dict[str, Any]]:
        """One question as chat messages.

        Args:
            index: from ``frame["index"]``.
            build: makes VLMEvalKit's parts of the data set object and the question's row; None
                for the data set's own prompt.

        Returns:
            Messages whose content parts are ``{"type": "image", "image": PIL RGB image}`` and
            ``{"type": "text", "text": str}``, in VLMEvalKit's order.

        Raises:
            BadQuestion: its image cannot be used.
        """
        key = self._key(index)
        if key in self.bad:
            raise BadQuestion(key, self.bad[key])
        try:
            return self._messages(self._positions[str(index)], build)
        except BadImageError as error:
            self.bad[key] = str(error)
            raise BadQuestion(key, str(error)) from error

    def _messages(self, position: int, build: Callable[..., Any] | None) -> list[dict[str, Any]]:
        line = self.dataset.data.iloc[position]
        before = os.environ.get("LMUData")
        os.environ["LMUData"] = str(self.root)
        try:
            parts = build(self.dataset, line) if build else self.dataset.build_prompt(line)
        finally:
            if before is None:
                del os.environ["LMUData"]
            else:
                os.environ["LMUData"] = before
        messages: list[dict[str, Any]] = []
        for part in parts:
            role = part.get("role", "user")
            if not messages or messages[-1]["role"] != role:
                messages.append({"role": role, "content": []})
            messages[-1]["content"].append(self._part(part))
        return messages

    def _part(self, part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return {"type": "text", "text": part["value"]}
        if part["type"] != "image":
            raise BadImageError(f"a prompt part of type {part['type']!r} is not supported")
        folders = [Path(self._folder.name), self.root, *hub_folders()]
        return {"type": "image", "image": open_rgb(check_inside(part["value"], folders))}

    def line(self, index: Any) -> pd.Series:
        """A question's row of ``frame``."""
        return self.frame.iloc[self._positions[str(index)]]

    def image_size(self, index: Any) -> tuple[int, int]:
        """Width and height, in pixels, of a question's first image.

        Raises:
            BadQuestion: as :meth:`messages`.
        """
        for message in self.messages(index):
            for part in message["content"]:
                if part["type"] == "image":
                    return part["image"].size
        raise BadQuestion(index, "the prompt has no image")

    def _key(self, index: Any) -> Any:
        if str(index) not in self._positions:
            raise KeyError(f"{self.name} has no question {index!r}")
        return self.frame["index"].tolist()[self._positions[str(index)]]


def lmu_root(lmu_data: Path | None = None) -> Path:
    """The folder of VLMEvalKit's tables: the argument, $LMUData, or ~/LMUData."""
    return Path(lmu_data or os.environ.get("LMUData") or "~/LMUData").expanduser().absolute()


def open_dataset(name: str, *, limit: int | None = None, lmu_data: Path | None = None) -> EvalData:
    """Opens a data set by name.

    Args:
        name: an embedded data set, any image data set of VLMEvalKit, or the name of a table
            NAME.tsv in LMUData, which VLMEvalKit takes for a custom one.
        limit: most questions to ask: a deterministic choice of whole units (an MME image's
            pair, an MMBench question with its circular copies) that goes round the categories.
        lmu_data: folder of the tables; default $LMUData, then ~/LMUData.

    Raises:
        UserError: unknown name, table missing without a download, or table unusable.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit {limit} leaves no question: give a whole number from 1 on")
    import_vlmeval()
    folder = tempfile.TemporaryDirectory(prefix="mm_capacity_images_")
    source, cls = _source(name, lmu_root(lmu_data), Path(folder.name))
    _make_root(source.root)
    with vlmeval_session(source.root), words_kept():
        dataset = build(cls, source)
    if not len(dataset.data):
        raise UserError(f"{name} has no questions with an image")
    style = style_of(dataset, name)
    data = dataset.data.reset_index(drop=True)
    if limit is not None and limit < len(data):
        data = data.iloc[select_first(data, style, limit)].reset_index(drop=True)
    dataset.data = data
    indices = data["index"].tolist()
    opened = EvalData(
        name=name,
        kind=getattr(dataset, "TYPE", "VQA"),
        frame=data.drop(columns="image", errors="ignore"),
        digest=source.digest,
        official=source.official,
        warnings=source.warnings,
        bad={i: source.bad[str(i)] for i in indices if str(i) in source.bad},
        dataset=dataset,
        style=style,
        root=source.root,
        _folder=folder,
        _positions={str(index): position for position, index in enumerate(indices)},
    )
    _probe_images(opened)
    return opened


def _make_root(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the data folder {root} cannot be made ({error.strerror}): set LMUData to another one"
        ) from error


def _source(name: str, root: Path, folder: Path) -> tuple[Source, type]:
    offline = tuple(EMBEDDED)
    if name in EMBEDDED:
        table = EMBEDDED[name].build()
        digest = content_digest(table)
        # No LMUData: nothing of an embedded data set is read or written there.
        source = Source(name, folder, folder, offline, table=table, digest=digest)
        return source, embedded_class(name)
    return Source(name, root, folder, offline), find_class(name, root)


def _probe_images(opened: EvalData) -> None:
    """Finds cells that hold no image, before a model is loaded."""
    if "image" not in opened.dataset.data:
        return
    verdicts: dict[str, str] = {}
    for index, cell in zip(opened.frame["index"], opened.dataset.data["image"], strict=True):
        if index in opened.bad:
            continue
        for text in cell if isinstance(cell, list) else [cell]:
            if text not in verdicts:
                try:
                    probe(text)
                    verdicts[text] = ""
                except BadImageError as error:
                    verdicts[text] = str(error)
            if verdicts[text]:
                opened.bad[index] = verdicts[text]
                break
