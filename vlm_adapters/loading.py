"""``load_model``: from a name, folder or hub id to a model that answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .base import LoadedVLM, ModelLoadError, UnsupportedModelError
from .registry import ADAPTERS, adapter_class, adapter_class_for

FILES_NEEDED = "config.json, *.safetensors, the processor's and the tokenizer's files"
# By name, for the checkpoints that run here as ports: part of a hub id or folder name -> files.
PORT_FILES = {
    "molmoe": (
        "config.json, model.safetensors.index.json with the *.safetensors it names, "
        "tokenizer.json, tokenizer_config.json and preprocessor_config.json"
    ),
    "deepseek-vl2": (
        "config.json, the *.safetensors with their index, processor_config.json, tokenizer.json "
        "and tokenizer_config.json"
    ),
}


def load_model(
    source: str,
    *,
    dtype: Any = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    adapter: str | None = None,
    **kwargs: Any,
) -> LoadedVLM:
    """Loads a vision-language MoE with its processor and adapter.

    Args:
        source: a folder, a hub id, or ``tiny:FAMILY`` for random weights without download.
        dtype: ``"auto"`` (the checkpoint's), or a torch dtype or its name.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or ``"auto"`` to spread over devices.
        trust_remote_code: run code that the checkpoint brings along; off by default.
        adapter: registry name, instead of the one that the configuration asks for.
        **kwargs: passed to the model's ``from_pretrained``.

    Raises:
        ModelLoadError: the checkpoint is not there or not complete.
        UnsupportedModelError: it is no vision-language MoE that an adapter takes.
    """
    if source.startswith("tiny:"):
        return tiny(source.removeprefix("tiny:"))
    if adapter is not None and adapter not in ADAPTERS:
        raise ValueError(f"unknown adapter {adapter!r}; known: {', '.join(ADAPTERS)}")
    cls = adapter_class(adapter) if adapter else adapter_class_for(read_config(source))
    try:
        return cls.load(
            source, dtype=dtype, device=device, trust_remote_code=trust_remote_code, **kwargs
        )
    except (UnsupportedModelError, ModelLoadError):
        raise
    except OSError as error:
        raise ModelLoadError(
            f"model {source!r} could not be loaded: {_first_line(error)}"
        ) from error


def tiny(name: str) -> LoadedVLM:
    """A tiny random model: of an adapter that makes its own, or of the table of native families.

    Raises:
        ValueError: unknown; lists the known ones.
    """
    from .tiny_families import FAMILIES

    own = name in ADAPTERS and name != "native"
    if not own and name not in FAMILIES:
        known = sorted({*ADAPTERS, *FAMILIES} - {"native"})
        raise ValueError(f"unknown tiny family {name!r}; known: {', '.join(known)}")
    if own:
        return adapter_class(name).tiny_model()
    from .tiny_build import tiny_vlm

    return tiny_vlm(name)


def read_config(source: str) -> dict[str, Any]:
    """The raw ``config.json`` of a folder or hub id.

    Raises:
        ModelLoadError: neither a folder with a config.json nor a hub model that can be fetched.
    """
    from transformers import PreTrainedConfig

    folder = Path(source).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"model folder {source!r} holds no config.json; it needs {files_needed(source)} side "
            "by side"
        )
    if not folder.exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise ModelLoadError(f"model folder {source!r} does not exist")
    try:
        config, _ = PreTrainedConfig.get_config_dict(str(folder) if folder.is_dir() else source)
    except Exception as error:
        # The hub client raises a family of unrelated exceptions when it is offline.
        if folder.is_dir():
            reason = f"its config.json cannot be read: {_first_line(error)}"
        else:
            reason = (
                "no such folder, and the hub could not be reached or has no such model; with a "
                f"local copy pass its folder, which needs {files_needed(source)}"
            )
        raise ModelLoadError(f"model {source!r}: {reason}") from error
    if not config:
        raise ModelLoadError(
            f"model {source!r}: no config.json there, and the hub could not be reached; with a "
            f"local copy pass its folder, which needs {files_needed(source)}"
        )
    return config


def files_needed(source: str) -> str:
    """Files of a checkpoint folder, for messages; by name for the ported families."""
    named = (files for part, files in PORT_FILES.items() if part in source.lower())
    return next(named, FILES_NEEDED)


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
