"""VLMEvalKit's data set classes, read carefully: its prompts and its scoring, our file handling.

The class of a name comes from VLMEvalKit's own lookup. A subclass made on the spot overrides
the three methods that touch files, where the class itself has not specialised them:

- ``prepare_tsv``: a table that is there is used as it is. VLMEvalKit would download again, and
  overwrite, one whose checksum is not the official one.
- ``load_data``: the table is checked before VLMEvalKit sees it, because VLMEvalKit passes cells
  of ``index``, ``image`` and ``image_path`` to ``eval``.
- ``dump_image``: images become RGB files in a private folder instead of ``LMUData/images``,
  where files of an earlier table with the same name would be taken for the new ones.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from mm_capacity.errors import UserError
from mm_capacity.evaluation.cells import (
    check_answers,
    check_columns,
    checked_images,
    checked_index,
    checked_paths,
)
from mm_capacity.evaluation.classes import answer_rule, is_custom, required_columns
from mm_capacity.evaluation.images import ImageStore
from mm_capacity.evaluation.tsv import TEXT_COLUMNS, file_digests, read_tsv
from mm_capacity.evaluation.vlmeval_process import first_line

DOWNLOAD_TIMEOUT_S = 60.0


@dataclass
class Source:
    """Where the questions of one data set come from, and what was found there.

    Attributes:
        name: data set name.
        root: LMUData.
        folder: private folder for images.
        offline: names of data sets that need no download, for the error message.
        table: the questions themselves, if they do not come from a file.
        digest: SHA-256 of the table file.
        official: whether its checksum is the official one; None if there is none to compare.
        warnings: what the user should know.
        bad: index -> why this question cannot be asked.
    """

    name: str
    root: Path
    folder: Path
    offline: tuple[str, ...] = ()
    table: pd.DataFrame | None = None
    digest: str = ""
    official: bool | None = None
    warnings: list[str] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Where the table is looked for."""
        return self.root / f"{self.name}.tsv"

    def read(self, url: str, official_md5: str | None) -> pd.DataFrame:
        """The table, from LMUData if it is there, otherwise downloaded by VLMEvalKit.

        Raises:
            UserError: it is not there and cannot be downloaded, or is not readable.
        """
        path = self.path
        if not path.exists():
            # VLMEvalKit's older name for the same file.
            older = self.root / url.rsplit("/", 1)[-1]
            if official_md5 and older.is_file() and file_digests(older)[1] == official_md5:
                path = older
            else:
                self._download(url)
        self.digest, md5 = file_digests(path)
        if official_md5:
            self.official = md5 == official_md5
            if not self.official:
                self.warnings.append(
                    f"{path} is not the official file (MD5 {md5}, official {official_md5}): used "
                    f"as it is, SHA-256 {self.digest}"
                )
        return read_tsv(path, TEXT_COLUMNS | {"index"})

    def _download(self, url: str) -> None:
        from vlmeval.smp import download_file

        missing = f"{self.name}: {self.path} is missing"
        remedy = f"put {self.name}.tsv into {self.root}"
        if self.offline:
            remedy += f", or use data that need no download: {', '.join(self.offline)}"
        if not url.startswith("http"):
            raise UserError(f"{missing} and VLMEvalKit knows no download for it; {remedy}")
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        timeout = socket.getdefaulttimeout()
        socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)
        # Its progress bar is for people; its log lines repeat the error.
        logging.disable(logging.CRITICAL)
        bar = sys.stderr if sys.stderr.isatty() else io.StringIO()
        try:
            with contextlib.redirect_stderr(bar):
                download_file(url, str(partial))
            os.replace(partial, self.path)
        except Exception as error:
            cause = error.__context__ or error
            raise UserError(
                f"{missing} and cannot be downloaded from {url} ({first_line(cause)}); {remedy}"
            ) from error
        finally:
            logging.disable(logging.NOTSET)
            socket.setdefaulttimeout(timeout)
            partial.unlink(missing_ok=True)

    def clean(self, frame: pd.DataFrame, cls: type, *, own_files: bool) -> pd.DataFrame:
        """Checks a table and makes its cells safe for VLMEvalKit.

        Args:
            frame: as read.
            cls: VLMEvalKit's class.
            own_files: the class itself fetches or writes image files.

        Returns:
            The table for VLMEvalKit.

        Raises:
            UserError: a column is missing, there is no question, an index is unusable.
        """
        from vlmeval.dataset import img_root_map

        frame = frame.reset_index(drop=True)
        where = self.path if self.path.exists() else self.name
        check_columns(frame, required_columns(cls, self.name), where)
        if not len(frame):
            raise UserError(f"{self.name} has no questions")
        frame["index"] = checked_index(frame["index"], self.name)
        check_answers(frame, self.name, answer_rule(cls, self.name), self.bad)
        if "image" in frame:
            cells = checked_images(frame, self.name, self.bad, self.warnings)
            frame["image"] = pd.Series(cells, dtype=object)
        if "image_path" in frame and ("image" not in frame or own_files):
            folders = [self.root / "images" / img_root_map(self.name), self.root]
            roots = [self.root, *(hub_folders() if own_files else ())]
            paths = checked_paths(frame, folders, roots, self.bad)
            if "image" not in frame:
                frame["image_path"] = pd.Series(paths, dtype=object)
        for column in ("category", "l2-category", "split"):
            # VLMEvalKit sorts these names and cannot sort a missing one.
            if column in frame and frame[column].isna().any():
                frame[column] = frame[column].astype(object).fillna("none")
        return frame


def hub_folders() -> list[Path]:
    """Caches into which VLMEvalKit's classes download image files."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return [Path(HF_HUB_CACHE), Path.home() / ".cache" / "modelscope"]


def build(cls: Any, source: Source) -> Any:
    """Makes VLMEvalKit's data set object for a source.

    Args:
        cls: VLMEvalKit's class.
        source: is filled with digest, warnings and bad questions.

    Raises:
        UserError: the data cannot be had or used.
    """
    from vlmeval.dataset.image_base import ImageBaseDataset

    own_files = (
        cls.prepare_tsv is not ImageBaseDataset.prepare_tsv
        or cls.dump_image is not ImageBaseDataset.dump_image
        or (cls.load_data is not ImageBaseDataset.load_data and not is_custom(cls))
    )
    store = ImageStore(source.folder)

    def load_data(self: Any, dataset: str) -> pd.DataFrame:
        if source.table is not None:
            frame = source.table.copy()
        elif is_custom(cls):
            frame = source.read("", None)
        else:
            frame = cls.load_data(self, dataset)
        return source.clean(frame, cls, own_files=own_files)

    def prepare_tsv(self: Any, url: str, file_md5: str | None = None) -> pd.DataFrame:
        self.data_path = str(source.path)
        return source.read(url, file_md5)

    def dump_image(self: Any, line: Any) -> list[str]:
        cells = line["image"] if isinstance(line["image"], list) else [line["image"]]
        return [str(store.path(cell)) for cell in cells]

    methods: dict[str, Callable[..., Any]] = {"load_data": load_data}
    if cls.prepare_tsv is ImageBaseDataset.prepare_tsv:
        methods["prepare_tsv"] = prepare_tsv
    if cls.dump_image is ImageBaseDataset.dump_image:
        methods["dump_image"] = dump_image
    ours = type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})
    try:
        dataset = ours(dataset=source.name)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{source.name}: VLMEvalKit cannot open it ({first_line(error)})"
        ) from error
    if not own_files:
        # VLMEvalKit's own switch for where images go.
        dataset.img_root = str(source.folder)
    return dataset
