"""How a wrapper runs its model: one prefill and single tokens, or something else.

A capacity window is part of one forward pass. Code that re-runs the whole prompt for each new
token, or feeds the prompt in chunks, has other windows than code that does not; here the forward
passes of the first questions are watched, so that the record can say which it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

WATCHED_QUESTIONS = 3
SHOWN_PASSES = 12
CACHE_KEYS = ("past_key_values", "cache", "cache_params")


@dataclass(frozen=True)
class Pass:
    """One forward pass.

    Attributes:
        tokens: positions that went in, per sequence.
        past: positions that the cache already held.
        caching: whether the pass was asked to keep keys and values; None: not said.
    """

    tokens: int
    past: int
    caching: bool | None = None


@dataclass(frozen=True)
class Pattern:
    """What the passes of one question come to.

    Attributes:
        reruns: passes that repeated the whole sequence for one more token.
        chunks: sizes of the passes that a prompt was split into; empty when it was not.
        prompts: separate prompts that were run.
        long_steps: passes of several tokens after the first new token (guessed ahead).
        cache: False without a KV cache, True with one, None when no pass could tell.
    """

    reruns: int = 0
    chunks: tuple[int, ...] = ()
    prompts: int = 1
    long_steps: int = 0
    cache: bool | None = None


def classify(passes: Sequence[Pass]) -> Pattern:
    """Reads the pattern off the passes of one question.

    Args:
        passes: in order.
    """
    reruns = prompts = long_steps = 0
    chunks: list[int] = []
    cache: bool | None = None
    start: Pass | None = None  # the latest pass that began with an empty cache
    prompt: list[int] = []
    decoding = False
    for one in passes:
        if one.past == 0:
            if start is not None and not decoding and one.tokens == start.tokens + 1:
                reruns += 1
            else:
                prompts += 1
                chunks = chunks or _split(prompt)
            start, prompt, decoding = one, [one.tokens], False
            continue
        cache = True
        if one.tokens == 1:
            decoding = True
        elif decoding:
            long_steps += 1
        else:
            prompt.append(one.tokens)
    chunks = chunks or _split(prompt)
    if reruns or (cache is None and any(one.caching is False for one in passes)):
        cache = False
    return Pattern(reruns, tuple(chunks), prompts, long_steps, cache)


def _split(prompt: Sequence[int]) -> list[int]:
    return list(prompt) if len(prompt) > 1 else []


@dataclass
class PassWatch:
    """Watches the forward passes of the first questions.

    Args:
        model: the module whose forward gets the token ids.
        questions: how many to watch; the hook is gone afterwards.
    """

    model: Any
    questions: int = WATCHED_QUESTIONS
    seen: list[list[Pass]] = field(default_factory=list)

    @contextmanager
    def question(self) -> Iterator[None]:
        """Surrounds one question; does nothing once enough were watched."""
        if len(self.seen) >= self.questions:
            yield
            return
        passes: list[Pass] = []

        def note(module: Any, args: tuple, kwargs: Mapping[str, Any]) -> None:
            one = read_pass(args, kwargs)
            if one is not None:
                passes.append(one)

        handle = self.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
            self.seen.append(passes)
        finally:
            handle.remove()

    def patterns(self) -> list[Pattern]:
        """One for each watched question."""
        return [classify(passes) for passes in self.seen if passes]

    def record(self) -> dict[str, Any]:
        """For run.json: what was seen, and the first question's passes."""
        patterns = self.patterns()
        caches = {pattern.cache for pattern in patterns} - {None}
        return {
            "questions_watched": len(patterns),
            "kv_cache": False if False in caches else True if caches else None,
            "whole_prompt_at_each_step": any(pattern.reruns for pattern in patterns),
            "prefill_chunks": [list(pattern.chunks) for pattern in patterns if pattern.chunks],
            "prompts_per_question": max((pattern.prompts for pattern in patterns), default=0),
            "first_question": [[p.tokens, p.past] for p in self.seen[0][:SHOWN_PASSES]]
            if self.seen
            else [],
        }

    def notes(self) -> list[str]:
        """What changes the capacity's windows, one line each."""
        found: dict[str, None] = {}
        for pattern in self.patterns():
            if pattern.cache is False:
                found[
                    "the wrapper generates without a KV cache: every new token is a pass of the "
                    "whole sequence, so the capacity acts in each and its window grows with the "
                    "answer"
                ] = None
            if pattern.chunks:
                found[
                    f"the wrapper prefills in chunks of up to {max(pattern.chunks)} tokens: each "
                    "chunk is a capacity window of its own, and one of a single token passes "
                    "untouched"
                ] = None
            if pattern.prompts > 1:
                found["the wrapper runs several prompts per question: each is capped by itself"] = (
                    None
                )
            if pattern.long_steps:
                found[
                    "the wrapper runs several new tokens in one pass: such a pass is capped like "
                    "a prompt"
                ] = None
        return list(found)


def read_pass(args: tuple, kwargs: Mapping[str, Any]) -> Pass | None:
    """Tokens and past of a forward pass; None when its inputs show neither ids nor embeddings."""
    inputs = kwargs.get("input_ids")
    if inputs is None:
        inputs = args[0] if args else kwargs.get("inputs_embeds")
    if inputs is None or getattr(inputs, "dim", int)() < 2:
        return None
    tokens = int(inputs.shape[1])
    caching = kwargs.get("use_cache")
    if caching is None and "past_key_values" in kwargs:
        caching = kwargs["past_key_values"] is not None
    return Pass(tokens, _past(kwargs, tokens), caching)


def _past(kwargs: Mapping[str, Any], tokens: int) -> int:
    positions = kwargs.get("cache_position")
    if positions is not None:
        return int(positions[0])
    for key in CACHE_KEYS:
        length = getattr(kwargs.get(key), "get_seq_length", None)
        if length is not None:
            return int(length())
    mask: Any = kwargs.get("attention_mask")
    if getattr(mask, "dim", int)() == 2:
        return max(0, int(mask.shape[1]) - tokens)
    return 0
