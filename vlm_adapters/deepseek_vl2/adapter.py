"""Adapter for DeepSeek-VL2 (tiny, small, base), read from the original checkpoints.

Router mathematics: scores are a softmax or sigmoid over all experts in float32. ``greedy`` takes
the K greatest; ``group_limited_greedy`` first keeps the groups with the greatest best score;
``noaux_tc`` chooses on scores plus a learned bias (groups by their two best), while weights come
from the scores without it. Weights are normalised over the K (``norm_topk_prob``) and scaled. So
under ``noaux_tc`` an expert may be chosen although others have a greater score:
:class:`RouterChoice` then holds the unbiased scores, which the weights are proportional to, and a
policy that keeps or expands by score follows them, not the biased ones.

Token layout: each image takes a run of ``<image>`` ids that ``images_seq_mask`` marks, all tagged
IMAGE: patch vectors and also the newline vector after every row and the separator vector between
the global and the local view. Text, roles and line breaks around an image are TEXT.

Not supported: DeepSeek-OCR checkpoints (same ``model_type``), tile tag "1D", token pooling,
projectors other than ``downsample_mlp_gelu``, training losses of the router.

Source: the DeepSeek-VL2 repository (behaviour of commit ef9f91e), arXiv 2412.10302.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..base import Adapter, LoadedVLM, MoELayer, RouterChoice, UnsupportedModelError
from ..modality import Modality
from ..registry import config_value
from .family import MODEL_TYPE, why_not_deepseek_vl2


class DeepseekVL2Adapter(Adapter):
    """See the module docstring."""

    name: ClassVar[str] = "deepseek_vl2"

    @classmethod
    def matches(cls, config: Any) -> bool:
        """See :meth:`Adapter.matches`; a DeepSeek-OCR config raises, with what tells it apart."""
        reason = why_not_deepseek_vl2(config)
        if reason is None:
            return True
        if config_value(config, "model_type") == MODEL_TYPE:
            raise UnsupportedModelError(f"not a DeepSeek-VL2 model: {reason}")
        return False

    # -- structure -------------------------------------------------------------------

    def moe_layers(self, model: nn.Module) -> list[MoELayer]:
        from .moe import DeepseekVLV2MoE

        blocks = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, DeepseekVLV2MoE)
        ]
        if not blocks:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no mixture-of-experts layer (looked for "
                "DeepseekVLV2MoE): n_routed_experts is empty, or first_k_dense_replace covers all "
                "layers"
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
        """See :meth:`Adapter.read_scores`.

        ``allowed`` is the group mask of a group-limited router, and None when every group is kept.
        An expert that the router picked all the same counts as allowed: ``noaux_tc`` can, when all
        choices of the groups are below 0, and any method when the groups hold fewer than K experts.
        Outside of the groups a score of ``group_limited_greedy`` is 0, as the weight would be.
        """
        logits, weights, index = router_output
        router: Any = layer.router
        scores = router.scores(logits)
        _, allowed = router.selection(scores)
        if allowed is not None:
            if router.topk_method != "noaux_tc":
                scores = scores.masked_fill(~allowed, 0.0)
            allowed = allowed.scatter(1, index, True)
        return RouterChoice(scores=scores, index=index, weights=weights, allowed=allowed)

    # -- tokens ----------------------------------------------------------------------

    def tag_tokens(self, inputs: Mapping[str, Any]) -> Tensor:
        from .modeling_image import split_mask

        tokens = inputs.get("input_ids")
        embeds = inputs.get("inputs_embeds")
        mask = inputs.get("images_seq_mask")
        if tokens is None and (embeds is None or mask is None):
            raise ValueError(
                "cannot tell image tokens from text: pass input_ids, or inputs_embeds together "
                "with images_seq_mask"
            )
        shaped: Any = embeds[..., 0] if tokens is None and embeds is not None else tokens
        tags = torch.full(shaped.shape, int(Modality.TEXT), dtype=torch.uint8, device=shaped.device)
        if mask is not None:
            here, _ = split_mask(mask, shaped.shape[1], inputs.get("cache"))
            tags = tags.masked_fill(here.to(tags.device), int(Modality.IMAGE))
        crops = inputs.get("images_spatial_crop")
        if crops is not None and bool(crops.any()) and (mask is None or not bool(mask.any())):
            raise ValueError(
                "the inputs hold images (images_spatial_crop) but images_seq_mask tags no token as "
                "image"
            )
        return _mark_padding(tags, inputs.get("attention_mask"))

    # -- loading and chat ------------------------------------------------------------

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "cpu",
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> LoadedVLM:
        """Loads a checkpoint folder, or a hub id, in the original layout.

        ``trust_remote_code`` changes nothing: no code of the checkpoint is needed or run.

        Raises:
            ModelLoadError: files are missing or broken, or parameters do not fit the configuration.
            UnsupportedModelError: a DeepSeek-OCR checkpoint, or a setting that is not implemented.
        """
        from .loading import load

        model, processor = load(path, dtype=dtype, device=device, **kwargs)
        return cls._assembled(model.eval(), processor, path)

    @classmethod
    def tiny_model(cls, seed: int = 0, **language: Any) -> LoadedVLM:
        """See :meth:`Adapter.tiny_model`; ``language`` changes fields of ``language_config``."""
        from .tiny import tiny_model, tiny_processor

        processor = tiny_processor()
        model = tiny_model(seed, vocab_size=len(processor.tokenizer), **language)
        return cls._assembled(model, processor, "tiny:deepseek_vl2")

    @classmethod
    def _assembled(cls, model: Any, processor: Any, source: str) -> LoadedVLM:
        # As the original's scripts: ids of the tokenizer, padding of answers with the end token.
        tokenizer, generation = processor.tokenizer, model.generation_config
        generation.bos_token_id = tokenizer.bos_token_id
        generation.eos_token_id = tokenizer.eos_token_id
        generation.pad_token_id = tokenizer.eos_token_id
        adapter = cls(model.config)
        adapter.moe_layers(model)
        return LoadedVLM(model=model, processor=processor, adapter=adapter, source=source)

    def prepare(
        self, vlm: LoadedVLM, conversations: Sequence[Sequence[Mapping[str, Any]]]
    ) -> dict[str, Any]:
        batch = vlm.processor(conversations=list(conversations))
        model: Any = vlm.model
        weight = model.get_input_embeddings().weight
        inputs = {key: value.to(weight.device) for key, value in batch.items()}
        inputs["images"] = inputs["images"].to(weight.dtype)
        self.tag_tokens(inputs)
        return inputs

    def decode(self, vlm: LoadedVLM, inputs: Mapping[str, Any], generated: Tensor) -> list[str]:
        new = generated[:, inputs["input_ids"].shape[1] :]
        texts = vlm.processor.batch_decode(new, skip_special_tokens=True)
        return [text.strip() for text in texts]


def _mark_padding(tags: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return tags
    if mask.dim() != 2:
        if tags.shape[1] == 1:
            # A decode step with a static cache; its one token is never padding.
            return tags
        raise ValueError(
            f"cannot tell padding from tokens: attention_mask must be [B, S], got {mask.dim()} axes"
        )
    # With a cache the mask also covers what came before; the last columns are this pass's.
    now = mask[:, -tags.shape[1] :].to(tags.device)
    return tags.masked_fill(now == 0, int(Modality.PAD))
