"""``--config FILE``: VLMEvalKit's JSON form with one more section, ``capacity``.

``model`` and ``data`` map a name to a dict, as VLMEvalKit reads them (``class`` and the
arguments of that class); ``capacity`` holds options of the command line by their long name.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation.plan import DataChoice, ModelChoice
from mm_capacity.evaluation.suggest import check_known

SECTIONS = ("model", "data", "capacity")
MODEL_KEYS = ("class", "model_path", "max_new_tokens", "dtype", "device")
DATA_KEYS = ("class", "dataset", "limit")


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """Reads a config file and checks its outer form.

    Returns:
        section name -> its contents; a section that is not in the file is missing.

    Raises:
        UserError: unreadable, not JSON, or a section that is not known.
    """
    try:
        # A byte order mark, as some editors write, is not part of the text.
        text = path.read_text(encoding="utf-8-sig")
        content = json.loads(text, object_pairs_hook=_no_repeats)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, json.JSONDecodeError):
            raise UserError(f"config file {str(path)!r} is not JSON: {error}") from error
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read config file {str(path)!r}: {reason}") from error
    except RecursionError:
        raise UserError(f"config file {str(path)!r} is nested too deeply") from None
    if not isinstance(content, dict):
        raise UserError(f"config file {str(path)!r} must hold an object with {', '.join(SECTIONS)}")
    for section, value in content.items():
        check_known("config section", section, SECTIONS)
        if not isinstance(value, dict):
            raise UserError(f"config section {section!r} must be an object, got {value!r}")
    return content


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of whose repeated keys JSON itself would keep the last without a word."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise UserError(f"config: the key {key!r} is there twice in one object")
        content[key] = value
    return content


def model_choices(section: dict[str, Any]) -> tuple[ModelChoice, ...]:
    """The models of a config file.

    Raises:
        UserError: a key that is not known, or a value of the wrong type.
    """
    models = []
    for name, arguments in _entries("model", section, MODEL_KEYS):
        models.append(
            ModelChoice(
                name=name,
                source=_text(name, "model_path", arguments) or name,
                wrapper_class=_text(name, "class", arguments),
                local_copy="model_path" in arguments,
                max_new_tokens=_positive(name, "max_new_tokens", arguments),
                dtype=_text(name, "dtype", arguments),
                device=_text(name, "device", arguments),
            )
        )
    return tuple(models)


def data_choices(section: dict[str, Any]) -> tuple[DataChoice, ...]:
    """The data sets of a config file.

    Raises:
        UserError: a key that is not known, or a value of the wrong type.
    """
    return tuple(
        DataChoice(
            name=name,
            dataset=_text(name, "dataset", arguments) or name,
            dataset_class=_text(name, "class", arguments),
            limit=_positive(name, "limit", arguments),
        )
        for name, arguments in _entries("data", section, DATA_KEYS)
    )


def capacity_options(section: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The ``capacity`` section as option name -> value, names in either spelling.

    Args:
        section: contents of the section.
        known: names of the command line's options, with underscores.

    Raises:
        UserError: an option that is not known.
    """
    options = {}
    for key, value in section.items():
        name = key.replace("-", "_")
        check_known("key of config section 'capacity'", name, known)
        if name in options:
            raise UserError(f"config: {name!r} is twice in section 'capacity', as {key!r} too")
        options[name] = value
    return options


def _entries(
    kind: str, section: dict[str, Any], keys: Collection[str]
) -> list[tuple[str, dict[str, Any]]]:
    entries = []
    for name, arguments in section.items():
        if not name.strip():
            raise UserError(f"config section {kind!r} has an empty name")
        if not isinstance(arguments, dict):
            raise UserError(f"config: {kind} {name!r} must be an object, got {arguments!r}")
        for key in arguments:
            check_known(f"key of config {kind} {name!r}", key, keys)
        entries.append((name, arguments))
    if not entries:
        raise UserError(f"config section {kind!r} is empty: name at least one {kind}")
    return entries


def _text(name: str, key: str, arguments: dict[str, Any]) -> str | None:
    value = arguments.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise UserError(f"config: {key!r} of {name!r} must be text, got {value!r}")
    return value


def _positive(name: str, key: str, arguments: dict[str, Any]) -> int | None:
    value = arguments.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UserError(f"config: {key!r} of {name!r} must be a whole number >= 1, got {value!r}")
    return value
