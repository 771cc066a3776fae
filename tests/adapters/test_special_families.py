"""What is special about single families."""

from __future__ import annotations

import pytest
import torch
from pictures import picture, question

from mm_capacity import limit_capacity, make_policy
from vlm_adapters import adapter_for
from vlm_adapters.modality import Modality
from vlm_adapters.tiny_build import tiny_config, tiny_model, tiny_vlm
from vlm_adapters.tiny_families import IMAGE, VIDEO, VIDEO_END, VIDEO_START


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def test_ernie_routes_images_and_text_apart():
    vlm = tiny_vlm("ernie4_5_vl_moe")
    inputs = vlm.prepare(question("What is it?", picture()))
    with limit_capacity(vlm.model, make_policy("none"), check=True) as trace:
        vlm.model(**inputs)
    layers = trace.layers().set_index("layer")
    image = int((inputs["moe_mm_token_type_ids"] == 1).sum())
    text = inputs["input_ids"].shape[1] - image
    assert list(layers["tokens"]) == [text, image] * 2
    assert list(layers["tokens_image"]) == [0, image] * 2
    # Without an image the image experts do not run, which is no error.
    with limit_capacity(vlm.model, make_policy("token-drop", gamma=0.5), check=True) as trace:
        vlm.model(**vlm.prepare(question("No picture.")))
    assert sorted(trace.layers()["layer"]) == [0, 2]


def test_llama_4_drops_what_goes_into_an_expert():
    """Against the block itself, its table of weights set to 0 where the policy dropped."""
    vlm = tiny_vlm("llama4")
    layer = vlm.adapter.moe_layers(vlm.model)[0]
    hidden = torch.randn(40, 32)
    table, logits = layer.router(hidden)
    index = logits.topk(2, dim=1).indices
    drop = torch.rand(40, 2) < 0.5
    kept = table.scatter(1, index, table.gather(1, index).masked_fill(drop, 0.0))
    rows = hidden.repeat(8, 1) * kept.T.reshape(-1, 1)
    expected = layer.experts(rows).reshape(8, 40, 32).sum(0)
    for skip_dropped in (False, True):
        with vlm.adapter.seam(vlm.model, [layer], skip_dropped=skip_dropped) as (stand_in,):
            got = stand_in.experts(
                hidden, index.masked_fill(drop, 8), table.gather(1, index).masked_fill(drop, 0.0)
            )
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        nothing = drop.all(1)
        assert nothing.any() and torch.equal(got[nothing], torch.zeros(int(nothing.sum()), 32))


def test_llama_4_as_it_comes_cannot_run():
    """When this fails, transformers was repaired, and the hook of the adapter can go."""
    from transformers import Llama4ForConditionalGeneration

    model = Llama4ForConditionalGeneration(tiny_config("llama4")).eval()
    with pytest.raises(AttributeError, match="image_outputs"):
        model(input_ids=torch.tensor([[1, 2, 3]]))


def test_a_looped_layer_is_capped_in_each_pass():
    vlm = tiny_vlm("inkling2_loop")
    inputs = vlm.prepare(question("Again and again?", picture()))
    with limit_capacity(vlm.model, make_policy("token-drop", gamma=0.5), check=True) as trace:
        vlm.model(**inputs)
    runs = trace.layers()["layer"].value_counts()
    assert dict(runs) == {0: 1, 1: vlm.model.config.text_config.loop_num_passes, 2: 1}


def test_the_vision_towers_experts_are_left_alone():
    model = tiny_model("dots3_note")
    experts = [n for n, m in model.named_modules() if type(m).__name__ == "Dots3NoteExperts"]
    names = [layer.name for layer in adapter_for(model).moe_layers(model)]
    assert len(experts) == 3 and len(names) == 2
    assert all("language_model" in name for name in names)


def test_the_thinker_inside_of_the_whole_omni_model():
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    thinker = tiny_config("qwen3_omni_moe_thinker")
    config = Qwen3OmniMoeConfig(thinker_config=thinker.to_dict(), enable_audio_output=False)
    model = Qwen3OmniMoeForConditionalGeneration(config).eval()
    adapter = adapter_for(model)
    assert adapter.entry(model) is model.thinker
    assert all(layer.name.startswith("thinker.") for layer in adapter.moe_layers(model))
    inputs = tiny_vlm("qwen3_omni_moe_thinker").prepare(question("Hello?", picture()))
    assert int((adapter.tag_tokens(inputs) == Modality.IMAGE).sum()) == 8
    with limit_capacity(model, make_policy("token-drop", gamma=0.5), check=True) as trace:
        model.generate(**inputs, thinker_max_new_tokens=2, return_audio=False)
    assert trace.steps == 1 and trace.summary()["drop_frac"] > 0


def test_video_is_tagged_and_audio_is_text():
    vlm = tiny_vlm("gemma4")
    ids = torch.tensor([[50, 51, 52, 53]])
    types = torch.tensor([[0, 1, 2, 3]])
    tags = vlm.adapter.tag_tokens({"input_ids": ids, "mm_token_type_ids": types})
    expected = [Modality.TEXT, Modality.IMAGE, Modality.VIDEO, Modality.TEXT]
    assert tags.tolist() == [expected]
    # What stands around the image token is not the image, whatever its type says.
    ids = torch.tensor([[50, IMAGE, VIDEO, 53, 54]])
    types = torch.tensor([[1, 1, 2, 3, 1]])
    tags = vlm.adapter.tag_tokens({"input_ids": ids, "mm_token_type_ids": types})
    assert tags.tolist() == [[*expected, Modality.TEXT]]


@pytest.mark.filterwarnings("ignore:expanded-drop")
@pytest.mark.parametrize("overflow", ["expand", "expand-global"])
@pytest.mark.parametrize("inside_groups", [True, False])
def test_expansion_stays_inside_the_groups_unless_asked_otherwise(overflow, inside_groups):
    vlm = tiny_vlm("glm4v_moe")
    inputs = vlm.prepare(question("Which group?", picture()))
    allowed, used = [], []
    layers = vlm.adapter.moe_layers(vlm.model)
    policy = make_policy(
        "expanded-drop", gamma=1.0, overflow=overflow, rounds=4, inside_groups=inside_groups
    )
    with limit_capacity(vlm.model, policy, check=True) as trace:
        handles = [
            layers[0].router.register_forward_hook(
                lambda m, a, out: allowed.append(
                    vlm.adapter.read_scores(layers[0], out, a[0]).allowed
                )
            ),
            layers[0].experts.register_forward_pre_hook(lambda m, a: used.append(a[1])),
        ]
        vlm.model(**inputs)
        for handle in handles:
            handle.remove()
    assert trace.summary()["added"] > 0
    inside = torch.nn.functional.pad(allowed[0], (0, 1), value=True).gather(1, used[0])
    assert bool(inside.all()) == inside_groups


def test_frames_between_the_start_and_the_end_of_a_video():
    """GLM-4.5V writes the frames of a video with the image token."""
    vlm = tiny_vlm("glm4v_moe")
    ids = torch.tensor([[9, IMAGE, VIDEO_START, IMAGE, 9, IMAGE, VIDEO_END, IMAGE, 9]])
    expected = [0, 1, 0, 2, 0, 2, 0, 1, 0]
    assert vlm.adapter.tag_tokens({"input_ids": ids}).tolist() == [expected]


def test_llama_4_from_its_configuration_runs_under_a_policy():
    """The field that is missing is filled in by the context, and only while it is open."""
    from transformers import Llama4ForConditionalGeneration

    model = Llama4ForConditionalGeneration(tiny_config("llama4")).eval()
    ids = {"input_ids": torch.arange(12, 32)[None]}
    with limit_capacity(model, make_policy("token-drop", gamma=0.5), check=True) as trace:
        model(**ids)
    assert trace.summary()["drop_frac"] > 0
    with pytest.raises(AttributeError, match="image_outputs"):
        model(**ids)
    adapter = adapter_for(model)
    adapter.after_loading(model)
    adapter.after_loading(model)
    assert len(model.language_model._forward_hooks) == 1


def test_llama_4_gives_back_a_forward_that_was_set_before():
    """Placing a model on several devices gives modules a forward of their own."""
    vlm = tiny_vlm("llama4")
    block = vlm.adapter.moe_layers(vlm.model)[0].block
    mine = block.forward
    block.forward = mine
    with limit_capacity(vlm.model, make_policy("none")):
        assert block.forward is not mine
    assert vars(block)["forward"] is mine
