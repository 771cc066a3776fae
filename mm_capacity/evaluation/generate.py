"""Questions to answers: batches, prepared inputs, greedy decoding under a policy."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mm_capacity.evaluation.vision import encode_images, fresh, n_bytes

if TYPE_CHECKING:
    from mm_capacity.evaluation.models import ModelHandle

DEFAULT_CACHE_BYTES = 2**30
NO_CACHE = {"use_cache": False}
GREEDY = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}


def plain_index(index: Any) -> Any:
    """A question's index as a plain int or str, so that it survives JSON."""
    return index if isinstance(index, str) else int(index)


def split_batches(frame: Any, size: int) -> list[list[Any]]:
    """Indices of consecutive questions, ``size`` at a time."""
    indices = [plain_index(index) for index in frame["index"]]
    return [indices[start : start + size] for start in range(0, len(indices), size)]


@dataclass(frozen=True)
class Prepared:
    """Model inputs of one batch, and the questions that could not be prepared.

    Attributes:
        indices: questions in the rows of ``inputs``.
        inputs: keyword arguments of ``generate``, None when no question is left.
        lost: index -> reason.
    """

    indices: list[Any]
    inputs: Mapping[str, Any] | None
    lost: dict[Any, str] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        return n_bytes(self.inputs)


class Preparer:
    """Prepares the batches of one data set for one model, and keeps what fits.

    Preprocessing and vision tower give the same under every policy, so what is kept saves them
    for all runs but the first. Batches are kept in order until the memory is used up, and never
    replaced: a sweep walks through all of them, so replacing the oldest would never hit.

    Args:
        handle: the model; loaded when the first batch is prepared.
        data: the opened data set.
        batches: indices of the questions of each batch.
        cache_bytes: most memory to use.
    """

    def __init__(
        self,
        handle: ModelHandle,
        data: Any,
        batches: Sequence[Sequence[Any]],
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self.handle = handle
        self.data = data
        self.batches = batches
        self._room = cache_bytes
        self._kept: dict[int, Prepared] = {}

    def __getitem__(self, number: int) -> Prepared:
        if number in self._kept:
            return self._kept[number]
        prepared = self._prepare(self.batches[number])
        if prepared.inputs is not None:
            prepared = replace(
                prepared, inputs=encode_images(self.handle.vlm.model, prepared.inputs)
            )
        if prepared.n_bytes <= self._room:
            self._room -= prepared.n_bytes
            self._kept[number] = prepared
        return prepared

    def _prepare(self, indices: Sequence[Any]) -> Prepared:
        from mm_capacity.evaluation.datasets import BadQuestion

        conversations: dict[Any, Any] = {}
        lost: dict[Any, str] = {}
        for index in indices:
            try:
                conversations[index] = self.data.messages(index)
            except BadQuestion as error:
                lost[index] = str(error.reason)
        if not conversations:
            return Prepared([], None, lost)
        try:
            inputs = self.handle.vlm.prepare_batch(list(conversations.values()))
        except ValueError:
            # The processor refuses the batch: find the questions that it refuses alone.
            refused = self._refused(conversations)
            if not refused:
                raise
            lost.update(refused)
            good = {i: c for i, c in conversations.items() if i not in refused}
            inputs = self.handle.vlm.prepare_batch(list(good.values())) if good else None
            return Prepared(list(good), inputs, lost)
        return Prepared(list(conversations), inputs, lost)

    def _refused(self, conversations: Mapping[Any, Any]) -> dict[Any, str]:
        refused = {}
        for index, conversation in conversations.items():
            try:
                self.handle.vlm.prepare(conversation)
            except ValueError as error:
                refused[index] = f"the processor refused it: {error}"
        return refused


@dataclass(frozen=True)
class Answered:
    """Answers to one batch.

    Attributes:
        texts: one per row of the inputs.
        loads: load counts (``trace.frame()``).
        layers: load of every layer (``trace.layers()``).
        seconds: time of ``generate``, including the policy; the vision tower has run before,
            where the model lets it (:mod:`mm_capacity.evaluation.vision`). Of a wrapper: of all
            that it does, reading the image included.
        notes: what the policy, the hooks or the model had to say, each text once.
    """

    texts: list[str]
    loads: Any
    layers: Any
    seconds: float
    notes: list[str]


def answer(
    vlm: Any,
    inputs: Mapping[str, Any],
    policy: Any,
    *,
    max_new_tokens: int | None,
    seed: int = 0,
    ep_size: int = 1,
    trace_window: str = "sequence",
    check: bool = False,
    use_cache: bool = True,
) -> Answered:
    """Answers one batch greedily under a policy.

    The policy is attached for this batch only, and random numbers start from ``seed``, so a
    batch's answers do not depend on the batches before it: a resumed run gives what an
    uninterrupted one gives.

    Args:
        vlm: the loaded model, or VLMEvalKit's wrapper around it.
        inputs: from the :class:`Preparer`.
        policy: from :func:`mm_capacity.policies.make_policy`.
        max_new_tokens: longest answer, in tokens; None for a wrapper's own number.
        seed: of torch's generators.
        ep_size: R.
        trace_window: what the load is counted over: "sequence" or "batch".
        check: assert load <= C in every layer.
        use_cache: keep keys and values; without, every step is a pass of the whole sequence,
            and the policy acts in each.
    """
    import torch

    from mm_capacity.attach import limit_capacity

    respond = getattr(vlm, "respond", None)  # a wrapper generates and decodes by itself
    torch.manual_seed(seed)
    with (
        warnings.catch_warnings(record=True) as caught,
        torch.no_grad(),
        limit_capacity(
            vlm.model,
            policy,
            adapter=vlm.adapter,
            ep_size=ep_size,
            trace_window=trace_window,
            check=check,
        ) as trace,
    ):
        warnings.simplefilter("default")
        _synchronize(vlm.model)
        start = time.perf_counter()
        if respond is not None:
            texts = respond(inputs, max_new_tokens=max_new_tokens, use_cache=use_cache)
        else:
            generated = vlm.model.generate(
                **fresh(inputs),
                max_new_tokens=max_new_tokens,
                **GREEDY,
                **({} if use_cache else NO_CACHE),
            )
        _synchronize(vlm.model)
        seconds = time.perf_counter() - start
    said = [str(w.message) for w in caught if not issubclass(w.category, DeprecationWarning)]
    notes = dict.fromkeys([*trace.notes, *said])
    frame = trace.frame()
    if respond is None:
        texts = vlm.decode(inputs, generated)
    else:
        vlm.check_tagged(inputs, frame)
        notes.update(dict.fromkeys(vlm.notes()))
    return Answered(list(texts), frame, trace.layers(), seconds, list(notes))


def _synchronize(model: Any) -> None:
    """Waits for the accelerator, so that the clock measures work and not launches."""
    import torch

    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
