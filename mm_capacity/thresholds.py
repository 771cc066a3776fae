"""MoDES' thresholds for a wanted share of skipped assignments, from a model and some questions.

Source: arXiv 2511.15690 (MoDES): of the pairs of thresholds that skip just enough
(:mod:`mm_capacity.policies.modes_search`), the one whose output is nearest to the untouched
model's, by mean KL divergence.

Ours: the share that the search sees is counted on the importances that the untouched model
shows, so it cannot decrease as a threshold grows. Skipping changes what later layers see, so the
share that is reached is measured beside it, in the passes that measure the divergence. In all, N
questions cost N passes, and for each wanted share at most D + 1 times N more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vlm_adapters.modality import Modality

from .attach import limit_capacity
from .calibration import Observe, kl_by_parts
from .policies.modes import MoDES, share_of_token
from .policies.modes_search import frontier, quantile_grid, skip_fraction_of
from .routing import Routing

DEFAULT_POINTS = 16


@dataclass
class Candidate:
    """A pair of thresholds on the frontier, and what it costs.

    Attributes:
        skip_frac: wanted share of skipped assignments.
        tau_text: threshold of text tokens.
        tau_image: threshold of image tokens.
        recorded_skip_frac: share that the pair skips of the untouched model's assignments.
        reached_skip_frac: share skipped when the model runs under the pair.
        kl: mean KL divergence from the untouched model over text positions, in nats.
    """

    skip_frac: float
    tau_text: float
    tau_image: float
    recorded_skip_frac: float
    reached_skip_frac: float = 0.0
    kl: float = 0.0


class Importances:
    """alpha_l * pi_i of every assignment, by modality; give :meth:`see` to ``Observe``.

    Args:
        alpha: one number per MoE layer.
    """

    def __init__(self, alpha: Sequence[float]) -> None:
        self._alpha = list(alpha)
        self._text: list[Tensor] = []
        self._image: list[Tensor] = []

    def see(self, routing: Routing) -> None:
        """Adds one layer of one forward pass; padding is left out."""
        importance = self._alpha[routing.layer] * share_of_token(routing.weights)
        self._text.append(importance[routing.modality == Modality.TEXT].flatten().cpu())
        self._image.append(importance[routing.visual].flatten().cpu())

    @property
    def text(self) -> Tensor:
        """``[n]`` float64, of text tokens."""
        return torch.cat(self._text)

    @property
    def image(self) -> Tensor:
        """``[m]`` float64, of image and video tokens."""
        return torch.cat(self._image)


def candidates(
    text: Tensor, image: Tensor, skip_fracs: Sequence[float], points: int
) -> list[list[Candidate]]:
    """The frontier of every wanted share.

    Args:
        text: ``[n]`` importances of text assignments.
        image: ``[m]`` importances of image assignments.
        skip_fracs: wanted shares, in [0, 1].
        points: D, thresholds of each modality to choose from.

    Raises:
        ValueError: a share or the number of points is out of range.
    """
    skipped = skip_fraction_of(text, image)
    grids = quantile_grid(text, points), quantile_grid(image, points)
    return [
        [Candidate(wanted, *pair) for pair in frontier(skipped, *grids, wanted)]
        for wanted in skip_fracs
    ]


def find_thresholds(
    vlm: Any,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    alpha: Sequence[float],
    skip_fracs: Sequence[float],
    *,
    points: int = DEFAULT_POINTS,
    progress: Callable[[int], None] = lambda done: None,
) -> list[dict[str, float]]:
    """Thresholds for every wanted share.

    Args:
        vlm: from :func:`vlm_adapters.load_model`.
        conversations: N questions, as ``vlm.prepare`` takes them.
        alpha: importance of every MoE layer, from :func:`mm_capacity.calibration.calibrate`.
        skip_fracs: wanted shares of skipped assignments, in [0, 1].
        points: D, thresholds of each modality to choose from.
        progress: called with the number of questions done in the second round.

    Returns:
        For each share the fields of the :class:`Candidate` with the least divergence (equal: the
        smaller text threshold); the entry ``thresholds`` of a calibration file.

    Raises:
        ValueError: there is no question, or an argument is out of range.
    """
    if not conversations:
        raise ValueError("conversations must hold at least one question, got none")
    seen = Importances(alpha)
    with torch.no_grad():
        for conversation in conversations:
            with limit_capacity(vlm.model, Observe(see=seen.see), adapter=vlm.adapter):
                vlm.model(**vlm.prepare(conversation))
        found = candidates(seen.text, seen.image, skip_fracs, points)
        totals = {id(pair): [0.0, 0, 0, 0] for pairs in found for pair in pairs}
        for done, conversation in enumerate(conversations, 1):
            inputs = vlm.prepare(conversation)
            text = vlm.adapter.tag_tokens(inputs) == Modality.TEXT
            reference = vlm.model(**inputs).logits
            text = text.to(reference.device)
            kept = reference[text]
            del reference
            for pair in (pair for pairs in found for pair in pairs):
                policy = MoDES(
                    tau_text=pair.tau_text,
                    tau_image=pair.tau_image,
                    calibration={"alpha": list(alpha)},
                )
                with limit_capacity(vlm.model, policy, adapter=vlm.adapter) as trace:
                    changed = vlm.model(**inputs).logits[text]
                layers = trace.layers()
                total = totals[id(pair)]
                total[0] += kl_by_parts(kept, changed) * len(kept) if len(kept) else 0.0
                total[1] += len(kept)
                total[2] += int(layers["assigned"].sum() - layers["kept"].sum())
                total[3] += int(layers["assigned"].sum())
            progress(done)
    for pair in (pair for pairs in found for pair in pairs):
        kl, positions, skipped, assigned = totals[id(pair)]
        pair.kl = kl / max(positions, 1)
        pair.reached_skip_frac = skipped / max(assigned, 1)
    return [asdict(min(pairs, key=lambda pair: pair.kl)) for pairs in found]
