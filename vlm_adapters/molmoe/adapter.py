"""Adapter for MolmoE-1B-0924, read from the original checkpoint.

Router mathematics: softmax over all experts in float32, the K greatest, their probabilities as
weights; they are not renormalised and sum to less than 1. No shared expert.

Token layout: BOS, then for an image ``<im_start>``, rows of ``<im_patch>`` each ended by
``<im_col>``, ``<im_end>``, once for the whole image and once for the stitched crops, then the text.
Image features are *added* to the embeddings at ``image_input_idx``: those positions are IMAGE;
start, end and column tokens are TEXT, and so is an ``<im_patch>`` that a user typed.

Not supported: several images in a prompt, several turns, dense Molmo models, rope scaling.

Source: https://huggingface.co/allenai/MolmoE-1B-0924 (behaviour of the first published revision).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..base import Adapter, LoadedVLM, MoELayer, RouterChoice, UnsupportedModelError
from ..modality import Modality
from ..registry import config_value
from .family import MODEL_TYPE, why_not_molmoe
from .padding import PAD_ID


class MolmoEAdapter(Adapter):
    """See the module docstring."""

    name: ClassVar[str] = "molmoe"

    @classmethod
    def matches(cls, config: Any) -> bool:
        """See :meth:`Adapter.matches`; a dense Molmo raises, with what tells it apart."""
        if config_value(config, "model_type") != MODEL_TYPE:
            return False
        reason = why_not_molmoe(config)
        if reason is not None:
            raise UnsupportedModelError(reason)
        return True

    # -- structure -------------------------------------------------------------------

    def moe_layers(self, model: nn.Module) -> list[MoELayer]:
        from .decoder import MolmoeSparseMoeBlock

        blocks = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, MolmoeSparseMoeBlock)
        ]
        if not blocks:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no mixture-of-experts layer (looked for "
                "MolmoeSparseMoeBlock)"
            )
        return [
            MoELayer(
                name=name,
                index=index,
                block=block,
                router=block.gate,
                experts=block.experts,
                num_experts=block.gate.num_experts,
                top_k=block.gate.top_k,
            )
            for index, (name, block) in enumerate(blocks)
        ]

    def read_scores(self, layer: MoELayer, router_output: Any, hidden: Tensor) -> RouterChoice:
        """See :meth:`Adapter.read_scores`; a weight is its score itself."""
        logits, weights, index = router_output
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        return RouterChoice(scores=scores, index=index, weights=weights)

    # -- tokens ----------------------------------------------------------------------

    def tag_tokens(self, inputs: Mapping[str, Any]) -> Tensor:
        """See :meth:`Adapter.tag_tokens`; ids of -1 and masked positions are PAD."""
        ids = inputs.get("input_ids")
        if ids is None:
            raise ValueError(
                "cannot tell image tokens from text: the model was called with 'inputs_embeds' "
                "only; pass 'input_ids' (the embeddings are made from them)"
            )
        tags = torch.zeros_like(ids, dtype=torch.uint8)
        if inputs.get("images") is not None:
            index = inputs.get("image_input_idx")
            if index is None or not bool((index >= 0).any()):
                raise ValueError(
                    "the inputs hold 'images' but no token is tagged as image: 'image_input_idx' "
                    f"{'is missing' if index is None else 'places none of their patches'}"
                )
            index = index.to(ids.device, torch.long).flatten(1)
            if int(index.max()) >= ids.shape[1]:
                raise ValueError(
                    f"image_input_idx points at position {int(index.max())} of a prompt of "
                    f"{ids.shape[1]} tokens"
                )
            rows = torch.arange(len(ids), device=ids.device)[:, None].expand_as(index)
            placed = index >= 0
            tags[rows[placed], index[placed]] = int(Modality.IMAGE)
        tags = tags.masked_fill(ids == PAD_ID, int(Modality.PAD))
        mask, cache = inputs.get("attention_mask"), inputs.get("cache")
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] > ids.shape[1]:
            # Longer than the tokens: it covers the cache before them, or room for new ones after.
            past = int(cache.get_seq_length()) if cache is not None else 0
            mask = mask[:, past : past + ids.shape[1]]
        if mask is None:
            return tags
        if not isinstance(mask, Tensor) or mask.shape != tags.shape:
            given = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                "cannot tell padding from tokens: 'attention_mask' must be a tensor of at least "
                f"{list(tags.shape)}, got {given}"
            )
        return tags.masked_fill(mask.to(tags.device) == 0, int(Modality.PAD))

    # -- loading and chat ------------------------------------------------------------

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "cpu",
        trust_remote_code: bool = False,
        max_crops: int | None = None,
        **kwargs: Any,
    ) -> LoadedVLM:
        """Loads a checkpoint folder or hub id in the original layout.

        Args:
            path: folder with config.json, safetensors, tokenizer and processor files, or a hub id.
            dtype: ``"auto"`` or a torch dtype or its name.
            device: ``"cpu"``, ``"cuda"``, ..., or ``"auto"`` to spread over devices.
            trust_remote_code: without effect, the checkpoint's own code is never run.
            max_crops: most crops of a picture in :meth:`prepare` (default 12; VLMEvalKit takes 36).
            **kwargs: passed to the model's ``from_pretrained``.

        Raises:
            ModelLoadError: a file is missing or damaged, or the weights do not fit the config.
        """
        from .folder import check_files, local_folder
        from .modeling import MolmoeForConditionalGeneration
        from .processing import MolmoProcessor

        folder = local_folder(path)
        check_files(folder)
        processor = MolmoProcessor.from_pretrained(folder)
        processor.special_ids()
        if device != "cpu":
            kwargs["device_map"] = device if device == "auto" else {"": device}
        model = MolmoeForConditionalGeneration.from_pretrained(folder, dtype=dtype, **kwargs).eval()
        tokenizer, generation = processor.tokenizer, model.generation_config
        # The original config names no EOS: the tokenizer knows it.
        if generation.eos_token_id is None:
            generation.eos_token_id = tokenizer.eos_token_id
        if generation.pad_token_id is None:
            generation.pad_token_id = tokenizer.pad_token_id
        adapter = cls(model.config)
        adapter.moe_layers(model)
        extra = {} if max_crops is None else {"max_crops": max_crops}
        return LoadedVLM(model, processor, adapter, source=path, extra=extra)

    @classmethod
    def tiny_model(cls, seed: int = 0) -> LoadedVLM:
        """See :func:`vlm_adapters.molmoe.tiny.tiny_parts`."""
        from .tiny import tiny_parts

        model, processor = tiny_parts(seed)
        return LoadedVLM(model, processor, cls(model.config), source="tiny:molmoe")

    def prepare(
        self, vlm: LoadedVLM, conversations: Sequence[Sequence[Mapping[str, Any]]]
    ) -> dict[str, Any]:
        """See :meth:`LoadedVLM.prepare_batch`.

        Raises:
            ValueError: more than one image or turn, or an image that cannot be tiled.
        """
        from .processing import collate

        options = {key: value for key, value in vlm.extra.items() if key == "max_crops"}
        samples = []
        for row, messages in enumerate(conversations):
            try:
                text, images = _one_turn(messages)
                samples.append(vlm.processor.process(text=text, images=images, **options))
            except ValueError as error:
                where = f"conversation {row}: " if len(conversations) > 1 else ""
                raise ValueError(f"{where}{error}") from error
        device = next(vlm.model.parameters()).device
        batch = collate(samples, vlm.processor.tokenizer.pad_token_id or 0)
        return {key: value.to(device) for key, value in batch.items()}

    def decode(self, vlm: LoadedVLM, inputs: Mapping[str, Any], generated: Tensor) -> list[str]:
        new = generated[:, inputs["input_ids"].shape[1] :]
        texts = vlm.processor.batch_decode(
            new, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return [text.strip() for text in texts]


def _one_turn(messages: Sequence[Mapping[str, Any]]) -> tuple[str, list[Any]]:
    """Text and images of a conversation of one user turn; text parts are joined by line breaks."""
    roles = [str(message.get("role")) for message in messages]
    if roles != ["user"]:
        named = f" with roles {', '.join(roles)}" if roles else ""
        raise ValueError(f"MolmoE takes one user message, got {len(roles)}{named}")
    content = messages[0].get("content") or ""
    if isinstance(content, str):
        return content, []
    texts, images = [], []
    for part in content:
        kind = part.get("type")
        if kind == "text":
            texts.append(part.get("text") or "")
        elif kind != "image":
            raise ValueError(f"MolmoE takes 'image' and 'text' parts, got {kind!r}")
        elif part.get("image") is None:
            raise ValueError("an image part needs its picture under 'image'")
        else:
            images.append(part["image"])
    return "\n".join(texts), images
