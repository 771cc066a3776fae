"""Tower, projector and decoder joined: image vectors take the places of the image tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.siglip.modeling_siglip import SiglipVisionModel

from .checks import check_config
from .configuration import DeepseekVLV2Config
from .modeling_image import DeepseekVLV2Projector, lay_out, row_crops, split_mask, tile_counts
from .modeling_text import DeepseekVLV2PreTrainedModel, DeepseekVLV2TextModel


class DeepseekVLV2Model(DeepseekVLV2PreTrainedModel):
    """Everything but the output layer."""

    config_class = DeepseekVLV2Config
    input_modalities = ["image", "text"]

    def __init__(self, config: DeepseekVLV2Config) -> None:
        check_config(config)
        super().__init__(config)
        width = config.projector_config.n_embed
        # The tower has no experts, and refuses an implementation that was asked for the decoder's.
        config.vision_config._experts_implementation = None
        self.vision_tower = SiglipVisionModel(config.vision_config)
        self.projector = DeepseekVLV2Projector(config)
        self.image_newline = nn.Parameter(torch.empty(width))
        self.view_seperator = nn.Parameter(torch.empty(width))  # spelled as in the checkpoints
        self.language_model = DeepseekVLV2TextModel(config.language_config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DeepseekVLV2Model):
            std = self.config.projector_config.n_embed**-0.5
            init.normal_(module.image_newline, mean=0.0, std=std)
            init.normal_(module.view_seperator, mean=0.0, std=std)

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.embed_tokens

    def set_input_embeddings(self, value: Any) -> None:
        self.language_model.embed_tokens = value

    def image_vectors(self, images: Tensor, images_spatial_crop: Tensor) -> list[Tensor]:
        """The vectors that take the places of the image tokens.

        Args:
            images: ``[B, N, 3, side, side]``; of each row the tiles of its images one after
                another, each image its global view first. Tiles beyond the last image are ignored.
            images_spatial_crop: ``[B, M, 2]``; a row's images end at the first ``[0, 0]``.

        Returns:
            one ``[tokens, D]`` tensor per batch row.

        Raises:
            ValueError: a row has fewer tiles than its crops need.
        """
        crops = row_crops(images_spatial_crop)
        needed = [sum(tile_counts(row)) for row in crops]
        for row, count in enumerate(needed):
            if count > images.shape[1]:
                raise ValueError(
                    f"row {row}: images_spatial_crop {crops[row]} needs {count} tiles, images "
                    f"holds {images.shape[1]}"
                )
        nothing = self.image_newline.new_zeros(0, len(self.image_newline))
        if not sum(needed):
            return [nothing for _ in crops]
        pixels = torch.cat([row[:count] for row, count in zip(images, needed, strict=True)])
        features = self.projector(
            self.vision_tower(pixels.to(self.image_newline.device)).last_hidden_state
        )
        head = self.config.global_view_pos == "head"
        rows = []
        for row_sizes, block in zip(crops, features.split(needed), strict=True):
            laid_out = [
                lay_out(tiles, across, down, self.image_newline, self.view_seperator, head)
                for (across, down), tiles in zip(
                    row_sizes, block.split(tile_counts(row_sizes)), strict=True
                )
            ]
            rows.append(torch.cat(laid_out) if laid_out else nothing)
        return rows

    def embed(
        self,
        input_ids: Tensor,
        images: Tensor | None,
        images_seq_mask: Tensor | None,
        images_spatial_crop: Tensor | None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Token embeddings ``[B, S, D]`` with the image vectors in their places.

        Raises:
            ValueError: mask and images do not fit each other.
        """
        embeds = self.language_model.embed_tokens(input_ids)
        given = images_spatial_crop is not None and bool(images_spatial_crop.any())
        if images_seq_mask is None:
            if images is not None and given:
                raise ValueError("images are given without images_seq_mask, which places them")
            return embeds
        here, before = split_mask(images_seq_mask, input_ids.shape[1], cache)
        marked = int(images_seq_mask.sum())
        if not marked and not given:
            return embeds
        if images is None or images_spatial_crop is None:
            raise ValueError(
                f"images_seq_mask marks {marked} image positions, but images or "
                "images_spatial_crop is missing"
            )
        if marked and not here.any():
            return embeds
        embeds = embeds.clone()
        for row, vectors in enumerate(self.image_vectors(images, images_spatial_crop)):
            places = int(images_seq_mask[row].sum())
            if places != len(vectors):
                raise ValueError(
                    f"row {row}: images_seq_mask marks {places} image positions, the images of the "
                    f"row make {len(vectors)} vectors"
                )
            start = int(before[row].sum())
            mine = here[row].to(embeds.device)
            embeds[row, mine] = vectors[start : start + int(mine.sum())].to(embeds)
        return embeds

    def forward(
        self,
        input_ids: Tensor | None = None,
        images: Tensor | None = None,
        images_seq_mask: Tensor | None = None,
        images_spatial_crop: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """See :meth:`DeepseekVLV2ForCausalLM.forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        if input_ids is not None:
            inputs_embeds = self.embed(
                input_ids, images, images_seq_mask, images_spatial_crop, cache
            )
        return self.language_model(inputs_embeds=inputs_embeds, cache=cache, **kwargs)
