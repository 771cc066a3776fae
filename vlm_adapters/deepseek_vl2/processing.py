"""Text and images to the inputs of the model, equal to the original processor's in inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AddedToken, PreTrainedTokenizerFast, ProcessorMixin
from transformers.feature_extraction_utils import BatchFeature

from .conversation import Prompt, check_count, read_conversation
from .image_processing import DeepseekVLV2ImageProcessor

# Tokens that the original adds to a tokenizer that lacks them, in this order.
ADDED_TOKENS = (
    "<|ref|>",
    "<|/ref|>",
    "<|det|>",
    "<|/det|>",
    "<|grounding|>",
    "<|User|>",
    "<|Assistant|>",
)
IMAGE_FIELDS = (
    "candidate_resolutions",
    "patch_size",
    "downsample_ratio",
    "image_mean",
    "image_std",
    "normalize",
)


class DeepseekVLV2Processor(ProcessorMixin):
    """Image processor and tokenizer in one.

    Args:
        image_processor: cuts images into tiles.
        tokenizer: the checkpoint's byte-level BPE; missing special tokens are added to it.
        image_token: marker of an image in a text, and the token that holds its places.
        pad_token: used when the tokenizer has none.
        sft_format: chat format; the releases use "deepseek" only.
        chat_template: kept for transformers; the chat format is built in.
    """

    def __init__(
        self,
        image_processor: DeepseekVLV2ImageProcessor,
        tokenizer: PreTrainedTokenizerFast,
        image_token: str = "<image>",
        pad_token: str = "<｜▁pad▁｜>",
        sft_format: str = "deepseek",
        chat_template: str | None = None,
    ) -> None:
        if sft_format != "deepseek":
            raise ValueError(f"sft_format {sft_format!r} is not supported, only 'deepseek'")
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token = image_token
        self.pad_token = pad_token
        self.sft_format = sft_format
        tokenizer.padding_side = "left"
        if tokenizer.pad_token is None:
            tokenizer.add_special_tokens({"pad_token": pad_token})
        vocabulary = tokenizer.get_vocab()
        for token in (image_token, *ADDED_TOKENS):
            if token not in vocabulary:
                added = AddedToken(token, special=True, normalized=False)
                tokenizer.add_tokens([added], special_tokens=True)
        self.image_token_id = tokenizer.get_vocab()[image_token]
        for name in ("bos_token_id", "eos_token_id"):
            if getattr(tokenizer, name) is None:
                raise ValueError(f"the tokenizer has no {name.removesuffix('_id')}")

    @classmethod
    def _get_arguments_from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        processor_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        # Not the class that the files name: they call a byte-level BPE a Llama tokenizer, which
        # would be rebuilt as a SentencePiece-like one.
        fields = processor_dict or {}
        image_processor = DeepseekVLV2ImageProcessor(
            **{key: fields[key] for key in IMAGE_FIELDS if key in fields}
        )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return [image_processor, tokenizer]

    @classmethod
    def from_args_and_dict(
        cls, args: Any, processor_dict: dict[str, Any], **kwargs: Any
    ) -> DeepseekVLV2Processor:
        # Only what the constructor takes; training settings of the original are left out.
        known = ("image_token", "pad_token", "sft_format", "chat_template")
        return cls(*args, **{key: processor_dict[key] for key in known if key in processor_dict})

    def to_dict(self) -> dict[str, Any]:
        """The content of processor_config.json, in the original's flat layout."""
        images = self.image_processor
        return {
            **{key: getattr(images, key) for key in IMAGE_FIELDS if key != "normalize"},
            "normalize": images.do_normalize,
            "image_token": self.image_token,
            "pad_token": self.pad_token,
            "sft_format": self.sft_format,
            "add_special_token": False,
            "mask_prompt": False,
            "ignore_id": -100,
            "processor_class": type(self).__name__,
        }

    @property
    def model_input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", "images", "images_seq_mask", "images_spatial_crop"]

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] | None = None,
        conversations: Any = None,
        prompt: str | Sequence[str] | None = None,
        system_prompt: str = "",
        force_batchify: bool = True,
        return_tensors: str = "pt",
    ) -> BatchFeature:
        """Prepares one or several prompts, left-padded.

        Args:
            images: PIL images in the order of the markers, a list of lists for several prompts.
                With ``conversations`` they may be inside the messages instead.
            text: raw prompt with image markers, or several; no chat format. Also as ``prompt``.
            conversations: one list of messages, or several; see
                :func:`.conversation.read_conversation`.
            system_prompt: text before the first turn of conversations that bring none.
            force_batchify: always True; there only because callers of the original pass it.
            return_tensors: always "pt".

        Returns:
            ``input_ids``, ``attention_mask`` ``[B, S]`` int64, ``images_seq_mask`` ``[B, S]`` bool,
            ``images`` ``[B, N, 3, side, side]`` float32, ``images_spatial_crop`` ``[B, M, 2]``
            int64.

        Raises:
            ValueError: markers and images do not match, or an image is too thin.
        """
        if not force_batchify or return_tensors != "pt":
            raise ValueError("only batched torch tensors: force_batchify=True, return_tensors='pt'")
        raw = text if text is not None else prompt
        if (raw is None) == (conversations is None):
            raise ValueError("pass either conversations or text")
        if raw is not None:
            texts = [raw] if isinstance(raw, str) else list(raw)
            prompts = [Prompt(turns=[(one, False)]) for one in texts]
        else:
            single = not len(conversations) or isinstance(conversations[0], Mapping)
            prompts = [
                self._conversation(messages, system_prompt)
                for messages in ([conversations] if single else conversations)
            ]
        if images is not None:
            groups = _image_groups(images, len(prompts))
            for one, group in zip(prompts, groups, strict=True):
                one.images = group
        return self._pad([self._encode(one) for one in prompts])

    def _conversation(self, messages: Sequence[Mapping[str, Any]], system_prompt: str) -> Prompt:
        one = read_conversation(messages, self.image_token)
        if system_prompt and messages[0].get("role") not in ("system", "deepseekapi-sys"):
            one.turns.insert(0, (system_prompt.strip(), False))
        return one

    def _encode(self, prompt: Prompt) -> dict[str, Tensor]:
        """One prompt to tensors without batch axis."""
        markers = sum(text.count(self.image_token) for text, _ in prompt.turns)
        check_count(markers, len(prompt.images), self.image_token)
        encoded = self.image_processor.preprocess(prompt.images)
        sizes = iter(encoded["images_spatial_crop"].tolist())
        ids = [self.tokenizer.bos_token_id]
        for text, ended in prompt.turns:
            # Each piece between images is tokenised alone: merges never cross an image.
            for position, piece in enumerate(text.split(self.image_token)):
                if position:
                    count = self.image_processor.image_tokens(*next(sizes))
                    ids += [self.image_token_id] * count
                ids += self.tokenizer.encode(piece, add_special_tokens=False)
            if ended:
                ids.append(self.tokenizer.eos_token_id)
        return {"input_ids": torch.tensor(ids), **encoded}

    def _pad(self, rows: Sequence[Mapping[str, Tensor]]) -> BatchFeature:
        length = max(len(row["input_ids"]) for row in rows)
        shape = (len(rows), length)
        ids = torch.full(shape, self.tokenizer.pad_token_id)
        mask = torch.zeros(shape, dtype=torch.int64)
        for i, row in enumerate(rows):
            ids[i, length - len(row["input_ids"]) :] = row["input_ids"]
            mask[i, length - len(row["input_ids"]) :] = 1
        pad = torch.nn.utils.rnn.pad_sequence
        return BatchFeature(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "images": pad([row["images"] for row in rows], batch_first=True),
                "images_seq_mask": ids == self.image_token_id,
                "images_spatial_crop": pad(
                    [row["images_spatial_crop"] for row in rows], batch_first=True
                ),
            }
        )


def _image_groups(images: Any, prompts: int) -> list[list[Any]]:
    """Images of each prompt, from one list or a list of lists."""
    listed = list(images) if isinstance(images, Sequence) else [images]
    nested = bool(listed) and all(isinstance(group, list | tuple) for group in listed)
    if not nested:
        if prompts > 1 and listed:
            raise ValueError(f"{prompts} prompts need a list of image lists, one for each prompt")
        return [listed] + [[] for _ in range(prompts - 1)]
    if len(listed) != prompts:
        raise ValueError(f"{len(listed)} image lists were given for {prompts} prompts")
    return [list(group) for group in listed]
