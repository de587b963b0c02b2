"""Plots that are readable on light and on dark pages.

A plot is an SVG that follows the colour scheme of the reader's browser and has its own background.
Its text stays text.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Scheme(NamedTuple):
    """The colours of a page."""

    ink: str
    paper: str


LIGHT: Final = Scheme("#1f2328", "#ffffff")
DARK: Final = Scheme("#e6edf3", "#0d1117")
LINES: Final = ("#3a7ebf", "#d9622b", "#2f9e66", "#b066cc", "#c8475f", "#8a7f2b", "#5f8a94")
"""Colours of lines. Each has a contrast of at least 3 to both backgrounds."""

_DARK_RULES: Final = " ".join(
    f'[style*="{use}: {light}"] {{ {use}: {dark} !important; }}'
    for use in ("fill", "stroke")
    for light, dark in zip(LIGHT, DARK, strict=True)
)
_STYLE: Final = f"<style>\n@media (prefers-color-scheme: dark) {{ {_DARK_RULES} }}\n</style>"
"""What is drawn has the colours of a light page. Only browsers know others: other viewers know
neither `var()` nor media queries."""


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of this size in inches. Raises `ImportError` without matplotlib."""
    from matplotlib import rc
    from matplotlib.figure import Figure

    ink, paper = LIGHT
    rc("text", color=ink)
    rc("xtick", color=ink)
    rc("ytick", color=ink)
    rc("grid", color=ink)
    rc("figure", facecolor=paper)
    rc("axes", facecolor=paper, edgecolor=ink, labelcolor=ink, titlecolor=ink)
    rc("legend", facecolor=paper, edgecolor=ink, labelcolor=ink)
    rc("svg", fonttype="none", hashsalt="diptych")  # the same plot is the same file
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> None:
    """Write the figure as an SVG."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    head, tag, rest = written.getvalue().partition("<defs>")
    lines = (line.rstrip() for line in f"{head}{_STYLE}\n{tag}{rest}".splitlines())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
