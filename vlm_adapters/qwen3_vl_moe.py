"""Qwen3-VL-MoE (and the embedded model, which is one).

Router mathematics: softmax over all experts in float32, top-k, weights divided by their
sum; the scores are the softmax before the division. No shared expert.
Token layout: ``<|vision_start|>`` image tokens ``<|vision_end|>`` inside the user turn; start
and end are text. Video frames are separated by timestamps, which are text.
Not supported: nothing known.

Source: ``transformers/models/qwen3_vl_moe/modeling_qwen3_vl_moe.py`` (interface).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from .base import LoadedVLM
from .generic import NativeAdapter

TINY_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


class Qwen3VLMoeAdapter(NativeAdapter):
    """See the module docstring."""

    name: ClassVar[str] = "qwen3_vl_moe"
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_vl_moe",)

    @classmethod
    def tiny_model(cls, seed: int = 0) -> LoadedVLM:
        """Random weights, 3 MoE layers of 8 experts (top 2), non-square expert matrices."""
        from transformers import (
            Qwen2VLImageProcessor,
            Qwen3VLMoeConfig,
            Qwen3VLMoeForConditionalGeneration,
            Qwen3VLProcessor,
            Qwen3VLVideoProcessor,
        )

        from .tiny import CHATML, byte_tokenizer

        tokenizer = byte_tokenizer(TINY_TOKENS, eos="<|im_end|>", chat_template=CHATML)
        ids = tokenizer.get_vocab()
        config = Qwen3VLMoeConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": 32,
                "intermediate_size": 48,
                "moe_intermediate_size": 24,
                "num_hidden_layers": 3,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1000.0,
                    "mrope_section": [2, 1, 1],
                    "mrope_interleaved": True,
                },
                "pad_token_id": tokenizer.pad_token_id,
                "eos_token_id": tokenizer.eos_token_id,
                # Large enough that tokens differ and experts are unevenly loaded.
                "initializer_range": 0.3,
            },
            vision_config={
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 4,
                "patch_size": 8,
                "spatial_merge_size": 2,
                "temporal_patch_size": 1,
                "out_hidden_size": 32,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
                "initializer_range": 0.3,
            },
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )
        pixels: dict[str, Any] = {
            "patch_size": 8,
            "merge_size": 2,
            "temporal_patch_size": 1,
            "size": {"shortest_edge": 64 * 64, "longest_edge": 64 * 64},
        }
        processor = Qwen3VLProcessor(
            image_processor=Qwen2VLImageProcessor(**pixels),
            tokenizer=tokenizer,
            video_processor=Qwen3VLVideoProcessor(**pixels),
            chat_template=CHATML,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen3VLMoeForConditionalGeneration(config).eval()
        return LoadedVLM(
            model=model, processor=processor, adapter=cls(model.config), source="tiny:qwen3_vl_moe"
        )
