"""limit_capacity on a real transformers model with random weights."""

from __future__ import annotations

import copy

import pytest
import torch
from pictures import picture, question

from mm_capacity import limit_capacity, make_policy
from mm_capacity.routing import Decision
from mm_capacity.trace import CapacityExceededError
from vlm_adapters.base import UnsupportedModelError
from vlm_adapters.modality import Modality


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def logits(vlm, inputs):
    return vlm.model(**inputs).logits


def state_of(model) -> dict:
    """Everything a context could leave behind: hooks, attributes, config entries."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    modules = {}
    for name, module in model.named_modules():
        hooks = [
            len(getattr(module, kind))
            for kind in (
                "_forward_hooks",
                "_forward_pre_hooks",
                "_forward_hooks_with_kwargs",
                "_forward_pre_hooks_with_kwargs",
                "_backward_hooks",
            )
        ]
        keys = {k for k in vars(module) if k != "rope_deltas"}
        modules[name] = (hooks, keys, module.forward.__func__)
    config = copy.deepcopy(model.config.to_dict())
    implementation = model.config.text_config._experts_implementation
    return {
        "modules": modules,
        "config": config,
        "implementation": implementation,
        "registry": sorted(ALL_EXPERTS_FUNCTIONS),
    }


def test_none_is_bit_identical(tiny_vlm, one_question):
    before = logits(tiny_vlm, one_question)
    with limit_capacity(tiny_vlm.model, make_policy("none"), check=True) as trace:
        inside = logits(tiny_vlm, one_question)
    assert torch.equal(before, inside)
    assert trace.summary()["drop_frac"] == 0
    assert trace.summary()["straggler_before"] > 1


@pytest.mark.parametrize("name", ["none", "token-drop", "expanded-drop"])
def test_nothing_is_left_behind(tiny_vlm, one_question, name):
    before, state = logits(tiny_vlm, one_question), state_of(tiny_vlm.model)
    policy = make_policy(name) if name == "none" else make_policy(name, gamma=0.5)
    with limit_capacity(tiny_vlm.model, policy, ep_size=4):
        inside = logits(tiny_vlm, one_question)
        assert state_of(tiny_vlm.model) != state
    if name != "none":
        assert not torch.equal(before, inside)
    assert state_of(tiny_vlm.model) == state
    assert torch.equal(before, logits(tiny_vlm, one_question))


def test_nothing_is_left_behind_after_an_exception(tiny_vlm, one_question):
    before, state = logits(tiny_vlm, one_question), state_of(tiny_vlm.model)
    with pytest.raises(KeyError, match="mine"):
        with limit_capacity(tiny_vlm.model, make_policy("token-drop", gamma=0.5)):
            logits(tiny_vlm, one_question)
            raise KeyError("mine")
    assert state_of(tiny_vlm.model) == state
    assert torch.equal(before, logits(tiny_vlm, one_question))


def test_exception_inside_a_forward_pass(tiny_vlm, one_question):
    before = logits(tiny_vlm, one_question)
    layer = tiny_vlm.adapter.moe_layers(tiny_vlm.model)[1]
    handle = layer.experts.register_forward_hook(lambda *_: 1 / 0)
    with limit_capacity(tiny_vlm.model, make_policy("token-drop", gamma=0.5)) as trace:
        with pytest.raises(ZeroDivisionError):
            logits(tiny_vlm, one_question)
        handle.remove()
        inside = logits(tiny_vlm, one_question)
    assert trace.steps == 1
    assert not torch.equal(before, inside)
    assert torch.equal(before, logits(tiny_vlm, one_question))


@pytest.mark.parametrize("gamma", [0.25, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("modality", ["uniform", "image-first", "text-first"])
@pytest.mark.parametrize("name", ["token-drop", "expanded-drop"])
def test_load_stays_under_capacity(tiny_vlm, one_question, name, modality, gamma):
    policy = make_policy(name, gamma=gamma, modality=modality)
    with limit_capacity(tiny_vlm.model, policy, ep_size=4, check=True) as trace:
        tiny_vlm.model.generate(**one_question, max_new_tokens=3)
    tokens = one_question["input_ids"].shape[1]
    capacity = -(-gamma * 2 * tokens // 8)
    frame = trace.frame()
    kept = frame.groupby(["step", "layer", "expert"])["kept"].sum()
    assert kept.max() <= capacity
    assert frame["assigned"].sum() == 3 * 2 * tokens
    assert (frame["layer"].nunique(), trace.steps) == (3, 1)
    if gamma <= 1:
        assert trace.summary()["drop_frac"] > 0


def test_dropping_order_shows_in_the_modalities(tiny_vlm, one_question):
    shares = {}
    for modality in ("image-first", "text-first"):
        policy = make_policy("token-drop", gamma=0.5, modality=modality)
        with limit_capacity(tiny_vlm.model, policy) as trace:
            logits(tiny_vlm, one_question)
        shares[modality] = trace.summary()
    image, text = shares["image-first"], shares["text-first"]
    assert image["drop_frac_image"] > text["drop_frac_image"]
    assert image["drop_frac_text"] < text["drop_frac_text"]


def test_large_gamma_changes_nothing_much(tiny_vlm, one_question):
    before = logits(tiny_vlm, one_question)
    with limit_capacity(tiny_vlm.model, make_policy("token-drop", gamma=100.0)) as trace:
        inside = logits(tiny_vlm, one_question)
    torch.testing.assert_close(before, inside, atol=1e-5, rtol=1e-5)
    assert trace.summary()["drop_frac"] == 0


def test_decode_passes_through_unless_phase_is_all(tiny_vlm, one_question):
    steps = {}
    for phase in ("prefill", "all"):
        policy = make_policy("token-drop", gamma=0.5, phase=phase)
        with limit_capacity(tiny_vlm.model, policy) as trace:
            tiny_vlm.model.generate(**one_question, max_new_tokens=4, min_new_tokens=4)
        steps[phase] = trace.steps
    assert steps == {"prefill": 1, "all": 4}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("modality", ["uniform", "image-first"])
def test_padded_rows_decide_as_alone(tiny_vlm, side, modality):
    """With window=sequence a row's decisions do not depend on the rest of the batch."""
    policy = make_policy("token-drop", gamma=0.5, window="sequence", modality=modality)
    conversations = [
        question("Short?", picture(1)),
        question("A question that is a good deal longer?", picture(2)),
        question("No picture at all."),
    ]
    rows = [tiny_vlm.prepare(c) for c in conversations]
    batch = tiny_vlm.prepare_batch(conversations)
    length = batch["input_ids"].shape[1]
    if side == "right":
        for key in ("input_ids", "attention_mask", "mm_token_type_ids"):
            batch[key] = torch.stack(
                [torch.nn.functional.pad(r[key][0], (0, length - r[key].shape[1])) for r in rows]
            )
    together = _decisions(tiny_vlm, policy, batch)
    for row, inputs in enumerate(rows):
        alone = _decisions(tiny_vlm, policy, inputs)
        valid = batch["attention_mask"][row].bool()
        assert int(valid.sum()) == inputs["input_ids"].shape[1]
        for layer in range(3):
            mine = together[layer].view(len(rows), length, -1)[row]
            assert torch.equal(mine[valid], alone[layer])


def _decisions(vlm, policy, inputs) -> list[torch.Tensor]:
    """Expert ids that reach the experts, by layer."""
    seen: list[torch.Tensor] = []
    layers = vlm.adapter.moe_layers(vlm.model)
    with limit_capacity(vlm.model, policy, check=True):
        handles = [
            layer.experts.register_forward_pre_hook(lambda m, args: seen.append(args[1].clone()))
            for layer in layers
        ]
        vlm.model(**inputs)
        for handle in handles:
            handle.remove()
    assert len(seen) == len(layers)
    return seen


def test_sequence_steps_are_the_rows(tiny_vlm):
    conversations = [question("One?", picture(1)), question("And the other one?", picture(2))]
    batch = tiny_vlm.prepare_batch(conversations)
    with limit_capacity(tiny_vlm.model, make_policy("none"), trace_window="sequence") as trace:
        logits(tiny_vlm, batch)
    layers = trace.layers()
    assert list(layers["step"].unique()) == [0, 1]
    for row in range(2):
        assert (
            layers[layers["step"] == row]["tokens"] == batch["attention_mask"][row].sum().item()
        ).all()


def test_keyword_and_positional_inputs(tiny_vlm, one_question):
    policy = make_policy("token-drop", gamma=0.5, modality="image-first")
    inputs = dict(one_question)
    with limit_capacity(tiny_vlm.model, policy):
        by_keyword = logits(tiny_vlm, inputs)
        ids = inputs.pop("input_ids")
        by_position = tiny_vlm.model(ids, **inputs).logits
    assert torch.equal(by_keyword, by_position)


class Greedy:
    """A policy that promises C = 1 and keeps everything: the check must catch it."""

    name = "greedy"
    phase = "prefill"

    def decide(self, routing):
        window = torch.zeros_like(routing.sequence)
        return Decision(
            routing.expert, routing.weights, window, 1, torch.ones(1, dtype=torch.int64)
        )


def test_check_catches_a_policy_that_keeps_too_much(tiny_vlm, one_question):
    with pytest.raises(
        CapacityExceededError, match=r"expert \d+ keeps \d+ assignments, capacity is 1"
    ):
        with limit_capacity(tiny_vlm.model, Greedy(), check=True):
            logits(tiny_vlm, one_question)


def test_a_layer_that_is_not_covered_is_an_error(tiny_vlm, one_question):
    block = tiny_vlm.adapter.moe_layers(tiny_vlm.model)[1].block
    block.forward = lambda hidden: torch.zeros_like(hidden)  # goes around router and experts
    try:
        with limit_capacity(tiny_vlm.model, make_policy("token-drop", gamma=0.5)):
            with pytest.raises(RuntimeError, match="1 of 3 MoE layers were not covered"):
                logits(tiny_vlm, one_question)
    finally:
        del block.forward


def test_calling_a_part_of_the_model_is_an_error(tiny_vlm, one_question):
    with limit_capacity(tiny_vlm.model, make_policy("token-drop", gamma=0.5)):
        with pytest.raises(RuntimeError, match="outside of Qwen3VLMoeForConditionalGeneration"):
            tiny_vlm.model.model(**one_question)


def test_embeddings_without_ids_are_an_error(tiny_vlm, one_question):
    embeds = tiny_vlm.model.get_input_embeddings()(one_question["input_ids"])
    with limit_capacity(tiny_vlm.model, make_policy("token-drop", gamma=0.5)):
        with pytest.raises(ValueError, match="pass 'input_ids'"):
            tiny_vlm.model(inputs_embeds=embeds)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"ep_size": 3}, "ep_size 3 does not divide the 8 experts"),
        ({"ep_size": 0}, "ep_size must be a positive integer, got 0"),
        ({"token_rank": "row"}, "token_rank must be one of sequence, slice, got 'row'"),
        ({"trace_window": "day"}, "trace_window must be one of"),
    ],
)
def test_bad_arguments(tiny_vlm, arguments, message):
    with pytest.raises(ValueError, match=message):
        with limit_capacity(tiny_vlm.model, make_policy("none"), **arguments):
            pass


def test_a_dense_model_is_refused():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    with pytest.raises(UnsupportedModelError, match="'qwen3' is not supported"):
        with limit_capacity(Qwen3ForCausalLM(config), make_policy("none")):
            pass


def test_modality_values_are_stable():
    assert [(m.name, int(m)) for m in Modality] == [
        ("TEXT", 0),
        ("IMAGE", 1),
        ("VIDEO", 2),
        ("PAD", 3),
    ]
