"""Every registered policy equals its oracle: indices exactly, weights to 1e-6."""

from __future__ import annotations

import dataclasses
import math
import warnings

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mm_capacity import enforce
from mm_capacity.policies import POLICIES, make_policy, policy_fields
from mm_capacity.routing import Decision, Routing
from tests import oracle
from tests.core.cases import PARAMETERS, policy_and_routing

# 2,250 cases in all; the policies with the most options get the most.
CASES = {"expanded-drop": 600, "token-drop": 450, "macs": 250, "random-drop": 200, "rank-tail": 200}
FEW = 110
MOVES_SLOTS = {"expanded-drop", "macs"}  # policies that add or exchange experts


def decide(policy, routing: Routing) -> Decision:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*expert-choice routing.*")
        return policy.decide(routing)


def assert_equals_oracle(policy, routing: Routing) -> None:
    decision = decide(policy, routing)
    fields = dataclasses.asdict(policy)
    if policy.name == "random-drop":
        other = make_policy(policy.like, **policy.arguments)
        fields["arguments_in_full"] = dataclasses.asdict(other)
    expected = oracle.ORACLES[policy.name](fields, oracle.Plain.of(routing))
    empty = routing.experts
    dtype = routing.weights.dtype
    assert decision.weights.dtype == dtype
    experts, weights = decision.expert.tolist(), decision.weights.tolist()
    tolerance = 1e-6 if dtype.itemsize >= 4 else 1e-2
    for token, (ids, given_weights) in enumerate(zip(experts, weights, strict=True)):
        got = {e: w for e, w in zip(ids, given_weights, strict=True) if e != empty}
        assert got.keys() == expected.kept[token].keys(), f"token {token}"
        assert len(got) == sum(e != empty for e in ids), f"token {token}: an expert twice"
        assert all(w == 0 for e, w in zip(ids, given_weights, strict=True) if e == empty)
        for e, w in got.items():
            want = torch.tensor(expected.kept[token][e]).to(dtype).item()
            close = math.isclose(w, want, rel_tol=tolerance, abs_tol=1e-6 * tolerance)
            assert close, f"token {token}, expert {e}: {w} is not {want}"
    # A pick that stays keeps its slot.
    if policy.name not in MOVES_SLOTS:
        stays = decision.expert != empty
        assert torch.equal(decision.expert[stays], routing.expert[stays])
    assert decision.window.tolist() == expected.window
    assert decision.windows == expected.windows
    capacity = None if decision.capacity is None else decision.capacity.tolist()
    assert capacity == expected.capacity
    assert_within_capacity(decision, routing)


def assert_within_capacity(decision: Decision, routing: Routing) -> None:
    """Every load <= C."""
    if decision.capacity is None:
        return
    loads: dict[tuple[int, int], int] = {}
    for ids, window in zip(decision.expert.tolist(), decision.window.tolist(), strict=True):
        for e in ids:
            if e != routing.experts:
                rank = int(routing.rank_of_expert[e])
                group = rank if decision.capacity_scope == "device" else e
                loads[window, group] = loads.get((window, group), 0) + 1
    for (window, group), load in loads.items():
        assert load <= int(decision.capacity[window]), f"window {window}, group {group}"


def test_every_policy_has_an_oracle_or_a_reason():
    for name in POLICIES:
        if name not in oracle.ORACLES:
            assert oracle.WITHOUT_ORACLE.get(name), f"policy {name!r} has no oracle and no reason"


def test_oracle_tests_draw_every_argument():
    for name in oracle.ORACLES:
        assert set(PARAMETERS[name]) | {"phase"} == set(policy_fields(name)), name


def run_cases(name: str, cases: int, derandomize: bool) -> None:
    @settings(
        max_examples=cases,
        deadline=None,
        derandomize=derandomize,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        arguments, routing = data.draw(policy_and_routing(name))
        assert_equals_oracle(make_policy(name, **arguments), routing)

    run()


def test_there_are_2_000_cases():
    assert sum(CASES.get(name, FEW) for name in oracle.ORACLES) >= 2_000


@pytest.mark.parametrize("name", sorted(oracle.ORACLES))
def test_policy_equals_oracle(name: str):
    run_cases(name, CASES.get(name, FEW), derandomize=True)


@pytest.mark.parametrize("name", ["expanded-drop", "random-drop", "token-drop", "visual-top-k"])
def test_policy_equals_oracle_on_the_path_of_other_devices(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(enforce, "_keep_first_on_cpu", enforce._keep_first)
    run_cases(name, 60, derandomize=True)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(oracle.ORACLES))
def test_policy_equals_oracle_100_000_cases(name: str):
    run_cases(name, 100_000 // len(oracle.ORACLES) + 1, derandomize=False)
