"""Greedy decoding for code that decodes its own way, undone on exit and written down.

Two steps, since wrappers keep their settings anywhere: whatever samples among the wrapper's
attributes, keyword dictionaries and generation configurations is set to its neutral value; and
the model's ``generate`` is surrounded on the instance, so that arguments written into the
wrapper's code cannot sample either.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from mm_capacity.evaluation.wrappers_find import plain_parts

# Setting -> the value under which the model's most likely token is taken, unchanged.
NEUTRAL: dict[str, Any] = {
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "best_of_n": 1,
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "penalty_alpha": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
# What else means "no effect", by setting.
ALSO_NEUTRAL: dict[str, tuple[Any, ...]] = {"temperature": (1.0,), "top_k": (-1,)}
# In a call of generate and in a GenerationConfig, None is "not set".
UNSET = frozenset(("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p"))
UNSET_TOO = frozenset(("epsilon_cutoff", "eta_cutoff", "penalty_alpha"))
# Arguments that GenerationMixin.generate knows, of the above.
ENFORCED = ("do_sample", "num_beams", "num_return_sequences", "temperature", "top_p", "top_k")
_MISSING = object()


def samples(key: str, value: Any) -> bool:
    """Whether a setting's value changes which token is taken.

    Args:
        key: one of :data:`NEUTRAL`.
        value: its value.
    """
    if value is None or isinstance(value, str):
        return False
    # 1.0 leaves the distribution as it is; whether it is sampled from says do_sample.
    return value != NEUTRAL[key] and value not in ALSO_NEUTRAL.get(key, ())


def neutral(key: str, *, in_generate: bool) -> Any:
    """The value that a setting gets; ``in_generate``: None where that means "not set"."""
    return None if in_generate and key in UNSET | UNSET_TOO else NEUTRAL[key]


@dataclass
class Decoding:
    """Makes a wrapper decode greedily.

    Args:
        wrapper: VLMEvalKit's model object.
        generators: modules whose ``generate`` decodes.

    Attributes:
        former: place -> value that was replaced.
        calls: calls of ``generate`` that were surrounded.
        error: what ``generate`` raised last while greedy; some wrappers catch everything and
            answer with an excuse.
    """

    wrapper: Any
    generators: Sequence[Any]
    former: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    error: Exception | None = None

    def scan(self) -> None:
        """Fills :attr:`former` from the settings, without changing one."""
        for place, _, key, value, _ in self._places():
            self.former.setdefault(f"{place}.{key}", plain(value))

    @contextmanager
    def greedy(
        self, *, max_new_tokens: int | None = None, use_cache: bool | None = None
    ) -> Iterator[None]:
        """Greedy while open.

        Args:
            max_new_tokens: longest answer; None for the wrapper's own.
            use_cache: False switches the KV cache off; None leaves it to the wrapper.
        """
        self.error = None
        with ExitStack() as stack:
            for place, holder, key, value, in_generate in list(self._places()):
                self.former.setdefault(f"{place}.{key}", plain(value))
                stack.callback(_put, holder, key, value)
                _put(holder, key, neutral(key, in_generate=in_generate))
            for module in self.generators:
                before = vars(module).get("generate", _MISSING)
                stack.callback(_restore, module, before)
                around = self._around(module.generate, max_new_tokens, use_cache)
                object.__setattr__(module, "generate", around)
            yield

    def _places(self) -> Iterator[tuple[str, Any, str, Any, bool]]:
        """(place, holder, key, value, is a GenerationConfig) of every setting that samples."""
        for place, holder in plain_parts(self.wrapper):
            known = holder if isinstance(holder, dict) else vars(holder)
            for key in [key for key in NEUTRAL if key in known and samples(key, known[key])]:
                yield place, holder, key, known[key], is_generation_config(holder)
        for module in self.generators:
            config = getattr(module, "generation_config", None)
            for key in NEUTRAL:
                value = getattr(config, key, None)
                if samples(key, value):
                    yield f"{type(module).__name__}.generation_config", config, key, value, True

    def _around(self, generate: Any, max_new_tokens: int | None, use_cache: bool | None) -> Any:
        @functools.wraps(generate)
        def greedy_generate(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if len(args) > 1 and is_generation_config(args[1]):
                kwargs["generation_config"], args = args[1], (args[0], *args[2:])
            self.error = None
            try:
                return generate(*args, **self._arguments(kwargs, max_new_tokens, use_cache))
            except Exception as error:
                self.error = error
                raise

        return greedy_generate

    def _arguments(
        self, kwargs: dict[str, Any], max_new_tokens: int | None, use_cache: bool | None
    ) -> dict[str, Any]:
        for key in [key for key in NEUTRAL if key in kwargs]:
            if samples(key, kwargs[key]):
                self.former.setdefault(f"generate({key})", plain(kwargs[key]))
            kwargs[key] = neutral(key, in_generate=True)
        kwargs.pop("best_of_n", None)
        enforced: dict[str, Any] = {key: neutral(key, in_generate=True) for key in ENFORCED}
        if max_new_tokens is not None:
            enforced["max_new_tokens"] = max_new_tokens
            kwargs.pop("max_length", None)
        if use_cache is not None:
            enforced["use_cache"] = use_cache
        config = kwargs.get("generation_config")
        if not is_generation_config(config):
            return {**kwargs, **enforced}
        config = copy.deepcopy(config)
        for key in NEUTRAL:
            value = getattr(config, key, None)
            if samples(key, value):
                self.former.setdefault(f"generate(generation_config.{key})", plain(value))
                enforced.setdefault(key, neutral(key, in_generate=True))
        for key, value in enforced.items():
            setattr(config, key, value)
        kept = {key: value for key, value in kwargs.items() if key not in enforced}
        return {**kept, "generation_config": config}

    def record(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "greedy": True,
            "former": dict(sorted(self.former.items())),
            "enforced_in_generate": self.calls > 0,
        }

    def notes(self) -> list[str]:
        """One line each."""
        found = []
        if self.former:
            changed = ", ".join(f"{place}={value}" for place, value in sorted(self.former.items()))
            found.append(f"the wrapper's decoding was set to greedy; it had {changed}")
        if not self.calls:
            found.append(
                "the wrapper decodes in a loop of its own: its settings were set to greedy, but "
                "whether it follows them was not seen"
            )
        return found


def is_generation_config(value: Any) -> bool:
    """Whether a value is transformers' GenerationConfig."""
    from transformers import GenerationConfig

    return isinstance(value, GenerationConfig)


def plain(value: Any) -> Any:
    """A value as JSON can hold it."""
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _put(holder: Any, key: str, value: Any) -> None:
    if isinstance(holder, Mapping):
        holder[key] = value  # type: ignore[index]
    else:
        setattr(holder, key, value)


def _restore(module: Any, before: Any) -> None:
    if before is _MISSING:
        object.__delattr__(module, "generate")
    else:
        object.__setattr__(module, "generate", before)
