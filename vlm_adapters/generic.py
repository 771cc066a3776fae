"""Adapter for native transformers-5 mixture-of-experts models.

Router mathematics: whatever :mod:`vlm_adapters.routers` reads off the router's class: softmax or
sigmoid, bias for the choice, groups, normalisation, scaling. The router module returns
``(logits, top_k_weights, top_k_index)`` and a sibling experts module is called with
``(hidden_states, top_k_index, top_k_weights)`` and skips the id E. Shared experts are outside of
the seam: they see every token and are never capped.

Token layout: from ``mm_token_type_ids`` where the processor gives them, otherwise from the
image and video token ids of the configuration (:mod:`vlm_adapters.tagging`). Start, end and
separator tokens are text, audio tokens too. Of a model without image settings every token is text.

Not supported: models whose top-k sits inside the block (no router module), experts of a vision
or audio tower (left alone: their tokens are patches), quantised experts, prompts passed as
``inputs_embeds`` without ids.

Source: ``transformers/models/*/modeling_*.py`` of transformers 5.24 (interfaces only).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .base import Adapter, LoadedVLM, MoELayer, RouterChoice, UnsupportedModelError
from .modality import Modality
from .native_parts import (
    EXPERTS_ARGUMENTS,
    check_not_quantised,
    expert_count,
    experts_arguments,
    find_router,
)
from .registry import config_value
from .routers import allowed_experts, formula_of_class, scores_of, selection_scores
from .tagging import (
    IMAGE_ID_KEYS,
    IMAGE_PIXEL_KEYS,
    VIDEO_ID_KEYS,
    VIDEO_PIXEL_KEYS,
    TokenIds,
    first_id,
    frames_by_pixels,
    mark_padding,
    pixels_given,
    tags_of,
)

# Parts of a model whose tokens are not those of the prompt.
OTHER_TOWERS = frozenset(
    ("visual", "vision_tower", "vision_model", "vision_encoder", "audio_tower", "talker", "mtp")
)
VISION_KEYS = ("vision_config", "vision_tower", "vision_backbone", "mm_vision_tower")


class NativeAdapter(Adapter):
    """Generic adapter; see the module docstring.

    Attributes:
        model_types: values of ``config.model_type`` that a named family takes.
    """

    name: ClassVar[str] = "native"
    model_types: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def matches(cls, config: Any) -> bool:
        """Whether this adapter takes a model with that configuration (object or dict)."""
        if cls.model_types:
            return config_value(config, "model_type") in cls.model_types
        text = config_value(config, "text_config")
        if text is not None and config_value(config, "vision_config") is not None:
            return expert_count(text) > 1
        text_only = all(config_value(config, key) is None for key in ("text_config", *VISION_KEYS))
        return text_only and expert_count(config) > 1

    @property
    def text_only(self) -> bool:
        """Whether the model takes no images."""
        return all(config_value(self.config, key) is None for key in VISION_KEYS)

    # -- structure -------------------------------------------------------------------

    def moe_layers(self, model: nn.Module) -> list[MoELayer]:
        layers: list[MoELayer] = []
        for name, block in model.named_modules():
            if OTHER_TOWERS.intersection(name.split(".")):
                continue
            for child_name, child in block.named_children():
                arguments = experts_arguments(child)
                if arguments is None:
                    if child_name == "experts":
                        raise self._unreachable(name, child)
                    continue
                found = find_router(block, child)
                if found is None:
                    raise UnsupportedModelError(
                        f"{type(model).__name__}: layer {name!r} has experts "
                        f"({type(child).__name__}) but no router module beside them (looked for a "
                        "child with an integer 'top_k'); this family needs an adapter of its own"
                    )
                check_not_quantised(name, child)
                formula_of_class(type(found[0]))
                layers.append(
                    MoELayer(
                        name=name,
                        index=len(layers),
                        block=block,
                        router=found[0],
                        experts=child,
                        num_experts=child.num_experts,
                        top_k=found[1],
                        arguments=arguments,
                    )
                )
        if not layers:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no mixture-of-experts layer: looked through "
                f"{sum(1 for _ in model.modules())} modules for one with 'num_experts' that is "
                f"called with {' and '.join(EXPERTS_ARGUMENTS[0])}"
            )
        return layers

    @staticmethod
    def _unreachable(name: str, experts: nn.Module) -> UnsupportedModelError:
        called = list(inspect.signature(type(experts).forward).parameters)[1:]
        if tuple(called[1:3]) in EXPERTS_ARGUMENTS:
            what = "do not say how many they are ('num_experts')"
        else:
            what = (
                f"are called with ({', '.join(called)}), not with "
                f"{' and '.join(EXPERTS_ARGUMENTS[0])}"
            )
        return UnsupportedModelError(
            f"experts of layer {name!r} ({type(experts).__name__}) {what}: quantised or replaced "
            "experts are out of reach, load the model dequantised"
        )

    def read_scores(self, layer: MoELayer, router_output: Any, hidden: Tensor) -> RouterChoice:
        if not isinstance(router_output, tuple) or len(router_output) != 3:
            raise UnsupportedModelError(
                f"router of layer {layer.name!r} ({type(layer.router).__name__}) returned "
                f"{type(router_output).__name__}, expected (logits, top_k_weights, top_k_index)"
            )
        logits, weights, index = router_output
        scores = scores_of(layer.router, logits)
        allowed = allowed_experts(layer.router, selection_scores(layer.router, scores))
        return RouterChoice(scores=scores, index=index, weights=weights, allowed=allowed)

    # -- tokens ----------------------------------------------------------------------

    @property
    def token_config(self) -> Any:
        """The configuration that holds the image and video token ids."""
        return self.config

    @property
    def token_ids(self) -> TokenIds:
        """Ids of the tokens that an image or a video is written with."""
        config = self.token_config
        return TokenIds(
            image=first_id(config, IMAGE_ID_KEYS),
            video=first_id(config, VIDEO_ID_KEYS),
            video_start=first_id(config, ("video_start_token_id",)),
            video_end=first_id(config, ("video_end_token_id",)),
        )

    def tag_tokens(self, inputs: Mapping[str, Any]) -> Tensor:
        ids = inputs.get("input_ids")
        if ids is None:
            raise ValueError(
                "cannot tell image tokens from text: the model was called with 'inputs_embeds' "
                "only; pass 'input_ids' (the embeddings are made from them)"
            )
        types = inputs.get("mm_token_type_ids")
        if types is not None and types.shape != ids.shape:
            types = None  # of the whole prompt, while a cache holds a part of it
        tags = tags_of(ids, types, self.token_ids)
        tags = mark_padding(frames_by_pixels(tags, inputs), inputs.get("attention_mask"))
        given = pixels_given(inputs, (*IMAGE_PIXEL_KEYS, *VIDEO_PIXEL_KEYS))
        if given and not bool(((tags == Modality.IMAGE) | (tags == Modality.VIDEO)).any()):
            raise ValueError(
                f"the inputs hold {given[0]!r} but no token is tagged as image: looked at "
                f"'mm_token_type_ids' and for the token id {self.token_ids.image} "
                f"({' / '.join(IMAGE_ID_KEYS)} of the configuration)"
            )
        return tags

    # -- loading and chat ------------------------------------------------------------

    @classmethod
    def tiny_model(cls, seed: int = 0) -> LoadedVLM:
        from .tiny_build import tiny_vlm

        return tiny_vlm(cls.name, seed)

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "cpu",
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> LoadedVLM:
        import transformers

        from .loading import read_config

        text_only = cls(read_config(path)).text_only
        kind = "AutoModelForCausalLM" if text_only else "AutoModelForImageTextToText"
        model_class = getattr(transformers, kind)
        processor_class = getattr(transformers, "AutoTokenizer" if text_only else "AutoProcessor")
        processor = processor_class.from_pretrained(path, trust_remote_code=trust_remote_code)
        tokenizer = getattr(processor, "tokenizer", processor)
        if getattr(tokenizer, "pad_token", "") is None:
            tokenizer.pad_token = tokenizer.eos_token  # masked wherever it pads
        placed = {"device_map": device} if device == "auto" else {}
        model = model_class.from_pretrained(
            path, dtype=dtype, trust_remote_code=trust_remote_code, **placed, **kwargs
        )
        if not placed:
            model = model.to(device)
        model.eval()
        adapter = cls(model.config)
        adapter.moe_layers(model)
        return LoadedVLM(model=model, processor=processor, adapter=adapter, source=path)

    def prepare(
        self, vlm: LoadedVLM, conversations: Sequence[Sequence[Mapping[str, Any]]]
    ) -> dict[str, Any]:
        inputs = vlm.processor.apply_chat_template(
            [list(messages) for messages in conversations],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": "left"},
        )
        device = next(vlm.model.parameters()).device
        # Processors give float32 pixels; not every vision tower casts them itself.
        dtype = getattr(vlm.model, "dtype", None) or next(vlm.model.parameters()).dtype
        inputs = {
            key: value.to(device, dtype) if value.is_floating_point() else value.to(device)
            for key, value in inputs.items()
        }
        tags = self.tag_tokens(inputs)
        for row, messages in enumerate(conversations):
            images = sum(
                part.get("type") in ("image", "video")
                for message in messages
                if not isinstance(message["content"], str)
                for part in message["content"]
            )
            seen = (tags[row] == Modality.IMAGE) | (tags[row] == Modality.VIDEO)
            if images and not bool(seen.any()):
                raise ValueError(
                    f"conversation {row} holds {images} image(s) but none of its tokens is tagged "
                    "as image: the chat template does not place an image token"
                )
        return inputs

    def decode(self, vlm: LoadedVLM, inputs: Mapping[str, Any], generated: Tensor) -> list[str]:
        new = generated[:, inputs["input_ids"].shape[1] :]
        texts = vlm.processor.batch_decode(
            new, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return [text.strip() for text in texts]
