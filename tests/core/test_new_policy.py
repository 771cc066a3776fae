"""A new policy costs one file and one registration line: a toy one, from registry to run record."""

from __future__ import annotations

import dataclasses
import importlib
import sys

import pytest
import torch

from mm_capacity import POLICIES, limit_capacity, make_policy
from mm_capacity.evaluation import policy_options
from mm_capacity.evaluation.arguments import build_parser, parse
from mm_capacity.evaluation.options import make_plan

FILE = '''
"""Keeps every n-th token's picks and drops the others'.

Source: none, a toy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mm_capacity.policies.base import Policy, apply_keep, integer
from mm_capacity.routing import Decision, Routing


@dataclass(frozen=True, kw_only=True)
class EveryNth(Policy):
    """Keeps tokens 0, n, 2n, ..."""

    name: ClassVar[str] = "every-nth"
    knob: ClassVar[str | None] = "n"
    knob_range: ClassVar[tuple[float, float]] = (1, 64)
    knob_raises_load: ClassVar[bool] = False

    n: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("n", self.n, 1)

    def decide(self, routing: Routing) -> Decision:
        routing.check()
        keep = (torch.arange(routing.tokens) % self.n == 0).unsqueeze(1).expand_as(routing.expert)
        expert, weights = apply_keep(routing, routing.expert, routing.weights, keep)
        return Decision(expert, weights, torch.zeros_like(routing.sequence), 1)
'''


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """The one file, and the one line."""
    (tmp_path / "toy_policy.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(POLICIES, "every-nth", "toy_policy:EveryNth")
    importlib.invalidate_caches()
    policy_options.policy_fields.cache_clear()
    yield
    policy_options.policy_fields.cache_clear()
    sys.modules.pop("toy_policy", None)


def test_it_runs_in_a_model(toy, tiny_vlm, one_question):
    policy = make_policy("every-nth", n=3)
    assert dataclasses.asdict(policy) == {"n": 3, "phase": "prefill"}
    with torch.no_grad(), limit_capacity(tiny_vlm.model, policy, check=True) as trace:
        tiny_vlm.model(**one_question)
    layers = trace.layers()
    tokens = one_question["input_ids"].numel()
    assert (layers["kept"] == -(-tokens // 3) * 2).all()  # K = 2
    with pytest.raises(ValueError, match="n must be an integer of at least 1, got 0"):
        make_policy("every-nth", n=0)
    with pytest.raises(ValueError, match="'m'; known: phase, n"):
        make_policy("every-nth", m=1)


def test_the_runner_offers_it(toy):
    argv = ["--policy", "every-nth", "token-drop", "--policy-arg", "n=5", "--gamma", "1"]
    plan = make_plan(parse(build_parser("run", ""), argv))
    (choice,) = (choice for choice in plan.policies if choice.name == "every-nth")
    assert dict(choice.options) == {"n": 5}  # no gamma, no modality: it has none
    assert choice.build() == make_policy("every-nth", n=5)
    assert choice.slug == "every-nth_n-5"


def test_it_can_be_placed_and_is_refused_copies_until_it_says_so(toy, tiny_vlm):
    load = {"load": [[8, 7, 6, 5, 4, 3, 2, 1]] * 3}
    policy = make_policy("every-nth", placement="lpt", placement_file=load)
    with limit_capacity(tiny_vlm.model, policy, ep_size=4):
        pass
    policy = make_policy("every-nth", placement="replicated", placement_file=load, replicas=4)
    with pytest.raises(ValueError, match="'every-nth' .*one rank"):
        with limit_capacity(tiny_vlm.model, policy, ep_size=4):
            pass
