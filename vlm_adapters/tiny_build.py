"""Builds the tiny random models of :mod:`vlm_adapters.tiny_families`, with a processor.

    vlm = tiny_vlm("glm4v_moe")
    inputs = vlm.prepare([{"role": "user", "content": [...]}])

The processor is not the family's own, which would need files of a checkpoint: it writes one token
per byte and the family's number of image tokens per image, and makes random pixels from the image.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .base import LoadedVLM
from .tiny_families import (
    END,
    FAMILIES,
    IMAGE,
    SPECIALS,
    START,
    TEXT,
    VIDEO,
    VIDEO_END,
    VIDEO_START,
    VISION,
    TinyFamily,
)

IDS = {
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "video_token_id": VIDEO,
    "video_token_index": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": VIDEO_START,
    "video_end_token_id": VIDEO_END,
}


def tiny_family(name: str) -> TinyFamily:
    """The sizes of a tiny family.

    Raises:
        ValueError: unknown family; lists the known ones.
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown tiny family {name!r}; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def tiny_config(name: str) -> Any:
    """The configuration of a tiny family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    spec = tiny_family(name)
    config_class = CONFIG_MAPPING[name.partition("+")[0]]
    if spec.vision is None:
        return config_class(**_known(config_class, TEXT, spec.text))
    parts: dict[str, Any] = {}
    for key, common, own in (
        ("text_config", TEXT, spec.text),
        ("vision_config", VISION, spec.vision),
    ):
        part_type = own.get("model_type")
        part_class = CONFIG_MAPPING[part_type] if part_type else config_class.sub_configs[key]
        sizes = _known(part_class, common, own)
        parts[key] = {**sizes, "model_type": part_type} if part_type else sizes
    return config_class(**_known(config_class, IDS, spec.top), **parts)


def _known(config_class: Any, common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a configuration class knows, the family's own over the common ones."""
    default = config_class().to_dict()
    known = {key: value for key, value in common.items() if key in default}
    return {**known, **{key: value for key, value in own.items() if key != "model_type"}}


def tiny_model(name: str, seed: int = 0) -> nn.Module:
    """A model of the family with random weights, on the CPU."""
    import transformers

    from .llama4 import add_missing_field

    config = tiny_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, tiny_family(name).model_class)(config).eval()
        _randomize(model)
    if name == "llama4":
        add_missing_field(model)
    return model


def to_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Casts a model as loading it in that dtype would: some parts stay in float32."""
    model.to(dtype)
    kept = {
        *(getattr(model, "_keep_in_fp32_modules", None) or ()),
        *(getattr(model, "_keep_in_fp32_modules_strict", None) or ()),
    }
    for name, module in model.named_modules():
        if kept.intersection(name.split(".")):
            module.float()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(name.endswith("." + part) for part in kept):
            tensor.data = tensor.data.float()
    return model


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Random values for what is constant after initialisation and matters for routing."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(0.2 * torch.randn(tensor.shape))
        elif name.endswith("per_expert_scale"):
            tensor.copy_(0.5 + torch.rand(tensor.shape))


def tiny_vlm(name: str, seed: int = 0) -> LoadedVLM:
    """Model, processor and adapter of a tiny family.

    Raises:
        ValueError: unknown family; lists the known ones.
    """
    from .registry import adapter_for

    model = tiny_model(name, seed)
    return LoadedVLM(
        model=model,
        processor=TinyProcessor(tiny_family(name)),
        adapter=adapter_for(model),
        source=f"tiny:{name}",
    )


class TinyProcessor:
    """Stands in for a family's processor."""

    def __init__(self, family: TinyFamily) -> None:
        from .tiny import byte_tokenizer

        self.family = family
        self.tokenizer = byte_tokenizer(SPECIALS, eos="<|end|>")

    def apply_chat_template(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Model inputs of several conversations, padded on the left."""
        images: list[Any] = []
        rows = [self._row(messages, images) for messages in conversations]
        length = max(map(len, rows))
        ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
        inputs = {"input_ids": ids, "attention_mask": mask}
        for key in self.family.types:
            inputs[key] = (ids == IMAGE).int()
        if images and self.family.pixels is not None:
            seed = zlib.crc32(b"".join(image.tobytes() for image in images))
            generator = torch.Generator().manual_seed(seed)
            inputs.update(self.family.pixels(len(images), generator))
        return inputs

    def _row(self, messages: Sequence[Mapping[str, Any]], images: list[Any]) -> list[int]:
        row: list[int] = []
        for message in messages:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            for part in parts:
                if part["type"] == "image":
                    if self.family.pixels is None:
                        raise ValueError("this model takes no images: every token is text")
                    images.append(part["image"])
                    row += [START, *[IMAGE] * self.family.tokens, END]
                else:
                    row += self.tokenizer(part["text"], add_special_tokens=False)["input_ids"]
        return [*row, len(SPECIALS) - 1]

    def batch_decode(self, ids: Tensor, **kwargs: Any) -> list[str]:
        """Text of generated ids."""
        return self.tokenizer.batch_decode(ids, **kwargs)
