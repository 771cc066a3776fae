"""The image side of MolmoE: CLIP tower, padding vectors, attention pooling, projector."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.olmoe.modeling_olmoe import eager_attention_forward
from transformers.utils.generic import is_flash_attention_requested

from .configuration import MolmoeConfig

PAD_CROP = -1.0  # every value of a crop that only fills up a batch


class MolmoeVisionAttention(nn.Module):
    """Full attention between image vectors, in float32 when the config says so.

    Args:
        config: the whole model's config.
        input_size: width of queries, keys and values before their projection.
    """

    is_causal = False

    def __init__(self, config: MolmoeConfig, input_size: int) -> None:
        super().__init__()
        vision = config.vision_backbone
        heads, self.head_dim = vision.image_num_heads, vision.image_head_dim
        kv_heads = vision.image_num_key_value_heads or heads
        self.config = config
        self.num_key_value_groups = heads // kv_heads
        self.scaling = self.head_dim**-0.5
        self.wq = nn.Linear(input_size, heads * self.head_dim)
        self.wk = nn.Linear(input_size, kv_heads * self.head_dim)
        self.wv = nn.Linear(input_size, kv_heads * self.head_dim)
        self.wo = nn.Linear(heads * self.head_dim, vision.image_emb_dim)

    def forward(self, inputs: Tensor, query: Tensor | None = None) -> Tensor:
        """``inputs [N, S, width]``, ``query [N, Q, width]`` (or inputs) to ``[N, Q, out]``."""
        query = inputs if query is None else query
        states = [
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project, x in ((self.wq, query), (self.wk, inputs), (self.wv, inputs))
        ]
        # Flash kernels have no float32; with them the tower runs in the model's own precision.
        if self.config.float32_attention and not is_flash_attention_requested(self.config):
            states = [state.float() for state in states]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, _ = attend(self, *states, None, dropout=0.0, scaling=self.scaling, is_causal=False)
        return self.wo(output.flatten(-2).to(inputs.dtype))


class MolmoeVisionMLP(nn.Module):
    """The feed-forward part of a CLIP block; quick GELU whatever the config names."""

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__()
        vision = config.vision_backbone
        self.w1 = nn.Linear(vision.image_emb_dim, vision.image_mlp_dim)
        self.w2 = nn.Linear(vision.image_mlp_dim, vision.image_emb_dim)
        self.act = ACT2FN["quick_gelu"]

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(x)))


class MolmoeVisionBlock(GradientCheckpointingLayer):
    """One pre-norm block of the tower."""

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__()
        vision = config.vision_backbone
        self.attention = MolmoeVisionAttention(config, vision.image_emb_dim)
        self.feed_forward = MolmoeVisionMLP(config)
        self.attention_norm = nn.LayerNorm(vision.image_emb_dim, eps=vision.image_norm_eps)
        self.ffn_norm = nn.LayerNorm(vision.image_emb_dim, eps=vision.image_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class MolmoeVisionTransformer(nn.Module):
    """CLIP ViT without its last layer norm."""

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__()
        vision = config.vision_backbone
        width, patch = vision.image_emb_dim, vision.image_patch_size
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.positional_embedding = nn.Parameter(torch.empty(vision.image_num_pos, width))
        self.patch_embedding = nn.Linear(patch * patch * 3, width, bias=False)
        self.pre_ln = nn.LayerNorm(width, eps=vision.image_norm_eps)
        blocks = [MolmoeVisionBlock(config) for _ in range(vision.image_num_layers)]
        self.transformer = nn.ModuleDict({"resblocks": nn.ModuleList(blocks)})

    def positions(self, patches: int) -> Tensor:
        """``[1 + patches, width]``; resized when the weights are for another (square) grid."""
        table = self.positional_embedding
        if patches == table.shape[0] - 1:
            return table
        old, new = round((table.shape[0] - 1) ** 0.5), round(patches**0.5)
        if old * old != table.shape[0] - 1 or new * new != patches:
            raise ValueError(
                f"{patches} patches in a crop, position embeddings for {table.shape[0] - 1}: "
                "only square grids can be resized into one another"
            )
        grid = table[1:].unflatten(0, (old, old)).permute(2, 0, 1)[None].float()
        grid = F.interpolate(grid, (new, new), mode="bicubic", align_corners=False, antialias=True)
        return torch.cat([table[:1], grid[0].flatten(1).T.to(table.dtype)])

    def forward(self, patches: Tensor, layers: list[int]) -> Tensor:
        """Hidden states of some layers, side by side.

        Args:
            patches: ``[N, patches, values]``.
            layers: 0-based layers, in the order of the output's channels. Layers above the highest
                are not computed.

        Returns:
            ``[N, 1 + patches, len(layers) * width]``, class token first.
        """
        x = self.patch_embedding(patches)
        first = self.class_embedding.to(x.dtype).expand(x.shape[0], 1, -1)
        x = torch.cat([first, x], dim=1) + self.positions(patches.shape[1]).to(x.dtype)
        x = self.pre_ln(x)
        seen = {}
        blocks = list(self.transformer["resblocks"].children())[: max(layers) + 1]
        for number, block in enumerate(blocks):
            x = block(x)
            if number in layers:
                seen[number] = x
        return torch.cat([seen[number] for number in layers], dim=-1)


class MolmoeImageProjector(nn.Module):
    """Gated feed-forward from the tower's width to the decoder's."""

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__()
        width, hidden = config.vision_backbone.image_emb_dim, config.intermediate_size
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, config.d_model, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MolmoeVisionBackbone(nn.Module):
    """Crops to the vectors that are added to the token embeddings."""

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__()
        width = config.vision_backbone.image_emb_dim * len(config.vit_layers)
        total = config.vision_backbone.image_num_layers
        self.layers = [layer % total for layer in config.vit_layers]
        self.pool = (config.image_pooling_h, config.image_pooling_w)
        self.image_vit = MolmoeVisionTransformer(config)
        self.image_pooling_2d = MolmoeVisionAttention(config, width)
        self.image_projector = MolmoeImageProjector(config)
        self.pad_embed = nn.Parameter(torch.empty(2, width))

    def encode(self, images: Tensor, image_masks: Tensor | None) -> Tensor:
        """Tower output of every patch, ``[N, patches, width]``, padding vectors added.

        Args:
            images: ``[N, patches, values]``. A crop that is -1 throughout only fills up the batch.
                It is looked for in the given precision: after a cast to bfloat16 single values of
                real crops are -1 too, which must not blank them.
            image_masks: ``[N, patches]``, share of real pixels. 0 adds the first padding vector;
                any other value below 1 the second, the -1 of a last crop included.
        """
        blank = (images == PAD_CROP).flatten(1).all(dim=1)
        features = self.image_vit(images.to(self.pad_embed.dtype), self.layers)[:, 1:]
        features = features.masked_fill(blank[:, None, None], 0.0)
        if image_masks is not None:
            share = image_masks.float()[..., None]
            none, part = share == 0, (share < 1) & (share != 0)
            kind = self.pad_embed[part.squeeze(-1).long()]
            features = features + torch.where(none | part, kind, torch.zeros_like(kind))
        return features

    def forward(self, images: Tensor, image_masks: Tensor | None) -> Tensor:
        """``images [N, patches, values]``, ``image_masks [N, patches]`` to ``[N, tokens, D]``."""
        features = self.encode(images, image_masks)
        side = round(features.shape[1] ** 0.5)
        height, width = self.pool
        grid = features.unflatten(1, (side, side))
        # A grid that the windows do not divide is filled up with zeros at the bottom and right.
        grid = F.pad(grid, (0, 0, 0, -side % width, 0, -side % height))
        windows = grid.unflatten(2, (-1, width)).unflatten(1, (-1, height)).transpose(2, 3)
        windows = windows.flatten(3, 4).flatten(0, 2)
        pooled = self.image_pooling_2d(windows, windows.mean(dim=1, keepdim=True))
        return self.image_projector(pooled.view(images.shape[0], -1, pooled.shape[-1]))
