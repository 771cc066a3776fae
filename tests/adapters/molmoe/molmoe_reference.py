"""MolmoE as slow, obvious code over a checkpoint's own names; any fast path must equal it.

One prompt at a time, one token and one expert at a time, in the precision of the weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def logits(
    weights: dict[str, Tensor],
    config: dict,
    input_ids: Tensor,
    images: Tensor | None = None,
    image_masks: Tensor | None = None,
    image_input_idx: Tensor | None = None,
) -> Tensor:
    """``input_ids [S]`` (and one image without batch axis) to ``[S, embedding_size]``."""
    t = {name.removeprefix("model."): value for name, value in weights.items()}
    tables = [t["transformer.wte.embedding"]]
    if "transformer.wte.new_embedding" in t:
        tables.append(t["transformer.wte.new_embedding"])
    x = torch.cat(tables)[input_ids]
    if images is not None:
        for crop, features in enumerate(_vision(t, config, images.to(x.dtype), image_masks)):
            for vector, position in zip(features, image_input_idx[crop].tolist(), strict=True):
                if position >= 0:
                    x[position] += vector
    for number in range(config["n_layers"]):
        layer = {
            name.split(f"blocks.{number}.")[1]: value
            for name, value in t.items()
            if name.startswith(f"transformer.blocks.{number}.")
        }
        x = x + _attention(layer, config, x)
        x = x + _experts(layer, config, x)
    x = _rms(x, t["transformer.ln_f.weight"], config)
    return x @ t.get("lm_head.weight", t["transformer.wte.embedding"]).T


def _rms(x: Tensor, weight: Tensor, config: dict) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + config["layer_norm_eps"]).sqrt()


def _attention(layer: dict, config: dict, x: Tensor) -> Tensor:
    width, heads = config["d_model"], config["n_heads"]
    kv_heads, dim = config["n_kv_heads"] or heads, width // heads
    fused = _rms(x, layer["attn.attn_norm.weight"], config) @ layer["attn.att_proj.weight"].T
    q, k, v = fused.split([width, kv_heads * dim, kv_heads * dim], dim=-1)
    q = _rms(q, layer["attn.q_norm.weight"], config).view(len(x), heads, dim)
    k = _rms(k, layer["attn.k_norm.weight"], config).view(len(x), kv_heads, dim)
    v = v.view(len(x), kv_heads, dim)
    out = torch.empty(len(x), heads, dim, dtype=x.dtype)
    for head in range(heads):
        shared = head * kv_heads // heads
        keys = _rotate(k[:, shared], config["rope_theta"])
        scores = _rotate(q[:, head], config["rope_theta"]) @ keys.T / math.sqrt(dim)
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        out[:, head] = scores.masked_fill(later, -math.inf).softmax(-1) @ v[:, shared]
    return out.flatten(1) @ layer["attn.attn_out.weight"].T


def _rotate(x: Tensor, theta: float) -> Tensor:
    out, half = x.clone(), x.shape[-1] // 2
    position = torch.arange(len(x), dtype=x.dtype)
    for i in range(half):
        angle = position / theta ** (i / half)
        a, b = x[:, i], x[:, i + half]
        out[:, i] = a * angle.cos() - b * angle.sin()
        out[:, i + half] = b * angle.cos() + a * angle.sin()
    return out


def _experts(layer: dict, config: dict, x: Tensor) -> Tensor:
    x = _rms(x, layer["mlp.ff_norm.weight"], config)
    chances = (x @ layer["mlp.gate.weight"].T).softmax(-1)
    out = torch.zeros_like(x)
    for token, chance in enumerate(chances):
        for expert in chance.argsort(descending=True)[: config["moe_top_k"]].tolist():
            name = f"mlp.experts.{expert}"
            gate = layer[f"{name}.gate_proj.weight"] @ x[token]
            hidden = gate * gate.sigmoid() * (layer[f"{name}.up_proj.weight"] @ x[token])
            out[token] += chance[expert] * (layer[f"{name}.down_proj.weight"] @ hidden)
    return out


def _vision(t: dict, config: dict, images: Tensor, masks: Tensor) -> list[Tensor]:
    vision = config["vision_backbone"]
    features = []
    for crop, mask in zip(images, masks, strict=True):
        x = _tower(t, config, vision, crop)[1:]
        if bool((crop == -1).all()):
            x = torch.zeros_like(x)
        pad = t["vision_backbone.pad_embed"]
        for patch, share in enumerate(mask.tolist()):
            if share < 1:
                x[patch] += pad[0] if share == 0 else pad[1]
        side = math.isqrt(len(x))
        grid, pooled = x.view(side, side, -1), []
        for i in range(0, side, 2):
            for j in range(0, side, 2):
                window = grid[i : i + 2, j : j + 2].flatten(0, 1)
                mean = window.mean(0, keepdim=True)
                prefix = "vision_backbone.image_pooling_2d"
                pooled.append(_cross(t, prefix, vision, mean, window))
        y = torch.cat(pooled)
        w1, w2, w3 = (t[f"vision_backbone.image_projector.w{i}.weight"] for i in (1, 2, 3))
        gate = y @ w1.T
        features.append((gate * gate.sigmoid() * (y @ w3.T)) @ w2.T)
    return features


def _tower(t: dict, config: dict, vision: dict, crop: Tensor) -> Tensor:
    root = "vision_backbone.image_vit"
    x = crop @ t[f"{root}.patch_embedding.weight"].T
    x = torch.cat([t[f"{root}.class_embedding"][None], x]) + t[f"{root}.positional_embedding"]
    x, states = _layer_norm(t, f"{root}.pre_ln", vision, x), []
    for number in range(vision["image_num_layers"]):
        name = f"{root}.transformer.resblocks.{number}"
        y = _layer_norm(t, f"{name}.attention_norm", vision, x)
        x = x + _cross(t, f"{name}.attention", vision, y, y)
        y = _linear(t, f"{name}.feed_forward.w1", _layer_norm(t, f"{name}.ffn_norm", vision, x))
        x = x + _linear(t, f"{name}.feed_forward.w2", y * (1.702 * y).sigmoid())
        states.append(x)
    return torch.cat([states[layer] for layer in config["vit_layers"]], dim=-1)


def _linear(t: dict, name: str, x: Tensor) -> Tensor:
    return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]


def _layer_norm(t: dict, name: str, vision: dict, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + vision["image_norm_eps"]).sqrt()
    return scaled * t[f"{name}.weight"] + t[f"{name}.bias"]


def _cross(t: dict, name: str, vision: dict, query: Tensor, inputs: Tensor) -> Tensor:
    q, k, v = (
        _linear(t, f"{name}.{part}", x)
        for part, x in (("wq", query), ("wk", inputs), ("wv", inputs))
    )
    heads, dim = vision["image_num_heads"], vision["image_head_dim"]
    kv_heads, out = vision["image_num_key_value_heads"], []
    for head in range(heads):
        shared = head * kv_heads // heads
        here, there = (slice(n * dim, (n + 1) * dim) for n in (head, shared))
        scores = q[:, here] @ k[:, there].T / math.sqrt(dim)
        out.append(scores.softmax(-1) @ v[:, there])
    return _linear(t, f"{name}.wo", torch.cat(out, dim=-1))
