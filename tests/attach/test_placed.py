"""Placements in ``limit_capacity``: who reads them, what the trace counts, who refuses."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from mm_capacity import limit_capacity, make_policy
from mm_capacity.placement import Placement, longest_processing_time, with_replicas
from mm_capacity.policies import POLICIES, policy_class
from mm_capacity.policies.base import Policy
from mm_capacity.policies.placed import placed
from mm_capacity.routing import Decision, Routing, unchanged

LAYERS, EXPERTS, RANKS = 3, 8, 4


def run(vlm, given, policy, **options):
    with torch.no_grad(), limit_capacity(vlm.model, policy, ep_size=RANKS, **options) as trace:
        logits = vlm.model(**given).logits
    return logits, trace


@pytest.fixture(scope="module")
def load(tiny_vlm, one_question):
    """What every expert of every layer gets of the question itself."""
    frame = run(tiny_vlm, one_question, make_policy("none"))[1].frame()
    counts = frame.groupby(["layer", "expert"])["assigned"].sum()
    return [[int(counts.get((x, e), 0)) for e in range(EXPERTS)] for x in range(LAYERS)]


def by_rank(load, rank_of_expert):
    loads = [0] * RANKS
    for expert, count in enumerate(load):
        loads[rank_of_expert[expert]] += count
    return loads


def test_every_rank_in_the_trace_is_the_placements(tiny_vlm, one_question, load):
    policy = make_policy("none", placement="lpt", placement_file={"load": load})
    plain, contiguous = run(tiny_vlm, one_question, make_policy("none"))
    logits, trace = run(tiny_vlm, one_question, policy, check=True)
    assert torch.equal(logits, plain)
    where = [longest_processing_time(layer, RANKS).rank_of_expert.tolist() for layer in load]
    for _, row in trace.frame().iterrows():
        assert row["rank"] == where[row["layer"]][row["expert"]]
    layers = trace.layers().set_index("layer")
    for layer in range(LAYERS):
        loads = by_rank(load[layer], where[layer])
        assert layers.loc[layer, "max_rank_load_after"] == max(loads)
        assert layers.loc[layer, "rank_straggler_after"] == max(loads) / (sum(loads) / RANKS)
    before = contiguous.summary()["rank_straggler_after"]
    assert trace.summary()["rank_straggler_after"] < before


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("token-drop", {"gamma": 0.6, "scope": "device"}),
        ("rank-tail", {"gamma": 0.8}),
        ("expanded-drop", {"gamma": 0.6}),
        ("macs", {"gamma": 0.4}),
    ],
)
def test_policies_get_the_ranks_of_the_placement(tiny_vlm, one_question, load, name, options):
    """The same policy with the placement handed over decides the same, and otherwise than before.

    Every rank's load is counted by hand from the experts' counts.
    """
    where = [longest_processing_time(layer, RANKS) for layer in load]
    placing = {"placement": "lpt", "placement_file": {"load": load}}
    own, trace = run(tiny_vlm, one_question, make_policy(name, **options, **placing), check=True)
    given, _ = run(tiny_vlm, one_question, make_policy(name, **options), placement=where)
    contiguous, _ = run(tiny_vlm, one_question, make_policy(name, **options))
    assert torch.equal(own, given)
    assert not torch.equal(own, contiguous)
    kept = trace.frame().groupby(["layer", "expert"])["kept"].sum()
    greatest = trace.layers().set_index("layer")["max_rank_load_after"]
    for layer in range(LAYERS):
        counts = [int(kept.get((layer, e), 0)) for e in range(EXPERTS)]
        assert greatest[layer] == max(by_rank(counts, where[layer].rank_of_expert.tolist()))


def shared_by_hand(counts, placement):
    """Each copy in turn, slot by slot, takes one assignment until none is left."""
    loads = [0] * placement.ranks
    slots = torch.stack([placement.expert_of_slot, placement.rank_of_slot], dim=1).tolist()
    for expert, count in enumerate(counts):
        ranks = [rank for held, rank in slots if held == expert]
        for number in range(count):
            loads[ranks[number % len(ranks)]] += 1
    return loads


@pytest.mark.parametrize("policy", ["none", "token-drop"])
def test_copies_share_the_load_of_every_step(tiny_vlm, load, policy):
    from pictures import picture, question

    given = tiny_vlm.prepare_batch(
        [question("Where?", picture(1)), question("What is it, and which colour?", picture(2))]
    )
    options = {} if policy == "none" else {"gamma": 0.5, "window": "sequence"}
    plain, flat = run(tiny_vlm, given, make_policy(policy, **options), trace_window="sequence")
    placing = {"placement": "replicated", "placement_file": {"load": load}, "replicas": 4}
    logits, trace = run(
        tiny_vlm, given, make_policy(policy, **options, **placing), trace_window="sequence"
    )
    assert torch.equal(logits, plain)
    where = [with_replicas(layer, RANKS, 4) for layer in load]
    frame = trace.frame()
    layers = trace.layers()
    assert sorted(layers["step"].unique()) == [0, 1] and len(layers) == 2 * LAYERS
    for _, row in layers.iterrows():
        mine = frame[(frame["step"] == row["step"]) & (frame["layer"] == row["layer"])]
        for when, column in (("before", "assigned"), ("after", "kept")):
            counts = mine.groupby("expert")[column].sum()
            loads = shared_by_hand(
                [int(counts.get(e, 0)) for e in range(EXPERTS)], where[int(row["layer"])]
            )
            assert row[f"max_rank_load_{when}"] == max(loads)
            straggler = max(loads) / row["mean_rank_load"]
            assert row[f"rank_straggler_{when}"] == pytest.approx(straggler)
    same = [c for c in layers if "rank" not in c]
    assert layers[same].equals(flat.layers()[same])
    copies = [placement.copies.tolist() for placement in where]
    several = [copies[x][e] > 1 for x, e in zip(frame["layer"], frame["expert"], strict=True)]
    assert ((frame["rank"] == -1) == several).all() and any(several)


NEEDS_RANKS = {"expanded-drop", "rank-tail", "macs"}


def test_policies_that_need_one_rank_per_expert_refuse_copies(tiny_vlm, load):
    placing = {"placement": "replicated", "placement_file": {"load": load}, "replicas": 4}
    cases = [(name, {}) for name in POLICIES] + [
        ("token-drop", {"scope": "device"}),
        ("expanded-drop", {"overflow": "expand-global"}),
        ("macs", {"hops": 0}),
        ("random-drop", {"like": "rank-tail"}),
        ("random-drop", {"keep_frac": 0.5, "like": "rank-tail"}),
    ]
    for name, options in cases:
        needs = (name in NEEDS_RANKS and not options) or options in (
            {"scope": "device"},
            {"like": "rank-tail"},
        )
        policy = make_policy(name, **options, **placing)
        if not needs:
            with limit_capacity(tiny_vlm.model, policy, ep_size=RANKS):
                continue
        with pytest.raises(ValueError, match="needs every expert on one rank.*4 replicas") as said:
            with limit_capacity(tiny_vlm.model, policy, ep_size=RANKS):
                pass
        assert "\n" not in str(said.value) and repr(name) in str(said.value)


def test_a_policy_that_says_nothing_is_refused_copies(tiny_vlm, load):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Silent(Policy):
        name = "silent"

        def decide(self, routing: Routing) -> Decision:
            return unchanged(routing)

    where = [with_replicas(layer, RANKS, 4) for layer in load]
    with pytest.raises(ValueError, match="one rank"):
        with limit_capacity(tiny_vlm.model, Silent(), ep_size=RANKS, placement=where):
            pass


def test_a_placed_policy_is_its_own_class_with_three_more_fields(tmp_path, load):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"load": load}))
    for name in POLICIES:
        policy = make_policy(name, placement="lpt", placement_file=str(file))
        cls = policy_class(name)
        assert isinstance(policy, cls) and policy.name == name and policy.knob == cls.knob
        assert placed(cls) is type(policy)
        plain = dataclasses.asdict(make_policy(name))
        extra = {"placement": "lpt", "placement_file": str(file), "replicas": 0}
        assert dataclasses.asdict(policy) == {**plain, **extra}
        assert repr(policy).startswith(f"Placed{cls.__name__}(")
        assert "placement" not in repr(make_policy(name))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"placement": "best", "placement_file": {"load": [[1]]}}, "must be one of lpt, repl"),
        ({"placement": "lpt"}, "placement_file"),
        ({"placement": "lpt", "placement_file": "nowhere.json"}, "cannot read 'nowhere.json'"),
        ({"placement": "lpt", "placement_file": {"alpha": [1]}}, "list 'load'"),
        ({"placement": "lpt", "placement_file": {"load": [[1, -1]]}}, r"load\[0\] must list"),
        ({"placement": "lpt", "placement_file": {"load": [3]}}, r"load\[0\] must list"),
        ({"placement": "lpt", "placement_file": {"load": [[1]]}, "replicas": 2}, "replicas"),
        ({"placement": "replicated", "placement_file": {"load": [[1]]}}, "replicas must be"),
    ],
)
def test_bad_placements_are_one_line(options, says):
    with pytest.raises(ValueError, match=says):
        make_policy("none", **options)


def test_a_placement_of_another_model_is_refused(tiny_vlm, load):
    def enter(policy, **options):
        with limit_capacity(tiny_vlm.model, policy, ep_size=RANKS, **options):
            pass

    short = {"placement": "lpt", "placement_file": {"load": load[:2]}}
    with pytest.raises(ValueError, match="loads of 3 MoE layers with 8 experts, got 2 with 8"):
        enter(make_policy("none", **short))
    narrow = [longest_processing_time([1.0] * 4, RANKS)] * LAYERS
    with pytest.raises(ValueError, match=r"placement must have .*got \[\(4, 4\)"):
        enter(make_policy("none"), placement=narrow)
    fits: list[Placement] = [longest_processing_time(layer, RANKS) for layer in load]
    whole = {"placement": "lpt", "placement_file": {"load": load}}
    with pytest.raises(ValueError, match="given twice"):
        enter(make_policy("none", **whole), placement=fits)
    three = {"placement": "replicated", "placement_file": {"load": load}, "replicas": 3}
    with pytest.raises(ValueError, match="replicas=3, got ranks=4"):
        enter(make_policy("none", **three))
