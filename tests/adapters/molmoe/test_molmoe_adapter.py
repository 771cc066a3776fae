"""The MolmoE adapter: tags, prompts, the tiny model, and policies on it."""

from __future__ import annotations

import pytest
import torch
from molmoe_golden import inputs, make_folder, original_batch
from pictures import picture, question

from mm_capacity import limit_capacity, make_policy
from vlm_adapters import adapter_for, load_model
from vlm_adapters.modality import Modality


@pytest.fixture(scope="module")
def vlm():
    return load_model("tiny:molmoe")


@pytest.fixture(scope="module")
def asked(vlm):
    return vlm.prepare(question("What is it?", picture()))


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def test_tiny_model(vlm, asked):
    layers = adapter_for(vlm.model).moe_layers(vlm.model)
    assert [layer.name for layer in layers] == [
        "model.transformer.blocks.0.mlp",
        "model.transformer.blocks.1.mlp",
    ]
    assert {(layer.num_experts, layer.top_k) for layer in layers} == {(8, 2)}
    experts = layers[0].experts
    assert experts.gate_up_proj.shape == (8, 48, 32) and experts.down_proj.shape == (8, 32, 24)
    again = load_model("tiny:molmoe").model
    assert torch.equal(again(**asked).logits, vlm.model(**asked).logits)


def test_scores_are_probabilities_of_all_experts(vlm):
    layer = vlm.adapter.moe_layers(vlm.model)[0]
    hidden = torch.randn(11, 32)
    choice = vlm.adapter.read_scores(layer, layer.router(hidden), hidden)
    assert torch.allclose(choice.scores.sum(-1), torch.ones(11))
    assert torch.equal(choice.scores.gather(1, choice.index), choice.weights)
    assert torch.equal(choice.scores.topk(2).indices, choice.index)
    assert choice.allowed is None


def test_prompt_and_tags(vlm, asked):
    ids, tags = asked["input_ids"][0], vlm.adapter.tag_tokens(asked)[0]
    tokenizer = vlm.processor.tokenizer
    text = tokenizer.decode(ids)
    assert text.startswith("<|endoftext|><im_start><im_patch>")
    assert text.endswith("<im_end> User: What is it? Assistant:")
    special = vlm.processor.special_ids()
    assert torch.equal(tags == Modality.IMAGE, ids == special["<im_patch>"])
    for token in ("<im_start>", "<im_end>", "<im_col>"):
        assert (tags[ids == special[token]] == Modality.TEXT).all()
    assert int((tags == Modality.IMAGE).sum()) == 2 * 144
    assert len(ids) == 1 + 2 * 158 + len(" User: What is it? Assistant:")


def test_a_typed_image_token_is_text(vlm):
    given = vlm.prepare(question("Say <im_patch>!", picture()))
    tags = vlm.adapter.tag_tokens(given)
    patches = given["input_ids"] == vlm.processor.special_ids()["<im_patch>"]
    assert int(patches.sum()) == 2 * 144 + 1
    assert int((tags == Modality.IMAGE).sum()) == 2 * 144


def test_text_only(vlm):
    given = vlm.prepare(question("No picture"))
    assert set(given) == {"input_ids", "attention_mask"}
    assert (vlm.adapter.tag_tokens(given) == Modality.TEXT).all()
    same = vlm.prepare([{"role": "user", "content": "No picture"}])
    assert torch.equal(same["input_ids"], given["input_ids"])


def test_padding_is_tagged(vlm):
    batch = original_batch()
    tags = vlm.adapter.tag_tokens(batch)
    assert torch.equal(tags == Modality.PAD, batch["input_ids"] == -1)
    assert int((tags[0] == Modality.IMAGE).sum()) == 288
    assert not (tags[1] == Modality.IMAGE).any()
    # A mask with room for new tokens, and a decode step whose mask covers the cache.
    mask = torch.cat([(batch["input_ids"] != -1).long(), torch.ones(2, 5).long()], dim=1)
    longer = {**batch, "input_ids": batch["input_ids"].clamp(min=0), "attention_mask": mask}
    assert torch.equal(vlm.adapter.tag_tokens(longer), tags)
    cache = vlm.model(batch["input_ids"].clamp(0, 200), attention_mask=mask, use_cache=True).cache
    step = {"input_ids": torch.tensor([[3], [4]]), "cache": cache, "attention_mask": mask}
    assert (vlm.adapter.tag_tokens(step) == Modality.TEXT).all()


def test_what_cannot_be_tagged(vlm):
    given = inputs("single")
    with pytest.raises(ValueError, match="'images' but no token .*: 'image_input_idx' is missing"):
        vlm.adapter.tag_tokens({**given, "image_input_idx": None})
    with pytest.raises(ValueError, match="'image_input_idx' places none of their patches"):
        vlm.adapter.tag_tokens({**given, "image_input_idx": -given["image_input_idx"].abs() - 1})
    with pytest.raises(ValueError, match="position 341 of a prompt of 50 tokens"):
        high = given["image_input_idx"].clamp(min=341)
        vlm.adapter.tag_tokens(
            {**given, "image_input_idx": high, "input_ids": given["input_ids"][:, :50]}
        )
    with pytest.raises(ValueError, match="'inputs_embeds' only"):
        vlm.adapter.tag_tokens({"inputs_embeds": torch.zeros(1, 3, 4)})


def test_what_cannot_be_asked(vlm):
    with pytest.raises(ValueError, match="2 images in one prompt: MolmoE takes one image"):
        vlm.prepare(question("Which?", picture(0), picture(1)))
    with pytest.raises(ValueError, match="conversation 1: image of 1x5000 pixels is too thin"):
        vlm.prepare_batch([question("a", picture()), question("b", picture(0, (1, 5000)))])
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match="one user message, got 2 with roles user, assistant"):
        vlm.prepare(turns)
    with pytest.raises(ValueError, match="takes 'image' and 'text' parts, got 'video'"):
        vlm.prepare([{"role": "user", "content": [{"type": "video", "video": 1}]}])
    for part in ({"type": "image"}, {"type": "image", "image": None}):
        with pytest.raises(ValueError, match="an image part needs its picture under 'image'"):
            vlm.prepare([{"role": "user", "content": [part]}])
    with pytest.raises(ValueError, match="one user message, got 1 with roles None"):
        vlm.prepare([{"content": "a"}])
    with pytest.raises(ValueError, match="one user message, got 0$"):
        vlm.prepare([])


def test_a_batch_answers_like_its_prompts(vlm):
    asked = [
        question("short", picture()),
        question("a longer question without a picture"),
        question("wide", picture(1, (500, 200))),
    ]
    greedy = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    batch = vlm.prepare_batch(asked)
    together = vlm.decode(batch, vlm.model.generate(**batch, **greedy))
    for conversation, answer in zip(asked, together, strict=True):
        given = vlm.prepare(conversation)
        assert vlm.decode(given, vlm.model.generate(**given, **greedy)) == [answer]


def test_max_crops_of_a_loaded_model(tmp_path):
    folder = str(make_folder(tmp_path))
    big = question("?", picture(0, (800, 800)))
    assert load_model(folder).prepare(big)["images"].shape[1] == 10
    assert load_model(folder, max_crops=36).prepare(big)["images"].shape[1] == 17


def test_none_is_bit_identical(vlm, asked):
    before = vlm.model(**asked).logits
    with limit_capacity(vlm.model, make_policy("none"), check=True) as trace:
        inside = vlm.model(**asked).logits
    assert torch.equal(before, inside)
    assert trace.summary()["drop_frac"] == 0
    assert trace.summary()["straggler_before"] > 1.5  # there is something to cap


@pytest.mark.parametrize("modality", ["uniform", "image-first", "text-first"])
@pytest.mark.parametrize("name", ["token-drop", "expanded-drop"])
def test_policies(vlm, asked, name, modality):
    before = vlm.model(**asked).logits
    policy = make_policy(name, gamma=0.5, modality=modality, order="score")
    with limit_capacity(vlm.model, policy, ep_size=2, check=True) as trace:
        inside = vlm.model(**asked).logits
        vlm.model.generate(**asked, max_new_tokens=3, do_sample=False)
    summary = trace.summary()
    assert inside.isfinite().all() and not torch.equal(before, inside)
    assert summary["straggler_after"] < summary["straggler_before"]
    assert summary["drop_frac"] > 0
    if modality == "image-first":
        assert summary["drop_frac_image"] > summary["drop_frac_text"]
    assert torch.equal(before, vlm.model(**asked).logits)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_dropping_does_not_depend_on_the_experts_function(vlm, asked, experts):
    policy = make_policy("token-drop", gamma=0.5, modality="image-first", order="score")
    with limit_capacity(vlm.model, policy):
        skipped = vlm.model(**asked).logits
    vlm.model.set_experts_implementation(experts)
    try:
        with limit_capacity(vlm.model, policy, skip_dropped=experts != "eager"):
            own = vlm.model(**asked).logits
    finally:
        vlm.model.set_experts_implementation("grouped_mm")
    torch.testing.assert_close(own, skipped, atol=1e-4, rtol=1e-4)


def test_every_step_without_a_cache(vlm, asked):
    """The reference's way: no cache and a cap in every step, here over the whole sequence."""
    policy = make_policy(
        "token-drop", gamma=0.5, modality="image-first", order="score", phase="all"
    )
    with limit_capacity(vlm.model, policy) as trace:
        vlm.model.generate(
            **asked, max_new_tokens=3, min_new_tokens=3, do_sample=False, use_cache=False
        )
    assert trace.summary()["steps"] == 3
    with limit_capacity(vlm.model, make_policy("token-drop", gamma=0.5)) as trace:
        vlm.model.generate(**asked, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert trace.summary()["steps"] == 1
