"""What a model's name means: an embedded folder, a path, a hub id, or VLMEvalKit's wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mm_capacity.errors import UserError
from mm_capacity.evaluation.plan import EMBEDDED_MODEL, ModelChoice
from mm_capacity.evaluation.suggest import unknown

if TYPE_CHECKING:
    from mm_capacity.evaluation.vlmeval_models import WrapperChoice

EMBEDDED_FOLDERS = {EMBEDDED_MODEL: Path(__file__).resolve().parents[1] / "data" / "digits_model"}
"""Models inside this package: name -> checkpoint folder."""


def resolve_source(source: str) -> str:
    """What to load: an embedded model's folder, a path, a hub id, or ``tiny:FAMILY``.

    Raises:
        UserError: none of them, nor a name that VLMEvalKit knows.
    """
    if source in EMBEDDED_FOLDERS:
        folder = EMBEDDED_FOLDERS[source]
        if not (folder / "config.json").exists():
            raise UserError(f"the embedded model {source!r} is missing: no checkpoint in {folder}")
        return str(folder)
    if source.startswith("tiny:"):
        return source
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise UserError(f"{source!r} is not a checkpoint folder: it has no config.json")
        return str(path)
    if path.exists():
        raise UserError(f"{source!r} is a file: --model wants the checkpoint's folder")
    if source.startswith(("/", "./", "../", "~")):
        raise UserError(f"model folder {source!r} does not exist")
    return source if "/" in source else wrapped_source(source)


def wrapped_source(name: str) -> str:
    """The hub id behind one of VLMEvalKit's model names.

    Raises:
        UserError: no such name, or no mixture of experts behind it.
    """
    from mm_capacity.evaluation.vlmeval_models import find_wrapper, moe_model_names, resolve_model

    if find_wrapper(name) is None:
        raise unknown("model", name, [*EMBEDDED_FOLDERS, *moe_model_names()])
    return resolve_model(name)


def wrapper_of(choice: ModelChoice, source: str) -> WrapperChoice | None:
    """VLMEvalKit's wrapper that a model is asked through, None for a model by itself.

    A wrapper is used for a name of VLMEvalKit's, also with a local copy of its weights, and for
    a config file's ``class``.

    Raises:
        UserError: no such class, or a wrapper that cannot be used here.
    """
    if source.startswith("tiny:") or choice.source in EMBEDDED_FOLDERS:
        if choice.wrapper_class is not None:  # kept for the record: there is no checkpoint
            from mm_capacity.evaluation.vlmeval_models import check_wrapper_class

            check_wrapper_class(choice.name, choice.wrapper_class)
        return None
    # Otherwise a folder or hub id, which stays what it is.
    by_name = source != choice.source and not Path(choice.source).expanduser().is_dir()
    if not by_name and choice.wrapper_class is None and not choice.local_copy:
        return None
    from mm_capacity.evaluation.vlmeval_models import wrapper_choice

    if by_name:
        return wrapper_choice(choice.source, wrapper_class=choice.wrapper_class)
    return wrapper_choice(choice.name, folder=source, wrapper_class=choice.wrapper_class)
