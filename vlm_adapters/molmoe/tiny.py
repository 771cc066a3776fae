"""A MolmoE with random weights, small enough for tests and made without any download."""

from __future__ import annotations

from typing import Any

import torch

from ..tiny import byte_tokenizer

TOKENS = (
    "<|padding|>",
    "<|endoftext|>",
    "<im_start>",
    "<im_end>",
    "<im_patch>",
    "<im_col>",
    "<|image|>",
)


def tiny_parts(seed: int) -> tuple[Any, Any]:
    """Model and processor: 2 layers of 8 experts (top 2), non-square expert matrices.

    Pictures are tiled as for the release, so that a prompt with an image has at least 317 tokens.
    """
    from .configuration import MolmoeConfig
    from .image_processing import MolmoImageProcessor
    from .modeling import MolmoeForConditionalGeneration
    from .processing import MolmoProcessor

    tokenizer = byte_tokenizer(TOKENS, eos="<|endoftext|>")
    size = -(-len(tokenizer) // 8) * 8
    config = MolmoeConfig(
        d_model=32,
        n_heads=4,
        n_layers=2,
        mlp_hidden_size=48,
        block_type="moe",
        moe_num_experts=8,
        moe_top_k=2,
        vocab_size=len(tokenizer),
        embedding_size=size,
        additional_vocab_size=8,
        weight_tying=False,
        layer_norm_type="rms",
        attention_layer_norm=True,
        include_bias=False,
        rope=True,
        max_position_embeddings=2048,
        max_sequence_length=2048,
        vit_layers=[-1, -3],
        image_padding_embed="pad_and_partial_pad",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # Large enough that tokens differ and experts are unevenly loaded.
        initializer_range=0.3,
        vision_backbone={
            "image_emb_dim": 16,
            "image_num_heads": 2,
            "image_num_key_value_heads": 2,
            "image_head_dim": 8,
            "image_mlp_dim": 24,
            "image_num_layers": 3,
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MolmoeForConditionalGeneration(config).eval()
    return model, MolmoProcessor(MolmoImageProcessor(), tokenizer)
