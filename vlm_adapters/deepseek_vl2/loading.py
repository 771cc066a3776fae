"""From a checkpoint folder, or a hub id, to model and processor, with every check in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..base import ModelLoadError, UnsupportedModelError
from .checkpoint import check_folder, register
from .checks import check_config
from .configuration import DeepseekVLV2Config
from .family import why_not_deepseek_vl2
from .modeling import DeepseekVLV2ForCausalLM
from .processing import DeepseekVLV2Processor

# No pickled weights, no code.
HUB_FILES = ("*.json", "*.safetensors")
PROCESSOR_FILES = ("processor_config.json", "tokenizer.json", "tokenizer_config.json")


def load(
    source: str, *, dtype: str | torch.dtype, device: str, **kwargs: Any
) -> tuple[DeepseekVLV2ForCausalLM, DeepseekVLV2Processor]:
    """Loads model and processor; see :meth:`.adapter.DeepseekVL2Adapter.load`."""
    register()
    folder = checkpoint_folder(source)
    lacking = [name for name in ("config.json", *PROCESSOR_FILES) if not (folder / name).is_file()]
    if lacking:
        raise ModelLoadError(
            f"model folder '{folder}' lacks {', '.join(lacking)}; config.json, "
            f"{', '.join(PROCESSOR_FILES)} and the *.safetensors files lie side by side"
        )
    for name in PROCESSOR_FILES:
        check_json(folder / name)
    config = usable_config(folder)
    check_folder(folder, config)
    processor = DeepseekVLV2Processor.from_pretrained(folder)
    check_fit(config, processor)
    placed: dict[str, Any] = {"device_map": device} if device != "cpu" else {}
    model = DeepseekVLV2ForCausalLM.from_pretrained(folder, dtype=dtype, **(placed | kwargs))
    return model, processor


def check_json(file: Path) -> None:
    """Raises ModelLoadError unless a file holds a JSON object, as a truncated one does not."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"'{file}' is not valid JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"'{file}' holds a {type(content).__name__}, not a JSON object")


def usable_config(folder: Path) -> DeepseekVLV2Config:
    """The configuration of a folder, once it is one that this port computes.

    Raises:
        ModelLoadError: a value of config.json is of the wrong kind.
        UnsupportedModelError: another family, or a setting that is not implemented.
    """
    try:
        config = read_config(DeepseekVLV2Config.get_config_dict(folder)[0])
        check_config(config)
    except UnsupportedModelError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()
        raise ModelLoadError(
            f"'{folder / 'config.json'}' holds a value of the wrong kind: {reason}"
        ) from error
    return config


def checkpoint_folder(source: str) -> Path:
    """The local folder of a checkpoint, fetched from the hub when it is not one already.

    Raises:
        ModelLoadError: neither is there.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=list(HUB_FILES)))
    except Exception as error:
        # The hub client raises a family of unrelated exceptions when it is offline.
        raise ModelLoadError(
            f"model {source!r}: no such folder, and the hub could not be reached or has no such "
            f"model; a local copy needs {', '.join(HUB_FILES)} side by side"
        ) from error


def read_config(raw: dict[str, Any]) -> DeepseekVLV2Config:
    """The configuration of a raw ``config.json``.

    Raises:
        UnsupportedModelError: it describes another family, with the reason.
    """
    reason = why_not_deepseek_vl2(raw)
    if reason is not None:
        raise UnsupportedModelError(f"not a DeepSeek-VL2 model: {reason}")
    return DeepseekVLV2Config.from_dict(raw)


def check_fit(config: DeepseekVLV2Config, processor: DeepseekVLV2Processor) -> None:
    """Raises ModelLoadError unless the processor makes the image tokens that the model fills."""
    images = processor.image_processor
    vision, ratio = config.vision_config, config.projector_config.downsample_ratio
    ours = (images.tile // images.patch_size, images.downsample_ratio)
    if ours != (vision.grid, ratio):
        raise ModelLoadError(
            f"processor_config.json makes {ours[0]} patches a side, merged by {ours[1]}, but "
            f"config.json has {vision.grid}, merged by {ratio}"
        )
    if processor.image_token_id >= config.language_config.vocab_size:
        raise ModelLoadError(
            f"the tokenizer gives {processor.image_token} the id {processor.image_token_id}, but "
            f"vocab_size is {config.language_config.vocab_size}"
        )
