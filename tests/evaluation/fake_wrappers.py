"""Wrappers as VLMEvalKit has them, around a tiny random mixture of experts or around none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image
from torch import nn

from mm_capacity.evaluation.vlmeval_models import WrapperChoice
from vlm_adapters import load_model

FAMILY = "tiny:qwen3_vl_moe"
NEW_TOKENS = 3


class Base:
    """Asks a tiny model; the answer is its new token ids."""

    arguments: dict[str, Any] = {}

    def __init__(self, model_path: str = "", **kwargs: Any) -> None:
        self.model_path = model_path
        self.vlm = None
        vlm = load_model(FAMILY)
        self.prepare = vlm.prepare
        self.kwargs = {"max_new_tokens": NEW_TOKENS, **kwargs}
        self.hold(vlm.model)

    def hold(self, model: nn.Module) -> None:
        self.model = model

    def chat(self) -> Any:
        return self.model

    def messages(self, message: list[dict[str, Any]]) -> list[dict[str, Any]]:
        content = [
            {"type": "image", "image": Image.open(part["value"]).convert("RGB")}
            if part["type"] == "image"
            else {"type": "text", "text": part["value"]}
            for part in message
        ]
        return [{"role": "user", "content": content}]

    def generate(self, message: list[dict[str, Any]], dataset: str | None = None) -> str:
        inputs = self.prepare(self.messages(message))
        message.clear()  # some wrappers write into what they are given
        out = self.chat().generate(**inputs, **self.kwargs)
        return " ".join(map(str, out[0, inputs["input_ids"].shape[1] :].tolist()))


class Sampling(Base):
    """Samples by attributes, a dictionary and the model's own generation configuration."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(do_sample=True, temperature=0.9, top_p=0.95, top_k=40, **kwargs)
        self.temperature = 0.8
        self.inner = SimpleNamespace(options={"repetition_penalty": 1.2, "num_beams": 3})
        self.model.generation_config.do_sample = True
        self.model.generation_config.top_k = 7


class HardCoded(Base):
    """Samples by arguments that stand in its code, one of them a generation configuration."""

    def generate(self, message: list[dict[str, Any]], dataset: str | None = None) -> str:
        from transformers import GenerationConfig

        inputs = self.prepare(self.messages(message))
        config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=True, temperature=5.0)
        first = self.model.generate(**inputs, generation_config=config)
        second = self.model.generate(
            **inputs, max_new_tokens=NEW_TOKENS, do_sample=True, temperature=5.0
        )
        start = inputs["input_ids"].shape[1]
        return f"{first[0, start:].tolist()} {second[0, start:].tolist()}"


class NoCache(Base):
    """Re-runs the whole sequence for every new token."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(use_cache=False, **kwargs)


class OwnLoop(Base):
    """Generates without ``generate``: calls the model itself, in chunks, then token by token."""

    chunk = 20

    def generate(self, message: list[dict[str, Any]], dataset: str | None = None) -> str:
        inputs = self.prepare(self.messages(message))
        ids, cache, new = inputs["input_ids"], None, []
        image = self.model.config.image_token_id
        last_image = int((ids[0] == image).nonzero().max()) + 1
        cuts = [0, last_image, *range(last_image + self.chunk, ids.shape[1], self.chunk)]
        for number, start in enumerate(cuts):
            stop = cuts[number + 1] if number + 1 < len(cuts) else ids.shape[1]
            pixels = {key: inputs[key] for key in ("pixel_values", "image_grid_thw")}
            types = inputs["mm_token_type_ids"][:, start:stop]
            out = self.model(
                input_ids=ids[:, start:stop],
                mm_token_type_ids=types,
                past_key_values=cache,
                use_cache=True,
                **(pixels if number == 0 else {}),
            )
            cache = out.past_key_values
        for _ in range(NEW_TOKENS):
            new.append(int(out.logits[0, -1].argmax()))
            token = torch.tensor([[new[-1]]])
            out = self.model(input_ids=token, past_key_values=cache, use_cache=True)
        return " ".join(map(str, new))


class Nested(Base):
    """Keeps the model two plain objects down, in a dictionary."""

    def hold(self, model: nn.Module) -> None:
        self.engine = SimpleNamespace(parts={"backbone": model})

    def chat(self) -> Any:
        return self.engine.parts["backbone"]


class Outer(nn.Module):
    """A module without a configuration around the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"vlm": model})


class InModule(Base):
    """Keeps the model inside of a larger module."""

    def hold(self, model: nn.Module) -> None:
        self.llm = Outer(model)

    def chat(self) -> Any:
        return self.llm.body["vlm"]


class Two(Base):
    """Holds two models."""

    def hold(self, model: nn.Module) -> None:
        self.model, self.judge = model, load_model(FAMILY).model


class Dense(Base):
    """Around a dense model."""

    def hold(self, model: nn.Module) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, vocab_size=32,
                        num_attention_heads=2, num_key_value_heads=2)
        )  # fmt: skip


class Blind(Base):
    """Embeds images itself, in front of a text-only mixture of experts."""

    def hold(self, model: nn.Module) -> None:
        self.model = Outer(load_model("tiny:qwen3_moe").model)


class Server:
    """Stands for a class of a serving library."""


Server.__module__ = "vllm.entrypoints.llm"


class Served(Base):
    """Answers through a server."""

    def hold(self, model: nn.Module) -> None:
        self.llm = Server()


class Elsewhere(Base):
    """Answers without the model that it holds."""

    def generate(self, message: list[dict[str, Any]], dataset: str | None = None) -> str:
        return "A"


class ForgetsImages(Base):
    """Leaves the images out of the prompt."""

    def messages(self, message: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return super().messages([part for part in message if part["type"] == "text"])


class NeedsPackage(Base):
    """Imports when asked what is not there."""

    def generate(self, message: list[dict[str, Any]], dataset: str | None = None) -> str:
        import not_to_be_found_anywhere  # noqa: F401

        return ""


class NeedsGpu(Base):
    """Puts its model on a GPU."""

    def hold(self, model: nn.Module) -> None:
        self.model = model.cuda()


class NeedsGpuAtOnce(Base):
    """Asserts that there is a GPU."""

    def __init__(self, **kwargs: Any) -> None:
        max_gpu_mem = -1
        assert max_gpu_mem > 0


def choice_of(wrapper: type, **arguments: Any) -> WrapperChoice:
    """A fake wrapper as VLMEvalKit would have it under a name."""
    return WrapperChoice("Fake-30B-A3B", wrapper, {"model_path": "org/fake", **arguments})
