"""DeepSeek-VL2 written out slowly in float64, from original parameter names, for one prompt.

It shares nothing with the model under test but the checkpoint: no transformers parts, loops instead
of reshapes wherever an order matters. The recorded samples anchor it; random configurations are
then compared with it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Reference:
    """One model: original parameters and the raw ``config.json``."""

    def __init__(self, parameters: dict[str, Tensor], config: dict[str, Any]) -> None:
        self.p = {key: value.double() for key, value in parameters.items()}
        self.config = config
        self.text = config["language_config"]
        self.routing: dict[int, tuple[Tensor, Tensor]] = {}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.p[name + ".weight"], self.p.get(name + ".bias"))

    def layer_norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.p[name + ".weight"], self.p[name + ".bias"]
        return F.layer_norm(x, weight.shape, weight, bias, 1e-6)

    def rms_norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * self.p[name + ".weight"]

    # -- vision ----------------------------------------------------------------------

    def tower(self, tiles: Tensor) -> Tensor:
        config = self.config["vision_config"]
        heads = config["heads"]
        weight, bias = (self.p[f"vision.patch_embed.proj.{kind}"] for kind in ("weight", "bias"))
        patches = F.conv2d(tiles.double(), weight, bias, stride=config["patch_size"])
        x = patches.flatten(2).transpose(1, 2) + self.p["vision.pos_embed"]
        for layer in range(config["layers"]):
            name = f"vision.blocks.{layer}."
            q, k, v = self.linear(name + "attn.qkv", self.layer_norm(name + "norm1", x)).chunk(
                3, -1
            )
            outputs = []
            for part in range(heads):
                size = q.shape[-1] // heads
                cut = slice(part * size, (part + 1) * size)
                scores = q[..., cut] @ k[..., cut].transpose(1, 2) / math.sqrt(size)
                outputs.append(scores.softmax(-1) @ v[..., cut])
            x = x + self.linear(name + "attn.proj", torch.cat(outputs, -1))
            hidden = self.linear(name + "mlp.fc1", self.layer_norm(name + "norm2", x))
            x = x + self.linear(name + "mlp.fc2", F.gelu(hidden, approximate="tanh"))
        return self.layer_norm("vision.norm", x)

    def project(self, features: Tensor) -> Tensor:
        """``[N, g * g, C]`` to ``[N, t, t, D]``."""
        config = self.config["projector_config"]
        ratio = config.get("downsample_ratio", 2)
        grid = math.isqrt(features.shape[1])
        side = math.ceil(grid / ratio)
        merged = features.new_zeros(len(features), side, side, features.shape[2], ratio * ratio)
        for row in range(grid):
            for column in range(grid):
                place = (row % ratio) * ratio + column % ratio
                merged[:, row // ratio, column // ratio, :, place] = features[
                    :, row * grid + column
                ]
        x = merged.flatten(3)
        names = sorted(
            {key.rsplit(".", 1)[0] for key in self.p if key.startswith("projector.layers.")},
            key=lambda name: int(name.rsplit(".", 1)[1]),
        )
        for name in names[:-1]:
            x = F.gelu(self.linear(name, x))
        return self.linear(names[-1], x)

    def image(self, squares: Tensor, across: int, down: int) -> Tensor:
        """``[1 + across * down, t, t, D]`` to the vectors of one image."""
        newline = self.p["image_newline"]
        side = squares.shape[1]
        whole, local = [], []
        for row in range(side):
            whole += [*squares[0, row], newline]
        for tile_row in range(down):
            for row in range(side):
                for tile_column in range(across):
                    local += [*squares[1 + tile_row * across + tile_column, row]]
                local.append(newline)
        separator = [self.p["view_seperator"]]
        head = self.config.get("global_view_pos", "head") == "head"
        return torch.stack(whole + separator + local if head else local + separator + whole)

    def embed(self, ids: Tensor, mask: Tensor, tiles: Tensor, crops: list[list[int]]) -> Tensor:
        x = self.p["language.model.embed_tokens.weight"][ids].clone()
        vectors, start = [], 0
        for across, down in crops:
            if across == 0:
                break
            count = 1 + across * down
            squares = self.project(self.tower(tiles[start : start + count]))
            vectors.append(self.image(squares, across, down))
            start += count
        if vectors:
            x[mask] = torch.cat(vectors)
        return x

    # -- language --------------------------------------------------------------------

    def frequencies(self, width: int, length: int) -> tuple[list[float], float]:
        """Angle per position of each pair, and the factor on cos and sin."""
        base = self.text.get("rope_theta", 10000.0)
        scaling = self.text.get("rope_scaling") or {}
        kind, factor = scaling.get("type"), scaling.get("factor", 1.0)
        longest = self.text["max_position_embeddings"]
        if kind == "dynamic" and length > longest:
            base *= (factor * length / longest - (factor - 1)) ** (width / (width - 2))
        plain = [base ** (-2 * i / width) for i in range(width // 2)]
        if kind == "linear":
            return [value / factor for value in plain], 1.0
        if kind != "yarn":
            return plain, 1.0
        original = scaling.get("original_max_position_embeddings", 4096)

        def pair_of(turns: float) -> float:
            return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

        low = max(math.floor(pair_of(scaling.get("beta_fast", 32))), 0)
        high = min(math.ceil(pair_of(scaling.get("beta_slow", 1))), width - 1)
        blended = []
        for i, value in enumerate(plain):
            ramp = min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0)
            blended.append(value / factor * ramp + value * (1 - ramp))
        return blended, mscale(factor, scaling.get("mscale", 1)) / mscale(
            factor, scaling.get("mscale_all_dim", 0)
        )

    def rotate(self, x: Tensor, interleaved: bool) -> Tensor:
        """RoPE on ``[S, width]``."""
        length, width = x.shape
        angles, scale = self.frequencies(width, length)
        turned = torch.empty_like(x)
        for i, angle in enumerate(angles):
            one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + width // 2)
            phase = torch.arange(length, dtype=torch.float64) * angle
            cos, sin = phase.cos() * scale, phase.sin() * scale
            turned[:, one] = x[:, one] * cos - x[:, two] * sin
            turned[:, two] = x[:, two] * cos + x[:, one] * sin
        return turned

    def attention(self, name: str, x: Tensor) -> Tensor:
        text = self.text
        heads = text["num_attention_heads"]
        outputs = []
        if not text.get("use_mla", True):
            size = text["hidden_size"] // heads
            sharing = heads // (text.get("num_key_value_heads") or heads)
            q, k, v = (self.linear(f"{name}.{part}_proj", x) for part in "qkv")
            for head in range(heads):
                mine = slice(head * size, (head + 1) * size)
                theirs = slice(head // sharing * size, (head // sharing + 1) * size)
                query, key = self.rotate(q[:, mine], False), self.rotate(k[:, theirs], False)
                outputs.append(causal(query, key, v[:, theirs], size**-0.5))
            return self.linear(f"{name}.o_proj", torch.cat(outputs, -1))
        nope, rope, value = (
            text[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        if text.get("q_lora_rank") is None:
            q = self.linear(f"{name}.q_proj", x)
        else:
            low = self.rms_norm(f"{name}.q_a_layernorm", self.linear(f"{name}.q_a_proj", x), 1e-6)
            q = self.linear(f"{name}.q_b_proj", low)
        joint = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        latent = self.rms_norm(f"{name}.kv_a_layernorm", joint[:, :-rope], 1e-6)
        expanded = self.linear(f"{name}.kv_b_proj", latent)
        shared = self.rotate(joint[:, -rope:], True)
        scale = (nope + rope) ** -0.5
        scaling = text.get("rope_scaling") or {}
        if scaling.get("mscale_all_dim"):
            scale *= mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
        for head in range(heads):
            mine = q[:, head * (nope + rope) : (head + 1) * (nope + rope)]
            query = torch.cat((mine[:, :nope], self.rotate(mine[:, nope:], True)), -1)
            own = expanded[:, head * (nope + value) : (head + 1) * (nope + value)]
            key = torch.cat((own[:, :nope], shared), -1)
            outputs.append(causal(query, key, own[:, nope:], scale))
        return self.linear(f"{name}.o_proj", torch.cat(outputs, -1))

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = self.linear(f"{name}.gate_proj", x), self.linear(f"{name}.up_proj", x)
        return self.linear(f"{name}.down_proj", F.silu(gate) * up)

    def route(self, name: str, token: Tensor) -> tuple[list[int], list[float]]:
        """Experts of one token and their weights, by ascending expert."""
        text = self.text
        logits = self.linear(name, token)
        sigmoid = text.get("scoring_func", "softmax") == "sigmoid"
        scores = (logits.sigmoid() if sigmoid else logits.softmax(-1)).tolist()
        choice, method = list(scores), text["topk_method"]
        if method == "noaux_tc":
            bias = self.p[name + ".e_score_correction_bias"].tolist()
            choice = [score + one for score, one in zip(scores, bias, strict=True)]
        if method != "greedy":
            groups = text.get("n_group") or 1
            size = len(scores) // groups
            best = []
            for group in range(groups):
                members = sorted(choice[group * size : (group + 1) * size], reverse=True)
                best.append(sum(members[:2]) if method == "noaux_tc" else members[0])
            order = sorted(range(groups), key=lambda group: -best[group])
            kept = set(order[: text.get("topk_group") or 1])
            choice = [value if i // size in kept else 0.0 for i, value in enumerate(choice)]
        top_k = text["num_experts_per_tok"]
        experts = sorted(sorted(range(len(choice)), key=lambda expert: -choice[expert])[:top_k])
        # Only the bias is left out of the weights; an expert outside of the groups weighs nothing.
        worth = scores if method == "noaux_tc" else choice
        weights = [worth[expert] for expert in experts]
        if top_k > 1 and text.get("norm_topk_prob", False):
            total = sum(weights) + 1e-20
            weights = [weight / total for weight in weights]
        return experts, [weight * text.get("routed_scaling_factor", 1.0) for weight in weights]

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        text, name = self.text, f"language.model.layers.{layer}.mlp"
        is_moe = (
            text.get("n_routed_experts")
            and layer >= text.get("first_k_dense_replace", 0)
            and layer % text.get("moe_layer_freq", 1) == 0
        )
        if not is_moe:
            return self.mlp(name, x)
        output = torch.zeros_like(x)
        chosen = [self.route(name + ".gate", token) for token in x]
        for token, (experts, weights) in enumerate(chosen):
            for expert, weight in zip(experts, weights, strict=True):
                output[token] += weight * self.mlp(f"{name}.experts.{expert}", x[token])
        self.routing[layer] = (
            torch.tensor([experts for experts, _ in chosen]),
            torch.tensor([weights for _, weights in chosen]),
        )
        if text.get("n_shared_experts"):
            output = output + self.mlp(name + ".shared_experts", x)
        return output

    def logits(self, x: Tensor) -> Tensor:
        """``[S, D]`` embeddings to ``[S, vocabulary]``; fills ``routing``."""
        eps = self.text.get("rms_norm_eps", 1e-6)
        for layer in range(self.text["num_hidden_layers"]):
            name = f"language.model.layers.{layer}."
            x = x + self.attention(
                name + "self_attn", self.rms_norm(name + "input_layernorm", x, eps)
            )
            x = x + self.feed_forward(
                layer, self.rms_norm(name + "post_attention_layernorm", x, eps)
            )
        return self.linear("language.lm_head", self.rms_norm("language.model.norm", x, eps))


def mscale(factor: float, value: float) -> float:
    return 0.1 * value * math.log(factor) + 1.0 if factor > 1 else 1.0


def causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    scores = query @ key.T * scale
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ value
