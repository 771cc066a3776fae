"""Folders with a tiny random model and its family's real processor, as a hub checkpoint has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlm_adapters.tiny import byte_tokenizer
from vlm_adapters.tiny_build import tiny_model
from vlm_adapters.tiny_families import SPECIALS

TEMPLATE = (
    "{%- for message in messages %}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- 'IMAGE' }}"
    "{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|turn|>' }}{%- endif %}"
)


def tokenizer() -> Any:
    """One token per byte, after the special tokens of the tiny families."""
    return byte_tokenizer(SPECIALS, eos="<|end|>")


def save(folder: Path, model: Any, processor: Any) -> Path:
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def glm(folder: Path) -> Path:
    """GLM-4.5V; VLMEvalKit's wrapper chooses the model's class by the folder's name."""
    from transformers import Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor

    model: Any = tiny_model("glm4v_moe")
    vision = model.config.vision_config
    pixels: dict[str, Any] = {
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32},
    }
    image = "<|image_start|><|image|><|image_end|>"
    processor = Glm4vProcessor(
        image_processor=Glm4vImageProcessor(**pixels),
        tokenizer=tokenizer(),
        video_processor=Glm4vVideoProcessor(**pixels),
        chat_template=TEMPLATE.replace("IMAGE", image),
    )
    return save(folder / "GLM-4.5V", model, processor)


def aria(folder: Path) -> Path:
    """Aria; VLMEvalKit's wrapper asks for images of 980 pixels, here cut into 14 x 14 patches."""
    from transformers import (
        AriaConfig,
        AriaForConditionalGeneration,
        AriaProcessor,
        PreTrainedTokenizerFast,
    )
    from transformers.models.aria.image_processing_aria import AriaImageProcessor

    from vlm_adapters.tiny_build import tiny_config

    config = tiny_config("aria").to_dict()
    config["vision_config"].update(image_size=980, patch_size=70)
    config["projector_patch_to_query_dict"] = {"196": 4}
    names = ["<|img|>" if name == "<|image|>" else name for name in (*SPECIALS, "<|im_end|>")]
    text = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(names, eos="<|end|>").backend_tokenizer,
        eos_token="<|end|>",
        pad_token=names[0],
        unk_token=names[0],
        extra_special_tokens={"image_token": "<|img|>"},
    )
    config["text_config"]["vocab_size"] = len(text)
    processor = AriaProcessor(
        image_processor=AriaImageProcessor(max_image_size=980, min_image_size=336),
        tokenizer=text,
        chat_template=TEMPLATE.replace("IMAGE", "<|img|>"),
        size_conversion={980: 4},
    )
    return save(folder / "aria", AriaForConditionalGeneration(AriaConfig(**config)), processor)


def llama4(folder: Path) -> Path:
    """Llama 4, with tiles of 16 x 16 pixels."""
    from transformers import Llama4Processor
    from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor

    model: Any = tiny_model("llama4")
    text = tokenizer()
    extra = ["<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]
    text.add_special_tokens({"additional_special_tokens": extra})
    model.resize_token_embeddings(len(text))
    model.config.image_token_index = text.convert_tokens_to_ids("<|patch|>")
    processor = Llama4Processor(
        image_processor=Llama4ImageProcessor(
            size={"height": 16, "width": 16}, max_patches=4, resize_to_max_canvas=False
        ),
        tokenizer=text,
        patch_size=4,
        chat_template=TEMPLATE.replace("IMAGE", "<|image|>"),
    )
    return save(folder / "llama4", model, processor)
