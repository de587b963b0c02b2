"""Draws a timeline as an SVG without other resources, for light and dark pages. It
performs no I/O."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape

from diptych_frontend.timeline.lanes import MEANINGS, Bar, Kind, Lane, Mark, Timeline

WIDTH: Final = 960
NAMES: Final = 170
"""The width of the names of lanes, left of the bars."""
RIGHT: Final = 20
TOP: Final = 34
LANE: Final = 46
BAR: Final = 18
LETTER: Final = 6.2
"""The approximate width of a letter in a bar's label."""
MOST_LETTERS: Final = 110
"""Longer texts of a mark are cut."""
COLORS: Final[dict[Kind, str]] = {
    "wait": "#8a7f2b",
    "queue": "#5f8a94",
    "prefill": "#3a7ebf",
    "kv": "#d9622b",
    "decode": "#2f9e66",
    "preempted": "#c8475f",
}
BAD: Final = COLORS["preempted"]
_NOT_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
INK: Final = "#1f2328"
PAPER: Final = "#ffffff"
LINE: Final = "#d0d7de"
_STYLE: Final = """<style>
text { font: 11px system-ui, sans-serif; }
.title { font-weight: 600; font-size: 12px; }
@media (prefers-color-scheme: dark) {
.ink { fill: #e6edf3; } .paper { fill: #0d1117; }
.edge { stroke: #0d1117; } .line { stroke: #30363d; }
}
</style>"""
"""Attributes have the colours of a light page. Only browsers know others, and only they read the
rules for a dark page: other viewers know neither `var()` nor media queries."""


def svg(timeline: Timeline) -> str:
    """Return the SVG. Its height grows with the lanes."""
    scale = _Scale(timeline.seconds)
    bottom = TOP + LANE * len(timeline.lanes)
    height = bottom + 52
    title = _text(timeline.title)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-labelledby="title description">',
        f'<title id="title">{title}</title>',
        f'<desc id="description">{_text(described(timeline))}</desc>',
        _STYLE,
        f'<rect class="paper" width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
        f'<text class="ink title" x="8" y="18" fill="{INK}">{title}</text>',
        *_axis(scale, bottom),
    ]
    for number, lane in enumerate(timeline.lanes):
        parts += _lane(lane, TOP + LANE * number, scale)
    return "\n".join([*parts, *_legend(timeline, bottom + 40), "</svg>", ""])


def described(timeline: Timeline) -> str:
    """Describe each bar and mark in a sentence, for readers who cannot see it."""
    said = []
    for lane in timeline.lanes:
        said += [
            f"{lane.name}: {bar.label} from {milliseconds(bar.began_s)} "
            f"to {milliseconds(bar.ended_s)}."
            for bar in lane.bars
        ]
        said += [f"{lane.name}: {mark.label} at {milliseconds(mark.at_s)}." for mark in lane.marks]
    return " ".join(said)


def milliseconds(seconds: float) -> str:
    """Format milliseconds for people."""
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:.0f} ms"


class _Scale:
    """From seconds to columns."""

    def __init__(self, seconds: float) -> None:
        self.seconds = max(seconds, 1e-6)
        self._per_s = (WIDTH - NAMES - RIGHT) / self.seconds

    def x(self, at_s: float) -> float:
        return NAMES + min(max(at_s, 0.0), self.seconds) * self._per_s

    def steps(self) -> Iterator[float]:
        """Round times for the axis, some eight of them."""
        rough = self.seconds / 8
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
        for number in range(int(self.seconds / step) + 1):
            yield number * step


def _axis(scale: _Scale, bottom: int) -> Iterator[str]:
    for at_s in scale.steps():
        x = scale.x(at_s)
        yield f'<path class="line" d="M{x:.1f} {TOP}V{bottom}" stroke="{LINE}"/>'
        yield _words(_tick(at_s), x, bottom + 14, "middle")


def _tick(at_s: float) -> str:
    return f"{at_s:g} s" if at_s >= 1 else f"{1e3 * at_s:g} ms"


def _lane(lane: Lane, top: int, scale: _Scale) -> Iterator[str]:
    middle = top + 8 + BAR // 2
    yield _words(_cut(lane.name, NAMES - 16), 8, middle + 4)
    yield f'<path class="line" d="M{NAMES} {middle}H{WIDTH - RIGHT}" stroke="{LINE}"/>'
    for bar in lane.bars:
        yield from _bar(bar, top + 8, scale)
    if lane.ticks_s:
        path = "".join(f"M{scale.x(at_s):.1f} {top + 9 + BAR}v5" for at_s in lane.ticks_s)
        yield f'<path d="{path}" stroke="{COLORS["decode"]}"/>'
    for number, mark in enumerate(lane.marks):
        # Labels of neighbours would run into each other on one line.
        yield from _mark(mark, top, top + (20 + BAR if number % 2 == 0 else 22), scale)


def _bar(bar: Bar, top: int, scale: _Scale) -> Iterator[str]:
    x = scale.x(bar.began_s)
    width = max(1.0, scale.x(bar.ended_s) - x)
    took = milliseconds(bar.ended_s - bar.began_s)
    yield (
        f'<rect class="edge" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" '
        f'fill="{COLORS[bar.kind]}" stroke="{PAPER}">'
        f"<title>{_text(bar.label)}: {took}</title></rect>"
    )
    if len(bar.label) * LETTER + 8 <= width:
        text = _text(bar.label)
        yield f'<text x="{x + 4:.1f}" y="{top + 13}">{text}</text>'


def _mark(mark: Mark, top: int, y: int, scale: _Scale) -> Iterator[str]:
    x = scale.x(mark.at_s)
    color = f'fill="{BAD}"' if mark.is_bad else f'class="ink" fill="{INK}"'
    anchor = "end" if x > (NAMES + WIDTH) / 2 else "start"
    label = _cut(mark.label, WIDTH - NAMES)
    yield f'<path {color} d="M{x:.1f} {top + 8}l-4 -6h8z"/>'
    yield (
        f'<text {color} x="{x:.1f}" y="{y}" text-anchor="{anchor}">{_text(label)}'
        f"<title>{_text(mark.label)}</title></text>"
    )


def _legend(timeline: Timeline, y: int) -> Iterator[str]:
    used = {bar.kind for lane in timeline.lanes for bar in lane.bars}
    x = float(NAMES)
    for kind, meaning in MEANINGS.items():
        if kind in used:
            yield f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" fill="{COLORS[kind]}"/>'
            yield _words(meaning, x + 14, y)
            x += 14 + len(meaning) * LETTER + 16


def _words(text: str, x: float, y: float, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y}" text-anchor="{anchor}"'
    return f'<text class="ink" {place} fill="{INK}">{_text(text)}</text>'


def _cut(text: str, width: float) -> str:
    room = min(MOST_LETTERS, int(width / LETTER))
    return text if len(text) <= room else f"{text[: room - 1]}…"


def _text(text: str) -> str:
    """Text for XML, which has no way to write some characters."""
    return escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text))
