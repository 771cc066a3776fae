"""Generation from the original processor's batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerationMixin

from .padding import to_left_padding

IMAGE_KEYS = ("images", "image_masks", "image_input_idx")


class MolmoeGenerationMixin(GenerationMixin):
    """transformers' generation, for prompts padded on either side."""

    config: Any

    def prepare_inputs_for_generation(
        self, *args: Any, is_first_iteration: bool | None = False, **kwargs: Any
    ) -> dict[str, Any]:
        """As the base class; with a cache the image goes in only once."""
        inputs = super().prepare_inputs_for_generation(
            *args, is_first_iteration=is_first_iteration, **kwargs
        )
        if not is_first_iteration and kwargs.get("use_cache", True):
            for key in IMAGE_KEYS:
                inputs.pop(key, None)
        return inputs

    @torch.no_grad()
    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """As the base class; padding is marked by -1 or by the attention mask.

        Right-padded prompts are moved to the right edge first, since generation appends to the last
        column; the sequences that come back start with the prompts as they were given.
        """
        ids = inputs if inputs is not None else kwargs.pop("input_ids", None)
        continued = kwargs.get("cache") is not None or kwargs.get("inputs_embeds") is not None
        if ids is None or continued:
            return super().generate(ids, *args, **kwargs)
        pad = self.config.pad_token_id
        aligned, changed = to_left_padding(ids, kwargs, 0 if pad is None else pad)
        output = super().generate(aligned, *args, **{**kwargs, **changed})
        sequences = output if isinstance(output, Tensor) else output.sequences
        repeats = sequences.shape[0] // ids.shape[0]
        given = ids.repeat_interleave(repeats, dim=0)
        sequences[:, : ids.shape[1]] = given.to(sequences.device)
        return output

    def generate_from_batch(
        self, batch: dict[str, Tensor], generation_config: Any = None, **kwargs: Any
    ) -> Any:
        """The original name of :meth:`generate` for a batch of the processor's outputs."""
        return self.generate(**batch, generation_config=generation_config, **kwargs)
