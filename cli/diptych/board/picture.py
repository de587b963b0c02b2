"""Draws the table of pods and figures, and the router's line below it. It performs no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from diptych.board.figures import Figures, Pace
from diptych.engine_load import Sample
from diptych.laptop.lifecycle import Phase
from diptych.watching import harmless

WIDE_COLUMNS = 100
"""From this width on, gaps are wider and the role is shown, which is usually in the name too."""
OTHERS, WIDE_OTHERS = 56, 72
"""The most columns that all but the name take."""
LEAST_NAME = 24
"""Figures are left out where a name would get less room, the least important ones first."""
FIGURE_WIDTHS = {"RESTARTS": 8, "QUEUE": 5, "ROWS": 4, "BLOCKS": 9, "TOKENS/S": 8}
"""Columns and their width, the least important first."""
_STYLES = {
    Phase.READY: "green",
    Phase.STARTING: "yellow",
    Phase.NOT_READY: "yellow",
    Phase.BACKING_OFF: "red",
    Phase.CRASHED: "bold red",
}


@dataclass(frozen=True, slots=True)
class PodRow:
    """One pod, as its supervisor reports it."""

    name: str
    role: str
    phase: Phase
    restarts: int
    waited_s: int | None = None
    """Seconds in this phase, if somebody waits for its end."""
    doing: str = ""
    """The last line of its log, if its start takes long."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that is shown."""

    pods: Sequence[PodRow]
    figures: Figures = field(default_factory=Figures)
    pace: Pace = field(default_factory=Pace)
    ended: bool = False
    """Whether the service has ended; these are its last figures."""


def drawn(picture: Picture, columns: int, lines: int) -> RenderableType:
    """Draw the table for a terminal of this size. Pods that are ready are left out first."""
    router = _router(picture.figures, picture.pace)
    room = lines - 1 + -len(router) // columns
    pods = list(picture.pods)
    if len(pods) > room:
        pods = sorted(pods, key=lambda pod: pod.phase is Phase.READY)[: max(1, room - 1)]
    parts: list[RenderableType] = [_table(replace(picture, pods=pods), columns)]
    if left_out := len(picture.pods) - len(pods):
        parts.append(Text(f"… and {left_out} more", style="dim"))
    parts += [
        Text(harmless(f"{pod.name}: {pod.doing}"), style="dim", no_wrap=True, overflow="ellipsis")
        for pod in [pod for pod in pods if pod.doing][: max(0, room - len(picture.pods))]
    ]
    parts.append(Text(router))
    return Group(*parts)


def _table(picture: Picture, columns: int) -> Table:
    is_wide = columns >= WIDE_COLUMNS
    table = Table(box=None, pad_edge=False, padding=(0, 2 if is_wide else 1, 0, 0))
    longest = max((len(pod.name) for pod in picture.pods), default=0)
    room, shown = columns - (WIDE_OTHERS if is_wide else OTHERS), dict(FIGURE_WIDTHS)
    while shown and room < min(longest, LEAST_NAME):
        room += 1 + shown.pop(next(iter(shown)))
    table.add_column("POD", no_wrap=True)
    for column in ("ROLE", "STATE") if is_wide else ("STATE",):
        table.add_column(column, no_wrap=True, min_width=len(column))
    for column in shown:
        table.add_column(column, no_wrap=True, justify="right", min_width=len(column))
    for pod in picture.pods:
        table.add_row(
            Text(_end_of(pod.name, room)),
            *((_role(pod, picture.figures),) if is_wide else ()),
            _state(pod, ended=picture.ended),
            *_figures(pod, picture)[len(FIGURE_WIDTHS) - len(shown) :],
        )
    return table


def _end_of(name: str, room: int) -> str:
    """The end of a name is what tells one pod from another."""
    return name if len(name) <= room else f"…{name[len(name) - room + 1 :]}"


def _figures(pod: PodRow, picture: Picture) -> tuple[str, ...]:
    """As in `FIGURE_WIDTHS`."""
    rate = picture.pace.tokens_per_s.get(pod.name)
    cells = _cells(picture.figures.engines.get(pod.name))
    return str(pod.restarts), *cells, "-" if rate is None else f"{rate:.1f}"


def _role(pod: PodRow, figures: Figures) -> str:
    """What it does now: a router may have given it the other role."""
    sample = figures.engines.get(pod.name)
    return pod.role if sample is None else sample.role


def _cells(sample: Sample | None) -> tuple[str, str, str]:
    if sample is None:
        return "-", "-", "-"
    used = sample.blocks - sample.blocks_free
    return str(sample.waiting), str(sample.running), f"{used}/{sample.blocks}"


def _state(pod: PodRow, *, ended: bool) -> Text:
    if ended and pod.phase is not Phase.CRASHED:
        return Text("ended", style="dim")
    waited = "" if pod.waited_s is None else f" {pod.waited_s}s"
    return Text(f"{pod.phase.value}{waited}", style=_STYLES.get(pod.phase, "dim"))


def _router(figures: Figures, pace: Pace) -> str:
    first = "-" if pace.first_token_s is None else f"{1000 * pace.first_token_s:.0f} ms"
    return (
        f"requests {figures.answered}, hand-offs {figures.hand_offs}, "
        f"moved {_bytes(figures.moved_bytes)}, first token {first}, "
        f"{sum(pace.tokens_per_s.values()):.1f} tokens/s"
    )


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
