"""What `diptych up` shows while it works: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from diptych.laptop.lifecycle import Phase
from diptych.laptop.supervisor import RunningPod

_STYLES = {
    Phase.READY: "green",
    Phase.STARTING: "yellow",
    Phase.NOT_READY: "yellow",
    Phase.BACKING_OFF: "red",
    Phase.CRASHED: "bold red",
}


class Progress:
    """One line per pod while they start; afterwards only what changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pods: Sequence[RunningPod] = ()
        self._shown: dict[str, Phase] = {}
        self._live: Live | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.settle()

    def begin(self, pods: Sequence[RunningPod]) -> None:
        self._pods = pods
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._table, console=self._console, refresh_per_second=5
            )
            self._live.start()

    def settle(self) -> None:
        """Leave the table as it stands; from now on changes are lines."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def changed(self) -> None:
        """Print the pods whose phase is not the one printed last."""
        for pod in self._pods:
            phase = pod.life.phase
            if self._shown.get(pod.spec.name) is not phase and phase is not Phase.PENDING:
                self._shown[pod.spec.name] = phase
                if self._live is None:
                    self._line(pod)

    def crashed(self, pod: RunningPod, code: int, delay_s: float) -> None:
        """One line: what the pod said last, and when it starts again."""
        end = f"{pod.spec.name} ended with code {code}: {pod.last_error()}"
        self.say(f"{end} (restart in {delay_s:g} s; log: {pod.log})")

    def say(self, text: str) -> None:
        """One plain line, above the live table if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _line(self, pod: RunningPod) -> None:
        life = pod.life
        restarts = f", restarts {life.restarts}" if life.restarts else ""
        self.say(f"{pod.spec.name}: {life.phase.value} (port {pod.spec.ports['http']}{restarts})")

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for column in ("POD", "STATE", "PORT", "RESTARTS", "SECONDS"):
            table.add_column(column, justify="left" if column in ("POD", "STATE") else "right")
        now = time.monotonic()
        for pod in self._pods:
            life = pod.life
            style = _STYLES.get(life.phase, "dim")
            table.add_row(
                pod.spec.name,
                f"[{style}]{life.phase.value}[/]",
                str(pod.spec.ports["http"]),
                str(life.restarts),
                f"{now - life.changed_at:.0f}" if life.changed_at else "",
            )
        return table
