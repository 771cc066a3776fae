"""MoDES' thresholds: a search along the frontier of pairs that skip just enough.

Source: arXiv 2511.15690 (MoDES), frontier search. The share of skipped assignments grows with
either threshold. So as the text threshold rises over its grid, the least vision threshold that
still meets the wanted share only falls: one staircase walk visits at most two grids of D values,
where trying all pairs visits D^2, and each visit costs N samples: O(N D). Public: the paper's code
takes grids of 100 thresholds. Ours: the grids of :func:`quantile_grid`, which need no range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Thresholds:
    """A pair of thresholds on the frontier.

    Attributes:
        tau_text: threshold of text tokens.
        tau_image: least threshold of image tokens on the grid that meets the target with it.
        skip_frac: share of assignments that the pair skips.
        loss: what the search minimises, for this pair.
    """

    tau_text: float
    tau_image: float
    skip_frac: float
    loss: float


def frontier(
    skip_frac: Callable[[float, float], float],
    text_grid: Sequence[float],
    image_grid: Sequence[float],
    target: float,
) -> list[tuple[float, float, float]]:
    """Pairs ``(tau_text, tau_image, skip_frac)`` that skip at least ``target``, and just so.

    Args:
        skip_frac: share of assignments that a pair of thresholds skips; must not decrease in
            either. It is called at most ``len(text_grid) + len(image_grid)`` times.
        text_grid: thresholds of text tokens, ascending.
        image_grid: thresholds of image tokens, ascending.
        target: wanted share, in [0, 1].

    Returns:
        For each text threshold that can meet the target, the pair with the least image threshold;
        pairs that another one makes needless (same image threshold, smaller text threshold) are
        left out. Empty when no pair of the grids meets the target.

    Raises:
        ValueError: a grid is empty or not ascending, or the target is out of range.
    """
    for name, grid in (("text_grid", text_grid), ("image_grid", image_grid)):
        if not grid or list(grid) != sorted(grid):
            raise ValueError(f"{name} must be ascending and not empty, got {list(grid)}")
    if not 0 <= target <= 1:
        raise ValueError(f"target must lie in [0, 1], got {target!r}")
    pairs: list[tuple[float, float, float]] = []
    image = len(image_grid) - 1
    for tau_text in text_grid:
        best = None
        while image >= 0:
            reached = skip_frac(tau_text, image_grid[image])
            if reached < target:
                break
            best = (tau_text, image_grid[image], reached)
            image -= 1
        if best is not None:
            pairs.append(best)
            # The next text threshold is compared from the first image threshold not yet passed.
        if image < 0:
            break
    return pairs


def search_thresholds(
    skip_frac: Callable[[float, float], float],
    loss: Callable[[float, float], float],
    text_grid: Sequence[float],
    image_grid: Sequence[float],
    target: float,
) -> Thresholds:
    """The pair on the frontier with the least loss; on equal loss, the smaller text threshold.

    Args:
        skip_frac: see :func:`frontier`.
        loss: what a pair costs, for instance the mean KL divergence from the untouched model; it
            must not decrease in either threshold for the frontier to hold the optimum.
        text_grid: see :func:`frontier`.
        image_grid: see :func:`frontier`.
        target: see :func:`frontier`.

    Raises:
        ValueError: as :func:`frontier`, or no pair of the grids meets the target.
    """
    pairs = frontier(skip_frac, text_grid, image_grid, target)
    if not pairs:
        raise ValueError(
            f"target must be reachable on the grids, got {target!r}: the greatest thresholds skip "
            f"{skip_frac(text_grid[-1], image_grid[-1]):.4f}"
        )
    scored = [Thresholds(*pair, loss(pair[0], pair[1])) for pair in pairs]
    return min(scored, key=lambda pair: pair.loss)


def quantile_grid(importance: Tensor, points: int) -> list[float]:
    """Thresholds that skip nothing, everything, and even shares in between.

    Args:
        importance: ``[n]`` importances of one modality's assignments.
        points: D, at least 2.

    Returns:
        At most D ascending thresholds; fewer when importances are equal.

    Raises:
        ValueError: fewer than 2 points.
    """
    if points < 2:
        raise ValueError(f"points must be at least 2, got {points!r}")
    if not importance.numel():
        return [0.0]
    ordered = importance.to(torch.float64).flatten().sort().values
    places = torch.arange(1, points - 1, dtype=torch.int64) * len(ordered) // (points - 1)
    above = torch.nextafter(ordered[-1], torch.tensor(torch.inf, dtype=torch.float64))
    return sorted({0.0, *ordered[places].tolist(), float(above)})


def skip_fraction_of(text: Tensor, image: Tensor) -> Callable[[float, float], float]:
    """The function ``skip_frac`` from the importances alpha_l * pi_i of a calibration set.

    Args:
        text: ``[n]`` importances of all text assignments, over all layers.
        image: ``[m]`` importances of all image assignments.

    Returns:
        A function of (tau_text, tau_image); each call is two binary searches.

    Raises:
        ValueError: there is no assignment at all.
    """
    total = text.numel() + image.numel()
    if not total:
        raise ValueError("text and image must hold at least one importance, got none")
    sorted_text = text.to(torch.float64).flatten().sort().values
    sorted_image = image.to(torch.float64).flatten().sort().values

    def skip_frac(tau_text: float, tau_image: float) -> float:
        below = 0
        for values, tau in ((sorted_text, tau_text), (sorted_image, tau_image)):
            below += int(torch.searchsorted(values, torch.tensor(tau, dtype=torch.float64)))
        return below / total

    return skip_frac
