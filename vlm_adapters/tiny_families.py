"""Sizes of the tiny random models: one entry per native family.

Every family has hidden size 32 and experts of another width, so that a transposed matrix cannot go
unnoticed, 8 experts of which 2 are used, and images of a few tokens. A name ``a+b`` is the wrapper
``a`` around the language model ``b``. A long file because it is a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Special tokens in the order of their ids; one token per byte follows.
SPECIALS = (
    "<|pad|>",
    "<|begin|>",
    "<|end|>",
    "<|image|>",
    "<|video|>",
    "<|image_start|>",
    "<|image_end|>",
    "<|video_start|>",
    "<|video_end|>",
    "<|audio|>",
    "<|audio_start|>",
    "<|turn|>",
)
PAD, BEGIN, EOS, IMAGE, VIDEO, START, END, VIDEO_START, VIDEO_END, AUDIO, AUDIO_START = range(11)
VOCABULARY = len(SPECIALS) + 256
Pixels = Callable[[int, "torch.Generator"], dict[str, "Tensor"]]

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": BEGIN,
    "eos_token_id": EOS,
    # Large enough that tokens differ and experts are unevenly loaded.
    "initializer_range": 0.3,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_heads": 4,
    "depth": 1,
    "patch_size": 4,
    "initializer_range": 0.3,
}
MROPE = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 1, 1]}
SPARSE = ["sparse", "sparse"]
MLA = {  # multi-head latent attention
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
INDEXER = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2}


@dataclass(frozen=True)
class TinyFamily:
    """How to build one family small.

    Attributes:
        model_class: class name in transformers.
        text: settings of the text configuration, over TEXT.
        vision: settings of the vision configuration, over VISION; None: text only.
        top: settings of the model's own configuration.
        pixels: makes the pixel inputs of n images.
        tokens: image tokens per image.
        types: names of token-type inputs that this family wants.
        sparse_layers: MoE layers that the model must have.
    """

    model_class: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any] | None = None
    top: Mapping[str, Any] = field(default_factory=dict)
    pixels: Pixels | None = None
    tokens: int = 0
    types: tuple[str, ...] = ()
    sparse_layers: int = 2


def grid(
    *, height: int = 4, width: int = 8, temporal: int = 2, patch: int = 4, flat: bool = True
) -> Pixels:
    """Pixels as rows of patches with ``image_grid_thw``."""

    def make(images: int, generator: torch.Generator) -> dict[str, Tensor]:
        import torch

        shape = (3 * temporal * patch * patch,) if flat else (3, patch, patch)
        return {
            "pixel_values": torch.randn(images * height * width, *shape, generator=generator),
            "image_grid_thw": torch.tensor([[1, height, width]] * images),
        }

    return make


def square(size: int, **more: Sequence[int]) -> Pixels:
    """Pixels as ``[n, 3, size, size]``; ``more`` holds one row per image of other inputs."""

    def make(images: int, generator: torch.Generator) -> dict[str, Tensor]:
        import torch

        pixels = torch.randn(images, 3, size, size, generator=generator)
        extra = {name: torch.tensor([list(row)] * images) for name, row in more.items()}
        return {"pixel_values": pixels, **extra}

    return make


def pixtral(images: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Two by four merged patches with ``image_sizes``."""
    import torch

    return {
        "pixel_values": torch.randn(images, 3, 16, 32, generator=generator),
        "image_sizes": torch.tensor([[16, 32]] * images),
    }


def gemma(images: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Four by eight patches with their positions, pooled two by two."""
    import torch

    rows = torch.stack(torch.meshgrid(torch.arange(8), torch.arange(4), indexing="xy"), -1)
    return {
        "pixel_values": torch.rand(images, 32, 3 * 16, generator=generator),
        "image_position_ids": rows.reshape(1, 32, 2).expand(images, -1, -1).contiguous(),
    }


def radio(images: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Four by eight patches with ``image_grid_hw``."""
    import torch

    return {
        "pixel_values": torch.randn(images * 32, 3 * 16, generator=generator),
        "image_grid_hw": torch.tensor([[4, 8]] * images),
    }


def inkling(images: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Eight patches, one token each."""
    import torch

    return {"pixel_values": torch.randn(images * 8, 2, 8, 8, 3, generator=generator)}


def inkling2(images: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Two by four merged patches; the grid counts merged patches."""
    import torch

    return {
        "pixel_values": torch.randn(images * 8, 8, 8, 3, generator=generator),
        "image_grid_thw": torch.tensor([[1, 2, 4]] * images),
    }


SAM = {
    "hidden_size": 16,
    "output_channels": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 4,
    "window_size": 4,
    "global_attn_indexes": [0],
    "mlp_dim": 16,
    "downsample_channels": [16, 32],
}
QWEN35_TEXT = {
    "num_experts": 8,
    "shared_expert_intermediate_size": 40,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {**MROPE, "partial_rotary_factor": 0.5},
}
QWEN_VISION = {"out_hidden_size": 32, "num_position_embeddings": 64}
INKLING2_TEXT = {
    "n_routed_experts": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "d_rel": 4,
    "rel_extent": 16,
    "unpadded_vocab_size": VOCABULARY,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "n_layers_per_attn_res_block": 1,
}
INKLING2_VISION = {"text_hidden_size": 32, "projection_hidden_dim": 40, "posemb_grid_size": 8}

FAMILIES: dict[str, TinyFamily] = {
    "qwen3_5_moe": TinyFamily(
        "Qwen3_5MoeForConditionalGeneration",
        text=QWEN35_TEXT,
        vision=QWEN_VISION,
        pixels=grid(),
        tokens=8,
        types=("mm_token_type_ids",),
    ),
    "qwen4_exp": TinyFamily(
        "Qwen4ExpForConditionalGeneration",
        text={
            **QWEN35_TEXT,
            "hc_count": 2,
            "hc_lowrank": 8,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
        },
        vision=QWEN_VISION,
        pixels=grid(),
        tokens=8,
        types=("mm_token_type_ids",),
    ),
    "qwen3_omni_moe_thinker": TinyFamily(
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        text={"num_experts": 8, "rope_parameters": MROPE},
        vision={**QWEN_VISION, "deepstack_visual_indexes": [0]},
        top={
            "audio_config": {
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 16,
                "d_model": 16,
                "output_dim": 32,
                "downsample_hidden_size": 8,
            },
            "audio_token_id": AUDIO,
            "audio_start_token_id": AUDIO_START,
            "vision_start_token_id": START,
            "vision_end_token_id": END,
        },
        pixels=grid(),
        tokens=8,
    ),
    "glm4v_moe": TinyFamily(
        "Glm4vMoeForConditionalGeneration",
        text={
            "n_routed_experts": 8,
            "first_k_dense_replace": 0,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**MROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
        },
        vision={"out_hidden_size": 32, "image_size": 32},
        pixels=grid(),
        tokens=8,
        types=("mm_token_type_ids",),
    ),
    "glm5_next": TinyFamily(
        "Glm5NextForConditionalGeneration",
        text={
            **MLA,
            **INDEXER,
            "qk_rope_head_dim": 0,
            "n_routed_experts": 8,
            "mlp_layer_types": SPARSE,
            "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_types": ["full", "full"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "hc_mult": 2,
            "index_kpool": 2,
        },
        vision={"out_hidden_size": 32, "image_size": 32, "projection_intermediate_size": 40},
        pixels=grid(),
        tokens=8,
        types=("mm_token_type_ids",),
    ),
    "ernie4_5_vl_moe": TinyFamily(
        "Ernie4_5_VLMoeForConditionalGeneration",
        text={
            "moe_intermediate_size": [24, 16],
            "moe_num_experts": 8,
            "moe_k": 2,
            "mlp_layer_types": SPARSE,
            "rope_parameters": {**MROPE, "mrope_section": [1, 1, 2]},
        },
        vision={},
        pixels=grid(temporal=1),
        tokens=8,
        types=("mm_token_type_ids", "moe_mm_token_type_ids"),
        sparse_layers=4,
    ),
    "gemma4": TinyFamily(
        "Gemma4ForConditionalGeneration",
        text={
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "per_layer_config": {"1": {"head_dim": 16}},
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "sliding_window": 64,
        },
        vision={"head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 32},
        top={"boi_token_id": START, "eoi_token_id": END, "audio_token_id": AUDIO},
        pixels=gemma,
        tokens=8,
        types=("mm_token_type_ids",),
    ),
    "dots3_note": TinyFamily(
        "Dots3NoteForConditionalGeneration",
        text={
            **MLA,
            **INDEXER,
            "head_dim": 16,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "shared_experts_intermediate_size": 40,
            "mlp_layer_types": SPARSE,
            "layer_types": ["indexed_attention", "sliding_attention"],
            "per_layer_config": {},
            "sliding_window": 64,
        },
        vision={
            "mlp_layer_types": ["sparse"],
            "num_local_experts": 4,
            "per_layer_config": {},
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        top={
            "audio_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "downsample_hidden_size": 8,
                "adapter_input_size": 16,
                "adapter_out_dim": 32,
            },
            "audio_token_id": AUDIO,
        },
        pixels=grid(temporal=1),
        tokens=8,
    ),
    "hy_v4_vl": TinyFamily(
        "HYV4VLForConditionalGeneration",
        text={
            **MLA,
            **INDEXER,
            "n_routed_experts": 8,
            "mlp_layer_types": SPARSE,
            "layer_types": ["indexed_attention"] * 2,
            "indexer_types": ["full", "shared"],
            "hc_mult": 2,
            "rope_parameters": MROPE,
        },
        vision={"out_hidden_size": 32, "max_image_size": 64},
        pixels=grid(temporal=1),
        tokens=10,
        types=("mm_token_type_ids",),
    ),
    "inkling_mm_model": TinyFamily(
        "InklingForConditionalGeneration",
        text={
            **{k: v for k, v in INKLING2_TEXT.items() if k != "n_layers_per_attn_res_block"},
            "mlp_layer_types": SPARSE,
            "n_shared_experts": 2,
        },
        vision={"text_hidden_size": 32, "patch_size": 8, "n_layers": 2},
        top={
            "audio_config": {"n_mel_bins": 8, "mel_vocab_size": 16, "text_hidden_size": 32},
            "audio_token_id": AUDIO,
        },
        pixels=inkling,
        tokens=8,
    ),
    "inkling2": TinyFamily(
        "Inkling2ForConditionalGeneration",
        text=INKLING2_TEXT,
        vision=INKLING2_VISION,
        pixels=inkling2,
        tokens=8,
    ),
    "inkling2_loop": TinyFamily(
        "Inkling2LoopForConditionalGeneration",
        text={
            **INKLING2_TEXT,
            "num_hidden_layers": 3,
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 2,
            "loop_num_passes": 2,
            "loop_gate_rank": 4,
        },
        vision={**INKLING2_VISION, "model_type": "inkling2_vision"},
        pixels=inkling2,
        tokens=8,
        sparse_layers=3,
    ),
    "kimi_k25": TinyFamily(
        "Kimi_K25ForConditionalGeneration",
        text={
            "model_type": "deepseek_v3",
            **MLA,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 0,
        },
        vision={"pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 2},
        top={"projection_hidden_size": 32, "vision_start_token_id": START},
        pixels=grid(flat=False),
        tokens=8,
    ),
    "llama4": TinyFamily(
        "Llama4ForConditionalGeneration",
        text={
            "num_local_experts": 8,
            "intermediate_size_mlp": 40,
            "moe_layers": [0, 1],
            "no_rope_layers": [1, 0],
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 64,
        },
        vision={
            "image_size": 16,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "intermediate_size": 128,
        },
        pixels=square(16),
        tokens=4,
    ),
    "minimax_m3_vl": TinyFamily(
        "MiniMaxM3SparseForConditionalGeneration",
        text={
            "intermediate_size": 24,
            "num_local_experts": 8,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 40,
            "rotary_dim": 8,
            "mlp_layer_types": SPARSE,
            "layer_types": ["full_attention"] * 2,
            "index_head_dim": 8,
        },
        vision={"image_size": 32},
        top={"projector_hidden_size": 32},
        pixels=grid(),
        tokens=8,
    ),
    "mistral_large4": TinyFamily(
        "MistralLarge4ForConditionalGeneration",
        text={
            **MLA,
            **INDEXER,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "mlp_layer_types": SPARSE,
            "layer_types": ["indexed_attention"] * 2,
            "indexer_types": ["full"] * 2,
            "no_rope_layers": [1, 1],
            "kv_source_layers": [0, 1],
        },
        vision={"model_type": "pixtral", "image_size": 32, "head_dim": 8},
        pixels=pixtral,
        tokens=8,
    ),
    "muse_spark": TinyFamily(
        "MuseSparkForConditionalGeneration",
        text={
            "num_local_experts": 8,
            "moe_hidden_size": 40,
            "mlp_layer_types": SPARSE,
            "layer_types": ["sliding_attention", "full_attention"],
            "layer_rope_theta": [1000.0, 0],
            "sliding_window": 64,
            "output_multiplier": 2.0,
        },
        vision={
            "pos_emb_height": 8,
            "pos_emb_width": 8,
            "max_position_embeddings": 64,
            "layer_types": ["full_attention"],
        },
        top={
            "out_hidden_size": 128,
            "projector_hidden_size": 40,
            "audio_config": {
                "patch_sizes": [4],
                "hidden_sizes": [16],
                "depths": [1],
                "num_hidden_layers": 1,
                "out_hidden_size": 32,
            },
            "audio_token_id": AUDIO,
        },
        pixels=grid(),
        tokens=8,
    ),
    "nemotron_h_omni": TinyFamily(
        "NemotronH_Omni_Reasoning_V3",
        text={
            "model_type": "nemotron_h",
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 16,
            "ssm_state_size": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "n_group": 2,
            "topk_group": 1,
        },
        vision={
            "model_type": "radio",
            "image_size": 32,
            "max_img_size": 64,
            "video_temporal_patch_size": 2,
        },
        top={"projector_hidden_size": 40, "vision_hidden_size": 32},
        pixels=radio,
        tokens=8,
    ),
    "step3p7": TinyFamily(
        "Step3p7ForConditionalGeneration",
        text={
            "n_routed_experts": 8,
            "mlp_layer_types": SPARSE,
            "layer_types": ["full_attention"] * 2,
            "share_expert_dim": 40,
            "num_sliding_attention_heads": 4,
            "query_pre_attn_scalar": 8,
            "sliding_window": 64,
        },
        vision={"image_size": 48, "max_position_embeddings": 144, "mlp_ratio": 1.5},
        pixels=square(48),
        tokens=9,
    ),
    "deepseek_ocr2": TinyFamily(
        "DeepseekOcr2ForConditionalGeneration",
        text={
            "n_routed_experts": 8,
            "num_key_value_heads": 4,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "group_limited_greedy",
            "mlp_layer_types": SPARSE,
        },
        vision={"sam_config": SAM, "encoder_config": {**TEXT, "num_hidden_layers": 1}},
        # The number of queries is a constant of the model: 144, and one separator.
        pixels=square(64),
        tokens=145,
    ),
    "unlimited_ocr": TinyFamily(
        "UnlimitedOcrForConditionalGeneration",
        text={
            "n_routed_experts": 8,
            "num_key_value_heads": 4,
            "mlp_layer_types": SPARSE,
            "layer_types": ["reference_sliding_attention"] * 2,
        },
        vision={"sam_config": SAM, "encoder_config": {**VISION, "image_size": 16}},
        # One newline per row and one separator belong to the image.
        pixels=square(64),
        tokens=4 * 5 + 1,
    ),
    "aria": TinyFamily(
        "AriaForConditionalGeneration",
        text={"intermediate_size": 24, "moe_num_experts": 8, "moe_topk": 2},
        vision={"image_size": 16, "model_type": "idefics3_vision"},
        top={
            "projector_patch_to_query_dict": {"16": 4},
            "max_value_projector_patch_to_query_dict": 4,
        },
        pixels=square(16),
        tokens=4,
    ),
    "internvl": TinyFamily(
        "InternVLForConditionalGeneration",
        text={"model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": True},
        vision={"image_size": [16, 16], "patch_size": [4, 4]},
        top={"image_seq_length": 4},
        pixels=square(16),
        tokens=4,
    ),
    "internvl+gpt_oss": TinyFamily(
        "InternVLForConditionalGeneration",
        text={
            "model_type": "gpt_oss",
            "intermediate_size": 24,
            "num_local_experts": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision={"image_size": [16, 16], "patch_size": [4, 4]},
        top={"image_seq_length": 4},
        pixels=square(16),
        tokens=4,
    ),
    "llava+mixtral": TinyFamily(
        "LlavaForConditionalGeneration",
        text={"model_type": "mixtral", "intermediate_size": 24, "num_local_experts": 8},
        vision={"model_type": "clip_vision_model", "image_size": 16, "projection_dim": 32},
        top={"vision_feature_layer": -1},
        pixels=square(16),
        tokens=16,
    ),
    "qwen3_vl_moe": TinyFamily(
        "Qwen3VLMoeForConditionalGeneration",
        text={"num_experts": 8, "rope_parameters": MROPE},
        vision={**QWEN_VISION, "deepstack_visual_indexes": [0]},
        pixels=grid(),
        tokens=8,
        types=("mm_token_type_ids",),
    ),
    "olmoe": TinyFamily(
        "OlmoeForCausalLM",
        text={"intermediate_size": 24, "num_experts": 8, "norm_topk_prob": False},
    ),
    "mixtral": TinyFamily(
        "MixtralForCausalLM", text={"intermediate_size": 24, "num_local_experts": 8}
    ),
    "qwen2_moe": TinyFamily(
        "Qwen2MoeForCausalLM", text={"num_experts": 8, "shared_expert_intermediate_size": 40}
    ),
    "qwen3_moe": TinyFamily("Qwen3MoeForCausalLM", text={"num_experts": 8}),
    "deepseek_v2": TinyFamily(
        "DeepseekV2ForCausalLM",
        text={
            **MLA,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3": TinyFamily(
        "DeepseekV3ForCausalLM",
        text={
            **MLA,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 0,
        },
    ),
}
