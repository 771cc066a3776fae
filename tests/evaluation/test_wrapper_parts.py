"""A wrapper's model is found, decodes greedily, and its forward passes are described."""

from __future__ import annotations

import pytest
import torch

from mm_capacity import make_policy
from mm_capacity.errors import UserError
from mm_capacity.evaluation.generate import answer
from mm_capacity.evaluation.wrappers import build
from mm_capacity.evaluation.wrappers_greedy import NEUTRAL, samples
from mm_capacity.evaluation.wrappers_passes import Pass, classify
from tests.evaluation import fake_wrappers as fakes
from tests.pictures import picture

NONE = make_policy("none")
CAPPED = make_policy("token-drop", gamma=0.5, modality="image-first", order="score")


def built(wrapper, **arguments):
    return build(
        fakes.choice_of(wrapper, **arguments), device="cpu", dtype="auto", trust_remote_code=False
    )


@pytest.fixture
def question(tmp_path):
    path = tmp_path / "picture.png"
    picture(3).save(path)
    parts = [
        {"type": "image", "value": str(path)},
        {"type": "text", "value": "What is in this picture, and how many of them are there?"},
    ]
    return {"message": parts, "dataset": "MMBench_DEV_EN"}


def ask(vlm, question, policy=NONE, **options):
    return answer(vlm, question, policy, max_new_tokens=None, check=True, **options)


@pytest.fixture(scope="module")
def plain_vlm():
    return built(fakes.Base)


@pytest.fixture
def greedy(plain_vlm, question):
    """What the tiny model answers greedily."""
    return ask(plain_vlm, question).texts[0]


# -- finding ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapper", "path"),
    [
        (fakes.Base, "model"),
        (fakes.Nested, "engine.parts.backbone"),
        (fakes.InModule, "llm.body.vlm"),
    ],
)
def test_the_model_is_found(wrapper, path, question, greedy):
    vlm = built(wrapper)
    assert vlm.found.path == path and type(vlm.model).__name__.startswith("Qwen3VLMoe")
    assert vlm.record()["model_at"] == path
    answered = ask(vlm, question)
    assert answered.texts == [greedy] and len(greedy.split()) == fakes.NEW_TOKENS
    capped = ask(vlm, question, CAPPED)
    assert capped.texts != [greedy]
    assert capped.loads["kept"].sum() < capped.loads["assigned"].sum()
    assert set(capped.loads["modality"]) == {"image", "text"}


@pytest.mark.parametrize(
    ("wrapper", "says"),
    [
        (fakes.Dense, "holds no mixture of experts: model is a LlamaForCausalLM"),
        (fakes.Two, "holds 2 mixtures of experts (model, judge)"),
        (fakes.Blind, "as embeddings, so image tokens cannot be told from text"),
        (fakes.Served, "holds no torch module but vllm's Server in 'llm'"),
        (fakes.NeedsGpu, "needs a CUDA device and there is none here"),
        (fakes.NeedsGpuAtOnce, "needs a CUDA device and there is none here"),
    ],
)
def test_a_wrapper_that_cannot_be_used_is_one_line(wrapper, says):
    if torch.cuda.is_available() and "CUDA" in says:
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(UserError) as caught:
        built(wrapper)
    message = str(caught.value)
    assert says in message and wrapper.__name__ in message and "\n" not in message
    assert message.startswith("Fake-30B-A3B: ")


@pytest.mark.parametrize(
    ("wrapper", "says"),
    [
        (fakes.Elsewhere, "answered without a prefill of the model in 'model'"),
        (fakes.ForgetsImages, "was given 1 image(s), but no token of its prompt is tagged"),
        (fakes.NeedsPackage, "needs the package not_to_be_found_anywhere"),
    ],
)
def test_an_answer_past_the_policy_is_an_error(wrapper, says, question):
    with pytest.raises(UserError) as caught:
        ask(built(wrapper), question)
    assert says in str(caught.value) and wrapper.__name__ in str(caught.value)


def test_a_missing_package_is_said_before_anything_is_loaded(monkeypatch):
    from mm_capacity.evaluation import vlmeval_models

    monkeypatch.setitem(vlmeval_models.PACKAGES, "Base", (("no_such_utils", "no-such-utils"),))
    monkeypatch.setattr(fakes.Base, "__init__", lambda *a, **k: pytest.fail("built"))
    with pytest.raises(UserError, match=r"needs the package no_such_utils \(pip install no-such"):
        built(fakes.Base)


# -- greedy ----------------------------------------------------------------------------


def test_sampling_is_set_to_greedy_and_written_down(question, greedy):
    vlm = built(fakes.Sampling)
    wrapper = vlm.wrapper
    before = dict(wrapper.kwargs), wrapper.temperature, dict(wrapper.inner.options)
    config = vlm.model.generation_config.to_dict()
    attributes = set(vars(vlm.model))
    former = {
        "wrapper.kwargs.do_sample": True,
        "wrapper.kwargs.temperature": 0.9,
        "wrapper.kwargs.top_p": 0.95,
        "wrapper.kwargs.top_k": 40,
        "wrapper.temperature": 0.8,
        "wrapper.inner.options.repetition_penalty": 1.2,
        "wrapper.inner.options.num_beams": 3,
        "Qwen3VLMoeForConditionalGeneration.generation_config.do_sample": True,
        "Qwen3VLMoeForConditionalGeneration.generation_config.top_k": 7,
    }
    assert vlm.record()["decoding"]["former"] == dict(sorted(former.items()))  # before it runs
    answered = [ask(vlm, question, seed=seed) for seed in (0, 1)]
    assert [one.texts for one in answered] == [[greedy], [greedy]]
    record = vlm.record()["decoding"]
    assert record["former"] == dict(sorted(former.items())) and record["enforced_in_generate"]
    assert any("wrapper.kwargs.temperature=0.9" in note for note in answered[0].notes)
    # All of it is as before.
    assert (wrapper.kwargs, wrapper.temperature, wrapper.inner.options) == before
    assert vlm.model.generation_config.to_dict() == config
    assert set(vars(vlm.model)) == attributes


def test_what_is_written_into_the_code_is_greedy_too(question, greedy):
    vlm = built(fakes.HardCoded)
    expected = str([int(token) for token in greedy.split()])
    assert ask(vlm, question).texts == [f"{expected} {expected}"]
    former = vlm.record()["decoding"]["former"]
    assert former["generate(generation_config.do_sample)"] is True
    assert former["generate(do_sample)"] is True and former["generate(temperature)"] == 5.0


def test_settings_return_when_the_wrapper_fails(question):
    vlm = built(fakes.Sampling)
    before = dict(vlm.wrapper.kwargs)
    with pytest.raises(OSError):
        ask(vlm, {**question, "message": [{"type": "image", "value": "/no/such.png"}]})
    assert vlm.wrapper.kwargs == before and "generate" not in vars(vlm.model)


def test_longest_answer_and_cache_can_be_given(plain_vlm, question, greedy):
    texts = answer(plain_vlm, question, NONE, max_new_tokens=2).texts
    assert texts == [" ".join(greedy.split()[:2])]
    vlm = built(fakes.Base)
    assert ask(vlm, question, use_cache=False).texts == [greedy]
    assert vlm.record()["passes"]["kv_cache"] is False


@pytest.mark.parametrize(
    ("key", "value", "answer"),
    [
        ("do_sample", True, True), ("do_sample", False, False), ("temperature", 0.01, True),
        ("temperature", 0, False), ("temperature", 1.0, False), ("temperature", None, False),
        ("top_k", 20, True), ("top_k", -1, False), ("top_p", 0.8, True), ("top_p", 1.0, False),
        ("repetition_penalty", 1.0, False), ("repetition_penalty", 1.05, True),
        ("presence_penalty", 1.5, True), ("num_beams", 1, False), ("num_beams", 5, True),
    ],
)  # fmt: skip
def test_what_counts_as_sampling(key, value, answer):
    assert samples(key, value) is answer
    assert not samples(key, NEUTRAL[key])


# -- passes ----------------------------------------------------------------------------


def test_an_ordinary_wrapper_has_nothing_to_say(plain_vlm, greedy):
    passes = plain_vlm.record()["passes"]
    first = passes["first_question"]
    assert passes["kv_cache"] is True and not passes["whole_prompt_at_each_step"]
    assert passes["prefill_chunks"] == [] and passes["prompts_per_question"] == 1
    length = first[0][0]
    assert first == [[length, 0], [1, length], [1, length + 1]]
    assert plain_vlm.notes() == []


def test_no_cache_is_told(question, greedy):
    vlm = built(fakes.NoCache)
    answered = ask(vlm, question)
    assert answered.texts == [greedy]
    passes = vlm.record()["passes"]
    length = passes["first_question"][0][0]
    assert passes["first_question"] == [[length, 0], [length + 1, 0], [length + 2, 0]]
    assert passes["kv_cache"] is False and passes["whole_prompt_at_each_step"] is True
    assert any("without a KV cache" in note for note in answered.notes)
    assert answered.layers["step"].nunique() == fakes.NEW_TOKENS  # the policy acts in each


def test_no_cache_is_told_from_one_new_token(question):
    vlm = built(fakes.NoCache)
    answer(vlm, question, NONE, max_new_tokens=1)
    assert vlm.record()["passes"]["kv_cache"] is False


def test_prefill_in_chunks_is_told(question, greedy):
    vlm = built(fakes.OwnLoop)
    answered = ask(vlm, question)
    assert answered.texts == [greedy]
    passes = vlm.record()["passes"]
    (chunks,) = passes["prefill_chunks"]
    assert len(chunks) > 2 and all(size <= fakes.OwnLoop.chunk for size in chunks[1:])
    assert passes["kv_cache"] is True and passes["prompts_per_question"] == 1
    assert any("prefills in chunks" in note for note in answered.notes)
    assert any("a loop of its own" in note for note in answered.notes)
    assert vlm.record()["decoding"]["enforced_in_generate"] is False


def test_chunks_of_transformers_are_told(question, greedy):
    vlm = built(fakes.Base, prefill_chunk_size=24)
    answered = ask(vlm, question)
    assert answered.texts == [greedy]
    (chunks,) = vlm.record()["passes"]["prefill_chunks"]
    assert set(chunks[:-1]) == {24} and 0 < chunks[-1] <= 24


def test_only_the_first_questions_are_watched(question):
    vlm = built(fakes.Base)
    for _ in range(5):
        ask(vlm, question)
        assert not [
            hook
            for hook in vlm.model._forward_pre_hooks.values()
            if "wrappers_passes" in getattr(hook, "__module__", "")
        ]
    assert vlm.record()["passes"]["questions_watched"] == 3


@pytest.mark.parametrize(
    ("passes", "reruns", "chunks", "prompts", "long_steps", "cache"),
    [
        ([(9, 0)], 0, (), 1, 0, None),
        ([(9, 0), (1, 9), (1, 10)], 0, (), 1, 0, True),
        ([(9, 0), (10, 0), (11, 0)], 2, (), 1, 0, False),
        ([(4, 0), (4, 4), (1, 8), (1, 9)], 0, (4, 4), 1, 0, True),
        ([(9, 0), (1, 9), (7, 0), (1, 7)], 0, (), 2, 0, True),
        ([(4, 0), (3, 4), (1, 7), (5, 0), (1, 5)], 0, (4, 3), 2, 0, True),
        ([(9, 0), (1, 9), (4, 10), (1, 14)], 0, (), 1, 1, True),
        ([(9, 0), (9, 0)], 0, (), 2, 0, None),
        ([(1, 0), (2, 0)], 1, (), 1, 0, False),
    ],
)
def test_patterns(passes, reruns, chunks, prompts, long_steps, cache):
    pattern = classify([Pass(*one) for one in passes])
    assert (pattern.reruns, pattern.chunks, pattern.prompts) == (reruns, chunks, prompts)
    assert (pattern.long_steps, pattern.cache) == (long_steps, cache)
