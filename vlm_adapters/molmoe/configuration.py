"""The original MolmoE ``config.json`` as a transformers configuration.

The file's own keys stay the fields (``d_model``, ``moe_top_k``, ...), so that a saved config is
again one in the original format; ``attribute_map`` and the properties give transformers its usual
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ..base import UnsupportedModelError
from .family import MODEL_TYPE, why_not_molmoe

# Keys whose other values change the mathematics in a way that this port does not implement.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "block_type": ("moe",),
    "rope": (True,),
    "alibi": (False, None),
    "rope_impl": ("llama", None),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True, None),
    "bias_for_layer_norm": (False, None),
    "attention_layer_norm": (True,),
    "attention_layer_norm_with_affine": (True, None),
    "include_bias": (False,),
    "qkv_bias": (False, None),
    "clip_qkv": (None,),
    "norm_after": (False, None),
    "scale_logits": (False, None),
    "normalize_input_embeds": (False, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_cls_feature": (False, None),
    "image_pooling_2d": ("attention-meanq", "attention_meanq"),
    "image_projector": ("mlp",),
    "image_padding_embed": ("pad_and_partial_pad",),
}


class MolmoeVisionConfig(PreTrainedConfig):
    """``vision_backbone`` of a MolmoE config: the CLIP tower.

    ``image_mlp_activations`` is kept but not read: the tower always applies quick GELU.
    """

    model_type = "molmo_vision_backbone"
    base_config_key = "vision_backbone"

    image_model_type: str = "openai"
    image_default_input_size: list[int] | tuple[int, ...] = (336, 336)
    image_patch_size: int = 14
    image_pos_patch_size: int = 14
    image_emb_dim: int = 1024
    image_num_heads: int = 16
    image_num_key_value_heads: int | None = 16
    image_num_layers: int = 24
    image_head_dim: int = 64
    image_mlp_dim: int = 4096
    image_mlp_activations: str = "gelu"
    image_num_pos: int = 577
    image_norm_eps: float = 1e-5
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    initializer_range: float = 0.02


class MolmoeConfig(PreTrainedConfig):
    """Configuration of a MolmoE model, field names as in the original ``config.json``.

    A field that the file omits takes the original class default, which is rarely the value of the
    release (``rope`` off, tied weights, 8 experts of which 2 act).
    """

    model_type = MODEL_TYPE
    attribute_map = {
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_experts": "moe_num_experts",
        "num_local_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_top_k",
        "rms_norm_eps": "layer_norm_eps",
        "tie_word_embeddings": "weight_tying",
    }
    sub_configs_defaults: ClassVar[dict[str, Any]] = {"vision_backbone": MolmoeVisionConfig}
    base_model_ep_plan: ClassVar[dict[str, Any] | None] = {
        "transformer.blocks.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "transformer.blocks.*.mlp.experts.down_proj": "grouped_gemm",
        "transformer.blocks.*.mlp.experts": "ep_dispatch_experts",
    }
    keys_to_ignore_at_inference = ["cache"]

    # What the original implementation fixes in code, under the names of transformers' OLMoE parts.
    hidden_act = "silu"
    norm_topk_prob = False

    vision_backbone: Any = None
    d_model: int = 768
    n_heads: int = 12
    n_kv_heads: int | None = None
    multi_query_attention: bool | None = None
    head_dim: int | None = None
    n_layers: int = 12
    mlp_ratio: int = 4
    mlp_hidden_size: int | None = None
    block_type: str = "sequential"
    moe_num_experts: int = 8
    moe_top_k: int = 2
    vocab_size: int = 50257
    embedding_size: int | None = 50304
    additional_vocab_size: int | None = None
    weight_tying: bool = True
    layer_norm_type: str = "default"
    layer_norm_eps: float = 1e-5
    attention_layer_norm: bool = False
    attention_dropout: float = 0.0
    include_bias: bool = True
    rope: bool = False
    rope_theta: float = 10000.0
    clip_qkv: float | None = None
    max_position_embeddings: int | None = None
    max_sequence_length: int = 1024
    initializer_range: float = 0.02
    use_cache: bool = True
    vit_layers: list[int] | tuple[int, ...] = (-1,)
    float32_attention: bool = True
    image_pooling_2d: str = "attention-meanq"
    image_pooling_h: int = 2
    image_pooling_w: int = 2
    image_projector: str = "mlp"
    image_padding_embed: str | None = None
    use_cls_feature: bool = False
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @property
    def num_key_value_heads(self) -> int:
        """Key/value heads: ``n_kv_heads``, else 1 (multi-query), else one for each query head."""
        if self.n_kv_heads is not None:
            return self.n_kv_heads
        return 1 if self.multi_query_attention else self.n_heads

    @property
    def attention_head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def intermediate_size(self) -> int:
        """Width of one expert, and of the image projector: half of the fused feed-forward width."""
        full = self.mlp_hidden_size
        if full is None:
            full = self.mlp_ratio * self.d_model
        return full // 2

    @property
    def output_size(self) -> int:
        """Rows of ``wte.embedding`` and of the logits; ids above can be read, not produced."""
        return self.embedding_size or self.vocab_size

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """transformers' view of ``rope_theta``."""
        return {"rope_type": "default", "rope_theta": self.rope_theta}

    @rope_parameters.setter
    def rope_parameters(self, value: Mapping[str, Any] | None) -> None:
        kind = (value or {}).get("rope_type") or (value or {}).get("type") or "default"
        if kind != "default":
            raise UnsupportedModelError(f"MolmoE has no rope scaling: {kind!r} is not supported")
        self.rope_theta = (value or {}).get("rope_theta") or self.rope_theta

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As the base class; refuses the dense models that share the model type.

        Raises:
            ValueError: the file describes another family, with the reason.
        """
        reason = why_not_molmoe(config_dict)
        if reason is not None:
            raise ValueError(f"not a MolmoE config: {reason}")
        return super().from_dict(config_dict, **kwargs)

    def check_supported(self) -> None:
        """Raises UnsupportedModelError naming the first key whose value cannot be computed."""
        for key, allowed in _REQUIRED.items():
            value = getattr(self, key, None)
            if value not in allowed:
                raise _unsupported(key, value, repr(allowed[0]))
        for key, part, whole_key, whole in (
            ("n_heads", self.n_heads, "d_model", self.d_model),
            ("n_kv_heads", self.num_key_value_heads, "n_heads", self.n_heads),
        ):
            if part < 1 or whole % part:
                raise _unsupported(key, part, f"a divisor of {whole_key}={whole}")
        if not 1 <= self.moe_top_k <= self.moe_num_experts:
            raise _unsupported("moe_top_k", self.moe_top_k, f"1 to {self.moe_num_experts} experts")
        if self.head_dim not in (None, self.attention_head_dim):
            raise _unsupported(
                "head_dim", self.head_dim, f"d_model/n_heads={self.attention_head_dim}"
            )
        vision = self.vision_backbone
        if vision.image_model_type != "openai":
            raise _unsupported("image_model_type", vision.image_model_type, "'openai'")
        layers = vision.image_num_layers
        wrong = [layer for layer in self.vit_layers if not -layers <= layer < layers]
        if wrong or not self.vit_layers:
            raise _unsupported(
                "vit_layers", list(self.vit_layers), f"layers of a tower that has {layers}"
            )

    def to_dict(self) -> dict[str, Any]:
        """As the base class, without ``auto_map``: the remote code it names is not needed here."""
        output = super().to_dict()
        output.pop("auto_map", None)
        return output


def _unsupported(key: str, value: Any, allowed: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"MolmoE config: {key}={value!r} is not supported, only {allowed}")
