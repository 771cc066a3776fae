"""The MolmoE model: image features added to token embeddings, then a sparse decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration import MolmoeConfig
from .decoder import MolmoeTransformer, rotary_tables
from .generation import MolmoeGenerationMixin
from .merging import add_image_features
from .padding import real_tokens
from .pretrained import MolmoePreTrainedModel
from .vision import MolmoeVisionBackbone


class MolmoeModel(MolmoePreTrainedModel):
    """Vision backbone and decoder without the output layer."""

    config: Any

    def __init__(self, config: MolmoeConfig) -> None:
        config.check_supported()
        super().__init__(config)
        self.transformer = MolmoeTransformer(config)
        self.vision_backbone = MolmoeVisionBackbone(config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_image_features(self, images: Tensor, image_masks: Tensor | None = None) -> Tensor:
        """Crops ``[N, patches, values]``, masks ``[N, patches]`` to vectors ``[N, tokens, D]``."""
        return self.vision_backbone(images, image_masks)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        images: Tensor | None = None,
        image_masks: Tensor | None = None,
        image_input_idx: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """See :meth:`MolmoeForConditionalGeneration.forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        past = cache.get_seq_length() if cache is not None else 0
        given = input_ids if input_ids is not None else inputs_embeds
        assert given is not None
        length = given.shape[1]
        attention_mask = real_tokens(input_ids, attention_mask, past, length)
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.transformer.wte(input_ids.clamp(min=0))
        if images is not None:
            if past:
                raise ValueError(
                    "images with a filled cache: the image belongs to the first forward of a prompt"
                )
            inputs_embeds = add_image_features(
                inputs_embeds, images, image_masks, image_input_idx, self.get_image_features
            )
        elif image_input_idx is not None:
            raise ValueError("image_input_idx without images: there are no features to place")
        if position_ids is None:
            if attention_mask is not None and attention_mask.dim() == 2:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
            else:
                position_ids = torch.arange(past, past + length, device=inputs_embeds.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        tables = rotary_tables(self.config, position_ids.to(inputs_embeds.device))
        hidden_states = inputs_embeds
        for block in self.transformer.blocks:
            hidden_states = block(
                hidden_states,
                position_embeddings=tables,
                attention_mask=mask,
                cache=cache,
                position_ids=position_ids,
                **kwargs,
            )
        return MoeModelOutputWithPast(
            last_hidden_state=self.transformer.ln_f(hidden_states), cache=cache
        )


class MolmoeForConditionalGeneration(MolmoePreTrainedModel, MolmoeGenerationMixin):
    """MolmoE with its output layer; takes the original processor's keys."""

    _tied_weights_keys = {"lm_head.weight": "model.transformer.wte.embedding"}

    def __init__(self, config: MolmoeConfig) -> None:
        super().__init__(config)
        self.model = MolmoeModel(config)
        self.lm_head = nn.Linear(config.d_model, config.output_size, bias=False)
        self.post_init()

    def get_image_features(self, images: Tensor, image_masks: Tensor | None = None) -> Tensor:
        """See :meth:`MolmoeModel.get_image_features`."""
        return self.model.get_image_features(images, image_masks)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        images: Tensor | None = None,
        image_masks: Tensor | None = None,
        image_input_idx: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """One forward pass.

        Args:
            input_ids: ``[B, S]``; -1 is padding. Ids of both embedding tables can be read, but
                logits exist only for the first, embedding_size.
            attention_mask: ``[B, past + S]`` or longer (the rest is ignored), 0 for padding on
                either side. Without it, every id but -1 is a token.
            position_ids: ``[B, S]``; by default tokens are counted without padding.
            cache: keys and values of earlier tokens.
            inputs_embeds: ``[B, S, D]`` instead of ``input_ids``.
            images: ``[B, crops, patches, values]``, only in the first forward of a prompt.
            image_masks: ``[B, crops, patches]``.
            image_input_idx: ``[B, crops, tokens]``, positions; negative for none.
            labels: ``[B, S]``, -100 for positions without loss; shifted here.
            use_cache: whether to return a cache.
            logits_to_keep: only the last so many positions (0: all), or which.
            **kwargs: for the attention function and the recording of outputs.

        Returns:
            ``logits [B, S, embedding_size]``, ``cache``, and what was asked to be recorded.

        Raises:
            ValueError: inputs that do not belong together.
        """
        if kwargs.get("loss_masks") is not None:
            raise ValueError("loss_masks is not supported: set labels to -100 where no loss is due")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            images=images,
            image_masks=image_masks,
            image_input_idx=image_input_idx,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1])
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )
