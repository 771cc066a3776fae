"""DeepSeek-VL2: SigLIP tower, 2x2 patch merger, DeepSeek-V2 decoder.

Inputs keep the original processor's names: ``input_ids``, ``attention_mask``, ``images`` (tiles,
``[B, N, 3, side, side]``), ``images_seq_mask`` (``[B, S]`` bool, positions that image vectors fill)
and ``images_spatial_crop`` (``[B, M, 2]``, tiles across and down of each image).
"""

from __future__ import annotations

import os
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg

from .configuration import DeepseekVLV2Config
from .modeling_joint import DeepseekVLV2Model
from .modeling_text import DeepseekVLV2PreTrainedModel

IMAGE_INPUTS = ("images", "images_seq_mask", "images_spatial_crop")


class DeepseekVLV2ForCausalLM(DeepseekVLV2PreTrainedModel, GenerationMixin):
    """The whole model, loaded from and saved to the original checkpoint layout."""

    config_class = DeepseekVLV2Config
    input_modalities = ["image", "text"]

    def __init__(self, config: DeepseekVLV2Config) -> None:
        super().__init__(config)
        self.model = DeepseekVLV2Model(config)
        language = config.language_config
        self.lm_head = nn.Linear(language.hidden_size, language.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *model_args: Any,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, but a checkpoint that does not fit exactly is an error.

        Raises:
            ModelLoadError: parameters are missing, unexpected or of the wrong shape; lists them.
        """
        from .checkpoint import check_loaded, register

        register()
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("use_safetensors", True)
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        model, info = loaded
        check_loaded(str(pretrained_model_name_or_path), info)
        return (model, info) if wants_info else model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers; writes the original parameter names."""
        from .checkpoint import register

        register()
        super().save_pretrained(*args, **kwargs)

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        images: Tensor | None = None,
        images_seq_mask: Tensor | None = None,
        images_spatial_crop: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Runs the model.

        Args:
            input_ids: ``[B, S]``; or ``inputs_embeds`` ``[B, S, D]``, already with the images.
            attention_mask: ``[B, past + S]``, 0 at padding.
            images: ``[B, N, 3, side, side]`` tiles; see
                :meth:`.modeling_joint.DeepseekVLV2Model.image_vectors`.
            images_seq_mask: ``[B, S]`` bool, or ``[B, L]`` of the whole prompt with a cache that
                holds its beginning.
            images_spatial_crop: ``[B, M, 2]`` tiles across and down of each image.
            position_ids: ``[B, S]``.
            cache: keys and values of earlier tokens.
            labels: ``[B, S]``, -100 where no loss is taken.
            use_cache: return a cache.
            logits_to_keep: compute only the last so many logits (0: all), or those of an index.

        Returns:
            float32 ``logits`` ``[B, S, vocabulary]``, ``cache`` and, when asked for,
            ``hidden_states``, ``attentions``, ``router_logits``.

        Raises:
            ValueError: the image inputs do not fit the ids.
        """
        kwargs.pop("return_dict", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            images=images,
            images_seq_mask=images_seq_mask,
            images_spatial_crop=images_spatial_crop,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits = self.lm_head(hidden).float()
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs
            )
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in transformers; images go in with the prompt, or with every step without cache."""
        inputs = super().prepare_inputs_for_generation(
            input_ids, inputs_embeds=inputs_embeds, is_first_iteration=is_first_iteration, **kwargs
        )
        if not is_first_iteration and kwargs.get("use_cache", True):
            return {key: value for key, value in inputs.items() if key not in IMAGE_INPUTS}
        return inputs

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        model_kwargs = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, *args, **kwargs
        )
        mask = model_kwargs.get("images_seq_mask")
        if mask is not None:
            # A generated <image> id is an ordinary token.
            added = kwargs.get("num_new_tokens", 1)
            model_kwargs["images_seq_mask"] = F.pad(mask, (0, added), value=False)
        return model_kwargs
