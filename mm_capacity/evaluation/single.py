"""One run: a model, a data set and a policy; asked, recorded, scored."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mm_capacity.errors import UserError
from mm_capacity.evaluation.generate import Preparer, answer, plain_index, split_batches
from mm_capacity.evaluation.identity import POLICY_KEYS, opening_record
from mm_capacity.evaluation.judged import score_run
from mm_capacity.evaluation.loads import summarize
from mm_capacity.evaluation.models import ModelHandle, one_line
from mm_capacity.evaluation.plan import DataChoice, Plan, PolicyChoice
from mm_capacity.evaluation.progress import Progress
from mm_capacity.evaluation.records import (
    ANSWERED,
    FINISHED,
    RunFolder,
    digest,
    now,
    slug,
    write_text,
)
from mm_capacity.policies import PLACEMENT_FIELDS


@dataclass
class Run:
    """One run of a plan, and what became of it."""

    plan: Plan
    handle: ModelHandle
    choice: DataChoice
    data: Any
    policy_choice: PolicyChoice
    policy: Any
    identity: dict[str, Any]
    reused: bool = False
    failure: str | None = None
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        return self.plan.settings.mode

    @property
    def fresh(self) -> bool:
        return self.plan.settings.fresh

    @cached_property
    def hash(self) -> str:
        return digest(self.identity)

    @cached_property
    def setting_hash(self) -> str:
        """Names what runs must have in common to be compared; where experts live is part of it."""
        setting = {k: v for k, v in self.identity.items() if k not in POLICY_KEYS}
        options = dict(self.policy_choice.options)
        placed = {k: options[k] for k in PLACEMENT_FIELDS if k in options}
        if placed:
            placed["placement_file"] = self.identity["policy_files"]["placement_file"]
            setting["placement"] = placed
        return digest(setting)

    @cached_property
    def folder(self) -> RunFolder:
        root = self.plan.settings.work_dir / slug(self.handle.choice.name) / slug(self.choice.name)
        return RunFolder(root / f"{slug(self.policy_choice.slug)}-{self.hash}")

    @property
    def label(self) -> str:
        return f"{self.handle.choice.name} {self.choice.name} {self.policy_choice.slug}"

    @cached_property
    def indices(self) -> list[Any]:
        return [plain_index(index) for index in self.data.frame["index"]]

    def is_answered(self) -> bool:
        """Whether every question has a line in the folder and the load counts are complete."""
        record = self.folder.record()
        if record.get("hash") != self.hash or not record.get("answers_complete"):
            return False
        try:
            have = {row["index"] for row in self.folder.predictions()}
        except UserError:
            return False
        return have.issuperset(self.indices)

    @property
    def is_scored(self) -> bool:
        """Whether the run has come to its end, with a score."""
        return self.record.get("status") in FINISHED

    def line(self) -> str:
        """The result in one line."""
        status = self.record.get("status", "failed")
        how = " (reused)" if self.reused else ""
        parts = [f"{self.label}: {status}{how}"]
        for metric in self.folder.score().get("metrics", []):
            if metric["name"] == "accuracy":
                parts.append(f"accuracy {metric['value']:.3f}")
        if self.record.get("seconds") is not None:
            parts.append(f"{self.record['seconds']:.1f} s")
        if self.failure is not None:
            parts.append(self.failure)
        return ", ".join(parts)


def execute(run: Run, preparer: Preparer, progress: Progress) -> None:
    """Brings a run to its end; what goes wrong ends up in ``run.failure`` and in its record.

    Raises:
        KeyboardInterrupt: passed on, after the record says "interrupted".
    """
    folder = run.folder
    try:
        with folder.lock():
            try:
                _execute_locked(run, preparer, progress)
            except KeyboardInterrupt:
                if folder.record().get("status") == "running":
                    folder.update(status="interrupted", finished=now())
                raise
            except UserError as error:
                _fail(run, str(error))
            except Exception as error:  # the other runs go on
                write_text(folder.path / "error.txt", traceback.format_exc())
                _fail(
                    run, f"{type(error).__name__}: {one_line(error)} (see {folder.path}/error.txt)"
                )
    except UserError as error:  # the lock
        run.failure = str(error)


def _fail(run: Run, reason: str) -> None:
    run.failure = reason
    if run.folder.run_file.exists():
        run.record = run.folder.update(status="failed", error=reason, finished=now())


def _execute_locked(run: Run, preparer: Preparer, progress: Progress) -> None:
    folder = run.folder
    if run.fresh:
        folder.clear()
    answered = run.is_answered()
    if run.mode == "eval" and not answered:
        run.failure = "no complete answers to score: run --mode infer (or all) first"
        return
    if answered:
        progress.skip(len(run.indices))
        run.record = folder.record()
    else:
        _infer(run, preparer, progress)
    scored = folder.score().get("judge") == run.plan.settings.judge
    if run.mode == "infer":
        run.reused = answered
        if run.record["status"] not in ANSWERED:
            run.record = folder.update(status="inferred", finished=now())
    elif answered and scored and run.record["status"] in FINISHED:
        run.reused = True
    else:
        score_run(run)
    lost = run.record.get("lost", [])
    if lost:
        shown = ", ".join(str(entry["index"]) for entry in lost[:5])
        more = ", ..." if len(lost) > 5 else ""
        run.failure = f"{len(lost)} question(s) lost ({shown}{more}): {lost[0]['reason']}"


def _infer(run: Run, preparer: Preparer, progress: Progress) -> None:
    folder, handle, settings = run.folder, run.handle, run.plan.settings
    vlm, ep_size = handle.vlm, handle.ep_size
    batches = split_batches(run.data.frame, settings.batch_size)
    run.record = folder.begin(opening_record(run, ep_size))
    folder.loads.split()
    complete = folder.keep_complete(batches)
    progress.skip(sum(len(batches[number]) for number in complete))
    notes: dict[str, None] = dict.fromkeys(run.record["warnings"])
    for number, batch in enumerate(batches):
        if number in complete:
            continue
        prepared = preparer[number]
        rows: list[dict[str, Any]] = []
        if prepared.inputs is not None:
            answered = answer(
                vlm,
                prepared.inputs,
                run.policy,
                max_new_tokens=run.identity["max_new_tokens"],
                seed=settings.seed,
                ep_size=ep_size,
                trace_window=run.identity["trace_window"],
                check=settings.check,
                use_cache=settings.use_cache,
            )
            if handle.wrapper is not None and run.record.get("wrapper") != vlm.record():
                run.record = folder.update(wrapper=vlm.record())
            for note in [*preparer.data.notes, *answered.notes]:
                if note not in notes:
                    notes[note] = None
                    run.record = folder.update(warnings=list(notes))
                    progress.say(f"warning: {run.label}: {note}")
            share = round(answered.seconds / len(prepared.indices), 6)
            folder.loads.save(number, answered.loads, answered.layers)
            rows = [
                {
                    "index": index,
                    "prediction": preparer.data.answer(index, text),
                    "batch": number,
                    "seconds": share,
                }
                for index, text in zip(prepared.indices, answered.texts, strict=True)
            ]
        rows += [
            {"index": index, "prediction": None, "batch": number, "seconds": 0.0, "error": reason}
            for index, reason in prepared.lost.items()
        ]
        folder.append(rows)
        progress.advance(len(batch))
    _close_answers(run, batches)


def _close_answers(run: Run, batches: Sequence[Sequence[Any]]) -> None:
    """All questions have a line: joins the load counts and says so in the record."""
    folder, vlm = run.folder, run.handle.vlm
    names = [layer.name for layer in vlm.adapter.moe_layers(vlm.model)]
    layers = folder.loads.merge([n for n in range(len(batches)) if folder.loads.has(n)])
    rows = folder.predictions()
    lost = [{"index": r["index"], "reason": r["error"]} for r in rows if "error" in r]
    run.record = folder.update(
        answers_complete=True,
        answered=len(rows) - len(lost),
        lost=lost,
        seconds=round(sum(row["seconds"] for row in rows), 3),
        load=summarize(layers, names),
    )
    if folder.loads.chunks.exists():
        folder.loads.drop_chunks()
