"""What a viewer that is no browser draws of an SVG: it knows neither `var()` nor media queries."""

from __future__ import annotations

import io

import resvg_py
from PIL import Image


def paper_and_colors(svg: str) -> tuple[str, set[str]]:
    """The colour of the upper left corner, and all colours, as `#rrggbb`."""
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, dpi=96))
    pixels = Image.open(io.BytesIO(png)).convert("RGB").tobytes()
    colors = [f"#{pixels[at : at + 3].hex()}" for at in range(0, len(pixels), 3)]
    return colors[0], set(colors)
