"""Pixels of images and videos through the families' own processors, to tags and to load."""

from __future__ import annotations

import pytest
import torch
from family_processors import REAL, inputs_of, names_of, processor_of

from mm_capacity import limit_capacity, make_policy
from vlm_adapters import adapter_for
from vlm_adapters.modality import Modality
from vlm_adapters.tiny_build import tiny_model
from vlm_adapters.tiny_families import FAMILIES, IMAGE, VIDEO

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = {"images": "see I and I?", "video": "see V now", "both": "see I and V then"}
WITHOUT_VIDEO = ("mistral_large4",)
# Frames of a video are written with the image token.
FRAMES_AS_IMAGES = ("glm4v_moe", "glm5_next", "nemotron_h_omni", "internvl")
# transformers 5.24.0 itself refuses an image and a video in one prompt.
NOT_BOTH = ("glm4v_moe", "nemotron_h_omni")
# What a video reads like between its frames.
BETWEEN_FRAMES = {
    "qwen3_vl_moe": "<0.2 seconds>",
    "qwen3_5_moe": "<1.2 seconds>",
    "qwen4_exp": "<0.2 seconds>",
    "glm4v_moe": "<|end_of_image|>1<|end_of_video|>",
    "glm5_next": "1.0 seconds",
    "kimi_k25": "00:00:01.000<|media_begin|>video",
    "minimax_m3_vl": "]<]1.0 seconds[>[",
    "nemotron_h_omni": "frame 2 sampled at 0.50 seconds",
    "internvl": "Frame4: <img>",
}


@pytest.fixture(autouse=True)
def quiet():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


class Case:
    """A tiny model, its family's processor and the inputs of the three prompts."""

    def __init__(self, name: str) -> None:
        self.name, self.real = name, REAL[name]
        self.model = tiny_model(name)
        self.adapter = adapter_for(self.model)
        self.processor = processor_of(self.real)
        self.inputs = {
            kind: inputs_of(self.real, self.processor, prompt)
            for kind, prompt in PROMPTS.items()
            if kind == "images" or name not in WITHOUT_VIDEO
        }

    def text(self, ids: torch.Tensor) -> str:
        return self.processor.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module", params=list(REAL))
def case(request):
    return Case(request.param)


@pytest.fixture(params=list(PROMPTS))
def kind(request, case):
    if request.param not in case.inputs:
        pytest.skip("this family takes no videos")
    return request.param


def replaced(case: Case, inputs: dict) -> torch.Tensor:
    """``[B, S]`` bool: where the model puts features in the place of a token's embedding."""
    seen: list[torch.Tensor] = []

    def read(module, args, kwargs):
        if kwargs.get("inputs_embeds") is not None and not seen:
            seen.append(kwargs["inputs_embeds"])

    decoder = case.model.get_decoder()
    handle = decoder.register_forward_pre_hook(read, with_kwargs=True)
    try:
        case.model(**inputs)
    finally:
        handle.remove()
    plain = case.model.get_input_embeddings()(inputs["input_ids"])
    return (seen[0] != plain).any(-1)


def test_tags_are_where_the_model_puts_features(case, kind):
    inputs = case.inputs[kind]
    if kind == "both" and case.name in NOT_BOTH:
        with pytest.raises(ValueError, match="placeholder tokens|do not match"):
            case.model(**inputs)
        return
    tags = case.adapter.tag_tokens(inputs)
    visual = (tags == Modality.IMAGE) | (tags == Modality.VIDEO)
    assert torch.equal(visual, replaced(case, inputs))
    assert visual.any()


def test_images_and_videos_are_told_apart(case, kind):
    ids = case.inputs[kind]["input_ids"]
    tags = case.adapter.tag_tokens(case.inputs[kind])
    image, video = tags == Modality.IMAGE, tags == Modality.VIDEO
    if case.name == "internvl":
        # Its model gets the frames as images, so nothing tells them apart.
        assert torch.equal(image, ids == IMAGE) and not video.any()
    elif case.name not in FRAMES_AS_IMAGES:
        assert torch.equal(image, ids == IMAGE)
        assert torch.equal(video, ids == VIDEO)
    elif kind == "both" and case.name == "nemotron_h_omni":
        assert torch.equal(image, ids == IMAGE)  # and the model refuses the prompt
    else:
        assert image.any() == (kind != "video")
        assert torch.equal(image | video, ids == IMAGE)
        first = PROMPTS[kind].index("V") if "V" in PROMPTS[kind] else None
        assert video.any() == (first is not None)
        if kind == "both":
            assert int(image[0].nonzero().max()) < int(video[0].nonzero().min())


def test_what_stands_between_is_text(case, kind):
    inputs = case.inputs[kind]
    tags = case.adapter.tag_tokens(inputs)[0]
    names = names_of(case.real)
    text = case.text(inputs["input_ids"][0][tags == Modality.TEXT])
    assert names["image"] not in text
    # Every character of the prompt's own words and every start and end is still there.
    for word in PROMPTS[kind].replace("I", " ").replace("V", " ").split():
        assert word in text
    if kind == "images":
        assert text.count(names["image_end"]) == 2
    elif case.name in BETWEEN_FRAMES:
        assert BETWEEN_FRAMES[case.name].replace(names["image"], "") in text


def test_the_ids_alone_tell_the_same(case, kind):
    """A processor need not return token types, and wrappers drop them."""
    inputs = dict(case.inputs[kind])
    tags = case.adapter.tag_tokens(inputs)
    types = inputs.pop("mm_token_type_ids", None)
    assert torch.equal(case.adapter.tag_tokens(inputs), tags)
    if types is None:
        # With token types, which may count start and end tokens to the image.
        rows = case.processor.create_mm_token_type_ids(inputs["input_ids"].tolist())
        inputs["mm_token_type_ids"] = torch.tensor(rows)
        assert torch.equal(case.adapter.tag_tokens(inputs), tags)


def test_padding_and_a_row_of_text(case):
    kind = "images" if case.name in WITHOUT_VIDEO else "video"
    inputs = case.inputs[kind]
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    more = {key: inputs[key] for key in FAMILIES[case.name].types}
    for pads in ((3, 0), (0, 3)):
        batch = {
            **inputs,
            **{
                key: torch.nn.functional.pad(value, pads)
                for key, value in {"input_ids": ids, "attention_mask": mask, **more}.items()
            },
        }
        tags = case.adapter.tag_tokens(batch)
        alone = torch.nn.functional.pad(
            case.adapter.tag_tokens(inputs), pads, value=int(Modality.PAD)
        )
        assert torch.equal(tags, alone)


def test_load_counts_video_tokens_as_video(case):
    kind = "images" if case.name in WITHOUT_VIDEO else "video"
    inputs = case.inputs[kind]
    tags = case.adapter.tag_tokens(inputs)
    before = case.model(**inputs).logits
    with limit_capacity(case.model, make_policy("none"), check=True) as trace:
        assert torch.equal(before, case.model(**inputs).logits)
    counted = trace.frame().groupby("modality")["assigned"].sum()
    layers = FAMILIES[case.name].sparse_layers
    if case.name == "ernie4_5_vl_moe":
        layers //= 2  # a token goes to the text or to the image experts
    for modality in (Modality.TEXT, Modality.IMAGE, Modality.VIDEO):
        tokens = int((tags == modality).sum())
        assert counted.get(modality.name.lower(), 0) == tokens * 2 * layers
    policy = make_policy("token-drop", gamma=0.5, modality="image-first")
    with limit_capacity(case.model, policy, check=True) as trace:
        case.model(**inputs)
    summary = trace.summary()
    assert summary["drop_frac_image"] > 0
    if case.name != "ernie4_5_vl_moe":  # whose text experts see no image tokens to drop first
        assert summary["drop_frac_image"] > summary["drop_frac_text"]
