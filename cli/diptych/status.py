"""`diptych status`: the services that run on this machine."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from diptych.laptop.rundir import RunState


def as_json(states: list[RunState]) -> str:
    """A list of services, the newest first."""
    return msgspec.json.format(msgspec.json.encode(states), indent=2).decode()


def show(states: list[RunState], console: Console) -> None:
    """One table for each service."""
    if not states:
        console.print("no service runs here; start one with `diptych up FILE`", markup=False)
    for state in states:
        ready = "ready" if state.ready else "starting"
        minutes = (time.time() - state.started_at) / 60
        title = f"{state.service}: {ready}, {state.url}, {minutes:.0f} min"
        logs = {str(Path(pod.log).parent) for pod in state.pods}
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for column in ("POD", "STATE", "PORT", "PID", "RESTARTS"):
            table.add_column(column)
        for pod in state.pods:
            port, pid = pod.ports.get("http", "-"), pod.pid if pod.pid is not None else "-"
            table.add_row(pod.name, pod.phase, str(port), str(pid), str(pod.restarts))
        console.print(table)
        console.print(f"logs: {', '.join(logs)}", markup=False, highlight=False, soft_wrap=True)
