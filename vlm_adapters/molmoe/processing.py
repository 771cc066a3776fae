"""Prompt and image to the inputs of MolmoE, under the original names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import BatchFeature, ProcessorMixin
from transformers.utils import logging

from .image_processing import SIZE_OPTIONS, only_image, tiling_spec

logger = logging.get_logger(__name__)

IMAGE_START, IMAGE_END = "<im_start>", "<im_end>"
IMAGE_PATCH, IMAGE_COLUMN = "<im_patch>", "<im_col>"
DISCARDED = -100  # image_input_idx of a patch that gets no token
ABSENT = -1  # fills padded crops, their masks and their positions
_TEXT_OPTIONS = ("message_format", "always_start_with_space")
# Options of the original call that never had an effect; accepted so that old callers run.
_NO_EFFECT = ("sequence_length", "style", "system_prompt")


def collate(
    samples: Sequence[Mapping[str, torch.Tensor]], pad_token_id: int, padding_side: str = "left"
) -> dict[str, torch.Tensor]:
    """Joins the outputs of :meth:`MolmoProcessor.process` into one batch.

    Args:
        samples: B prompts, with or without image.
        pad_token_id: id of padded positions (the attention mask is what marks them).
        padding_side: ``"left"`` or ``"right"``; positions in ``image_input_idx`` move along.

    Returns:
        ``input_ids`` and ``attention_mask`` ``[B, S]``; with an image in any prompt also ``images``
        ``[B, crops, patches, values]``, ``image_masks`` and ``image_input_idx``, padded with -1.
    """
    if padding_side not in ("left", "right"):
        raise ValueError(f"padding_side={padding_side!r}: use 'left' or 'right'")
    longest = max(len(sample["input_ids"]) for sample in samples)
    ids = torch.full((len(samples), longest), pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    batch = {"input_ids": ids, "attention_mask": mask}
    pictured = [sample for sample in samples if "images" in sample]
    crops = max((len(sample["images"]) for sample in pictured), default=0)
    if pictured:
        for key in ("images", "image_masks", "image_input_idx"):
            like = pictured[0][key]
            batch[key] = like.new_full((len(samples), crops, *like.shape[1:]), ABSENT)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        start = longest - length if padding_side == "left" else 0
        ids[row, start : start + length] = sample["input_ids"]
        mask[row, start : start + length] = 1
        if "images" in sample:
            count = len(sample["images"])
            batch["images"][row, :count] = sample["images"]
            batch["image_masks"][row, :count] = sample["image_masks"]
            index = sample["image_input_idx"]
            batch["image_input_idx"][row, :count] = torch.where(index < 0, index, index + start)
    return batch


class MolmoProcessor(ProcessorMixin):
    """The processor of MolmoE.

    The name is the one that the original ``preprocessor_config.json`` asks for. A prompt is BOS,
    the image's tokens, the text ``" User: ... Assistant:"``. The tokenizer has no BOS of its own:
    its EOS takes that place.

    Args:
        image_processor: a :class:`MolmoImageProcessor`.
        tokenizer: a fast tokenizer that knows the image tokens as special tokens.
    """

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **kwargs: Any) -> None:
        super().__init__(image_processor, tokenizer, **kwargs)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> MolmoProcessor:
        """As the base class, after making the image processor known to transformers."""
        from .checkpoint import register

        register()
        return super().from_pretrained(*args, **kwargs)

    @property
    def model_input_names(self) -> list[str]:
        """Keys that the model takes."""
        return ["input_ids", "attention_mask", "images", "image_masks", "image_input_idx"]

    def special_ids(self) -> dict[str, int]:
        """Ids of the image tokens.

        Raises:
            ValueError: the tokenizer lacks one.
        """
        ids = {}
        for token in (IMAGE_START, IMAGE_END, IMAGE_PATCH, IMAGE_COLUMN):
            found = self.tokenizer.encode(token, add_special_tokens=False)
            if len(found) != 1:
                raise ValueError(f"the tokenizer has no special token {token}: not a MolmoE folder")
            ids[token] = found[0]
        return ids

    def encode_text(
        self, text: str, message_format: str = "role", always_start_with_space: bool = True
    ) -> list[int]:
        """Token ids of the text part, without BOS.

        Args:
            text: what the user says; a special token spelled in it becomes that token.
            message_format: ``"role"`` wraps it as ``User: ... Assistant:``, ``"none"`` does not.
            always_start_with_space: whether a space precedes it.
        """
        if message_format not in ("role", "none", None):
            raise ValueError(f"message_format={message_format!r}: use 'role' or 'none'")
        prompt = f"User: {text} Assistant:" if message_format == "role" else text
        prompt = " " + prompt if always_start_with_space else prompt
        return self.tokenizer.encode(prompt, add_special_tokens=False)

    def process(
        self,
        text: str | None = None,
        images: Any = None,
        *,
        images_kwargs: Mapping[str, Any] | None = None,
        text_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, torch.Tensor]:
        """One prompt, without a batch axis, as the original's method of this name.

        As there, the sizes are built-in unless the call gives others: those that
        ``preprocessor_config.json`` stores are not read.

        Args:
            text: what the user says.
            images: the image, a list of at most one, or None.
            images_kwargs: ``max_crops`` and the other sizes, by their original names.
            text_kwargs: ``message_format``, ``always_start_with_space``.
            **kwargs: the same options, ungrouped.

        Returns:
            ``input_ids`` ``[S]``; with an image also ``images`` ``[1 + crops, patches, values]``,
            ``image_masks`` ``[1 + crops, patches]`` and ``image_input_idx``
            ``[1 + crops, tokens]``, the position in ``input_ids`` of each pooled patch, -100 where
            it has none.

        Raises:
            ValueError: several images, or one that cannot be tiled.
            TypeError: an unknown option.
        """
        options = {**(images_kwargs or {}), **(text_kwargs or {}), **kwargs}
        known = (*SIZE_OPTIONS, *_TEXT_OPTIONS, *_NO_EFFECT)
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise TypeError(f"unknown processor options {unknown}; known: {', '.join(known)}")
        sizes = {key: value for key, value in options.items() if key in SIZE_OPTIONS}
        wording = {key: value for key, value in options.items() if key in _TEXT_OPTIONS}
        bos = self.tokenizer.bos_token_id or self.tokenizer.eos_token_id
        if bos is None:
            raise ValueError("the tokenizer has neither a BOS nor an EOS token to start with")
        words = self.encode_text(text or "", **wording)
        image = only_image(images)
        if image is None:
            return {"input_ids": torch.tensor([bos, *words])}

        self._warn_about_stored_sizes(sizes)
        tiles = self.image_processor.tile(image, tiling_spec(sizes))
        special = self.special_ids()
        spec = tiling_spec(sizes)
        picture: list[np.ndarray] = []
        place: list[np.ndarray] = []
        for rows, columns in (spec.token_grid, tiles.token_rows):
            line = [special[IMAGE_PATCH]] * columns + [special[IMAGE_COLUMN]]
            block = np.array([special[IMAGE_START], *line * rows, special[IMAGE_END]])
            inside = np.arange(rows * (columns + 1)).reshape(rows, columns + 1)[:, :-1] + 1
            # + 1: BOS comes first.
            place.append(inside.ravel() + 1 + sum(block.size for block in picture))
            picture.append(block)
        crops = np.where(tiles.order < 0, DISCARDED, place[1][tiles.order])
        return {
            "input_ids": torch.tensor([bos, *np.concatenate(picture).tolist(), *words]),
            "images": tiles.images,
            "image_masks": tiles.masks,
            "image_input_idx": torch.from_numpy(
                np.concatenate([place[0][None], crops]).astype(np.int32)
            ),
        }

    def __call__(  # type: ignore[override]
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        *,
        padding_side: str = "left",
        return_tensors: str = "pt",
        **kwargs: Any,
    ) -> BatchFeature:
        """Prompts as one batch; see :meth:`process` for the options and :func:`collate`.

        Args:
            images: for one text its image (or a list of at most one); for a list of texts one
                entry per text: an image, a list of at most one, or None.
            text: one text or a list of B texts.
            padding_side: where shorter prompts are padded.
            return_tensors: only ``"pt"``.
            **kwargs: options of :meth:`process`.

        Raises:
            ValueError: as :meth:`process`, or as many images as texts are not given.
        """
        if return_tensors not in (None, "pt"):
            raise ValueError(f"return_tensors={return_tensors!r}: only 'pt' is offered")
        texts = [text] if text is None or isinstance(text, str) else list(text)
        if text is None or isinstance(text, str):
            pictures = [images]
        else:
            pictures = [None] * len(texts) if images is None else list(images)
        if len(pictures) != len(texts):
            raise ValueError(f"{len(pictures)} images for {len(texts)} prompts: give one for each")
        samples = [
            self.process(one, picture, **kwargs)
            for one, picture in zip(texts, pictures, strict=True)
        ]
        pad = self.tokenizer.pad_token_id
        return BatchFeature(collate(samples, 0 if pad is None else pad, padding_side))

    def _warn_about_stored_sizes(self, given: Mapping[str, Any]) -> None:
        stored = tiling_spec(self.image_processor.options())
        if not given and stored != tiling_spec({}):
            logger.warning_once(
                "the image processor stores other sizes than the built-in ones; as in the original "
                "they are not read: pass them to the call, for example max_crops="
                f"{stored.max_crops}"
            )
