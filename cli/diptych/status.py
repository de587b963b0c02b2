"""`diptych status`: the services that run on this machine."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

import httpx
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from diptych.engine_load import items_of
from diptych.laptop.rundir import RunState, read_metrics


def with_facts(state: RunState) -> RunState:
    """Add what the service's router reports of its engines' processors and health."""
    try:
        metrics = read_metrics(state)
        cpus, health = read_cpus(metrics), read_health(metrics)
    except (httpx.HTTPError, OSError, ValueError):  # it may be starting, or leaving
        return state
    pods = [
        replace(x, cpu=cpus.get(x.name, ""), health=health.get(x.name, x.health))
        for x in state.pods
    ]
    return replace(state, pods=pods)


def read_cpus(metrics: str) -> dict[str, str]:
    """Return each engine's processor facts by name, from a router's /metrics.

    Raises `ValueError` if the text is something else.
    """
    words: dict[str, list[str]] = defaultdict(list)
    for sample in items_of(metrics):
        engine = sample.labels.get("engine", "").rpartition("/")[2]
        if sample.name == "diptych:cpu_level_info":
            words[engine].insert(0, sample.labels["level"])
        elif sample.name == "diptych:cpu_kernels_set_aside" and sample.value:
            words[engine].append(f"{sample.value:.0f} kernels set aside")
    return {engine: ", ".join(own) for engine, own in words.items()}


def read_health(metrics: str) -> dict[str, str]:
    """Return the router's judgement of each engine, by name. Raises as `read_cpus` does."""
    found: dict[str, str] = {}
    for sample in items_of(metrics):
        engine = sample.labels.get("engine", "").rpartition("/")[2]
        if sample.name == "diptych:engine_silent":
            found[engine] = "silent" if sample.value else found.get(engine, "ok")
        elif sample.name == "diptych:engine_breaker_state":
            failing = sample.labels["state"] != "closed" and found.get(engine) != "silent"
            found[engine] = "failing" if failing else found.get(engine, "ok")
    return found


def show(states: list[RunState], console: Console) -> None:
    """Print one table for each service."""
    if not states:
        console.print("no service runs here; start one with `diptych up`", markup=False)
    for state in states:
        ready = "ready" if state.ready else "starting"
        minutes = (time.time() - state.started_at) / 60
        title = f"{state.service}: {ready}, {state.url}, {minutes:.0f} min"
        logs = {str(Path(pod.log).parent) for pod in state.pods}
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for column in ("POD", "STATE", "PORT", "PID", "RESTARTS", "CPU", "HEALTH"):
            table.add_column(column, overflow="fold")  # the end of a name tells pods apart
        for pod in state.pods:
            port, pid = pod.ports.get("http", "-"), pod.pid if pod.pid is not None else "-"
            facts = (pod.cpu or "-", pod.health or "-")
            table.add_row(pod.name, pod.phase, str(port), str(pid), str(pod.restarts), *facts)
        console.print(table)
        if state.access:
            console.print(f"the API: {state.access}", markup=False, highlight=False, soft_wrap=True)
        console.print(f"logs: {', '.join(logs)}", markup=False, highlight=False, soft_wrap=True)
