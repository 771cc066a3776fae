"""Making policies: names, arguments, records, and what a wrong value says."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from mm_capacity.policies import POLICIES, make_policy, policy_class, policy_fields
from tests.core.cases import HIDDEN, routing_of

ROOT = Path(__file__).parents[2]


def test_listing_imports_nothing_heavy():
    code = (
        "import sys, mm_capacity.policies as p; assert p.POLICIES; "
        "print([m for m in ('torch', 'transformers', 'vlmeval', 'numpy') if m in sys.modules])"
    )
    start = time.perf_counter()
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert out.stdout.strip() == "[]"
    assert time.perf_counter() - start < 10  # seconds; generous, the machine may be busy


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_contract(name: str):
    cls = policy_class(name)
    assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
    assert cls.name == name
    assert isinstance(cls.needs_hidden, (bool, property))
    policy = make_policy(name)
    assert isinstance(policy.needs_hidden, bool)
    assert policy.phase == "prefill"
    assert make_policy(name, phase="all").phase == "all"
    if cls.knob is not None:
        low, high = cls.knob_range
        assert low < high and cls.knob in policy_fields(name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.phase = "all"
    # The record of a run is made of plain values and makes the same policy again.
    record = json.loads(json.dumps(dataclasses.asdict(policy)))
    assert make_policy(name, **record) == policy
    assert repr(policy).startswith(cls.__name__ + "(")


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_defaults_decide(name: str):
    routing = routing_of(7, batch=2, length=8, experts=8, top_k=2, ranks=2, hidden=HIDDEN)
    decision = make_policy(name).decide(routing)
    assert decision.expert.shape == decision.weights.shape
    assert decision.expert.dtype == torch.int64 and decision.weights.dtype == torch.float32
    assert decision.window.shape == (16,)
    assert bool((decision.weights[decision.expert == 8] == 0).all())


def test_none_returns_the_router_s_own_tensors():
    routing = routing_of(7, batch=2, length=8, experts=8, top_k=2, ranks=2)
    decision = make_policy("none").decide(routing)
    assert decision.expert is routing.expert
    assert decision.weights is routing.weights


def test_unknown_policy():
    with pytest.raises(ValueError, match="unknown policy 'token_drop'.*did you mean 'token-drop'"):
        make_policy("token_drop")
    with pytest.raises(ValueError, match="known: none, token-drop, expanded-drop"):
        make_policy("xyz")


def test_unknown_argument():
    with pytest.raises(ValueError, match="'token-drop' has no argument 'gama'; known: .*gamma"):
        make_policy("token-drop", gama=1.0)


WRONG = [
    *(
        (name, "gamma", value)
        for name in ("token-drop", "expanded-drop", "macs", "rank-tail")
        for value in (0, -1, -0.5, math.nan, math.inf, "0.5", "text", None, True, [1.0])
    ),
    *(
        ("token-drop", argument, value)
        for argument in ("modality", "order", "scope", "window", "rounding", "phase")
        for value in ("xyz", None, 3)
    ),
    ("token-drop", "count_padding", 1),
    ("token-drop", "renormalize", "yes"),
    ("token-drop", "seed", -1),
    ("token-drop", "seed", 1.5),
    ("expanded-drop", "overflow", "drop"),
    ("expanded-drop", "rounds", 0),
    ("expanded-drop", "originals_first", None),
    ("expanded-drop", "at_most_top_k", 2),
    ("expanded-drop", "inside_groups", 2),
    ("expert-drop", "fraction", -0.1),
    ("expert-drop", "fraction", 1.5),
    ("expert-drop", "count", 0),
    ("naee", "beta", 2),
    ("naee", "calibration", "no/such/file.json"),
    ("naee", "calibration", {"alpha": [1]}),
    ("naee", "calibration", {"beta": [1, -1]}),
    ("naee", "calibration", 3),
    ("top-p", "p", 1.1),
    ("modes", "tau_text", -1),
    ("modes", "tau_image", math.nan),
    ("modes", "tau_scale", "1"),
    ("modes", "calibration", {"alpha": ["x"]}),
    ("macs", "delta", -1),
    ("macs", "rho", 3),
    ("macs", "hops", -1),
    ("macs", "calibration", {"other": 1}),
    ("visual-top-k", "keep", -1),
    ("visual-top-k", "keep", 1.5),
    ("visual-top-k", "first_layer", -1),
    ("random-drop", "like", "xyz"),
    ("random-drop", "like", "random-drop"),
    ("random-drop", "keep_frac", 1.1),
    ("random-drop", "match", "rank"),
    ("random-drop", "arguments", [1]),
    ("rank-tail", "only_image", "no"),
]


@pytest.mark.parametrize(("name", "argument", "value"), WRONG)
def test_wrong_value_is_named(name: str, argument: str, value: object):
    with pytest.raises(ValueError) as caught:
        make_policy(name, **{argument: value})
    message = str(caught.value)
    expected = "unknown policy" if argument == "like" and value == "xyz" else argument
    assert expected in message
    shown = type(value).__name__ if isinstance(value, dict) else repr(value)
    inner = {"[1, -1]": "-1", "['x']": "'x'", "other": "other"}
    assert shown in message or any(k in str(value) and v in message for k, v in inner.items())
    assert "\n" not in message


def test_calibration_from_file(tmp_path: Path):
    file = tmp_path / "alpha.json"
    file.write_text(json.dumps({"alpha": [0.5, 1.0, 2.0, 4.0]}))
    routing = routing_of(3, batch=2, length=8, experts=8, top_k=4, ranks=2, layer=2)
    from_file = make_policy("modes", calibration=str(file)).decide(routing)
    given = make_policy("modes", calibration={"alpha": [0.5, 1.0, 2.0, 4.0]}).decide(routing)
    assert torch.equal(from_file.expert, given.expert)
    file.write_text("{")
    with pytest.raises(ValueError, match="calibration: .*alpha.json' is not JSON"):
        make_policy("modes", calibration=str(file))


def test_calibration_of_another_model():
    routing = routing_of(3, batch=1, length=4, experts=4, top_k=2, ranks=1, layers=4, hidden=HIDDEN)
    with pytest.raises(ValueError, match="layers=4, got 2"):
        make_policy("modes", calibration={"alpha": [1, 2]}).decide(routing)
    with pytest.raises(ValueError, match="each of experts=4"):
        make_policy("macs", calibration={"modality": [[1]] * 4}).decide(routing)
    with pytest.raises(ValueError, match="each of experts=4"):
        make_policy("macs", calibration={"neighbours": [[[1], [1], [2], [0]]] * 4}).decide(routing)


def test_policies_that_need_what_is_missing():
    routing = routing_of(3, batch=1, length=4, experts=4, top_k=2, ranks=1)
    with pytest.raises(ValueError, match="hidden must be given to policy 'macs', got None"):
        make_policy("macs").decide(routing)
    with pytest.raises(ValueError, match="count must leave at least one of experts=4, got 4"):
        make_policy("expert-drop", count=4).decide(routing)
    assert make_policy("random-drop", like="macs").needs_hidden
    assert not make_policy("random-drop").needs_hidden


def test_expert_choice_is_said_once():
    routing = routing_of(3, batch=1, length=4, experts=4, top_k=2, ranks=1)
    policy = make_policy("expanded-drop")
    with pytest.warns(UserWarning, match="expert-choice routing"):
        policy.decide(routing)
    two_ranks = routing_of(3, batch=1, length=4, experts=4, top_k=2, ranks=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy.decide(routing)
        make_policy("expanded-drop").decide(two_ranks)
        make_policy("expanded-drop", overflow="expand-global").decide(routing)
    assert "_warned" not in dataclasses.asdict(policy)


def test_the_document_names_every_policy_and_parameter():
    text = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    for name in POLICIES:
        assert f"| `{name}` |" in text, f"docs/policies.md: no row for {name}"
        section = text.split(f"### `{name}`")[1].split("\n### ")[0]
        base = set(policy_fields("token-drop")) if name == "expanded-drop" else set()
        for argument in set(policy_fields(name)) - base - {"phase"}:
            assert f"`{argument}`" in section, f"docs/policies.md: {name} lacks {argument}"
        knob = policy_class(name).knob
        assert knob is None or f"(knob `{knob}`)" in section
