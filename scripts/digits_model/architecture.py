"""The embedded model: a small ``Qwen3VLMoeForConditionalGeneration`` and its processor."""

from __future__ import annotations

import torch
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from mm_capacity.data.digits import IMAGE_PX

PATCH_PX = 8
SIDE_TOKENS = IMAGE_PX // PATCH_PX
# About 1 / sqrt(width). The usual 0.02 suits wide models; here it leaves attention so flat that
# the digits were not learned at all in 200 steps.
INIT_STD = 0.08


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLMoeForConditionalGeneration:
    """Untrained model; seed torch first."""
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen3VLMoeConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "initializer_range": INIT_STD,
            "tie_word_embeddings": True,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": PATCH_PX,
            "spatial_merge_size": 1,
            "temporal_patch_size": 1,
            "out_hidden_size": 128,
            "num_position_embeddings": SIDE_TOKENS**2,
            "deepstack_visual_indexes": [1],
            "initializer_range": INIT_STD,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    model = Qwen3VLMoeForConditionalGeneration(config)
    # Reading by position starts to work only when the position signal is not drowned
    # by the patch content, hence an initialisation far above the usual 0.02.
    visual = model.model.visual
    torch.nn.init.normal_(visual.pos_embed.weight, std=0.5)
    patch = visual.patch_embed.proj.weight
    torch.nn.init.normal_(patch, std=patch[0].numel() ** -0.5)
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=16,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def build_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLProcessor:
    """Processor that turns any picture into about SIDE_TOKENS x SIDE_TOKENS image tokens."""
    pixels = {"shortest_edge": IMAGE_PX**2, "longest_edge": IMAGE_PX**2}
    common = {
        "patch_size": PATCH_PX,
        "merge_size": 1,
        "temporal_patch_size": 1,
        "size": pixels,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**common),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**common),
        chat_template=tokenizer.chat_template,
    )
