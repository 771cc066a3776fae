"""A DeepSeek-VL2 of a few thousand parameters with random weights, made without any download."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .configuration import DeepseekVLV2Config
from .family import MODEL_TYPE
from .image_processing import DeepseekVLV2ImageProcessor
from .processing import ADDED_TOKENS, DeepseekVLV2Processor

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
IMAGE = "<image>"
TILE, PATCH = 42, 14
CANDIDATES = [(TILE * w, TILE * h) for w, h in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1))]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one id per byte after the special tokens."""
    specials = [BOS, EOS, PAD]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*specials, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*specials, IMAGE, *ADDED_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def tiny_processor() -> DeepseekVLV2Processor:
    """A processor with tiles of 42 pixels: 3 x 3 patches, 2 x 2 tokens, as odd a grid as 27."""
    return DeepseekVLV2Processor(
        DeepseekVLV2ImageProcessor(CANDIDATES, patch_size=PATCH), tiny_tokenizer()
    )


def tiny_settings(vocab_size: int = 267, **language: Any) -> dict[str, Any]:
    """The raw ``config.json`` of a small model; expert matrices are not square.

    Args:
        vocab_size: rows of the embedding.
        **language: fields of ``language_config`` to change, ``use_mla`` for one.
    """
    text: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 20,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "topk_method": "greedy",
        "first_k_dense_replace": 1,
        "use_mla": False,
        "q_lora_rank": None,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 1,
        # Wide enough that experts, and answers, differ between tokens.
        "initializer_range": 0.2,
    }
    return {
        "model_type": MODEL_TYPE,
        "tile_tag": "2D",
        "global_view_pos": "head",
        "candidate_resolutions": [list(size) for size in CANDIDATES],
        "vision_config": {
            "image_size": TILE,
            "patch_size": PATCH,
            "width": 16,
            "layers": 2,
            "heads": 2,
            "mlp_ratio": 3.7362,
        },
        "projector_config": {"input_dim": 16, "n_embed": 32},
        "language_config": text | language,
    }


def tiny_model(seed: int, **language: Any) -> Any:
    """A :class:`.modeling.DeepseekVLV2ForCausalLM` of such a config, the same for each seed."""
    from .modeling import DeepseekVLV2ForCausalLM

    config = DeepseekVLV2Config.from_dict(tiny_settings(**language))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DeepseekVLV2ForCausalLM(config).eval()
