"""The vision tower's output in place of pixels changes nothing but the time."""

from __future__ import annotations

import pytest

from mm_capacity import make_policy
from mm_capacity.evaluation.generate import answer
from mm_capacity.evaluation.vision import ENCODED, encode_images, fresh, n_bytes
from tests.runner.fakes import ask
from vlm_adapters import load_model
from vlm_adapters.tiny_families import FAMILIES as TINY

POLICY = make_policy("token-drop", gamma=0.5, modality="image-first", window="sequence")


FAMILIES = sorted(name for name, family in TINY.items() if family.vision is not None)


@pytest.mark.parametrize("family", [*FAMILIES, "molmoe", "deepseek_vl2"])
def test_answers_and_loads_stay_the_same(family):
    """For every family with a tiny model, whether or not it takes the encoding."""
    vlm = load_model(f"tiny:{family}")
    inputs = vlm.prepare(ask("What is this?", 1))
    encoded = encode_images(vlm.model, inputs)
    pixels = answer(vlm, inputs, POLICY, max_new_tokens=3)
    again = answer(vlm, encoded, POLICY, max_new_tokens=3)
    assert again.texts == pixels.texts
    assert again.loads.equals(pixels.loads)
    if encoded is not inputs:
        assert "pixel_values" not in encoded and "pixel_values" in inputs


def test_the_tower_runs_once(tiny_vlm):
    runs = []
    hook = tiny_vlm.model.model.visual.register_forward_hook(lambda *a: runs.append(1))
    try:
        inputs = encode_images(tiny_vlm.model, tiny_vlm.prepare(ask("What is this?", 1)))
        texts = {answer(tiny_vlm, inputs, POLICY, max_new_tokens=2).texts[0] for _ in range(3)}
    finally:
        hook.remove()
    assert len(runs) == 1 and len(texts) == 1
    assert set(inputs[ENCODED]) == {"image"}
    assert n_bytes(inputs) > 1000


def test_text_alone_is_left_alone(tiny_vlm):
    message = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    inputs = tiny_vlm.prepare(message)
    assert encode_images(tiny_vlm.model, inputs) is inputs
    assert fresh(inputs) == dict(inputs)
