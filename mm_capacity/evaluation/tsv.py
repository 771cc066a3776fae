"""Tables as they are written: words stay words, digits of a text column stay text.

pandas reads the words NA, None, null and nan as missing values, and "007" as the number 7.
Both happen to options and answers, so tables are read here with empty cells alone as missing.
VLMEvalKit reads its own files again while it scores; :func:`words_kept` makes its loader do
the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import string
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from mm_capacity.errors import UserError

OPTIONS = tuple(string.ascii_uppercase)
# Texts that go into a prompt or are matched with an answer; all else is read as pandas does.
TEXT_COLUMNS = frozenset(
    (
        "question", "hint", "answer", "prediction", "category", "l2-category", "split",
        "image", "image_path", "extracted", "log", *OPTIONS,
    )
)  # fmt: skip
BLOCK_BYTES = 2**20


def read_options(text: Collection[str]) -> dict[str, Any]:
    """Arguments for pandas' readers under which only an empty cell is missing."""
    return {"keep_default_na": False, "na_values": [""], "dtype": dict.fromkeys(text, str)}


def read_tsv(path: Path, text: Collection[str] = TEXT_COLUMNS) -> pd.DataFrame:
    """Reads a table.

    Args:
        path: tab-separated file, UTF-8, quoted as CSV is.
        text: columns read as text; others get the type that pandas infers.

    Raises:
        UserError: the file is not such a table, or has no row.
    """
    try:
        frame = pd.read_csv(path, sep="\t", encoding="utf-8", **read_options(text))
    except pd.errors.EmptyDataError:
        raise UserError(f"{path} is empty") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (line {_line_not_utf8(path)})") from error
    except (pd.errors.ParserError, ValueError) as error:
        raise UserError(f"{path} is not a tab-separated table: {_one_line(error)}") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if not len(frame):
        raise UserError(f"{path} has no questions: only a header line")
    return frame


def file_digests(path: Path) -> tuple[str, str]:
    """SHA-256 and MD5 of a file; VLMEvalKit's official checksums are MD5.

    Raises:
        UserError: the file cannot be read.
    """
    sha, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                sha.update(block)
                md5.update(block)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    return sha.hexdigest(), md5.hexdigest()


class _Pandas:
    """pandas for VLMEvalKit's loader: same names, readers that keep words."""

    def __init__(self, text: Collection[str]) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Any:
        return getattr(pd, name)

    def read_csv(self, *args: Any, **kwargs: Any) -> pd.DataFrame:
        return self._filled(pd.read_csv(*args, **kwargs, **read_options(self._text)))

    def read_excel(self, *args: Any, **kwargs: Any) -> pd.DataFrame:
        return self._filled(pd.read_excel(*args, **kwargs, **read_options(self._text)))

    @staticmethod
    def _filled(frame: pd.DataFrame) -> pd.DataFrame:
        if "prediction" in frame:
            # VLMEvalKit would turn an empty answer into the word "nan" and match that.
            frame["prediction"] = frame["prediction"].fillna("")
        return frame


@contextlib.contextmanager
def words_kept(text: Collection[str] = TEXT_COLUMNS) -> Iterator[None]:
    """Inside, VLMEvalKit's file loader reads tables as :func:`read_tsv` does.

    Its loader has no option for this. Only the name ``pd`` inside its module ``smp.file`` is
    exchanged, so that pandas itself and everything else stays untouched.
    """
    import vlmeval.smp.file as loader

    original = loader.pd
    loader.pd = _Pandas(text)  # type: ignore[assignment]
    try:
        yield
    finally:
        loader.pd = original


def _line_not_utf8(path: Path) -> int:
    """First line of a file that is not UTF-8; 0 if every one is."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 0


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
