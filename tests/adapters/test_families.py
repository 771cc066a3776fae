"""Every native family as a tiny random model: the method must act on it, and on nothing else."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import contextmanager

import pytest
import torch
from pictures import picture, question

from mm_capacity import limit_capacity, make_policy
from mm_capacity.experts import SKIP_DROPPED, dispatches, skipping_dropped
from mm_capacity.inspection.footprint import differences, footprint
from vlm_adapters import ADAPTERS
from vlm_adapters.modality import Modality
from vlm_adapters.routers import check_choice
from vlm_adapters.tiny_build import tiny_vlm, to_dtype
from vlm_adapters.tiny_families import FAMILIES, IMAGE, VIDEO

pytestmark = pytest.mark.filterwarnings("ignore")
TEXT_ONLY = {name for name, spec in FAMILIES.items() if spec.vision is None}
# Experts that transformers does not dispatch: there is one implementation only.
OWN_FORWARD = ("step3p7",)
# generate(use_cache=False) does not lengthen the token types that its own layers need.
NO_CACHE_BY_HAND = ("ernie4_5_vl_moe",)
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm", SKIP_DROPPED)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads cost more than they gain on models of this size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module", params=list(FAMILIES))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def vlm(name):
    return tiny_vlm(name)


@pytest.fixture(scope="module")
def inputs(name, vlm):
    images = [] if name in TEXT_ONLY else [picture(1), picture(2)]
    return vlm.prepare(question("What is this, and what is it for?", *images))


@pytest.fixture(scope="module")
def before(vlm, inputs):
    with torch.no_grad():
        return logits(vlm, inputs)


def logits(vlm, inputs):
    return vlm.model(**inputs).logits


def test_layers_are_those_of_the_configuration(name, vlm):
    layers = vlm.adapter.moe_layers(vlm.model)
    config = vlm.model.config.get_text_config()
    sparse = config.num_hidden_layers
    if name == "nemotron_h_omni":
        sparse = list(config.layers_block_type).count("moe")
    if name == "ernie4_5_vl_moe":
        sparse *= 2  # text and image experts
    assert len(layers) == sparse == FAMILIES[name].sparse_layers
    assert {(layer.num_experts, layer.top_k) for layer in layers} == {(8, 2)}
    assert [layer.index for layer in layers] == list(range(len(layers)))


def test_experts_are_not_square(vlm):
    for layer in vlm.adapter.moe_layers(vlm.model):
        for parameter_name, parameter in layer.experts.named_parameters():
            if parameter_name == "down_proj":
                assert parameter.shape[1] != parameter.shape[2]


def test_adapter_is_the_registered_one(name, vlm):
    assert vlm.adapter.name == (name if name in ADAPTERS else "native")


@pytest.mark.parametrize("images", [0, 1, 3])
def test_image_tags_are_the_image_positions(name, vlm, images):
    if images and name in TEXT_ONLY:
        with pytest.raises(ValueError, match="takes no images"):
            vlm.prepare(question("How many?", picture()))
        return
    inputs = vlm.prepare(question("How many?", *(picture(i) for i in range(images))))
    tags = vlm.adapter.tag_tokens(inputs)
    assert int((tags == Modality.IMAGE).sum()) == images * FAMILIES[name].tokens
    assert torch.equal(tags == Modality.IMAGE, inputs["input_ids"] == IMAGE)
    assert int((tags == Modality.TEXT).sum()) == int((inputs["input_ids"] != IMAGE).sum())


def test_image_tags_are_where_the_model_puts_features(name, vlm, inputs):
    """Elsewhere the language model is given the embeddings of the ids."""
    if name in TEXT_ONLY:
        pytest.skip("takes no images")
    seen = []
    handle = vlm.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    logits(vlm, inputs)
    handle.remove()
    plain = vlm.model.get_input_embeddings()(inputs["input_ids"])
    replaced = (seen[0] != plain).any(-1)
    assert torch.equal(replaced, vlm.adapter.tag_tokens(inputs) == Modality.IMAGE)


def test_router_is_read_as_it_computes(name, vlm, inputs):
    """Scores times one factor per token are the weights; the picks are the greatest allowed."""
    layers, seen = vlm.adapter.moe_layers(vlm.model), []

    def hook(layer):
        def read(module, args, output):
            hidden = args[0].reshape(-1, args[0].shape[-1])
            choice = vlm.adapter.read_scores(layer, output, hidden)
            seen.append(check_choice(module, choice.scores, choice.index, choice.weights))
            if FAMILIES[name].text.get("topk_group") == 1:
                assert choice.allowed.sum(1).eq(4).all()
                assert choice.allowed.gather(1, choice.index).all()

        return read

    handles = [layer.router.register_forward_hook(hook(layer)) for layer in layers]
    logits(vlm, inputs)
    for handle in handles:
        handle.remove()
    assert len(seen) >= len(layers)
    assert set(seen) == {None}


def test_none_is_bit_identical(vlm, inputs, before):
    with limit_capacity(vlm.model, make_policy("none"), check=True) as trace:
        inside = logits(vlm, inputs)
    assert torch.equal(before, inside)
    assert trace.summary()["drop_frac"] == 0


@pytest.mark.parametrize("policy", ["token-drop", "expanded-drop"])
def test_load_stays_under_capacity(vlm, inputs, before, policy):
    """``check`` compares every load with C."""
    arguments = {"gamma": 0.5, "modality": "image-first"}
    with limit_capacity(
        vlm.model, make_policy(policy, **arguments), ep_size=4, check=True
    ) as trace:
        inside = logits(vlm, inputs)
    layers = trace.layers()
    capacity = (0.5 * layers["mean_load"]).apply(lambda value: -(-value // 1))
    assert (layers["max_load_after"] <= capacity).all()
    assert trace.summary()["drop_frac"] > 0
    assert torch.isfinite(inside).all()
    assert not torch.equal(before, inside)


def test_capacity_that_never_binds_changes_nothing_much(vlm, inputs, before):
    """Through our own experts function, or the stand-in of a block."""
    with limit_capacity(vlm.model, make_policy("token-drop", gamma=100.0)) as trace:
        inside = logits(vlm, inputs)
    assert trace.summary()["drop_frac"] == 0
    torch.testing.assert_close(before, inside, atol=1e-4, rtol=1e-4)


def test_nothing_is_left_behind(vlm, inputs, before):
    state = footprint(vlm.model)
    with pytest.raises(KeyError, match="mine"):
        with limit_capacity(vlm.model, make_policy("token-drop", gamma=0.5)):
            logits(vlm, inputs)
            assert differences(state, footprint(vlm.model))
            raise KeyError("mine")
    assert differences(state, footprint(vlm.model)) == []
    assert torch.equal(before, logits(vlm, inputs))


def test_generation_with_and_without_cache(name, vlm, inputs):
    greedy = {
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
        "suppress_tokens": [IMAGE, VIDEO],
    }
    with limit_capacity(vlm.model, make_policy("none")):
        with_cache = vlm.model.generate(**inputs, **greedy)
        if name in NO_CACHE_BY_HAND:
            without = greedy_by_hand(name, vlm, inputs, 8)
        else:
            without = vlm.model.generate(**inputs, **greedy, use_cache=False)
    assert torch.equal(with_cache, without)
    assert with_cache.shape[1] == inputs["input_ids"].shape[1] + 8


def greedy_by_hand(name, vlm, inputs, count):
    """Generates text without a cache: every forward pass sees the whole sequence."""
    inputs = dict(inputs)
    eos = vlm.model.generation_config.eos_token_id
    for _ in range(count):
        scores = logits(vlm, inputs)[:, -1]
        scores[:, [eos, IMAGE, VIDEO]] = -torch.inf
        new = {"input_ids": scores.argmax(-1, keepdim=True)}
        new["attention_mask"] = torch.ones_like(new["input_ids"])
        new |= {key: torch.zeros_like(new["input_ids"]) for key in FAMILIES[name].types}
        for key, value in new.items():
            inputs[key] = torch.cat([inputs[key], value.to(inputs[key].dtype)], dim=1)
    return inputs["input_ids"]


def test_generation_drops_in_prefill_only(vlm, inputs):
    policy = make_policy("token-drop", gamma=0.5, modality="image-first")
    with limit_capacity(vlm.model, policy, check=True) as trace:
        vlm.model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert trace.steps == 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_do_not_depend_on_padding(name, vlm, side):
    images = 0 if name in TEXT_ONLY else 1
    rows = [
        vlm.prepare(question("Short?", *[picture(1)] * images)),
        vlm.prepare(question("A question that is longer than that?", *[picture(2)] * images * 2)),
    ]
    batch = padded(rows, side)
    policy = make_policy("token-drop", gamma=0.5, window="sequence", modality="image-first")
    together = decisions(vlm, policy, batch)
    for row, inputs in enumerate(rows):
        alone = decisions(vlm, policy, inputs)
        for mine, own in zip(together, alone, strict=True):
            assert sorted(map(tuple, mine[row])) == sorted(map(tuple, own[0]))


def padded(rows: list[Mapping], side: str) -> dict:
    length = max(row["input_ids"].shape[1] for row in rows)
    batch = {}
    for key in rows[0]:
        parts = [row[key] for row in rows]
        if parts[0].shape == rows[0]["input_ids"].shape:
            room = [length - part.shape[1] for part in parts]
            pads = [(n, 0) if side == "left" else (0, n) for n in room]
            parts = [
                torch.nn.functional.pad(part, pad) for part, pad in zip(parts, pads, strict=True)
            ]
        batch[key] = torch.cat(parts)
    return batch


def decisions(vlm, policy, inputs) -> list[list[list[list[int]]]]:
    """Expert ids that reach the experts: by call, row, valid token that enters the layer."""
    seen = []
    with limit_capacity(vlm.model, policy, check=True):
        # The stand-ins of a block are made on entering; hooks go to what really runs.
        run = [cell for cell in _hooked_layers(vlm)]
        handles = []
        for layer in run:
            mask = vlm.adapter.layer_tokens(layer, inputs)
            valid = inputs["attention_mask"].bool()
            enters = torch.ones_like(valid) if mask is None else mask
            handles.append(
                layer.experts.register_forward_pre_hook(
                    lambda m, args, enters=enters, valid=valid: seen.append(
                        by_row(args[1], enters, valid)
                    )
                )
            )
        vlm.model(**inputs)
        for handle in handles:
            handle.remove()
    return seen


def _hooked_layers(vlm):
    layers = vlm.adapter.moe_layers(vlm.model)
    if vlm.adapter.name == "llama4":
        for layer in layers:
            stand_in = layer.block.forward.__func__.__closure__[0].cell_contents
            yield copy.copy(layer).__class__(**{**vars(layer), "experts": stand_in})
        return
    yield from layers


def by_row(index, enters, valid) -> list[list[list[int]]]:
    rows: list[list[list[int]]] = [[] for _ in range(len(valid))]
    position = 0
    for row in range(enters.shape[0]):
        for column in range(enters.shape[1]):
            if not enters[row, column]:
                continue
            if valid[row, column]:
                rows[row].append(index[position].tolist())
            position += 1
    assert position == len(index)
    return rows


@contextmanager
def implementation(vlm, which):
    """The experts implementation of a model for a while."""
    layers = vlm.adapter.moe_layers(vlm.model)
    configs = {id(layer.experts.config): layer.experts.config for layer in layers}
    if which == SKIP_DROPPED:
        with skipping_dropped([layer.experts for layer in layers]):
            yield
        return
    old = {key: config._experts_implementation_internal for key, config in configs.items()}
    try:
        for config in configs.values():
            config._experts_implementation_internal = which
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation_internal = old[key]


def test_experts_implementations_agree(name, vlm, inputs):
    layer = vlm.adapter.moe_layers(vlm.model)[0]
    if name == "llama4":
        pytest.skip("experts without the seam: tested against the block in test_special_families")
    given = []
    handle = layer.experts.register_forward_pre_hook(lambda m, args: given.append(args))
    logits(vlm, inputs)
    handle.remove()
    hidden, index, weights = given[0]
    drop = torch.rand(index.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    silent = weights.masked_fill(drop, 0.0)
    results, dropped = {}, {}
    assert dispatches(layer.experts) == (name not in OWN_FORWARD)
    if name in OWN_FORWARD:
        torch.testing.assert_close(
            layer.experts(hidden, index, silent),
            layer.experts(hidden, index.masked_fill(drop, 8), silent),
        )
        return
    for which in IMPLEMENTATIONS:
        with implementation(vlm, which):
            results[which] = layer.experts(hidden, index, weights)
            # Only ours takes the id E in every family; weight 0 says the same to the others.
            some = index.masked_fill(drop, 8) if which == SKIP_DROPPED else index
            dropped[which] = layer.experts(hidden, some, silent)
    for which in IMPLEMENTATIONS[1:]:
        for got in (results, dropped):
            scale = float(got["eager"].abs().max())
            torch.testing.assert_close(got["eager"], got[which], atol=1e-5 * scale, rtol=1e-5)


def test_bfloat16_runs(name):
    vlm = tiny_vlm(name)
    to_dtype(vlm.model, torch.bfloat16)
    images = [] if name in TEXT_ONLY else [picture(1)]
    inputs = {
        key: value.to(torch.bfloat16) if value.is_floating_point() else value
        for key, value in vlm.prepare(question("In half precision?", *images)).items()
    }
    plain = logits(vlm, inputs)
    with limit_capacity(vlm.model, make_policy("none"), check=True):
        assert torch.equal(plain, logits(vlm, inputs))
    policy = make_policy("token-drop", gamma=0.5, modality="image-first")
    with limit_capacity(vlm.model, policy, check=True) as trace:
        out = logits(vlm, inputs)
    layer = vlm.adapter.moe_layers(vlm.model)[0]
    assert {p.dtype for p in layer.experts.parameters()} == {torch.bfloat16}
    assert torch.isfinite(out).all()
    assert trace.summary()["drop_frac"] > 0
