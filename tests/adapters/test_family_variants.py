"""Other sizes than those of the tiny models: dense layers, more experts, more groups.

The tiny models share E = 8 and K = 2 and have two MoE layers. Here every family gets another number
of experts, another K, more groups and, where it can, dense layers in between.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from pictures import picture, question

from mm_capacity import limit_capacity, make_policy
from mm_capacity.experts import dispatches
from vlm_adapters import tiny_build
from vlm_adapters.routers import check_choice, selection_scores
from vlm_adapters.tiny_build import tiny_vlm
from vlm_adapters.tiny_families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore")
GROUPS = {"n_group": 3, "topk_group": 2}
THREE = {"num_hidden_layers": 3}
DENSE_FIRST = {**THREE, "mlp_layer_types": ["dense", "sparse", "sparse"]}
TWELVE = {"n_routed_experts": 12, "num_experts_per_tok": 3}
TWELVE_LOCAL = {"num_local_experts": 12, "num_experts_per_tok": 3}
TWELVE_PLAIN = {"num_experts": 12, "num_experts_per_tok": 3}
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
# Settings of the text configuration, and the MoE layers that must be found.
VARIANTS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3_vl_moe": (
        {**TWELVE_PLAIN, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
        1,
    ),
    "qwen3_5_moe": ({**TWELVE_PLAIN, **THREE, **LINEAR}, 3),
    "qwen4_exp": ({**TWELVE_PLAIN, **THREE, **LINEAR}, 3),
    "qwen3_omni_moe_thinker": (
        {**TWELVE_PLAIN, "num_hidden_layers": 4, "decoder_sparse_step": 2},
        2,
    ),
    "glm4v_moe": (
        {
            **TWELVE,
            **GROUPS,
            **THREE,
            "first_k_dense_replace": 1,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
        },
        2,
    ),
    "glm5_next": (
        {
            **TWELVE,
            **GROUPS,
            **DENSE_FIRST,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
            "indexer_types": ["full"] * 3,
        },
        2,
    ),
    "ernie4_5_vl_moe": ({**DENSE_FIRST, "moe_num_experts": 6, "moe_k": 3}, 4),
    "gemma4": (
        {
            **THREE,
            "num_experts": 12,
            "top_k_experts": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "per_layer_config": {"2": {"head_dim": 16}},
        },
        3,
    ),
    "dots3_note": (
        {
            **TWELVE,
            **GROUPS,
            **DENSE_FIRST,
            "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        },
        2,
    ),
    "hy_v4_vl": (
        {
            **TWELVE,
            **GROUPS,
            **DENSE_FIRST,
            "layer_types": ["indexed_attention"] * 3,
            "indexer_types": ["full", "shared", "full"],
        },
        2,
    ),
    "inkling_mm_model": (
        {**TWELVE, **DENSE_FIRST, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]},
        2,
    ),
    "inkling2": (
        {**TWELVE, **THREE, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]},
        3,
    ),
    "inkling2_loop": (TWELVE, 3),
    "kimi_k25": ({**TWELVE, **GROUPS, "num_hidden_layers": 4, "first_k_dense_replace": 1}, 3),
    "llama4": (
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "moe_layers": [1, 3],
            "no_rope_layers": [1, 0, 1, 0],
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
        2,
    ),
    "minimax_m3_vl": ({**TWELVE_LOCAL, **DENSE_FIRST, "layer_types": ["full_attention"] * 3}, 2),
    "mistral_large4": (
        {
            **TWELVE,
            **GROUPS,
            **DENSE_FIRST,
            "layer_types": ["indexed_attention"] * 3,
            "indexer_types": ["full"] * 3,
            "no_rope_layers": [1] * 3,
            "kv_source_layers": [0, 1, 2],
        },
        2,
    ),
    "muse_spark": (
        {
            **TWELVE_LOCAL,
            **DENSE_FIRST,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "layer_rope_theta": [1000.0, 0, 0],
        },
        2,
    ),
    "nemotron_h_omni": (
        {
            **TWELVE,
            **GROUPS,
            "layers_block_type": ["moe", "linear_attention", "moe", "full_attention", "moe"],
        },
        3,
    ),
    "step3p7": ({**TWELVE, **DENSE_FIRST, "layer_types": ["full_attention"] * 3}, 2),
    "deepseek_ocr2": ({**TWELVE, **GROUPS, **DENSE_FIRST, "norm_topk_prob": True}, 2),
    "unlimited_ocr": (
        {
            **TWELVE,
            **GROUPS,
            **DENSE_FIRST,
            "topk_method": "group_limited_greedy",
            "layer_types": ["reference_sliding_attention"] * 3,
        },
        2,
    ),
    "aria": ({**THREE, "moe_num_experts": 12, "moe_topk": 3, "moe_num_shared_experts": 3}, 3),
    "internvl": (
        {
            **TWELVE_PLAIN,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
        },
        2,
    ),
    "internvl+gpt_oss": (
        {
            **TWELVE_LOCAL,
            **THREE,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        3,
    ),
    "llava+mixtral": ({**THREE, "num_local_experts": 6, "num_experts_per_tok": 3}, 3),
    "olmoe": ({**TWELVE_PLAIN, **THREE, "norm_topk_prob": True}, 3),
    "mixtral": ({**THREE, "num_local_experts": 6, "num_experts_per_tok": 1}, 3),
    "qwen2_moe": (
        {**TWELVE_PLAIN, "num_hidden_layers": 4, "decoder_sparse_step": 2, "norm_topk_prob": True},
        2,
    ),
    "qwen3_moe": ({**TWELVE_PLAIN, **THREE, "mlp_only_layers": [0], "norm_topk_prob": True}, 2),
    "deepseek_v2": (
        {
            **TWELVE,
            **THREE,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "norm_topk_prob": True,
        },
        2,
    ),
    "deepseek_v3": (
        {**TWELVE, **GROUPS, **THREE, "first_k_dense_replace": 1, "norm_topk_prob": False},
        2,
    ),
}


@pytest.fixture(autouse=True)
def quiet():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def test_every_family_has_a_variant():
    assert set(VARIANTS) == set(FAMILIES)


@pytest.fixture(scope="module", params=list(VARIANTS))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def vlm(name):
    spec = FAMILIES[name]
    text = {**spec.text, **VARIANTS[name][0]}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(tiny_build.FAMILIES, name, dataclasses.replace(spec, text=text))
        return tiny_vlm(name, seed=3)


@pytest.fixture(scope="module")
def inputs(name, vlm):
    images = [] if FAMILIES[name].vision is None else [picture(1), picture(2)]
    return vlm.prepare(question("What is this, and what is it for?", *images))


def records(vlm, policy, inputs) -> list:
    """Routing and decision of every layer."""
    seen = []
    decide = type(policy).decide

    class Seen(type(policy)):
        def decide(self, routing):
            decision = decide(self, routing)
            seen.append((routing, decision))
            return decision

    object.__setattr__(policy, "__class__", Seen)
    with limit_capacity(vlm.model, policy, ep_size=2, check=True):
        vlm.model(**inputs)
    return seen


def test_layers_experts_and_top_k(name, vlm):
    text, expected = VARIANTS[name]
    layers = vlm.adapter.moe_layers(vlm.model)
    assert len(layers) == expected
    experts = next(value for key, value in text.items() if "experts" in key and value > 3)
    assert {layer.num_experts for layer in layers} == {experts}
    assert {layer.top_k for layer in layers} <= {1, 3}


def test_none_is_bit_identical_and_routers_are_read(name, vlm, inputs):
    before = vlm.model(**inputs).logits
    problems = []
    handles = [
        layer.router.register_forward_hook(
            lambda module, args, out, layer=layer: problems.append(
                check(module, vlm.adapter.read_scores(layer, out, args[0]))
            )
        )
        for layer in vlm.adapter.moe_layers(vlm.model)
    ]
    with limit_capacity(vlm.model, make_policy("none"), check=True):
        assert torch.equal(before, vlm.model(**inputs).logits)
    for handle in handles:
        handle.remove()
    assert problems and set(problems) == {None}


def check(router, choice) -> str | None:
    return check_choice(router, choice.scores, choice.index, choice.weights)


def test_groups_hold_what_is_added(name, vlm, inputs):
    """Added weights are proportional to the scores, and lie in the groups of the token."""
    seen = records(vlm, make_policy("expanded-drop", gamma=1.5), inputs)
    added = 0
    for routing, decision in seen:
        kept = decision.expert < routing.experts
        padded = torch.nn.functional.pad(routing.scores, (0, 1)).gather(1, decision.expert)
        factor = routing.weights.sum(1) / routing.scores.gather(1, routing.expert).sum(1)
        torch.testing.assert_close(
            (padded * factor[:, None])[kept].float(),
            decision.weights[kept].float(),
            rtol=2e-3,
            atol=1e-6,
        )
        own = (decision.expert[:, :, None] == routing.expert[:, None, :]).any(-1)
        added += int((kept & ~own).sum())
        grouped = "n_group" in VARIANTS[name][0]
        assert (routing.allowed is not None) == grouped
        if grouped:
            assert routing.allowed.sum(1).eq(8).all()
            inside = torch.nn.functional.pad(routing.allowed, (0, 1), value=True)
            assert inside.gather(1, decision.expert).all()
    assert added > 0


def test_load_stays_under_capacity(vlm, inputs):
    policy = make_policy("token-drop", gamma=0.5, modality="image-first")
    with limit_capacity(vlm.model, policy, check=True) as trace:
        out = vlm.model(**inputs).logits
    layers = trace.layers()
    assert (layers["max_load_after"] <= -(-0.5 * layers["mean_load"] // 1)).all()
    assert trace.summary()["drop_frac"] > 0
    assert torch.isfinite(out).all()


def test_the_bias_is_for_the_choice_only(name, vlm, inputs):
    """Where there is a bias, some pick is not among the greatest scores without it."""
    layers = vlm.adapter.moe_layers(vlm.model)
    if torch.equal(selection_scores(layers[0].router, torch.zeros(1)), torch.zeros(1)):
        pytest.skip("a router without bias")
    seen = records(vlm, make_policy("token-drop", gamma=100.0), inputs)
    differs = []
    for routing, _ in seen:
        scores = routing.scores
        if routing.allowed is not None:
            scores = scores.masked_fill(~routing.allowed, -torch.inf)
        greatest = scores.topk(routing.top_k, dim=1).indices.sort(1).values
        differs.append(not torch.equal(greatest, routing.expert.sort(1).values))
    assert any(differs)


def test_a_row_of_text_beside_a_row_with_an_image(name, vlm):
    """Neither row sees the other, nor its padding."""
    if FAMILIES[name].vision is None:
        pytest.skip("takes no images")
    rows = [question("What is on this picture?", picture(1)), question("No picture here.")]
    policy = {"gamma": 0.5, "window": "sequence", "modality": "image-first"}
    together = records(vlm, make_policy("token-drop", **policy), vlm.prepare_batch(rows))
    for row, messages in enumerate(rows):
        alone = records(vlm, make_policy("token-drop", **policy), vlm.prepare(messages))
        assert kept(together, row) == kept(alone, 0)


def kept(seen: list, row: int) -> dict[int, list[list[int]]]:
    """Experts of every valid token of a row, by layer; layers that none enters are left out."""
    found: dict[int, list[list[int]]] = {}
    for routing, decision in seen:
        mine = (routing.sequence == row) & routing.valid
        experts = decision.expert[mine].sort(dim=1).values.tolist()
        if experts:
            found.setdefault(routing.layer, []).extend(experts)
    return found


def test_experts_implementations_agree_under_a_policy(name, vlm, inputs):
    experts = [layer.experts for layer in vlm.adapter.moe_layers(vlm.model)]
    if not all(map(dispatches, experts)):
        pytest.skip("one implementation only")
    results = {}
    for which in ("eager", "batched_mm", "grouped_mm"):
        with pytest.MonkeyPatch.context() as patch:
            for module in experts:
                patch.setattr(module.config, "_experts_implementation_internal", which)
            for policy in (make_policy("none"), make_policy("token-drop", gamma=0.5)):
                with limit_capacity(vlm.model, policy, check=True):
                    results[which, policy.name] = vlm.model(**inputs).logits
    for (which, policy_name), got in results.items():
        expected = results["eager", policy_name]
        scale = float(expected.abs().max())
        torch.testing.assert_close(got, expected, atol=1e-5 * scale, rtol=0, msg=which)
