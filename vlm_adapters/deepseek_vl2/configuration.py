"""The original DeepSeek-VL2 ``config.json`` as transformers configurations.

The file's own keys stay the fields (``vision_config.width``, ``language_config``, ...), so that a
saved config is again one in the original format; ``attribute_map`` and the properties give
transformers its usual names. The one exception is RoPE: ``rope_theta`` and ``rope_scaling`` are
read and become transformers' ``rope_parameters``.

Released files leave most fields out. An omitted field takes the original class default, which is
often not a usable value (``topk_method`` selects nothing, ``tile_tag`` is no layout): such a config
loads, and :func:`vlm_adapters.deepseek_vl2.checks.check_config` says what is wrong with it.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from .family import MODEL_TYPE, why_not_deepseek_vl2


class DeepseekVLV2VisionConfig(PreTrainedConfig):
    """``vision_config``: a SigLIP tower without class token and without its pooling head."""

    model_type = "vision"
    base_config_key = "vision_config"
    attribute_map = {
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
    }

    # What the original fixes in code, under the names that transformers' SigLIP reads.
    num_channels = 3
    hidden_act = "gelu_pytorch_tanh"
    layer_norm_eps = 1e-6
    attention_dropout = 0.0
    vision_use_head = False

    model_name: str = "siglip_large_patch16_384"
    image_size: int = 384
    patch_size: int = 16
    width: int = 1024
    layers: int = 24
    heads: int = 16
    mlp_ratio: int | float = 4.0
    class_token: bool = False
    ignore_head: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("model_type", None)
        super().__post_init__(**kwargs)

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP; truncated, not rounded."""
        return int(self.width * self.mlp_ratio)

    @property
    def grid(self) -> int:
        """Patches along one side of a tile."""
        return self.image_size // self.patch_size


class DeepseekVLV2ProjectorConfig(PreTrainedConfig):
    """``projector_config``: 2x2 patch merger and MLP between tower and language model."""

    model_type = "mlp_projector"
    base_config_key = "projector_config"

    projector_type: str = "downsample_mlp_gelu"
    input_dim: int = 1152
    n_embed: int = 2048
    depth: int = 2
    mlp_ratio: int = 1
    downsample_ratio: int = 2
    token_pooling: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("model_type", None)
        super().__post_init__(**kwargs)


class DeepseekVLV2TextConfig(PreTrainedConfig):
    """``language_config``: a DeepSeek-V2 decoder with MLA, or with plain multi-head attention."""

    model_type = "deepseek_v2"
    base_config_key = "language_config"
    keys_to_ignore_at_inference = ["cache"]
    attribute_map = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}
    base_model_ep_plan: ClassVar[Any] = {
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
        "layers.*.mlp.experts": "ep_dispatch_experts",
    }
    # The expert-parallel modes that share one batch are built on tensor parallelism. Attention is
    # replicated in it, which fits both kinds and any number of heads.
    base_model_tp_plan: ClassVar[Any] = {
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        **{
            f"layers.*.mlp.{owner}{name}_proj": "rowwise" if name == "down" else "colwise"
            for owner in ("shared_experts.", "")
            for name in ("gate", "up", "down")
        },
    }
    # MLA rotates interleaved pairs; transformers' DeepSeek-V3 attention asks for it by this name.
    rope_interleave = True

    vocab_size: int = 102400
    hidden_size: int = 4096
    intermediate_size: int = 11008
    moe_intermediate_size: int = 1407
    num_hidden_layers: int = 30
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    n_shared_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    routed_scaling_factor: int | float = 1.0
    topk_method: str = "gready"
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    n_group: int | None = None
    topk_group: int | None = None
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    use_mla: bool = True
    kv_lora_rank: int | None = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int | None = 128
    qk_rope_head_dim: int | None = 64
    v_head_dim: int | None = 128
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: int | float = 0.02
    rms_norm_eps: int | float = 1e-6
    use_cache: bool = True
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: int | float = 0.0
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("model_type", None)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        # The width that RoPE turns: in MLA only the rotary part of a head.
        if self.use_mla:
            self.head_dim = self.qk_rope_head_dim
            kwargs["qk_head_dim"] = (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0)
        else:
            self.head_dim = self.hidden_size // self.num_attention_heads
            kwargs.pop("qk_head_dim", None)
        super().__post_init__(**kwargs)

    def standardize_rope_params(self) -> None:
        """As the base class, with DeepSeek's meaning of the YaRN fields.

        Both ``mscale`` factors act on their own: cos and sin are multiplied by
        ``m(mscale) / m(mscale_all_dim)`` with defaults 1 and 0, where m(x) = 0.1 x ln(factor) + 1.
        transformers applies that ratio only when both are given.
        """
        rope = self.rope_parameters or {}
        if rope.get("rope_type", rope.get("type")) == "yarn":
            rope.setdefault("original_max_position_embeddings", 4096)
            if rope.get("attention_factor") is None:
                factor = float(rope.get("factor") or 1.0)
                rope["attention_factor"] = yarn_mscale(factor, rope.get("mscale", 1.0)) / (
                    yarn_mscale(factor, rope.get("mscale_all_dim", 0.0))
                )
        super().standardize_rope_params()

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer ``layer`` (0-based) holds experts."""
        return (
            bool(self.n_routed_experts)
            and layer >= self.first_k_dense_replace
            and layer % self.moe_layer_freq == 0
        )

    @property
    def groups(self) -> tuple[int, int]:
        """Expert groups and how many of them a token may use; (1, 1) without group limit."""
        if self.topk_method == "greedy":
            return 1, 1
        groups = self.n_group or 1
        return groups, self.topk_group or (1 if groups == 1 else 0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """m(mscale) = 0.1 mscale ln(factor) + 1. Source: YaRN (arXiv 2309.00071), section 3.4."""
    return 0.1 * (mscale or 0.0) * math.log(factor) + 1.0 if factor > 1.0 else 1.0


class DeepseekVLV2Config(PreTrainedConfig):
    """Configuration of a DeepSeek-VL2 model, field names as in the original ``config.json``."""

    model_type = MODEL_TYPE
    # get_text_config() of transformers looks for the name text_config.
    attribute_map = {"text_config": "language_config"}
    sub_configs_defaults: ClassVar[Any] = {
        "vision_config": DeepseekVLV2VisionConfig,
        "language_config": DeepseekVLV2TextConfig,
    }
    keys_to_ignore_at_inference = ["cache"]

    vision_config: Any = None
    projector_config: Any = None
    language_config: Any = None
    tile_tag: str = "tile_tag"
    global_view_pos: str = "head"
    candidate_resolutions: Any = ((384, 384),)
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("model_type", None)
        reason = why_not_deepseek_vl2(self)
        if reason is not None:
            raise ValueError(f"not a DeepSeek-VL2 config: {reason}")
        self.candidate_resolutions = tuple(
            (int(width), int(height)) for width, height in self.candidate_resolutions
        )
        # No sub_configs_defaults entry: those belong to sub-models, which the projector is not.
        if not isinstance(self.projector_config, PreTrainedConfig):
            self.projector_config = DeepseekVLV2ProjectorConfig(**(self.projector_config or {}))
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As the base class, without ``auto_map``: the remote code it names is not needed here."""
        output = super().to_dict()
        for part in (output, output.get("language_config", {})):
            part.pop("auto_map", None)
        return output
