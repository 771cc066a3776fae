"""A policy's own parameter, and the search for its value that meets a load."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mm_capacity.evaluation.plan import PolicyChoice

CLOSE_FRAC = 0.02  # a load this far below its target counts as equal to it
STEPS = 14


@dataclass(frozen=True)
class Found:
    """What the search came to for one policy and target.

    Attributes:
        value: the knob's value to evaluate, None when there is none.
        load: maximum rank load over the mean, as searched.
        status: "met", or why not.
    """

    value: float | int | None
    load: float | None
    status: str

    @property
    def met(self) -> bool:
        return self.status == "met"


@dataclass(frozen=True)
class Knob:
    """A policy's own parameter, see :class:`mm_capacity.policies.base.Policy`."""

    name: str
    low: float
    high: float
    raises_load: bool
    whole: bool

    @property
    def hardest(self) -> float:
        return self.low if self.raises_load else self.high

    @property
    def gentlest(self) -> float:
        return self.high if self.raises_load else self.low

    def harder(self, a: float, b: float) -> bool:
        """Whether value ``a`` means less load than ``b``."""
        return a < b if self.raises_load else a > b

    def between(self, a: float, b: float, share: float = 0.5) -> float | None:
        """A value between two others, ``share`` of the way from ``a`` to ``b`` by ratio.

        Four digits, so that it can be written down; None when the two are neighbours.
        """
        low, high = min(a, b), max(a, b)
        if self.whole:
            return (int(low) + int(high)) // 2 if high - low > 1 else None
        if low > 0:
            middle = math.exp(math.log(a) + share * (math.log(b) - math.log(a)))
        else:
            middle = high / 8
        middle = float(f"{middle:.4g}")
        return middle if low < middle < high else None


class Measured:
    """Loads of one policy by value of its knob; earlier targets narrow the search for later ones.

    Args:
        load_at: measures the load at a value.
    """

    def __init__(self, load_at: Callable[[float], float]) -> None:
        self._load_at = load_at
        self.points: dict[float, float] = {}

    def __call__(self, value: float) -> float:
        if value not in self.points:
            self.points[value] = self._load_at(value)
        return self.points[value]


def find_knob(knob: Knob, target: float, load_at: Measured | Callable[[float], float]) -> Found:
    """Searches a knob for the greatest load that does not exceed the target.

    Args:
        knob: what to turn.
        target: maximum rank load over the mean.
        load_at: load at a value of the knob; hand in one :class:`Measured` for all targets.
    """
    measured = load_at if isinstance(load_at, Measured) else Measured(load_at)

    def shown(value: float) -> str:
        return f"{measured(value):.3f} at {knob.name}={value:g}"

    def found(value: float, status: str) -> Found:
        return Found(int(value) if knob.whole else value, measured(value), status)

    hard, gentle = knob.hardest, knob.gentlest
    least = target * (1 - CLOSE_FRAC)
    if measured(hard) > target:
        return Found(None, None, f"cannot: the load is never below {shown(hard)}")
    if measured(gentle) < least:
        return Found(None, None, f"cannot: the load is never above {shown(gentle)}")
    if measured(gentle) <= target:
        return found(gentle, "met")
    below, above = _bracket(knob, target, measured)
    for step in range(STEPS):
        if measured(below) >= least:
            break
        middle = knob.between(below, above, _share(step, target, measured(below), measured(above)))
        if middle is None:
            break
        if measured(middle) > target:
            above = middle
        else:
            below = middle
    if measured(below) < least:
        return found(below, f"not met: nearest are {shown(below)} and {shown(above)}")
    return found(below, "met")


def _bracket(knob: Knob, target: float, measured: Measured) -> tuple[float, float]:
    """Neighbouring measured values, the harder one at most at the target, the gentler one above."""
    above = knob.gentlest
    for value, load in measured.points.items():
        if load > target and knob.harder(value, above):
            above = value
    below = knob.hardest
    for value, load in measured.points.items():
        if load <= target and knob.harder(value, above) and knob.harder(below, value):
            below = value
    return below, above


def _share(step: int, target: float, below: float, above: float) -> float:
    """Where to look next: by turns where a straight line says, and in the middle."""
    if step % 2 == 0:
        return 0.5
    straight = (target * (1 - CLOSE_FRAC / 2) - below) / (above - below)
    return min(max(straight, 0.1), 0.9)


def knob_of(choice: PolicyChoice) -> Knob | None:
    """The knob of a policy, None if it has none."""
    policy = choice.build()
    if policy.knob is None:
        return None
    low, high = policy.knob_range
    whole = isinstance(low, int) and isinstance(high, int)
    return Knob(policy.knob, low, high, policy.knob_raises_load, whole)


def turned(choice: PolicyChoice, knob: Knob, value: float) -> PolicyChoice:
    """The policy with its knob at a value."""
    options = {**dict(choice.options), knob.name: int(value) if knob.whole else float(value)}
    return PolicyChoice(choice.name, tuple(options.items()))
