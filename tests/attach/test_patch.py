"""The one-call form: the reference's configuration, on text-only and vision-language MoEs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from pictures import picture, question

import mm_capacity
from mm_capacity import apply_capacity_aware_moe_patch, limit_capacity, make_policy
from mm_capacity.inspection.footprint import differences, footprint
from vlm_adapters import load_model

TEXT_ONLY = ("olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
# What each strategy stands for, written out once more.
MEANS = {
    "score": ("token-drop", {"order": "score"}),
    "first": ("token-drop", {"order": "order"}),
    "last": ("token-drop", {"order": "reverse"}),
    "random": ("token-drop", {"order": "random"}),
    "overselect": (
        "expanded-drop",
        {"overflow": "expand-global", "rounds": 2, "at_most_top_k": True},
    ),
}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def olmoe():
    return load_model("tiny:olmoe")


@pytest.fixture(scope="module")
def words(olmoe):
    return olmoe.prepare(question("Name three animals that can fly."))


def logits(vlm, inputs):
    return vlm.model(**inputs).logits


@pytest.mark.parametrize("scope", ["expert", "device"])
@pytest.mark.parametrize("strategy", list(MEANS))
def test_a_strategy_is_the_policy_that_it_names(olmoe, words, strategy, scope):
    name, options = MEANS[strategy]
    policy = make_policy(name, gamma=0.5, scope=scope, **options)
    with limit_capacity(olmoe.model, policy, ep_size=4):
        want = logits(olmoe, words)
    config = SimpleNamespace(
        expert_capacity=0.5,
        strategy=strategy,
        rounds=2 if strategy == "overselect" else 1,
        capacity_scope=scope,
        capacity_devices=4,
    )
    layers, undo = apply_capacity_aware_moe_patch(olmoe.model, config)
    try:
        assert layers == 2
        assert torch.equal(logits(olmoe, words), want)
    finally:
        undo()
    assert not torch.equal(logits(olmoe, words), want)


@pytest.mark.parametrize("family", [*TEXT_ONLY, "qwen3_vl_moe"])
def test_loads_are_capped_and_nothing_is_left_behind(family):
    vlm = load_model(f"tiny:{family}")
    images = [picture()] if family == "qwen3_vl_moe" else []
    inputs = vlm.prepare(question("What is this, and what is it for?", *images))
    before, state = logits(vlm, inputs), footprint(vlm.model)
    patched = apply_capacity_aware_moe_patch(vlm.model, {"expert_capacity": 0.5})
    loads = []
    moe = vlm.adapter.moe_layers(vlm.model)
    # Behind the patch: sees what reaches the experts.
    handles = [
        layer.experts.register_forward_pre_hook(
            lambda _, args, kwargs, e=layer.num_experts: loads.append(
                torch.bincount([*args, *kwargs.values()][1].flatten(), minlength=e + 1)[:e]
            ),
            with_kwargs=True,
        )
        for layer in moe
    ]
    inside = logits(vlm, inputs)
    for handle in handles:
        handle.remove()
    assert patched.layers == len(moe) == len(loads)
    tokens = inputs["input_ids"].shape[1]
    capacity = -(-tokens * 2 // 16)  # ceil(0.5 * K T / E), K = 2 and E = 8
    assert max(int(load.max()) for load in loads) == capacity
    assert not torch.equal(before, inside)
    patched.undo()
    patched.undo()
    assert differences(state, footprint(vlm.model)) == []
    assert torch.equal(before, logits(vlm, inputs))


def test_a_second_patch_is_refused_until_the_first_is_undone(olmoe, words):
    first = apply_capacity_aware_moe_patch(olmoe.model, {"expert_capacity": 0.5})
    inside = logits(olmoe, words)
    with pytest.raises(ValueError, match=r"patched already .*undo\(\)"):
        apply_capacity_aware_moe_patch(olmoe.model, {"expert_capacity": 2.0})
    assert torch.equal(logits(olmoe, words), inside)
    first.undo()
    again = apply_capacity_aware_moe_patch(olmoe.model, {"expert_capacity": 0.5})
    assert torch.equal(logits(olmoe, words), inside)
    first.undo()  # an old handle does not take back a new patch
    assert torch.equal(logits(olmoe, words), inside)
    again.undo()


def test_a_refused_patch_leaves_nothing_behind(olmoe, words):
    before = logits(olmoe, words)
    config = {"expert_capacity": 0.5, "capacity_scope": "device", "capacity_devices": 3}
    with pytest.raises(ValueError, match="3 does not divide the 8 experts"):
        apply_capacity_aware_moe_patch(olmoe.model, config)
    assert torch.equal(logits(olmoe, words), before)
    apply_capacity_aware_moe_patch(olmoe.model, {**config, "capacity_devices": 2}).undo()


def test_no_capacity_patches_nothing(olmoe):
    layers, undo = apply_capacity_aware_moe_patch(olmoe.model, {"expert_capacity": None})
    assert layers == 0
    undo()


def test_a_long_run_keeps_no_counts(olmoe, words, monkeypatch):
    traces = []
    real = mm_capacity.patch.limit_capacity

    def watched(*args, **kwargs):
        context = real(*args, **kwargs)
        enter = context.__enter__

        class Watched:
            def __enter__(self):
                traces.append(enter())
                return traces[-1]

            def __exit__(self, *exc):
                return context.__exit__(*exc)

        return Watched()

    monkeypatch.setattr(mm_capacity.patch, "limit_capacity", watched)
    patched = apply_capacity_aware_moe_patch(olmoe.model, {"expert_capacity": 0.5})
    logits(olmoe, words)
    logits(olmoe, words)
    patched.undo()
    assert traces[0].steps == 2 and traces[0].frame().empty


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "'expert_capacity'"),
        ({"expert_capacity": 1.0, "gamma": 1}, "unknown field 'gamma'; known: expert_capacity"),
        (SimpleNamespace(expert_capacity=1.0, stratgy="x"), "unknown field 'stratgy'"),
        ({"expert_capacity": -1}, "expert_capacity -1"),
        ({"expert_capacity": "much"}, "expert_capacity 'much'"),
        ({"expert_capacity": 1.0, "strategy": "best"}, "score, first, last, random, overselect"),
        ({"expert_capacity": 1.0, "rounds": 0}, "rounds .* got 0"),
        ({"expert_capacity": 1.0, "capacity_scope": "node"}, "expert, device, got 'node'"),
        ({"expert_capacity": 1.0, "capacity_scope": "device"}, "capacity_devices .* got None"),
        ({"expert_capacity": 1.0, "capacity_devices": 0}, "capacity_devices .* got 0"),
    ],
)
def test_bad_configurations(olmoe, config, says):
    with pytest.raises(ValueError, match=says):
        apply_capacity_aware_moe_patch(olmoe.model, config)


def test_rounds_without_overselect_is_said(olmoe):
    with pytest.warns(UserWarning, match="rounds=2 has no effect with strategy 'score'"):
        config = {"expert_capacity": 1.0, "rounds": 2}
        apply_capacity_aware_moe_patch(olmoe.model, config).undo()
