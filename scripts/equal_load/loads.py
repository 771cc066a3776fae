"""Loads of policies on the questions of one data set; measured once, kept in a file."""

from __future__ import annotations

import json
from typing import Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation.plan import Plan, PolicyChoice


class Loads:
    """Measures what one forward pass per question loads the ranks with.

    Args:
        plan: with one model and one data set.
        handle: the model.
        data: the opened data set.
        search_limit: most questions to measure on, evenly spaced over all; None for all.
    """

    def __init__(self, plan: Plan, handle: Any, data: Any, search_limit: int | None) -> None:
        from mm_capacity.evaluation.generate import split_batches
        from mm_capacity.evaluation.records import slug

        self.plan, self.handle, self.data = plan, handle, data
        frame = evenly_spaced(data.frame, search_limit)
        self.batches = split_batches(frame, plan.settings.batch_size)
        self.questions = [index for batch in self.batches for index in batch]
        self.prepared = handle.preparer(data, self.batches)
        name = f"{slug(plan.models[0].name)}-{slug(plan.data[0].name)}.json"
        self.file = plan.settings.work_dir / "equal_load_search" / name
        self.known: dict[str, float] = {}
        if self.file.exists():
            self.known = json.loads(self.file.read_text(encoding="utf-8"))

    def of(self, choice: PolicyChoice) -> float:
        """Maximum rank load over the mean, averaged over steps and layers."""
        from mm_capacity.evaluation.identity import identity_of
        from mm_capacity.evaluation.records import digest, write_text

        policy = choice.build()
        identity = identity_of(self.plan, self.handle, self.plan.data[0], self.data, policy)
        key = digest({**identity, "questions": self.questions})
        if key not in self.known:
            self.known[key] = self._measure(policy)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, json.dumps(self.known, indent=1) + "\n")
            print(f"  {choice.slug}: load {self.known[key]:.3f}", flush=True)
        return self.known[key]

    def refusal(self, choice: PolicyChoice) -> str | None:
        """Why the model cannot run under a policy, None when it can."""
        from mm_capacity.attach import limit_capacity
        from mm_capacity.evaluation.models import one_line

        vlm = self.handle.vlm
        try:
            with limit_capacity(
                vlm.model, choice.build(), adapter=vlm.adapter, ep_size=self.handle.ep_size
            ):
                return None
        except ValueError as error:
            return one_line(error)

    def _measure(self, policy: Any) -> float:
        import pandas as pd

        from mm_capacity.evaluation.generate import answer

        settings, parts = self.plan.settings, []
        for number in range(len(self.batches)):
            inputs = self.prepared[number].inputs
            if inputs is not None:
                answered = answer(
                    self.handle.vlm,
                    inputs,
                    policy,
                    max_new_tokens=1,
                    seed=settings.seed,
                    ep_size=self.handle.ep_size,
                    trace_window=self.plan.trace_window,
                    check=settings.check,
                    use_cache=settings.use_cache,
                )
                parts.append(answered.layers)
        if not parts:
            raise UserError(f"{self.data.name}: no question can be asked")
        return float(pd.concat(parts)["rank_straggler_after"].mean())


def evenly_spaced(frame: Any, most: int | None) -> Any:
    """At most ``most`` rows of a frame, from its first to its last, in order.

    Data sets are often sorted by category, so the first rows alone would be of a kind.
    """
    count = len(frame)
    if most is None or most >= count:
        return frame
    return frame.iloc[[number * count // most for number in range(most)]]
