"""Padded batches and generation with MolmoE, against what the original generated."""

from __future__ import annotations

import pytest
import torch
from molmoe_golden import expected, inputs, make_folder, original_batch

from vlm_adapters.molmoe.modeling import MolmoeForConditionalGeneration
from vlm_adapters.molmoe.processing import collate

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("molmoe"))
    return MolmoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("sample", ["single", "text"])
def test_greedy(model, sample, use_cache):
    given = inputs(sample)
    output = model.generate(
        **given, **GREEDY, use_cache=use_cache, return_dict_in_generate=True, output_logits=True
    )
    prompt = given["input_ids"].shape[1]
    assert torch.equal(output.sequences[:, :prompt], given["input_ids"])
    assert torch.equal(output.sequences[0, prompt:], expected()[f"{sample}.generated_tokens"])
    logits = torch.cat(output.logits)
    assert (logits - expected()[f"{sample}.generated_logits"]).abs().max() < 5e-5


def padded_batches() -> dict[str, dict[str, torch.Tensor]]:
    original = original_batch()
    samples = [
        {name: value[0] for name, value in inputs(sample).items()} for sample in ("single", "text")
    ]
    longer = torch.cat([(original["input_ids"] != -1).long(), torch.ones(2, 8).long()], dim=1)
    return {
        "-1 on the right": original,
        "-1, mask with room for new tokens": {**original, "attention_mask": longer},
        "left": collate(samples, 1, "left"),
        "right": collate(samples, 1, "right"),
    }


CACHED = [(kind, True) for kind in padded_batches()]


@pytest.mark.parametrize(
    ("kind", "use_cache"), [*CACHED, ("-1 on the right", False), ("left", False)]
)
def test_greedy_in_a_padded_batch(model, kind, use_cache):
    batch = padded_batches()[kind]
    made = model.generate(**batch, **GREEDY, use_cache=use_cache)
    prompt = batch["input_ids"].shape[1]
    assert torch.equal(made[:, :prompt], batch["input_ids"])
    wanted = torch.stack([expected()[f"{name}.generated_tokens"] for name in ("single", "text")])
    assert torch.equal(made[:, prompt:], wanted)


@pytest.mark.parametrize("kind", padded_batches())
def test_forward_of_a_padded_batch(model, kind):
    batch = padded_batches()[kind]
    logits = model(**batch).logits
    assert logits.isfinite().all()
    length = inputs("text")["input_ids"].shape[1]
    row = logits[1, -length:] if kind == "left" else logits[1, :length]
    golden = expected()
    assert (
        logits[0, golden["single.logits_positions"]] - golden["single.logits"]
    ).abs().max() < 5e-5
    assert (row[golden["text.logits_positions"]] - golden["text.logits"]).abs().max() < 5e-5


def test_the_original_call(model):
    from transformers import GenerationConfig

    made = model.generate_from_batch(
        inputs("single"), GenerationConfig(max_new_tokens=8), use_cache=False
    )
    assert torch.equal(made[0, 342:], expected()["single.generated_tokens"])


def test_chunked_prefill_with_an_image_is_refused(model):
    with pytest.raises(ValueError, match="no chunked prefill"):
        model.generate(**inputs("single"), **GREEDY, prefill_chunk_size=64)
    cache = model(**inputs("text"), use_cache=True).cache
    with pytest.raises(ValueError, match="images with a filled cache"):
        model(**inputs("single"), cache=cache)
