"""The families' own processors, built without files: byte tokenizer, tiny patches.

Special tokens get the family's names and the ids of the tiny models, so that one goes with the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import transformers
from pictures import picture
from transformers import PreTrainedTokenizerFast
from transformers.video_utils import VideoMetadata

from vlm_adapters.tiny import byte_tokenizer
from vlm_adapters.tiny_families import SPECIALS

QWEN = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "image_start": "<|vision_start|>",
    "image_end": "<|vision_end|>",
}
GLM = {
    "image": "<|image|>",
    "video": "<|video|>",
    "image_start": "<|begin_of_image|>",
    "image_end": "<|end_of_image|>",
    "video_start": "<|begin_of_video|>",
    "video_end": "<|end_of_video|>",
}
PATCHES = {"patch_size": 4, "merge_size": 2}
SMALL = {"shortest_edge": 16 * 16, "longest_edge": 4 * 16 * 32}
HEIGHT, WIDTH, FRAMES = 16, 32, 4


@dataclass(frozen=True)
class Real:
    """How to build one family's processor.

    Attributes:
        processor: class name in transformers.
        names: special tokens by what they are in the tiny models.
        image_processor: class name and settings.
        video_processor: class name and settings; None if the family takes no videos.
        attributes: tokens that the processor asks the tokenizer for, by attribute.
        more: other arguments of the processor.
        image, video: how a prompt asks for one.
        call: arguments of the call if there is a video.
    """

    processor: str
    names: Mapping[str, str]
    image_processor: tuple[str, Mapping[str, Any]]
    video_processor: tuple[str, Mapping[str, Any]] | None
    attributes: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[], dict[str, Any]] = dict
    image: str = "{image_start}{image}{image_end}"
    video: str = "{image_start}{video}{image_end}"
    call: Mapping[str, Any] = field(default_factory=lambda: {"do_sample_frames": False})


QWEN3_VL = Real(
    "Qwen3VLProcessor",
    QWEN,
    ("Qwen2VLImageProcessor", {**PATCHES, "size": SMALL}),
    ("Qwen3VLVideoProcessor", {**PATCHES, "size": SMALL}),
)
REAL: dict[str, Real] = {
    "qwen3_vl_moe": QWEN3_VL,
    "qwen3_5_moe": QWEN3_VL,
    "qwen4_exp": QWEN3_VL,
    "qwen3_omni_moe_thinker": Real(
        "Qwen3OmniMoeProcessor",
        {**QWEN, "audio": "<|audio_pad|>", "audio_start": "<|audio_start|>"},
        ("Qwen2VLImageProcessor", {**PATCHES, "size": SMALL}),
        ("Qwen2VLVideoProcessor", {**PATCHES, "size": SMALL}),
        attributes={
            "image_token": "image",
            "video_token": "video",
            "audio_token": "audio",
            "vision_bos_token": "image_start",
            "vision_eos_token": "image_end",
            "audio_bos_token": "audio_start",
            "audio_eos_token": "turn",
        },
        more=lambda: {"feature_extractor": transformers.WhisperFeatureExtractor()},
        call={"do_sample_frames": False, "videos_kwargs": {"size": SMALL}},
    ),
    "glm4v_moe": Real(
        "Glm4vProcessor",
        GLM,
        ("Glm4vImageProcessor", {**PATCHES, "size": SMALL}),
        ("Glm4vVideoProcessor", {**PATCHES, "size": SMALL}),
        video="{video_start}{video}{video_end}",
    ),
    "glm5_next": Real(
        "Glm5NextProcessor",
        GLM,
        ("Glm5NextImageProcessor", {**PATCHES, "size": SMALL}),
        ("Glm5NextVideoProcessor", {**PATCHES, "size": SMALL}),
        video="{video_start}{video}{video_end}",
    ),
    "kimi_k25": Real(
        "Kimi_K25Processor",
        {
            "image": "<|media_pad|>",
            "video": "<|kimi_k25_video_placeholder|>",
            "image_start": "<|media_begin|>",
            "image_end": "<|media_end|>",
            "turn": "<|media_content|>",
        },
        ("Kimi_K25ImageProcessor", PATCHES),
        ("Kimi_K25VideoProcessor", {**PATCHES, "temporal_patch_size": 2}),
        image="{image_start}image{turn}{image}{image_end}",
        video="{video}",
    ),
    "nemotron_h_omni": Real(
        "NemotronH_Omni_Reasoning_V3Processor",
        {"image": "<image>", "video": "<video>", "image_start": "<img>", "image_end": "</img>"},
        (
            "NemotronH_Omni_Reasoning_V3ImageProcessor",
            {"patch_size": 4, "min_num_patches": 32, "max_num_patches": 32},
        ),
        (
            "NemotronH_Omni_Reasoning_V3VideoProcessor",
            {
                "patch_size": 4,
                "video_target_num_patches": 32,
                "norm_mean": [0.5] * 3,
                "norm_std": [0.5] * 3,
            },
        ),
        more=lambda: {"feature_extractor": transformers.ParakeetFeatureExtractor()},
        image="{image}",
        video="{video}",
    ),
    "minimax_m3_vl": Real(
        "MiniMaxM3VLProcessor",
        {
            "image": "]<]image[>[",
            "video": "]<]video[>[",
            "image_start": "]<]start of image[>[",
            "image_end": "]<]end of image[>[",
        },
        ("MiniMaxM3VLImageProcessor", {**PATCHES, "size": SMALL}),
        ("MiniMaxM3VLVideoProcessor", PATCHES),
        image="{image}",
        video="{video}",
    ),
    "hy_v4_vl": Real(
        "HYV4VLProcessor",
        {**QWEN, "image": "<|image_pad|>", "video": "<|video_pad|>"},
        ("HYV4VLImageProcessor", {**PATCHES, "size": SMALL}),
        ("HYV4VLVideoProcessor", {**PATCHES, "size": SMALL}),
    ),
    "mistral_large4": Real(
        "PixtralProcessor",
        {"image": "[IMG]", "image_start": "[IMG_BREAK]", "image_end": "[IMG_END]"},
        ("PixtralImageProcessor", {"patch_size": 4, "size": {"longest_edge": 32}}),
        None,
        more=lambda: {"patch_size": 4, "spatial_merge_size": 2},
        image="{image}",
    ),
    "ernie4_5_vl_moe": Real(
        "Ernie4_5_VLMoeProcessor",
        {
            "image": "<|IMAGE_PLACEHOLDER|>",
            "video": "<|VIDEO_PLACEHOLDER|>",
            "image_start": "<|IMAGE_START|>",
            "image_end": "<|IMAGE_END|>",
            "video_start": "<|VIDEO_START|>",
            "video_end": "<|VIDEO_END|>",
        },
        ("Ernie4_5_VLMoeImageProcessor", {**PATCHES, "size": SMALL}),
        ("Ernie4_5_VLMoeVideoProcessor", {**PATCHES, "size": SMALL, "draw_on_frames": False}),
        attributes={
            f"{name}_token": name
            for name in (
                "image",
                "video",
                "image_start",
                "image_end",
                "video_start",
                "video_end",
            )
        },
        video="{video_start}{video}{video_end}",
    ),
    "internvl": Real(
        "InternVLProcessor",
        {
            "image": "<IMG_CONTEXT>",
            "video": "<video>",
            "image_start": "<img>",
            "image_end": "</img>",
        },
        ("GotOcr2ImageProcessor", {"size": {"height": 16, "width": 16}, "max_patches": 2}),
        ("InternVLVideoProcessor", {"size": {"height": 16, "width": 16}}),
        attributes={
            "start_image_token": "image_start",
            "end_image_token": "image_end",
            "context_image_token": "image",
            "video_token": "video",
        },
        more=lambda: {"image_seq_length": 4},
        image="{image}",
        video="{video}",
    ),
}


def names_of(real: Real) -> dict[str, str]:
    """Special tokens by what they are in the tiny models."""
    return {special.strip("<|>"): special for special in SPECIALS} | dict(real.names)


def processor_of(real: Real) -> Any:
    """A family's own processor."""
    names = names_of(real)
    made = byte_tokenizer(list(names.values()), eos=names["end"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer,
        pad_token=names["pad"],
        eos_token=names["end"],
        extra_special_tokens={key: names[value] for key, value in real.attributes.items()},
    )
    chosen = {"image_processor": real.image_processor, "video_processor": real.video_processor}
    parts = {
        part: getattr(transformers, each[0])(**each[1]) for part, each in chosen.items() if each
    }
    return getattr(transformers, real.processor)(tokenizer=tokenizer, **parts, **real.more())


def inputs_of(real: Real, processor: Any, prompt: str) -> dict[str, Any]:
    """Model inputs of a prompt in which I stands for an image and V for a video."""
    names = names_of(real)
    text = prompt.replace("I", real.image.format(**names)).replace("V", real.video.format(**names))
    given: dict[str, Any] = {}
    if "I" in prompt:
        given["images"] = [
            picture(i).convert("RGB").resize((WIDTH, HEIGHT)) for i in range(prompt.count("I"))
        ]
    if "V" in prompt:
        rng = np.random.default_rng(0)
        frames = rng.integers(0, 255, (FRAMES, HEIGHT, WIDTH, 3), dtype=np.uint8)
        meta = VideoMetadata(
            total_num_frames=FRAMES, fps=2.0, frames_indices=list(range(FRAMES)), duration=2.0
        )
        given |= {"videos": [frames], "video_metadata": [meta], **real.call}
    return dict(processor(text=[text], return_tensors="pt", **given))
