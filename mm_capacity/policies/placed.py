"""Any policy together with a placement of the experts that the calibration's loads ask for.

With the policy ``none`` these are the baselines that drop nothing; with another one the policy acts
on ranks that are evened out already. Source of the placements: :mod:`mm_capacity.placement`.

A placed policy is the policy's own class with three more fields, so that its repr, the files that
it names and its knob are found where those of any policy are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mm_capacity.placement import Placement, with_replicas
from mm_capacity.policies.base import Policy, integer, one_of, read_calibration

PLACEMENTS = ("lpt", "replicated")


@dataclass(frozen=True, kw_only=True)
class Placed:
    """What is added to a policy.

    Attributes:
        placement: ``lpt`` (longest processing time first) or ``replicated`` (the same with copies
            of the busiest experts). Without these fields experts are placed contiguously.
        placement_file: path of a calibration file, or its content, with ``{"load": [per MoE layer
            [assignments of each expert]]}``.
        replicas: r, copies on top of one per expert in every layer; of ``replicated``.
    """

    placement: str
    placement_file: str | dict
    replicas: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        one_of("placement", self.placement, PLACEMENTS)
        integer("replicas", self.replicas, 0)
        if (self.replicas > 0) != (self.placement == "replicated"):
            raise ValueError(
                "replicas must be at least 1 with placement 'replicated' and 0 with 'lpt', got "
                f"{self.replicas!r} with {self.placement!r}"
            )
        table = read_calibration("placement_file", self.placement_file, "load")
        for layer, loads in enumerate(table["load"]):
            if not isinstance(loads, list) or not loads or not all(map(_is_load, loads)):
                raise ValueError(
                    f"placement_file load[{layer}] must list a number of at least 0 for each "
                    f"expert, got {str(loads)[:60]!r}"
                )
        object.__setattr__(self, "_load", table["load"])

    def placements(self, experts: Sequence[int], ranks: int) -> list[Placement]:
        """The placement in every MoE layer.

        Args:
            experts: E of each MoE layer.
            ranks: R.

        Raises:
            ValueError: the file is of another model, or R does not divide the slots.
        """
        load: list[list[float]] = self.__dict__["_load"]
        if [len(layer) for layer in load] != list(experts):
            raise ValueError(
                f"placement_file must have loads of {len(experts)} MoE layers with "
                f"{_shown(experts)} experts, got {len(load)} with {_shown([*map(len, load)])}"
            )
        return [with_replicas(layer, ranks, self.replicas) for layer in load]


@cache
def placed(cls: type[Policy]) -> Any:
    """The class of a policy with the fields of :class:`Placed`."""
    return dataclass(frozen=True, kw_only=True)(type(f"Placed{cls.__name__}", (Placed, cls), {}))


def _is_load(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


def _shown(counts: Sequence[int]) -> str:
    return "/".join(map(str, sorted(set(counts)))) or "no"
