"""The slow, obvious reference: every policy again, in plain Python loops over plain numbers.

Follows the section "Semantics" of docs/design.md sentence by sentence. It shares no code with
``mm_capacity``: what it reads of a routing are numbers, what it reads of a policy are its fields.
One file in spite of its length, so that the whole of what is meant can be read in one go.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

TEXT, IMAGE, VIDEO, PAD = 0, 1, 2, 3


@dataclass
class Plain:
    """A routing in plain numbers; the names are those of ``mm_capacity.routing.Routing``."""

    scores: list[list[float]]
    expert: list[list[int]]
    weights: list[list[float]]
    modality: list[int]
    sequence: list[int]
    sequences: int
    rank_of_expert: list[int]
    rank_of_token: list[int]
    ranks: int
    layer: int
    layers: int
    hidden: list[list[float]] | None
    allowed: list[list[bool]] | None
    tokens: int = 0
    experts: int = 0
    top_k: int = 0

    @classmethod
    def of(cls, routing: Any) -> Plain:
        values = {}
        for name in (
            "scores expert weights modality sequence rank_of_expert rank_of_token hidden allowed"
        ).split():
            tensor = getattr(routing, name)
            values[name] = None if tensor is None else tensor.tolist()
        for name in ("sequences", "ranks", "layer", "layers"):
            values[name] = getattr(routing, name)
        tokens, experts = routing.scores.shape
        return cls(**values, tokens=tokens, experts=experts, top_k=routing.expert.shape[1])


@dataclass
class Outcome:
    """What stays: for every token a mapping from expert to weight, and the caps that held."""

    kept: list[dict[int, float]]
    window: list[int]
    windows: int
    capacity: list[int] | None = None
    notes: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------------- capacity and windows


def windows_of(r: Plain, window: str) -> tuple[list[int], int]:
    """1. Window: the whole forward pass, a sequence, or the tokens of a rank."""
    if window == "batch":
        return [0] * r.tokens, 1
    if window == "sequence":
        return r.sequence, r.sequences
    return r.rank_of_token, r.ranks


def capacity(p: dict[str, Any], r: Plain, of: list[int], windows: int, shared_by: int) -> list[int]:
    """1. C = gamma K T_w / E; padding is not counted unless count_padding; ceil or floor."""
    gamma = Fraction(repr(float(p["gamma"]))).limit_denominator(10**9)
    result = []
    for w in range(windows):
        counted = 0
        for t in range(r.tokens):
            if of[t] == w and (p["count_padding"] or r.modality[t] != PAD):
                counted += 1
        exact = gamma * r.top_k * counted * shared_by / r.experts
        result.append(max(1, math.ceil(exact)) if p["rounding"] == "ceil" else math.floor(exact))
    return result


# --------------------------------------------------------------------------------- who stays


def mix(x: int) -> int:
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) % 2**32
    return x ^ (x >> 16)


def random_key(seed: int, layer: int, position: int, expert: int) -> int:
    state = mix(mix(seed % 2**32) ^ (seed // 2**32 % 2**32))
    for part in (layer, position, expert):
        state = mix(state ^ part)
    return state


def valid_before(r: Plain, of: list[int], t: int) -> int:
    """How many tokens of the same window, padding left out, come before token t."""
    return sum(1 for u in range(t) if of[u] == of[t] and r.modality[u] != PAD)


def standing(
    p: dict[str, Any], r: Plain, of: list[int], t: int, e: int, score: float, original: bool
) -> tuple:
    """4. The sort keys of one assignment; the greater tuple stays."""
    not_padding = 1 if r.modality[t] != PAD else 0
    is_text = r.modality[t] == TEXT
    is_image = r.modality[t] in (IMAGE, VIDEO)
    modality = {
        "uniform": 0,
        "image-first": 0 if is_image else 1,
        "text-first": 0 if is_text else 1,
    }[p["modality"]]
    first_original = 1 if p.get("originals_first") and original else 0
    order: tuple
    if p["order"] == "score":
        order = (score,)
    elif p["order"] == "order":
        order = (-t,)
    elif p["order"] == "reverse":
        order = (t,)
    else:
        # The hash is a cost: smaller stays.
        order = (-random_key(p["seed"], r.layer, valid_before(r, of, t), e),)
    # Ties: the earlier token; then the greater router score; then the lower expert id.
    return (not_padding, first_original, modality, *order, -t, score, -e)


def count_cap(p: dict[str, Any], r: Plain, candidates: list[dict[int, bool]]) -> Outcome:
    """3. Every expert, or the experts of a rank together, keeps the C greatest candidates.

    Args:
        candidates: of each token, candidate expert -> is it an original.
    """
    of, windows = windows_of(r, p["window"])
    shared_by = r.experts // r.ranks if p["scope"] == "device" else 1
    caps = capacity(p, r, of, windows, shared_by)
    kept: list[dict[int, float]] = [{} for _ in range(r.tokens)]
    groups = range(r.ranks if p["scope"] == "device" else r.experts)
    for w in range(windows):
        for g in groups:
            members = []
            for t in range(r.tokens):
                for e, original in candidates[t].items():
                    mine = r.rank_of_expert[e] if p["scope"] == "device" else e
                    if of[t] == w and mine == g:
                        keys = standing(p, r, of, t, e, r.scores[t][e], original)
                        members.append((keys, t, e, original))
            members.sort(reverse=True)
            for _, t, e, original in members[: caps[w]]:
                kept[t][e] = weight_of(r, t, e, original)
    return Outcome(kept, of, windows, caps)


# ------------------------------------------------------------------------------------- weights


def weight_of(r: Plain, t: int, e: int, original: bool) -> float:
    """6. A survivor's weight is the router's; an added expert's is its score times the scale."""
    if original:
        return r.weights[t][r.expert[t].index(e)]
    anchor = 0
    for slot in range(r.top_k):
        here = abs(r.scores[t][r.expert[t][slot]])
        if here > abs(r.scores[t][r.expert[t][anchor]]):
            anchor = slot
    score = r.scores[t][r.expert[t][anchor]]
    return 0.0 if score == 0 else r.scores[t][e] * (r.weights[t][anchor] / score)


def renormalized(p: dict[str, Any], r: Plain, outcome: Outcome) -> Outcome:
    """6. The survivors sum to what the token's weights summed to before."""
    if p["renormalize"]:
        for t, survivors in enumerate(outcome.kept):
            before, after = math.fsum(r.weights[t]), math.fsum(survivors.values())
            if after != 0:
                for e in survivors:
                    survivors[e] *= before / after
    return outcome


# ------------------------------------------------------------------------------- the policies


def originals(r: Plain) -> list[dict[int, bool]]:
    return [{e: True for e in r.expert[t]} for t in range(r.tokens)]


def none(p: dict[str, Any], r: Plain) -> Outcome:
    kept = [dict(zip(r.expert[t], r.weights[t], strict=True)) for t in range(r.tokens)]
    return Outcome(kept, [0] * r.tokens, 1)


def token_drop(p: dict[str, Any], r: Plain) -> Outcome:
    return renormalized(p, r, count_cap(p, r, originals(r)))


def expanded_drop(p: dict[str, Any], r: Plain) -> Outcome:
    """5. Candidates: the top-K plus the own rank's experts, or the router's top-(K * rounds)."""
    candidates = originals(r)
    for t in range(r.tokens):
        if r.modality[t] == PAD:
            continue
        free = [e for e in range(r.experts) if e not in candidates[t]]
        if r.allowed is not None and p["inside_groups"]:
            free = [e for e in free if r.allowed[t][e]]
        if p["overflow"] == "expand":
            added = [e for e in free if r.rank_of_expert[e] == r.rank_of_token[t]]
        else:
            free.sort(key=lambda e: (-r.scores[t][e], e))  # noqa: B023
            added = free[: r.top_k * (p["rounds"] - 1)]
        for e in added:
            candidates[t][e] = False
    outcome = count_cap(p, r, candidates)
    if p["at_most_top_k"]:
        for t in range(r.tokens):
            best = sorted(
                outcome.kept[t],
                key=lambda e: (
                    -int(p["originals_first"] and candidates[t][e]),  # noqa: B023
                    -r.scores[t][e],  # noqa: B023
                    e,
                ),
            )
            for e in best[r.top_k :]:
                del outcome.kept[t][e]
    return renormalized(p, r, outcome)


def thinned(p: dict[str, Any], r: Plain, stays: Callable[[int, int], bool]) -> Outcome:
    """The router's choice without the slots for which ``stays(token, slot)`` is False."""
    kept: list[dict[int, float]] = [{} for _ in range(r.tokens)]
    for t in range(r.tokens):
        for slot in range(r.top_k):
            if stays(t, slot):
                kept[t][r.expert[t][slot]] = r.weights[t][slot]
    return renormalized(p, r, Outcome(kept, [0] * r.tokens, 1))


def expert_drop(p: dict[str, Any], r: Plain) -> Outcome:
    """The least loaded experts are skipped; of equally loaded ones the lower id stays."""
    of, windows = windows_of(r, p["window"])
    share = Fraction(repr(float(p["fraction"]))) * r.experts
    skipped = p["count"] if p["count"] is not None else max(1, math.floor(share))
    out = []
    for w in range(windows):
        loads = [0] * r.experts
        for t in range(r.tokens):
            if of[t] == w and r.modality[t] != PAD:
                for e in r.expert[t]:
                    loads[e] += 1
        least_first = sorted(range(r.experts), key=lambda e: (loads[e], -e))  # noqa: B023
        out.append(set(least_first[:skipped]))
    outcome = thinned(p, r, lambda t, slot: r.expert[t][slot] not in out[of[t]])
    outcome.window, outcome.windows = of, windows
    return outcome


def naee(p: dict[str, Any], r: Plain) -> Outcome:
    """Slot i is skipped when w_i < beta * w_top; a slot as heavy as the top one stays."""
    beta = p["beta"] * (p["calibration"]["beta"][r.layer] if p["calibration"] else 1.0)

    def stays(t: int, slot: int) -> bool:
        weight, top = r.weights[t][slot], max(r.weights[t])
        return weight == top or not weight < beta * top

    return thinned(p, r, stays)


def modes(p: dict[str, Any], r: Plain) -> Outcome:
    """Slot i is skipped when alpha_l * pi_i < tau of the token's modality."""
    alpha = p["calibration"]["alpha"][r.layer] if p["calibration"] else 1.0

    def stays(t: int, slot: int) -> bool:
        total = math.fsum(r.weights[t])
        share = 0.0 if total == 0 else r.weights[t][slot] / total
        tau = p["tau_text"] if r.modality[t] == TEXT else p["tau_image"]
        return not alpha * share < tau * p["tau_scale"]

    return thinned(p, r, stays)


def top_p(p: dict[str, Any], r: Plain) -> Outcome:
    """The heaviest slots until they hold p of the token's weight; ties: the lower expert id."""

    def stays(t: int, slot: int) -> bool:
        order = sorted(range(r.top_k), key=lambda k: (-r.weights[t][k], r.expert[t][k]))
        heavier = order[: order.index(slot)]
        before = math.fsum(max(r.weights[t][k], 0.0) for k in heavier)
        return not heavier or before < p["p"] * math.fsum(max(w, 0.0) for w in r.weights[t])

    return thinned(p, r, stays)


def visual_top_k(p: dict[str, Any], r: Plain) -> Outcome:
    """From a layer on, an image token keeps its heaviest slots; ties: the lower expert id."""

    def stays(t: int, slot: int) -> bool:
        if r.layer < p["first_layer"] or r.modality[t] not in (IMAGE, VIDEO):
            return True
        order = sorted(range(r.top_k), key=lambda k: (-r.weights[t][k], r.expert[t][k]))
        return slot in order[: p["keep"]]

    return thinned(p, r, stays)


def rank_tail(p: dict[str, Any], r: Plain) -> Outcome:
    """One at a time: the most loaded rank sheds its lightest image assignment, until all fit.

    Padding goes before image, and text only when nothing else is left (never with only_image).
    """
    of, windows = windows_of(r, p["window"])
    caps = capacity(p, r, of, windows, r.experts // r.ranks)
    here = [[True] * r.top_k for _ in range(r.tokens)]
    for w in range(windows):
        stuck: set[int] = set()
        while True:
            members: list[list[tuple]] = [[] for _ in range(r.ranks)]
            for t in range(r.tokens):
                for slot in range(r.top_k):
                    if of[t] == w and here[t][slot]:
                        e = r.expert[t][slot]
                        step = {PAD: 0, IMAGE: 1, VIDEO: 1, TEXT: 2}[r.modality[t]]
                        keys = (step, r.weights[t][slot], -t, -e, t, slot)
                        members[r.rank_of_expert[e]].append(keys)
            over = [m for m in range(r.ranks) if len(members[m]) > caps[w] and m not in stuck]
            if not over:
                break
            busiest = max(over, key=lambda m: len(members[m]))  # noqa: B023
            lightest = min(members[busiest])
            if p["only_image"] and lightest[0] == 2:
                stuck.add(busiest)
            else:
                here[lightest[-2]][lightest[-1]] = False
    outcome = thinned(p, r, lambda t, slot: here[t][slot])
    outcome.window, outcome.windows = of, windows
    outcome.capacity = None if p["only_image"] else caps
    return outcome


def random_drop(p: dict[str, Any], r: Plain) -> Outcome:
    """As many of the router's assignments stay as under the other policy, whichever they are."""
    if p["keep_frac"] is None:
        other = ORACLES[p["like"]](p["arguments_in_full"], r)
        of, windows = other.window, other.windows
    else:
        of, windows = [0] * r.tokens, 1

    def group(t: int, e: int) -> tuple:
        detail = {"window": 0, "modality": r.modality[t] in (IMAGE, VIDEO), "expert": e}
        return of[t], detail[p["match"]]

    valid = [t for t in range(r.tokens) if r.modality[t] != PAD]
    budget: dict[tuple, int] = {}
    members: dict[tuple, list[tuple]] = {}
    for t in valid:
        if p["keep_frac"] is None:
            for e in other.kept[t]:
                budget[group(t, e)] = budget.get(group(t, e), 0) + 1
        for e in r.expert[t]:
            key = random_key(p["seed"], r.layer, valid_before(r, of, t), e)
            members.setdefault(group(t, e), []).append((key, t, e))
    if p["keep_frac"] is not None:
        share = Fraction(repr(float(p["keep_frac"]))).limit_denominator(10**9)
        budget = {(0, 0): math.floor(share * len(valid) * r.top_k)}
    stay: set[tuple[int, int]] = set()
    for name, candidates in members.items():
        stay.update((t, e) for _, t, e in sorted(candidates)[: budget.get(name, 0)])
    outcome = thinned(p, r, lambda t, slot: (t, r.expert[t][slot]) in stay)
    outcome.window, outcome.windows = of, windows
    return outcome


# ---------------------------------------------------------------------------------------- MACS

UNIT = 2**16


def macs_load(p: dict[str, Any], r: Plain, of: list[int], windows: int) -> list[int]:
    """A text token weighs 1, an image token sigmoid(-delta z(H)), in units of 2^-16."""
    assert r.hidden is not None
    load = [UNIT] * r.tokens
    for w in range(windows):
        images = [t for t in range(r.tokens) if of[t] == w and r.modality[t] in (IMAGE, VIDEO)]
        if not images:
            continue
        entropy = {}
        for t in images:
            total = math.fsum(math.exp(h) for h in r.hidden[t])
            probabilities = [math.exp(h) / total for h in r.hidden[t]]
            entropy[t] = -math.fsum(q * math.log(q) for q in probabilities)
        mean = math.fsum(entropy.values()) / len(images)
        spread = math.sqrt(math.fsum((h - mean) ** 2 for h in entropy.values()) / len(images))
        for t in images:
            z = 0.0 if spread < 1e-6 else (entropy[t] - mean) / spread
            load[t] = round(UNIT / (1 + math.exp(p["delta"] * z)))
    return load


def macs(p: dict[str, Any], r: Plain) -> Outcome:
    of, windows = windows_of(r, p["window"])
    load = macs_load(p, r, of, windows)
    caps = capacity(p | {"count_padding": False}, r, of, windows, 1)
    calibration = p["calibration"] or {}
    room: dict[tuple[int, int], int] = {}
    for w in range(windows):
        mine = [t for t in range(r.tokens) if of[t] == w and r.modality[t] != PAD]
        total = sum(load[t] for t in mine)
        visual = sum(load[t] for t in mine if r.modality[t] in (IMAGE, VIDEO))
        share = visual / total if total else 0.5
        for e in range(r.experts):
            kind = calibration["modality"][r.layer][e] if "modality" in calibration else 0
            cap = caps[w] * UNIT
            if kind:
                cap = max(0, math.floor(cap * (1.0 + p["rho"] * kind * (share - 0.5))))
            room[w, e] = cap

    def rank_order(t: int, slot: int) -> tuple:
        """Not padding first, the greater score, the earlier token."""
        return (r.modality[t] == PAD, -r.scores[t][r.expert[t][slot]], t)

    def neighbour(t: int, slot: int, hop: int) -> int | None:
        """The expert of the picked expert's rank that is asked in round ``hop``."""
        picked = r.expert[t][slot]
        if "neighbours" in calibration:
            ring = calibration["neighbours"][r.layer][picked]
        else:
            free = [e for e in range(r.experts) if e not in r.expert[t]]
            if r.allowed is not None:
                free = [e for e in free if r.allowed[t][e]]
            ring = sorted(free, key=lambda e: (-r.scores[t][e], e))
        ring = [e for e in ring if r.rank_of_expert[e] == r.rank_of_expert[picked]]
        return ring[hop] if hop < len(ring) else None

    placed: dict[tuple[int, int], int] = {}  # (token, slot) -> expert

    def fill(asked: dict[tuple[int, int], int]) -> None:
        """Every expert takes, best first, what fits; the first that does not fit ends it."""
        by_target: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for (t, slot), e in asked.items():
            by_target.setdefault((of[t], e), []).append((t, slot))
        for place, group in by_target.items():
            for t, slot in sorted(group, key=lambda item: rank_order(*item)):
                if load[t] > room[place]:
                    break
                room[place] -= load[t]
                placed[t, slot] = place[1]

    slots = [(t, slot) for t in range(r.tokens) for slot in range(r.top_k)]
    fill({(t, slot): r.expert[t][slot] for t, slot in slots})
    for hop in range(p["hops"]):
        asked: dict[tuple[int, int], int] = {}
        best_first = sorted(
            slots, key=lambda item: (*rank_order(*item), r.expert[item[0]][item[1]])
        )
        for t, slot in best_first:
            target = neighbour(t, slot, hop)
            has = set(r.expert[t]) | {e for (u, _), e in placed.items() if u == t}
            if (t, slot) in placed or target is None or target in has or r.modality[t] == PAD:
                continue
            if r.allowed is not None and not r.allowed[t][target]:
                continue
            if target in [e for (u, _), e in asked.items() if u == t]:
                continue  # a heavier slot of this token asks the same expert
            asked[t, slot] = target
        fill(asked)
    kept: list[dict[int, float]] = [{} for _ in range(r.tokens)]
    for (t, slot), e in placed.items():
        kept[t][e] = weight_of(r, t, e, e == r.expert[t][slot])
    return renormalized(p, r, Outcome(kept, of, windows))


ORACLES: dict[str, Callable[[dict[str, Any], Plain], Outcome]] = {
    "none": none,
    "token-drop": token_drop,
    "expanded-drop": expanded_drop,
    "expert-drop": expert_drop,
    "macs": macs,
    "modes": modes,
    "naee": naee,
    "visual-top-k": visual_top_k,
    "top-p": top_p,
    "random-drop": random_drop,
    "rank-tail": rank_tail,
}

# Policies that no oracle can follow, each with the reason. Empty is the aim.
WITHOUT_ORACLE: dict[str, str] = {}
