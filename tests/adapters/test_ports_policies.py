"""Every policy acts on the ported families, and on nothing else."""

from __future__ import annotations

import pytest
import torch
from pictures import picture, question

from mm_capacity import POLICIES, limit_capacity, make_policy
from vlm_adapters import load_model
from vlm_adapters.modality import Modality

pytestmark = pytest.mark.filterwarnings("ignore")
PORTS = ("molmoe", "deepseek_vl2")
GAMMA = 0.5
# What makes a policy without a gamma drop something on a random model.
ARGUMENTS = {
    "expert-drop": {"fraction": 0.25},
    "modes": {"tau_text": 0.5, "tau_image": 0.5},
    "naee": {"beta": 0.95},
    "visual-top-k": {"keep": 1},
    "top-p": {"p": 0.5},
    "random-drop": {"arguments": {"gamma": GAMMA}},
}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=PORTS)
def vlm(request):
    return load_model(f"tiny:{request.param}")


@pytest.fixture(scope="module")
def inputs(vlm):
    """Two rows of unlike length, one picture each, so that there is padding."""
    pair = [question("What is it?", picture(1)), question("Is it large or small?", picture(2))]
    return vlm.prepare_batch(pair)


def policy_of(name, **more):
    arguments = ARGUMENTS.get(name, {} if name == "none" else {"gamma": GAMMA})
    return make_policy(name, **arguments, **more)


def test_inputs_are_what_the_tests_need(vlm, inputs):
    tags = vlm.adapter.tag_tokens(inputs)
    assert {int(tag) for tag in tags.unique()} == {Modality.TEXT, Modality.IMAGE, Modality.PAD}


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "none"])
def test_policy(vlm, inputs, name):
    before = vlm.model(**inputs).logits
    with limit_capacity(vlm.model, policy_of(name), ep_size=2, check=True) as trace:
        capped = vlm.model(**inputs).logits
    summary = trace.summary()
    assert summary["drop_frac"] > 0
    assert len(trace.layers()) == len(vlm.adapter.moe_layers(vlm.model))
    assert torch.isfinite(capped).all() and not torch.equal(capped, before)
    assert torch.equal(vlm.model(**inputs).logits, before)


def test_none_is_bit_identical(vlm, inputs):
    before = vlm.model(**inputs).logits
    with limit_capacity(vlm.model, policy_of("none"), ep_size=2, check=True) as trace:
        assert torch.equal(vlm.model(**inputs).logits, before)
    assert trace.summary()["drop_frac"] == 0


@pytest.mark.parametrize("name", ["token-drop", "expanded-drop"])
def test_image_first_spares_text(vlm, inputs, name):
    drops = {}
    for modality in ("image-first", "text-first"):
        policy = policy_of(name, modality=modality)
        with limit_capacity(vlm.model, policy, ep_size=2, check=True) as trace:
            vlm.model(**inputs)
        drops[modality] = trace.summary()
    assert drops["image-first"]["drop_frac_text"] < drops["text-first"]["drop_frac_text"]
    assert drops["image-first"]["drop_frac_image"] > 0


@pytest.mark.parametrize("cache", [True, False])
def test_steps_that_a_policy_sees(vlm, cache):
    """With a cache the prefill alone; without, every step is a pass of the whole sequence."""
    asked = vlm.prepare(question("What is it?", picture(1)))
    steps, new = {}, 3
    for phase in ("prefill", "all"):
        policy = policy_of("token-drop", phase=phase)
        with limit_capacity(vlm.model, policy, check=True) as trace:
            vlm.model.generate(
                **asked, max_new_tokens=new, min_new_tokens=new, do_sample=False, use_cache=cache
            )
        steps[phase] = [int(n) for n in trace.layers().groupby("step")["tokens"].first()]
    length = asked["input_ids"].shape[1]
    grown = [length + step for step in range(new)]
    assert steps["prefill"] == ([length] if cache else grown)
    assert steps["all"] == ([length, 1, 1] if cache else grown)
