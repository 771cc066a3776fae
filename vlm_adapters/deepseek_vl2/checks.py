"""What of the configuration space this port computes; anything else is refused by name."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from transformers.activations import ACT2FN

from ..base import UnsupportedModelError
from .configuration import DeepseekVLV2Config, DeepseekVLV2TextConfig

TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
SCORING_FUNCS = ("softmax", "sigmoid")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn")
MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def check_config(config: DeepseekVLV2Config) -> None:
    """Raises UnsupportedModelError naming the first field whose value cannot be computed."""
    vision, projector = config.vision_config, config.projector_config
    language = config.language_config
    _one_of("tile_tag", config.tile_tag, ("2D",))
    _one_of("vision_config.class_token", vision.class_token, (False,))
    _one_of("vision_config.ignore_head", vision.ignore_head, (True,))
    _one_of("projector_config.projector_type", projector.projector_type, ("downsample_mlp_gelu",))
    _one_of("projector_config.token_pooling", projector.token_pooling, (False,))
    _equal("projector_config.input_dim", projector.input_dim, "vision_config.width", vision.width)
    _equal(
        "projector_config.n_embed",
        projector.n_embed,
        "language_config.hidden_size",
        language.hidden_size,
    )
    _divides("vision_config.heads", vision.heads, "width", vision.width)
    if vision.grid < 1:
        raise _error("vision_config.image_size", vision.image_size, "at least one patch")
    _check_attention(language)
    frequency = language.moe_layer_freq
    if frequency < 1:
        raise _error("language_config.moe_layer_freq", frequency, "a number of layers above 0")
    if any(language.is_moe_layer(layer) for layer in range(language.num_hidden_layers)):
        _check_router(language)


def _check_attention(config: DeepseekVLV2TextConfig) -> None:
    prefix = "language_config."
    heads = config.num_attention_heads
    if config.use_mla:
        for key in MLA_SIZES:
            if not getattr(config, key):
                raise _error(prefix + key, getattr(config, key), "a width above 0 with use_mla")
    else:
        _divides(prefix + "num_attention_heads", heads, "hidden_size", config.hidden_size)
        _divides(prefix + "num_key_value_heads", config.num_key_value_heads, "heads", heads)
    _known(prefix + "hidden_act", config.hidden_act, ACT2FN)
    rope = config.rope_parameters or {}
    rope_type, factor = rope.get("rope_type"), rope.get("factor")
    _one_of(prefix + "rope_scaling.type", rope_type, ROPE_TYPES)
    if rope_type == "default" and factor is not None:
        raise _error(prefix + "rope_scaling.type", None, "a type beside its factor")
    if rope_type != "default" and not (isinstance(factor, int | float) and factor > 0):
        raise _error(prefix + "rope_scaling.factor", factor, "a number above 0")


def _check_router(config: DeepseekVLV2TextConfig) -> None:
    prefix = "language_config."
    _one_of(prefix + "topk_method", config.topk_method, TOPK_METHODS)
    _one_of(prefix + "scoring_func", config.scoring_func, SCORING_FUNCS)
    experts, top_k = config.n_routed_experts or 0, config.num_experts_per_tok or 0
    if not 1 <= top_k <= experts:
        raise _error(prefix + "num_experts_per_tok", top_k or None, f"1 to {experts} experts")
    groups, kept = config.groups
    _divides(prefix + "n_group", groups, "n_routed_experts", experts)
    if not 1 <= kept <= groups:
        raise _error(prefix + "topk_group", config.topk_group, f"1 to n_group={groups}")


def _one_of(key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise _error(key, value, " or ".join(repr(item) for item in allowed))


def _known(key: str, value: Any, known: Container[Any]) -> None:
    if value not in known:
        raise _error(key, value, "an activation that transformers knows")


def _equal(key: str, value: int, other_key: str, other: int) -> None:
    if value != other:
        raise _error(key, value, f"{other_key}={other}")


def _divides(key: str, value: int | None, of_key: str, of: int) -> None:
    if not value or of % value:
        raise _error(key, value, f"a divisor of {of_key}={of}")


def _error(key: str, value: Any, allowed: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"DeepSeek-VL2 config: {key}={value!r} is not supported, only {allowed}"
    )
