"""Original checkpoints: their parameter names and shapes, to those of the model and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    revert_weight_conversion,
)

from ..base import ModelLoadError
from .configuration import DeepseekVLV2Config
from .family import MODEL_TYPE

UNUSED = "vision.attn_pool."
TOWER = "model.vision_tower."
LAYER = r"^vision\.blocks\.(\d+)\."
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHOWN = 8


class DropLeadingAxis(ConversionOps):
    """``[1, N, C]`` to ``[N, C]``: the tower's position table is an embedding in transformers."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        (value,) = input_dict.values()
        tensor = value[0] if isinstance(value, list) else value
        if tensor.dim() == 3 and tensor.shape[0] == 1:
            tensor = tensor[0]
        return {target_patterns[0]: tensor}

    @property
    def reverse_op(self) -> ConversionOps:
        return AddLeadingAxis()


class AddLeadingAxis(ConversionOps):
    """The reverse of :class:`DropLeadingAxis`."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        (value,) = input_dict.values()
        tensor = value[0] if isinstance(value, list) else value
        return {target_patterns[0]: tensor[None]}

    @property
    def reverse_op(self) -> ConversionOps:
        return DropLeadingAxis()


def weight_mapping() -> list[Any]:
    """Transforms from original names to those of :class:`.modeling.DeepseekVLV2ForCausalLM`."""
    layer = TOWER + r"encoder.layers.\1."
    renamed = {
        r"^vision\.patch_embed\.proj\.": TOWER + "embeddings.patch_embedding.",
        r"^vision\.pos_embed": TOWER + "embeddings.pos_embed",
        r"^vision\.norm\.": TOWER + "post_layernorm.",
        LAYER + r"norm1\.": layer + "layer_norm1.",
        LAYER + r"norm2\.": layer + "layer_norm2.",
        LAYER + r"attn\.proj\.": layer + "self_attn.out_proj.",
        LAYER + r"attn\.qkv\.": layer + "self_attn.qkv.",
        LAYER + r"mlp\.": layer + "mlp.",
        r"^projector\.": "model.projector.",
        r"^image_newline": "model.image_newline",
        r"^view_seperator": "model.view_seperator",
        r"^language\.model\.": "model.language_model.",
        r"^language\.lm_head\.": "lm_head.",
    }
    transforms: list[Any] = [
        WeightRenaming(source_patterns=source, target_patterns=target)
        for source, target in renamed.items()
    ]
    tower: list[Any] = [
        WeightConverter(
            source_patterns=f"self_attn.qkv.{kind}",
            target_patterns=[f"self_attn.{name}_proj.{kind}" for name in "qkv"],
            operations=[Chunk(dim=0)],
        )
        for kind in ("weight", "bias")
    ]
    tower.append(
        WeightConverter(
            source_patterns="embeddings.pos_embed",
            target_patterns="embeddings.position_embedding.weight",
            operations=[DropLeadingAxis()],
        )
    )
    for transform in tower:
        # The decoder's own q, k and v must not be fused when a model is saved.
        transform.scope_prefix, transform.base_model_prefix = "vision_tower", "model"
    experts = [
        WeightConverter(
            source_patterns=["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
            target_patterns="mlp.experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter(
            source_patterns="mlp.experts.*.down_proj.weight",
            target_patterns="mlp.experts.down_proj",
            operations=[MergeModulelist(dim=0)],
        ),
    ]
    return transforms + tower + experts


def register() -> None:
    """Makes the family known to transformers: weight mapping and the Auto classes. Repeatable."""
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    from .modeling import DeepseekVLV2ForCausalLM
    from .processing import DeepseekVLV2Processor

    register_checkpoint_conversion_mapping(MODEL_TYPE, weight_mapping(), overwrite=True)
    AutoConfig.register(MODEL_TYPE, DeepseekVLV2Config, exist_ok=True)
    AutoModelForImageTextToText.register(DeepseekVLV2Config, DeepseekVLV2ForCausalLM, exist_ok=True)
    AutoProcessor.register(DeepseekVLV2Config, DeepseekVLV2Processor, exist_ok=True)


def original_parameters(config: DeepseekVLV2Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a checkpoint of this configuration holds, without the unused ones.

    They are those of the model on the meta device, taken back through the weight mapping.
    """
    from .modeling import DeepseekVLV2ForCausalLM

    register()
    with torch.device("meta"):
        model = DeepseekVLV2ForCausalLM(config)
    original = revert_weight_conversion(model, dict(model.state_dict()))
    return {name: tuple(tensor.shape) for name, tensor in original.items()}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder: those of its index, else the single file.

    Raises:
        ModelLoadError: there is none, or a shard is missing or named outside the folder.
    """
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise ModelLoadError(f"model folder '{folder}' holds neither {SINGLE} nor {INDEX}")
        return [folder / SINGLE]
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = sorted(set(content["weight_map"].values()))
        content["metadata"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"'{index}' is not an index of safetensors files: it needs 'metadata' and 'weight_map'"
        ) from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelLoadError(f"'{index}' names {outside[0]!r}, which is not a file of its folder")
    lacking = [name for name in names if not (folder / name).is_file()]
    if lacking:
        raise ModelLoadError(f"model folder '{folder}' lacks {', '.join(lacking[:SHOWN])}")
    # Beside an index the single file is what transformers loads: both have to be whole.
    both = [SINGLE] if SINGLE not in names and (folder / SINGLE).is_file() else []
    return [folder / name for name in names + both]


def check_folder(folder: Path, config: DeepseekVLV2Config) -> None:
    """Compares the headers of a folder's safetensors files with the configuration.

    Raises:
        ModelLoadError: a file cannot be read, or parameters are missing, unexpected or of the wrong
            shape; lists them under their original names.
    """
    found: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                found.update(
                    {key: tuple(tensors.get_slice(key).get_shape()) for key in tensors.keys()}
                )
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(
                f"'{file}' is not a complete safetensors file ({str(error).splitlines()[0]}); "
                "fetch it again"
            ) from error
    expected = original_parameters(config)
    used = {key: shape for key, shape in found.items() if not key.startswith(UNUSED)}
    wrong = [
        f"{key} {used[key]} instead of {expected[key]}"
        for key in sorted(expected.keys() & used.keys())
        if used[key] != expected[key]
    ]
    _raise_problems(
        str(folder), expected.keys() - used.keys(), used.keys() - expected.keys(), wrong
    )


def check_loaded(source: str, info: Mapping[str, Any]) -> None:
    """Raises ModelLoadError when transformers' loading report names any difference."""
    wrong = [
        f"{key} {tuple(found)} instead of {tuple(expected)}"
        for key, found, expected in sorted(info["mismatched_keys"])
    ]
    _raise_problems(source, info["missing_keys"], info["unexpected_keys"], wrong)


def _raise_problems(
    source: str, missing: Iterable[str], unexpected: Iterable[str], wrong: Iterable[str]
) -> None:
    problems = [
        f"{len(names)} {what}: {', '.join(names[:SHOWN])}" + (", ..." if len(names) > SHOWN else "")
        for what, names in (
            ("missing", sorted(missing)),
            ("unexpected", sorted(unexpected)),
            ("of the wrong shape", sorted(wrong)),
        )
        if names
    ]
    if problems:
        raise ModelLoadError(
            f"checkpoint '{source}' does not fit its config.json; parameters " + "; ".join(problems)
        )
