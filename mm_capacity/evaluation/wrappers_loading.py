"""What a wrapper's constructor may load, and where to: device, dtype, attention, foreign code.

VLMEvalKit's constructors name the device, the dtype and the attention function themselves, and
many ask for the checkpoint's own code. Nothing in their interface changes that, so while a
wrapper is built the ``from_pretrained`` methods of transformers are surrounded; each change is
noted, and the methods are put back on exit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

DTYPE_KEYS = ("dtype", "torch_dtype")
PLACES = ("device_map",)


@dataclass
class Loading:
    """How a wrapper's model is to be loaded.

    Args:
        device: "cpu", "cuda", "cuda:1", or "auto" to spread over devices.
        dtype: "auto" for what the wrapper asks for, or a torch dtype's name.
        trust_remote_code: run code that the checkpoint brings along.

    Attributes:
        changes: what was changed, as "argument: asked -> used", each once.
    """

    device: str
    dtype: str = "auto"
    trust_remote_code: bool = False
    changes: dict[str, None] = field(default_factory=dict)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Surrounds ``from_pretrained`` while open."""
        with ExitStack() as stack:
            for owner in owners():
                original = vars(owner)["from_pretrained"]
                stack.callback(setattr, owner, "from_pretrained", original)
                owner.from_pretrained = self._around(original)  # type: ignore[attr-defined]
            yield

    def _around(self, original: Any) -> Any:
        def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
            kwargs = self.arguments(cls, kwargs)
            return original.__func__(self._native(cls, args, kwargs), *args, **kwargs)

        return classmethod(from_pretrained)

    def arguments(self, cls: type, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of one ``from_pretrained``, changed where the settings differ."""
        kwargs = dict(kwargs)
        if kwargs.get("trust_remote_code") and not self.trust_remote_code:
            kwargs["trust_remote_code"] = False
            self._note("trust_remote_code", True, False)
        if not loads_weights(cls):
            return kwargs
        for key in PLACES:
            if kwargs.get(key) is not None and kwargs[key] != self.device:
                self._note(key, kwargs[key], self.device)
                kwargs[key] = self.device
        if self.dtype != "auto":
            self._set_dtype(kwargs)
        self._set_attention(kwargs)
        return kwargs

    def _set_dtype(self, kwargs: dict[str, Any]) -> None:
        import torch

        wanted = getattr(torch, self.dtype)
        asked = [kwargs.pop(key) for key in DTYPE_KEYS if key in kwargs]
        kwargs["dtype"] = wanted
        if not asked or asked[0] not in (wanted, self.dtype):
            self._note("dtype", asked[0] if asked else None, wanted)

    def _set_attention(self, kwargs: dict[str, Any]) -> None:
        """Attention functions that are not there are replaced; results differ by rounding only."""
        from transformers.utils import is_flash_attn_2_available

        for key in ("attn_implementation", "_attn_implementation"):
            asked = kwargs.get(key)
            if not isinstance(asked, str) or not asked.startswith("flash_attention"):
                continue
            if self.device == "cpu" or not is_flash_attn_2_available():
                kwargs[key] = "sdpa"
                self._note(key, asked, "sdpa")

    def _native(self, cls: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The auto class to use: the one for images and text where the asked one knows the
        configuration only through the checkpoint's own code."""
        from transformers import AutoConfig, AutoModelForImageTextToText
        from transformers.models.auto.auto_factory import _BaseAutoModelClass

        if not issubclass(cls, _BaseAutoModelClass) or kwargs.get("trust_remote_code"):
            return cls
        source: Any = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        try:
            config = kwargs.get("config") or AutoConfig.from_pretrained(source)
        except (OSError, ValueError, KeyError):
            return cls  # the call itself says what is wrong
        images: Any = AutoModelForImageTextToText
        if type(config) not in images._model_mapping or cls is images:
            return cls
        # AutoModel knows every family, but gives the part that cannot generate.
        if type(config) in cls._model_mapping and cls.__name__ != "AutoModel":
            return cls
        self._note("class", cls.__name__, images.__name__)
        return images

    def _note(self, key: str, asked: Any, used: Any) -> None:
        self.changes[f"{key}: {asked} -> {used}"] = None


def owners() -> list[type]:
    """Classes of transformers that define a ``from_pretrained`` which these settings concern."""
    import transformers
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    found: list[type] = [transformers.PreTrainedModel]
    found += [value for value in vars(modeling_auto).values() if isinstance(value, type)]
    found += [
        getattr(transformers, name)
        for name in (
            "AutoConfig",
            "AutoTokenizer",
            "AutoProcessor",
            "AutoImageProcessor",
            "AutoFeatureExtractor",
            "AutoVideoProcessor",
        )
    ]
    unique = dict.fromkeys([_BaseAutoModelClass, *found])
    return [cls for cls in unique if "from_pretrained" in vars(cls)]


def loads_weights(cls: type) -> bool:
    """Whether a class's ``from_pretrained`` gives a model."""
    from transformers import PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    return issubclass(cls, (PreTrainedModel, _BaseAutoModelClass))
