"""Colours and lines that every plot uses for the same thing."""

from __future__ import annotations

# Okabe-Ito colours: told apart with any kind of colour vision.
MODALITY_COLOURS = {
    "uniform": "#0072B2",
    "image-first": "#009E73",
    "text-first": "#D55E00",
    "": "#CC79A7",
}
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P")
BASELINE_COLOUR = "#444444"


def colour_of(modality: str) -> str:
    """Colour of a modality; policies without one share a colour."""
    return MODALITY_COLOURS.get(modality, MODALITY_COLOURS[""])
