"""keep_assignments and what it is made of: exactness, independence, no waiting, clear errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mm_capacity import enforce
from mm_capacity.enforce import keep_assignments, keep_first, keep_within
from mm_capacity.policies import POLICIES, make_policy
from mm_capacity.routing import Decision, Routing
from mm_capacity.sort_keys import SortKey, float_keys, hash_key, modality_key, positions_in_window
from tests import oracle
from tests.core.cases import HIDDEN, routing_of
from tests.core.test_oracle import assert_equals_oracle, decide
from vlm_adapters.modality import Modality

# Arguments that send every policy through all of its code.
FULL: dict[str, list[dict[str, Any]]] = {
    "token-drop": [
        {"gamma": 0.5, "order": order, "modality": modality, "scope": scope, "window": window}
        for order, modality, scope, window in (
            ("score", "image-first", "expert", "batch"),
            ("random", "text-first", "device", "sequence"),
            ("reverse", "uniform", "device", "rank"),
            ("order", "image-first", "expert", "rank"),
        )
    ],
    "expanded-drop": [
        {"gamma": 0.7, "overflow": overflow, "originals_first": first, "at_most_top_k": first}
        for overflow in ("expand", "expand-global")
        for first in (False, True)
    ],
    "random-drop": [{"match": match} for match in ("window", "modality", "expert")]
    + [{"keep_frac": 0.4}],
    "macs": [
        {"gamma": 0.3, "hops": 3},
        {
            "gamma": 0.3,
            "calibration": {
                "modality": [[1, -1, 0, 1, 0, 0, -1, 1]] * 4,
                "neighbours": [[[e for e in range(8) if e != own] for own in range(8)]] * 4,
            },
        },
    ],
    "modes": [{"calibration": {"alpha": [0.5, 1, 2, 3]}, "tau_image": 0.4}],
}
EVERY = [(name, arguments) for name in POLICIES for arguments in FULL.get(name, [{}])]


def routing(**changes: Any) -> Routing:
    structure: dict[str, Any] = {
        "batch": 4, "length": 12, "experts": 8, "top_k": 3, "ranks": 2, "hidden": HIDDEN,
        "tag_kind": "any",
    }  # fmt: skip
    return routing_of(11, **{**structure, **changes})


def same(a: Decision, b: Decision) -> None:
    assert torch.equal(a.expert, b.expert)
    assert torch.equal(a.weights, b.weights)


# ------------------------------------------------------------------------------- exactness


def test_float_keys_order_like_the_floats():
    values = [-torch.inf, -1e30, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.0000001, 3e38, torch.inf]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        tensor = torch.tensor(values, dtype=dtype)
        words = [key.offset + key.sign * key.values.long() for key in float_keys(tensor)]
        for word, key in zip(words, float_keys(tensor), strict=True):
            assert int(word.min()) >= 0 and int(word.max()) < 2**key.bits
        packed = [tuple(int(word[i]) for word in words) for i in range(len(values))]
        for i in range(len(values)):
            for j in range(len(values)):
                assert (packed[i] < packed[j]) == bool(tensor[i] > tensor[j]), (dtype, i, j)


def test_neighbouring_floats_are_told_apart():
    low = torch.tensor(0.3)
    high = torch.nextafter(low, torch.tensor(1.0))
    scores = torch.stack([low, high, low]).unsqueeze(1)
    keep = keep_assignments(
        torch.zeros(3, 1, dtype=torch.int64),
        scores,
        torch.tensor([2]),
        experts=1,
        tags=torch.zeros(3, dtype=torch.uint8),
    )
    assert keep[:, 0].tolist() == [True, True, False]


def test_keys_wider_than_one_word():
    """float64 scores, the device scope and many windows exceed 63 bits; nothing may change."""
    case = routing(
        batch=40, length=2, experts=64, top_k=6, ranks=4, dtype=torch.float64, score_kind="coarse"
    )
    for order in ("score", "random", "order"):
        policy = make_policy(
            "token-drop", gamma=0.5, order=order, scope="device", window="sequence", seed=2**40 + 1
        )
        assert_equals_oracle(policy, case)


@pytest.mark.parametrize("path", ["_keep_first", "_keep_first_on_cpu"])
def test_key_is_split_into_words_exactly(path: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(enforce, "_keep_first_on_cpu", getattr(enforce, path))
    generator = torch.Generator().manual_seed(0)
    wide = [SortKey(torch.randint(0, 3, (50, 3), generator=generator) << 30, 32) for _ in range(4)]
    index = SortKey(torch.arange(150).view(50, 3), 8)
    group = torch.randint(0, 3, (50, 3), generator=generator)  # group 2 is "no candidate"
    limit = torch.tensor([20, 0])
    keep = keep_first(group, limit, [*wide, index])
    for g in range(2):
        members = [
            (*(int(key.values[t, k]) for key in wide), t * 3 + k)
            for t in range(50)
            for k in range(3)
            if int(group[t, k]) == g
        ]
        stay = {entry[-1] for entry in sorted(members)[: int(limit[g])]}
        got = {t * 3 + k for t in range(50) for k in range(3) if keep[t, k] and group[t, k] == g}
        assert got == stay
    assert not keep[group == 2].any()
    with pytest.raises(ValueError, match="bits must lie in .*, got 33"):
        SortKey(group, 33)


def test_keep_within_takes_the_longest_run_that_fits():
    group = torch.tensor([[0], [0], [0], [0], [1], [2]])
    load = torch.tensor([[2], [5], [1], [0], [4], [1]])
    keys = [SortKey(torch.arange(6).unsqueeze(1), 3)]
    # Group 0 has room for 4: 2 fits, 5 does not and ends the run although 1 would fit.
    keep = keep_within(group, torch.tensor([4, 4]), load, keys)
    assert keep[:, 0].tolist() == [True, False, False, False, True, False]
    keep = keep_within(group, torch.tensor([7, 3]), load, keys)
    assert keep[:, 0].tolist() == [True, True, False, False, False, False]


def test_modality_key():
    tags = torch.tensor([Modality.TEXT, Modality.IMAGE, Modality.VIDEO, Modality.PAD]).byte()
    for modality, want in (
        ("uniform", [0, 0, 0, 1]),
        ("image-first", [0, 1, 1, 2]),
        ("text-first", [1, 0, 0, 2]),
    ):
        key = modality_key(tags, modality)
        assert key.values[:, 0].tolist() == want and max(want) < 2**key.bits


def test_hash_equals_the_oracle_s_and_spreads():
    positions, experts = torch.arange(4096).unsqueeze(1), torch.arange(8).unsqueeze(0)
    keys = hash_key(12345678901, 3, positions, experts)
    for position, expert in ((0, 0), (17, 5), (4095, 7)):
        want = oracle.random_key(12345678901, 3, position, expert)
        assert int(keys[position, expert]) == want
    assert int(keys.min()) >= 0 and int(keys.max()) < 2**32
    assert len(keys.unique()) > 0.999 * keys.numel()
    for bit in range(32):
        ones = float((keys >> bit & 1).double().mean())
        assert 0.48 < ones < 0.52, f"bit {bit}"


def test_positions_skip_padding():
    valid = torch.tensor([True, False, True, True, False, True])
    window = torch.tensor([1, 1, 0, 1, 0, 1])
    assert positions_in_window(valid, window, 2).tolist() == [0, 1, 0, 1, 1, 2]
    assert positions_in_window(valid, None, 1).tolist() == [0, 1, 1, 2, 3, 3]


@pytest.mark.parametrize("seed", range(40))
def test_both_paths_keep_the_same(seed: int):
    """Keys narrow and wide, signed and not, few values (ties above 31 bits) and many."""
    rng = np.random.default_rng(seed)
    tokens, columns, groups = int(rng.integers(1, 60)), int(rng.integers(1, 5)), 5

    def key(bits: int, per_token: bool, signed: bool, descending: bool) -> SortKey:
        low = -(2 ** (bits - 1)) if signed else 0
        few = rng.integers(low, low + 2**bits, size=2)
        many = rng.integers(low, low + 2**bits, size=(tokens, columns))
        values = rng.choice(few, size=(tokens, columns)) if rng.random() < 0.6 else many
        return SortKey(
            torch.tensor(values[:, :1] if per_token else values), bits, descending, signed
        )

    keys = [
        key(int(rng.integers(1, 33)), *(bool(flag) for flag in rng.integers(0, 2, size=3)))
        for _ in range(int(rng.integers(0, 4)))
    ]
    entries = torch.arange(tokens * columns).view(tokens, columns)
    keys.append(SortKey(entries, (tokens * columns).bit_length()))
    group = torch.tensor(rng.integers(0, groups + 1, size=(tokens, columns)))
    limit = torch.tensor(rng.integers(0, tokens, size=groups))
    on_cpu = keep_first(group, limit, keys)
    elsewhere = enforce._keep_first(group, limit, [SortKey(group, groups.bit_length()), *keys])
    assert torch.equal(on_cpu, elsewhere)
    for g in range(groups):
        members = []
        for t, k in (group == g).nonzero().tolist():
            standing = [
                int(key.values[t, k if key.values.shape[1] > 1 else 0]) * key.sign for key in keys
            ]
            members.append((standing, t, k))
        stay = {(t, k) for _, t, k in sorted(members)[: int(limit[g])]}
        assert {(t, k) for _, t, k in members if on_cpu[t, k]} == stay
    assert not on_cpu[group == groups].any()


# ---------------------------------------------------------------------------- independence


@pytest.mark.parametrize(("name", "arguments"), EVERY)
def test_independent_of_memory_layout(name: str, arguments: dict[str, Any]):
    policy = make_policy(name, **arguments)
    packed = routing()

    def strided(tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The same values, every second element of a column-major buffer."""
        if tensor is None:
            return None
        if tensor.dim() == 1:
            return torch.stack([tensor, tensor], dim=1)[:, 0]
        return torch.stack([tensor.T, tensor.T], dim=2).contiguous()[..., 0].T

    loose = dataclasses.replace(
        packed,
        **{
            field.name: strided(getattr(packed, field.name))
            for field in dataclasses.fields(packed)
            if isinstance(getattr(packed, field.name), torch.Tensor)
        },
    )
    assert not loose.scores.is_contiguous() and not loose.expert.is_contiguous()
    same(decide(policy, packed), decide(policy, loose))


@pytest.mark.parametrize(("name", "arguments"), EVERY)
def test_independent_of_thread_count(name: str, arguments: dict[str, Any]):
    policy = make_policy(name, **arguments)
    # T * K = 33000 elements: just enough for torch to split the work between threads.
    case = routing(batch=8, length=1375, score_kind="coarse", dtype=torch.float32)
    case = dataclasses.replace(case, validate=False)
    before = torch.get_num_threads()
    try:
        decisions = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            decisions.append(decide(policy, case))
    finally:
        torch.set_num_threads(before)
    same(*decisions)


@pytest.mark.parametrize("order", ["score", "order", "reverse", "random"])
@pytest.mark.parametrize("pad", ["left-pad", "right-pad"])
@pytest.mark.parametrize("name", ["token-drop", "expanded-drop"])
def test_rows_of_a_padded_batch_decide_as_if_alone(name: str, pad: str, order: str):
    policy = make_policy(name, gamma=0.4, order=order, window="sequence", modality="image-first")
    batch = routing(tag_kind=pad)
    whole = decide(policy, batch)
    assert (whole.expert == batch.experts).any()
    for row in range(4):
        mine = (batch.sequence == row) & batch.valid
        if not mine.any():
            continue
        alone = dataclasses.replace(
            batch,
            scores=batch.scores[mine],
            expert=batch.expert[mine],
            weights=batch.weights[mine],
            modality=batch.modality[mine],
            sequence=torch.zeros(int(mine.sum()), dtype=torch.int64),
            sequences=1,
            rank_of_token=batch.rank_of_token[mine],
            hidden=None,
        )
        decision = decide(policy, alone)
        assert torch.equal(decision.expert, whole.expert[mine])
        assert torch.equal(decision.weights, whole.weights[mine])


def test_padding_goes_first():
    case = routing(tag_kind="right-pad", top_k=2)
    decision = decide(make_policy("token-drop", gamma=1.0), case)
    for e in range(case.experts):
        dropped = ((case.expert == e) & (decision.expert != e)).any(dim=1)
        kept = (decision.expert == e).any(dim=1)
        if (dropped & case.valid).any():
            assert not (kept & ~case.valid).any()


# ------------------------------------------------------------------- no waiting, little memory


class Watch(TorchDispatchMode):
    """Fails on operations that make the host wait for the device, and notes tensor sizes."""

    WAITS = (
        "_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "equal",
        "bincount", "item",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        waits = name in self.WAITS or name.startswith("_unique")
        if waits:
            raise AssertionError(f"{func.name()} waits for the device")
        if name == "index":
            for index in args[1]:
                if index is not None and index.dtype == torch.bool:
                    raise AssertionError("a bool index waits for the device")
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@contextmanager
def watching() -> Iterator[Watch]:
    """A watch; ``tolist`` of a CPU tensor is no operation, so it is looked for apart."""

    def tolist(self):
        raise AssertionError("tolist waits for the device")

    with pytest.MonkeyPatch.context() as patch, Watch() as watch:
        patch.setattr(torch.Tensor, "tolist", tolist)
        yield watch


def test_the_watch_sees():
    ones = torch.ones(3)
    for wait in (
        lambda: ones.sum().item(),
        lambda: bool(ones[0]),
        lambda: ones.tolist(),
        lambda: ones[ones > 0],
        lambda: ones.nonzero(),
    ):
        with pytest.raises(AssertionError, match="wait"), watching():
            wait()


@pytest.mark.parametrize(("name", "arguments"), EVERY)
def test_does_not_wait_for_the_device(name: str, arguments: dict[str, Any]):
    case = dataclasses.replace(routing(), validate=False)
    policy = make_policy(name, **arguments)
    with watching():
        decide(policy, case)


@pytest.mark.parametrize("arguments", FULL["token-drop"])
def test_token_drop_makes_nothing_of_size_tokens_times_experts(arguments: dict[str, Any]):
    case = routing(batch=4, length=50, experts=64, top_k=2, hidden=0)
    case = dataclasses.replace(case, validate=False)
    with watching() as watch:
        decide(make_policy("token-drop", **arguments), case)
    assert 200 <= watch.largest <= 200 * 3


# ------------------------------------------------------------------------------- bad input


def bad(change: dict[str, Any]) -> Routing:
    return dataclasses.replace(routing(), **change)


def scores_with_nan() -> torch.Tensor:
    scores = routing().scores.clone()
    scores[3, 1] = torch.nan
    return scores


def expert_with(value: int) -> torch.Tensor:
    expert = routing().expert.clone()
    expert[5, 2] = value
    return expert


BAD = {
    "scores must not be NaN, got 1 NaN": lambda: bad({"scores": scores_with_nan()}),
    r"expert must lie in \[0, 8\) \(experts\), got 8": lambda: bad({"expert": expert_with(8)}),
    r"expert must lie in \[0, 8\) \(experts\), got -1": lambda: bad({"expert": expert_with(-1)}),
    "top_k must be between 1 and experts=8, got top_k=9": lambda: bad(
        {"expert": torch.arange(9).repeat(48, 1), "weights": torch.ones(48, 9)}
    ),
    "ranks must divide experts=8, got ranks=3": lambda: bad({"ranks": 3}),
    "expert must not name one expert twice for a token": lambda: bad(
        {"expert": torch.ones_like(routing().expert)}
    ),
    r"rank_of_expert must give every rank 4 experts, got \[5, 3\]": lambda: bad(
        {"rank_of_expert": torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])}
    ),
    r"rank_of_token must lie in \[0, 2\) \(ranks\), got 2": lambda: bad(
        {"rank_of_token": torch.full((48,), 2)}
    ),
    "sequence must not decrease": lambda: bad({"sequence": routing().sequence.flip(0)}),
    r"weights must have shape \[48, 3\], got \[48, 2\]": lambda: bad(
        {"weights": torch.ones(48, 2)}
    ),
    r"scores must be float \[T, E\], got int64 \[48, 8\]": lambda: bad(
        {"scores": routing().scores.long()}
    ),
    r"expert must be int64 \[T, K\], got int32 \[48, 3\]": lambda: bad(
        {"expert": routing().expert.int()}
    ),
    r"allowed must have shape \[48, 8\], got \[48, 7\]": lambda: bad(
        {"allowed": torch.ones(48, 7, dtype=torch.bool)}
    ),
    "sequences must be at least 1, got 0": lambda: bad({"sequences": 0}),
}


@pytest.mark.parametrize("message", BAD)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_bad_routing_is_named(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        decide(make_policy(name), BAD[message]())


def test_bad_arguments_of_keep_assignments():
    good: dict[str, Any] = {
        "expert": torch.zeros(4, 1, dtype=torch.int64),
        "scores": torch.ones(4, 1),
        "capacity": torch.tensor([2]),
        "experts": 2,
        "tags": torch.zeros(4, dtype=torch.uint8),
        "validate": True,
    }
    assert int(keep_assignments(**good).sum()) == 2
    for message, change in {
        "scores must not be NaN, got 4 NaN values": {"scores": torch.full((4, 1), torch.nan)},
        r"expert must lie in \[0, 2\], got 3": {"expert": torch.full((4, 1), 3)},
        "capacity must not be negative, got -1": {"capacity": torch.tensor([-1])},
        "window must be given for 2 windows, got None": {"capacity": torch.tensor([1, 1])},
        "scores must have shape": {"scores": torch.ones(4, 2)},
        "scores must be a float tensor, got torch.int64": {
            "scores": torch.ones(4, 1, dtype=torch.int64)
        },
        r"tags must have shape \[4\], got \[3\]": {"tags": torch.zeros(3, dtype=torch.uint8)},
        r"expert must be int64 \[T, K\], got torch.int64 \[4\]": {
            "expert": torch.zeros(4, dtype=torch.int64)
        },
        "capacity must be int64": {"capacity": torch.tensor([1.5])},
        "order must be one of score, order, reverse, random, got 'last'": {"order": "last"},
        "modality must be one of .*, got 'audio-first'": {"modality": "audio-first"},
        "scope must be one of expert, device, got 'node'": {"scope": "node"},
        "rank_of_expert must be given for scope 'device'": {"scope": "device"},
    }.items():
        with pytest.raises(ValueError, match=message):
            keep_assignments(**{**good, **change})


def test_no_token_at_all():
    empty = routing(batch=1, length=0)
    for name, arguments in EVERY:
        decision = decide(make_policy(name, **arguments), empty)
        assert decision.expert.shape[0] == 0
