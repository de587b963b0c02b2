"""Shows the progress of `diptych up`: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich.console import Console, RenderableType
from rich.live import Live

from diptych.board.figures import Figures, Pace
from diptych.board.picture import Picture, PodRow, drawn
from diptych.laptop.lifecycle import Phase
from diptych.laptop.supervisor import RunningPod
from diptych.watching import harmless

TICK_S = 1.0
"""The shortest time between two drawings of the table. It is drawn only if it has changed."""
SLOW_S = 3
"""When a start takes longer, the table shows the last line of the log, such as what is compiled."""
LAST_LINES = 5
"""The number of lines of a pod's log that are shown when it fails."""
_LOG_HEAD = re.compile(r"^[\d:]+ [A-Z] \[[^]]*\] [\w.]+: ")
"""Time, level, pod and module before a message in the log of one of our pods."""
_WAITING = (Phase.STARTING, Phase.NOT_READY, Phase.BACKING_OFF)


class Board:
    """Shows the pods of one service. Without a terminal, or if asked, it prints one line for each
    change."""

    def __init__(self, console: Console, *, plain: bool = False) -> None:
        self._console = console
        self._plain = plain or not console.is_terminal or console.is_dumb_terminal
        self._pods: Sequence[RunningPod] = ()
        self._said: dict[str, Phase] = {}
        """The phases that were told in lines."""
        self._live: Live | None = None
        self._drawn: Picture | None = None
        self._figures, self._pace = Figures(), Pace()
        self._news = asyncio.Event()

    @property
    def is_live(self) -> bool:
        """Whether there is a table to update."""
        return self._live is not None

    @contextlib.contextmanager
    def showing(self, pods: Sequence[RunningPod]) -> Iterator[None]:
        """Show these pods during the block. Afterwards the last table stays."""
        self._pods = pods
        if self._plain:
            yield
            return
        self._live = Live(
            get_renderable=self._renderable,
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._shown(self._live.start)
        drawing = asyncio.create_task(self._draw())
        try:
            yield
        finally:
            drawing.cancel()
            self.settle(ended=True)

    def settle(self, *, ended: bool = False) -> None:
        """Leave the table as it is; from now on print changes as lines."""
        if self._live is not None:
            self._drawn = self._picture(ended=ended)
            self._shown(self._live.stop)
            self._live = None

    def changed(self) -> None:
        """Note that a pod has another phase or another process."""
        self._news.set()
        for pod in self._pods:
            phase = pod.life.phase
            if self._said.get(pod.spec.name) is not phase and phase is not Phase.PENDING:
                self._said[pod.spec.name] = phase
                if self._live is None:
                    self._line(pod)

    def crashed(self, pod: RunningPod, code: int, delay_s: float) -> None:
        """Show the pod's last output, where the rest is, and when it starts again."""
        end = f"{pod.spec.name} ended with code {code}: {pod.last_error()}"
        self.say(f"{end} (restart in {delay_s:g} s; log: {pod.log})")
        if self._live is not None:
            for line in pod.last_lines(LAST_LINES):
                self.say(f"  {line}")

    def tell(self, figures: Figures, pace: Pace) -> None:
        """Show newer figures of the service."""
        self._figures, self._pace = figures, pace
        self._news.set()

    def say(self, text: str) -> None:
        """Print one plain line, above the live table if there is one."""
        said = partial(self._console.print, markup=False, highlight=False, soft_wrap=True)
        self._shown(partial(said, harmless(text)))

    def _shown(self, draw: Callable[[], object]) -> None:
        """Draw, as long as that is seen: a terminal or a pipe that has gone, and a full disk, end
        no service, and keep none from its end."""
        try:
            draw()
        except (OSError, UnicodeError, SystemExit):  # the last is what rich makes of a closed pipe
            self._console.quiet = True

    def _line(self, pod: RunningPod) -> None:
        life = pod.life
        restarts = f", restarts {life.restarts}" if life.restarts else ""
        self.say(f"{pod.spec.name}: {life.phase.value} (port {pod.spec.ports['http']}{restarts})")

    async def _draw(self) -> None:
        """Draw what has changed, until cancelled. Nothing happens here while nothing changes."""
        while True:
            picture = self._picture()
            if picture != self._drawn and self._live is not None:
                self._drawn = picture
                self._shown(self._live.refresh)
            await asyncio.sleep(TICK_S)
            if not any(pod.life.phase in _WAITING for pod in self._pods):
                await self._news.wait()
            self._news.clear()

    def _renderable(self) -> RenderableType:
        return drawn(self._drawn or self._picture(), *self._console.size)

    def _picture(self, *, ended: bool = False) -> Picture:
        now = time.monotonic()
        rows = [_row(pod, now) for pod in self._pods]
        return Picture(rows, self._figures, self._pace, ended)


def _row(pod: RunningPod, now: float) -> PodRow:
    life = pod.life
    waited_s = int(now - life.changed_at) if life.phase in _WAITING else None
    is_slow = life.phase is Phase.STARTING and waited_s is not None and waited_s >= SLOW_S
    return PodRow(
        name=pod.spec.name,
        role=pod.spec.role,
        phase=life.phase,
        restarts=life.restarts,
        waited_s=waited_s,
        doing=message_of("".join(pod.last_lines(1))) if is_slow else "",
    )


def message_of(line: str) -> str:
    """Return the message of a line in a log of ours, without time and level; others unchanged."""
    return _LOG_HEAD.sub("", line, count=1)
