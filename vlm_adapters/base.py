"""The adapter contract: what a family must tell, so that policies need not know it.

An adapter knows one family of vision-language MoEs: where its MoE layers are, what its
router's output means, which tokens are image tokens, how to load it. It knows nothing of
capacity policies. Everything it returns refers to the model; it never changes the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class UnsupportedModelError(ValueError):
    """The model cannot be run under a capacity policy; the message says what was looked for."""


class ModelLoadError(ValueError):
    """A checkpoint is missing or incomplete; one line that says what is needed."""


@dataclass(frozen=True)
class MoELayer:
    """One MoE layer of a model.

    Attributes:
        name: dotted name of the block inside the model.
        index: position among the MoE layers, 0-based (not the decoder layer number).
        block: the module that holds router and experts.
        router: module whose forward returns ``(logits, top_k_weights, top_k_index)``.
        experts: module called as ``experts(hidden_states, top_k_index, top_k_weights)``.
        num_experts: E, routed experts only.
        top_k: K.
        arguments: names of the experts module's arguments: hidden states, index, weights.
    """

    name: str
    index: int
    block: nn.Module
    router: nn.Module
    experts: nn.Module
    num_experts: int
    top_k: int
    arguments: tuple[str, str, str] = ("hidden_states", "top_k_index", "top_k_weights")


@dataclass(frozen=True)
class RouterChoice:
    """What the router of one layer chose, in plain tensors.

    Attributes:
        scores: ``[T, E]``, score of every expert, the quantity that a weight is proportional to.
        index: ``[T, K]`` int64.
        weights: ``[T, K]``, as handed to the experts.
        allowed: ``[T, E]`` bool, or None when every expert may be used: the groups of a
            group-limited router.
    """

    scores: Tensor
    index: Tensor
    weights: Tensor
    allowed: Tensor | None = None


@dataclass(frozen=True)
class LoadedVLM:
    """A model ready to answer: ``vlm.model``, ``vlm.processor``, ``vlm.adapter``."""

    model: nn.Module
    processor: Any
    adapter: Adapter
    source: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def prepare(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Turns one conversation into model inputs on the model's device.

        Args:
            messages: chat messages; content parts are ``{"type": "image", "image": PIL image}``
                and ``{"type": "text", "text": str}``.

        Returns:
            Keyword arguments for ``model(...)`` and ``model.generate(...)``, batch size 1.

        Raises:
            ValueError: an image was given but no token is tagged as image.
        """
        return self.adapter.prepare(self, [messages])

    def prepare_batch(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        """Like :meth:`prepare` for several conversations, left-padded to one batch."""
        return self.adapter.prepare(self, conversations)

    def decode(self, inputs: Mapping[str, Any], generated: Tensor) -> list[str]:
        """Text of what ``generate`` added to the prompts, one string per row."""
        return self.adapter.decode(self, inputs, generated)


class Adapter(ABC):
    """Base class of the family adapters.

    Attributes:
        name: registry name.
    """

    name: ClassVar[str]

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def matches(cls, config: Any) -> bool:
        """Whether this adapter takes a model with that configuration.

        Args:
            config: a configuration object or the dictionary of a ``config.json``.

        Raises:
            UnsupportedModelError: the configuration looks like this family but is a relative
                of it that cannot be run (a dense model of the same type, say).
        """

    @abstractmethod
    def moe_layers(self, model: nn.Module) -> list[MoELayer]:
        """All MoE layers in forward order.

        Raises:
            UnsupportedModelError: none was found, or a layer was found that cannot be covered.
        """

    @abstractmethod
    def read_scores(self, layer: MoELayer, router_output: Any, hidden: Tensor) -> RouterChoice:
        """Reads a router's output.

        Args:
            layer: the layer whose router ran.
            router_output: what its forward returned.
            hidden: what went into the router, ``[T, D]`` or ``[B, S, D]``.
        """

    @abstractmethod
    def tag_tokens(self, inputs: Mapping[str, Any]) -> Tensor:
        """Modality of every token of a forward pass.

        Args:
            inputs: the keyword arguments of the forward pass.

        Returns:
            ``[B, S]`` uint8 of :class:`vlm_adapters.modality.Modality`; padding is PAD.

        Raises:
            ValueError: the inputs hold pixels but no token can be tagged as image, or the
                tokens cannot be tagged at all (``inputs_embeds`` alone).
        """

    def after_loading(self, model: nn.Module) -> None:
        """Mends what the installed transformers lacks for this family, if anything.

        :meth:`load` does it by itself; a model that something else loaded needs the call.
        """
        return None

    def entry(self, model: nn.Module) -> nn.Module:
        """The module whose forward gets the token ids: the model itself, or a part of it."""
        return model

    def seam(
        self, model: nn.Module, layers: list[MoELayer], *, skip_dropped: bool
    ) -> AbstractContextManager[list[MoELayer]]:
        """Gives every layer a router and an experts module that hooks can reach.

        Nothing to do for families that have them. Others stand in for a block's forward while
        the context is open, and give back layers that name the stand-ins.

        Args:
            model: the model.
            layers: from :meth:`moe_layers`.
            skip_dropped: whether dropped assignments are to be left out of the work; with False
                the result must be bit-identical to the untouched model if nothing is dropped.
        """
        return nullcontext(layers)

    def layer_tokens(self, layer: MoELayer, inputs: Mapping[str, Any]) -> Tensor | None:
        """Which tokens enter a layer: ``[B, S]`` bool, or None when all do."""
        return None

    @classmethod
    @abstractmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "cpu",
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> LoadedVLM:
        """Loads model and processor from a folder or hub id."""

    @classmethod
    def tiny_model(cls, seed: int = 0) -> LoadedVLM:
        """A model of this family with random weights, made without any download."""
        raise UnsupportedModelError(f"{cls.__name__} offers no tiny model")

    @abstractmethod
    def prepare(
        self, vlm: LoadedVLM, conversations: Sequence[Sequence[Mapping[str, Any]]]
    ) -> dict[str, Any]:
        """See :meth:`LoadedVLM.prepare_batch`."""

    @abstractmethod
    def decode(self, vlm: LoadedVLM, inputs: Mapping[str, Any], generated: Tensor) -> list[str]:
        """See :meth:`LoadedVLM.decode`."""
