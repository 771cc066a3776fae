"""The experts function that leaves dropped assignments out, against a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from mm_capacity.experts import SKIP_DROPPED, skip_dropped_experts, skipping_dropped

E, D, INNER, T, K = 6, 10, 7, 23, 3


class Config:
    """Just what transformers' dispatch reads."""

    def __init__(self) -> None:
        self._experts_implementation_internal = "eager"

    @property
    def _experts_implementation(self) -> str:
        return self._experts_implementation_internal


def make_experts(*, transposed: bool, bias: bool, gate: bool):
    @use_experts_implementation(is_transposed=transposed, has_bias=bias, has_gate=gate)
    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = E
            width = 2 * INNER if gate else INNER
            up, down = (width, D), (D, INNER)
            if transposed:
                up, down = up[::-1], down[::-1]
            name = "gate_up_proj" if gate else "up_proj"
            setattr(self, name, nn.Parameter(torch.randn(E, *up)))
            self.down_proj = nn.Parameter(torch.randn(E, *down))
            if bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(E, width)))
                self.down_proj_bias = nn.Parameter(torch.randn(E, D))
            self.act_fn = nn.SiLU()

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("the registered function must be called")

    torch.manual_seed(0)
    return Experts(Config())


def plain_loop(module, hidden, index, weights):
    """One assignment after the other."""
    out = torch.zeros_like(hidden)
    for t in range(hidden.shape[0]):
        for slot in range(index.shape[1]):
            e = int(index[t, slot])
            if e == module.num_experts:
                continue
            name = "gate_up_proj" if module.has_gate else "up_proj"
            up, down = getattr(module, name)[e], module.down_proj[e]
            if module.is_transposed:
                up, down = up.T, down.T
            inner = up @ hidden[t]
            if module.has_bias:
                inner = inner + getattr(module, f"{name}_bias")[e]
            if module.has_gate:
                left, right = inner.chunk(2)
                inner = torch.nn.functional.silu(left) * right
            else:
                inner = torch.nn.functional.silu(inner)
            row = down @ inner
            if module.has_bias:
                row = row + module.down_proj_bias[e]
            out[t] += weights[t, slot] * row
    return out


def assignments(drop: float, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    weights = torch.rand(T, K, generator=generator)
    gone = torch.rand(T, K, generator=generator) < drop
    return index.masked_fill(gone, E), weights.masked_fill(gone, 0.0)


@pytest.mark.parametrize("drop", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", [True, False])
@torch.no_grad()
def test_equals_the_plain_loop(drop, transposed, bias, gate):
    module = make_experts(transposed=transposed, bias=bias, gate=gate)
    index, weights = assignments(drop)
    hidden = torch.randn(T, D)
    got = skip_dropped_experts(module, hidden, index, weights)
    torch.testing.assert_close(
        got, plain_loop(module, hidden, index, weights), atol=2e-5, rtol=1e-5
    )
    gone = (index == E).all(1)
    assert torch.equal(got[gone], torch.zeros_like(got[gone]))


@torch.no_grad()
def test_dropped_assignments_cost_no_work(monkeypatch):
    module = make_experts(transposed=False, bias=False, gate=True)
    rows = []
    original = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: rows.append(a.shape[0]) or original(a, b))
    index, weights = assignments(0.5)
    skip_dropped_experts(module, torch.randn(T, D), index, weights)
    assert sum(rows) == 2 * int((index < E).sum())


@torch.no_grad()
def test_hidden_infinities_of_dropped_tokens_do_not_spread():
    """0 * inf is NaN: a dropped row must not be multiplied away but never be computed."""
    module = make_experts(transposed=False, bias=False, gate=True)
    index, weights = assignments(0.0)
    hidden = torch.randn(T, D)
    hidden[3] = float("inf")
    index[3], weights[3] = E, 0.0
    assert torch.isfinite(skip_dropped_experts(module, hidden, index, weights)).all()


@torch.no_grad()
def test_registration_is_undone():
    module = make_experts(transposed=False, bias=False, gate=True)
    assert SKIP_DROPPED not in ALL_EXPERTS_FUNCTIONS
    with pytest.raises(ValueError, match="inside"):
        with skipping_dropped([module, nn.Linear(2, 2)]) as own:
            assert own == ["Linear"]
            assert SKIP_DROPPED in ALL_EXPERTS_FUNCTIONS
            index, weights = assignments(0.5)
            module(torch.randn(T, D), index, weights)
            with skipping_dropped([module]):
                pass
            assert SKIP_DROPPED in ALL_EXPERTS_FUNCTIONS
            raise ValueError("inside")
    assert SKIP_DROPPED not in ALL_EXPERTS_FUNCTIONS
    assert module.config._experts_implementation == "eager"
