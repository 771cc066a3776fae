"""What will be run: models x data sets x policies, decided before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mm_capacity.evaluation.policy_options import policy_fields

EMBEDDED_MODEL = "digits-moe"
EMBEDDED_DATA = ("DIGITS_MCQ", "DIGITS_YN")
PAPER_MODEL = "allenai/MolmoE-1B-0924"

MODALITIES = ("uniform", "image-first", "text-first")
ORDERS = ("score", "order", "reverse", "random")
WINDOWS = ("batch", "sequence", "rank")

EMBEDDED_BATCH_SIZE = 32
EMBEDDED_NEW_TOKENS = 16
DEFAULT_NEW_TOKENS = 512
DEFAULT_EP_SIZE = 4


@dataclass(frozen=True)
class ModelChoice:
    """One model: ``name`` is shown and names the folder, ``source`` is what gets loaded.

    ``local_copy``: the user gave the name and, beside it, where its weights are.
    """

    name: str
    source: str
    wrapper_class: str | None = None
    local_copy: bool = False
    max_new_tokens: int | None = None
    dtype: str | None = None
    device: str | None = None

    @property
    def embedded(self) -> bool:
        return self.source == EMBEDDED_MODEL


@dataclass(frozen=True)
class DataChoice:
    """One data set: ``name`` is shown, ``dataset`` is VLMEvalKit's name for it."""

    name: str
    dataset: str
    dataset_class: str | None = None
    limit: int | None = None

    @property
    def embedded(self) -> bool:
        return self.dataset in EMBEDDED_DATA


@dataclass(frozen=True)
class PolicyChoice:
    """One policy with its options, not built yet (building it needs torch)."""

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def get(self, key: str) -> Any:
        """The option's value, or None when it is not set."""
        return dict(self.options).get(key)

    def build(self) -> Any:
        """The policy itself.

        Raises:
            ValueError: an option has a value that the policy refuses.
        """
        from mm_capacity.policies import make_policy

        return make_policy(self.name, **dict(self.options))

    @property
    def slug(self) -> str:
        """A readable name, also used for the run folder; the hash beside it is what counts."""
        parts = [self.name]
        for key, value in self.options:
            if key == "gamma":
                parts.append(f"gamma{value:g}")
            elif key == "modality":
                parts.append(str(value))
            elif key == "order":
                parts += [str(value)] if value != "score" else []
            elif key == "placement":
                parts.append(str(value))
            elif key not in ("window", "seed", "placement_file"):
                shown = Path(value).name if isinstance(value, str) and "/" in value else value
                parts.append(f"{key}-{shown}"[:40])
        return "_".join(parts)


BASELINE = PolicyChoice("none")


@dataclass(frozen=True)
class Settings:
    """Everything but model, data and policy.

    Attributes:
        ep_size: R, or None for :data:`DEFAULT_EP_SIZE` or the greatest number below it that
            divides the model's experts.
        max_new_tokens: longest answer, or None for the data set's default.
        use_cache: False makes every new token a forward pass of the whole sequence.
        progress: "auto" (a bar on a terminal, else lines), "bar", "lines" or "off".
        jobs: processes that work on the data sets at once.
    """

    work_dir: Path = Path("outputs")
    device: str = "auto"
    dtype: str = "auto"
    batch_size: int = 1
    ep_size: int | None = None
    max_new_tokens: int | None = None
    limit: int | None = None
    seed: int = 0
    mode: str = "all"
    judge: str = "exact_matching"
    fresh: bool = False
    check: bool = False
    use_cache: bool = True
    trust_remote_code: bool = False
    lmu_data: Path | None = None
    progress: str = "auto"
    jobs: int = 1


@dataclass(frozen=True)
class Plan:
    """Every run: each model on each data set under each policy, in this order."""

    models: tuple[ModelChoice, ...]
    data: tuple[DataChoice, ...]
    policies: tuple[PolicyChoice, ...]
    settings: Settings = field(default_factory=Settings)

    @property
    def runs(self) -> int:
        return len(self.models) * len(self.data) * len(self.policies)

    @property
    def trace_window(self) -> str:
        """What load is counted over, the same for all runs so that they can be compared.

        A question ("sequence"), unless a policy caps several of them together ("batch").
        """
        windows = {policy.get("window") for policy in self.policies} - {None, "sequence"}
        return "batch" if windows and self.settings.batch_size > 1 else "sequence"

    def limit(self, data: DataChoice) -> int | None:
        """Most questions of this data set, None for all."""
        return data.limit if data.limit is not None else self.settings.limit

    def new_tokens(self, model: ModelChoice, data: DataChoice, family: int | None = None) -> int:
        """Longest answer in tokens.

        Args:
            model: whose own number goes first, then the plan's.
            data: embedded data have short answers.
            family: what the model's family has on other data; None for the default.
        """
        for choice in (model.max_new_tokens, self.settings.max_new_tokens):
            if choice is not None:
                return choice
        return EMBEDDED_NEW_TOKENS if data.embedded else family or DEFAULT_NEW_TOKENS


def policy_grid(
    names: Sequence[str],
    gammas: Sequence[float | None],
    axes: Mapping[str, Sequence[Any]],
    *,
    fixed: Mapping[str, Any],
    baseline: bool,
    placement: Mapping[str, Any] | None = None,
) -> tuple[PolicyChoice, ...]:
    """Every combination, without repeats; the baseline comes first.

    An axis that a policy has no option for is left out for that policy, so it appears once
    instead of once per value.

    Args:
        names: registry names.
        gammas: capacity factors; None means the baseline.
        axes: option name -> its values.
        fixed: options that every policy which has them gets.
        baseline: put the policy ``none`` in front.
        placement: options that say where experts live; every policy gets them, the baseline too.
    """
    placed = tuple((placement or {}).items())
    choices: dict[PolicyChoice, None] = {}
    if baseline or None in gammas or BASELINE.name in names:
        choices[PolicyChoice(BASELINE.name, placed)] = None
    for name in names:
        if name == BASELINE.name:
            continue
        known = policy_fields(name)
        combinations: list[dict[str, Any]] = [{}]
        for axis, values in {**axes, "gamma": gammas}.items():
            if axis in known:
                given = [value for value in values if value is not None]
                combinations = [{**c, axis: value} for c in combinations for value in given]
        for options in combinations:
            extra = {key: value for key, value in fixed.items() if key in known}
            choices[PolicyChoice(name, tuple({**extra, **options}.items()) + placed)] = None
    return tuple(choices)


def describe(plan: Plan, *, dry_run: bool = False) -> Iterable[str]:
    """The plan as lines of text."""
    s = plan.settings
    yield f"Plan: {plan.runs} runs = {len(plan.models)} model(s) x {len(plan.data)} data set(s)" + (
        f" x {len(plan.policies)} policies"
    )
    for model in plan.models:
        shown = "" if model.source == model.name else f" ({model.source})"
        yield f"  model   {model.name}{shown}"
    for data in plan.data:
        limit = plan.limit(data)
        yield f"  data    {data.name}" + (f", {limit} questions" if limit is not None else "")
    for policy in plan.policies:
        text = ", ".join(f"{key}={value}" for key, value in policy.options)
        yield f"  policy  {policy.name}" + (f" ({text})" if text else "")
    ranks = s.ep_size or f"{DEFAULT_EP_SIZE} where it divides the experts"
    tokens = sorted({plan.new_tokens(m, d) for m in plan.models for d in plan.data})
    open_end = s.max_new_tokens is None and any(
        m.max_new_tokens is None and not d.embedded for m in plan.models for d in plan.data
    )
    yield (
        f"  batch size {s.batch_size}, expert-parallel ranks {ranks}, "
        f"max new tokens {'/'.join(map(str, tokens))}"
        f"{' (or what VLMEvalKit has for the family)' if open_end else ''}, device {s.device}, "
        f"dtype {s.dtype}, seed {s.seed}, mode {s.mode}, judge {s.judge}"
        f"{'' if s.use_cache else ', no KV cache'}"
    )
    yield f"  results in {s.work_dir}"
    if dry_run:
        yield (
            "Dry run: nothing was loaded; names of data sets and models outside this package are "
            "looked up when the run starts."
        )
