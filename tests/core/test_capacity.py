"""C in integer arithmetic, and windows."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_capacity.capacity import (
    capacity_of,
    count_by_window,
    read_gamma,
    tokens_in_windows,
    window_of,
)
from tests.core.cases import routing_of


def one(tokens: int, gamma: float, top_k: int, experts: int, **options) -> int:
    counted = torch.tensor([tokens])
    return int(capacity_of(counted, gamma=gamma, top_k=top_k, experts=experts, **options))


def test_gamma_is_read_as_written():
    assert read_gamma(1.1) == Fraction(11, 10)
    assert read_gamma(1 / 3) == Fraction(1, 3)
    # In floating point 1.1 * 10 = 11.000000000000002, whose ceiling is 12.
    assert one(10, 1.1, 1, 1) == 11
    assert one(30, 0.1, 1, 1) == 3  # 0.1 * 30 = 3.0000000000000004


@pytest.mark.parametrize(
    ("rounding", "local", "want"),
    [("ceil", 1, 2), ("floor", 1, 1), ("ceil", 4, 6), ("floor", 4, 6)],
)
def test_device_scope_rounds_once(rounding: str, local: int, want: int):
    # gamma K T / E = 1.5; four experts share 6, not 4 * 2.
    assert one(12, 0.5, 2, 8, rounding=rounding, local_experts=local) == want


def test_ceil_keeps_at_least_one_and_floor_may_keep_none():
    assert one(0, 0.5, 1, 8) == 1
    assert one(3, 0.01, 1, 8) == 1
    assert one(3, 0.01, 1, 8, rounding="floor") == 0


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    st.integers(0, 2**22),
    st.floats(1e-3, 1e3),
    st.sampled_from([4, 8, 64, 128, 256, 512]),
    st.integers(1, 4),
    st.sampled_from(["ceil", "floor"]),
)
def test_exact_up_to_millions_of_tokens(tokens, gamma, experts, top_k, rounding):
    exact = Fraction(repr(gamma)).limit_denominator(10**9) * top_k * tokens / experts
    want = max(1, math.ceil(exact)) if rounding == "ceil" else math.floor(exact)
    assert one(tokens, gamma, top_k, experts, rounding=rounding) == want


def test_bad_input():
    with pytest.raises(ValueError, match="gamma .*-1"):
        one(4, -1.0, 1, 4)
    with pytest.raises(ValueError, match="top_k .*experts=4, got top_k=5"):
        one(4, 1.0, 5, 4)
    with pytest.raises(ValueError, match="rounding .*'nearest'"):
        one(4, 1.0, 1, 4, rounding="nearest")


def test_windows_and_padding():
    routing = routing_of(5, batch=3, length=6, experts=4, top_k=2, ranks=2, tag_kind="right-pad")
    valid = (routing.modality != 3).view(3, 6).sum(dim=1).tolist()
    assert sum(valid) < 18
    for kind, want in (
        ("batch", [sum(valid)]),
        ("sequence", valid),
        ("rank", [valid[0] + valid[2], valid[1]]),
    ):
        window, windows = window_of(routing, kind)
        assert tokens_in_windows(routing, window, windows).tolist() == want
        counted = tokens_in_windows(routing, window, windows, count_padding=True)
        assert int(counted.sum()) == 18
    with pytest.raises(ValueError, match="window must be one of batch, sequence, rank, got 'x'"):
        window_of(routing, "x")


def test_count_by_window():
    window = torch.tensor([2, 0, 2, 2])
    assert count_by_window(torch.tensor([1, 2, 3, 4]), window, 3).tolist() == [2, 0, 8]
    assert count_by_window(torch.tensor([True, False, True, True]), window, 3).tolist() == [0, 0, 3]
