"""Runs a service in the foreground, for `diptych up` and `diptych demo`."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from diptych.board.board import Board
from diptych.board.watch import watch
from diptych.demo import MAX_TOKENS, QUESTION, demonstrate
from diptych.errors import RunError
from diptych.known_models import Source
from diptych.laptop.api_access import ApiAccess
from diptych.laptop.model import with_local_model
from diptych.laptop.nursery import Nursery
from diptych.laptop.programs import other_programs
from diptych.laptop.rundir import RunState
from diptych.manifest import load
from diptych.up import WhileReady, ends, up
from diptych_operator.api.service import KIND


def serve(source: Source, api: ApiAccess, cache: Path, nursery: Nursery, *, plain: bool) -> None:
    """Serve until Ctrl-C, for `diptych up`. Raises what `up.up` does."""
    console = Console()
    board = Board(console, plain=plain)

    async def wait(state: RunState) -> None:
        board.say("\n".join(what_to_try(state)))
        if board.is_live:
            await watch(state, board.tell)
        await asyncio.Event().wait()

    _run(source, api, cache, nursery, console, board, wait)


def ask_once(source: Source, api: ApiAccess, cache: Path, nursery: Nursery) -> None:
    """Run, ask once and end, for `diptych demo`. Raises what `up.up` and `demonstrate` do."""
    console = Console()
    board = Board(console)

    async def ask(state: RunState) -> None:
        board.settle()
        await demonstrate(state, console)

    _run(source, api, cache, nursery, console, board, ask)


def _run(
    source: Source,
    api: ApiAccess,
    cache: Path,
    nursery: Nursery,
    console: Console,
    board: Board,
    while_ready: WhileReady,
) -> None:
    for number in filter(ends, (signal.SIGTERM, signal.SIGHUP)):
        signal.signal(number, _leave)  # until `up` has handlers of its own
    service, others = load(source)
    if others:
        kinds = ", ".join(str(other.get("kind")) for other in others)
        board.say(f"of {source} only the {KIND} runs here, not: {kinds}")
    if service.spec.engine.runtime == "diptych":
        nursery.expect_engines()
    programs = other_programs(source, service)  # before anything is fetched in vain
    service = with_local_model(source, service, cache, console)
    try:
        asyncio.run(up(source, service, api, programs, nursery, board, while_ready))
    except OSError as exc:
        raise RunError(
            f"this machine does not allow it: {exc}. `diptych doctor` looks at the machine; "
            "XDG_RUNTIME_DIR or TMPDIR can name another place for the files of the run"
        ) from exc


def _leave(number: int, _: object) -> None:
    """End as a shell says that this signal ends a program, but remove what was begun."""
    sys.exit(128 + number)


def what_to_try(state: RunState) -> list[str]:
    return [
        "try:",
        f"  curl {state.url}/chat/completions -H 'Content-Type: application/json' \\",
        *_example_credentials(state),
        f"    -d {shlex.quote(_example_request(state.model))}",
        "  diptych chat",
        "  diptych status",
        "Ctrl-C ends it.",
    ]


def _example_credentials(state: RunState) -> list[str]:
    """What curl needs beside the request: nothing on plain loopback."""
    header = f"Authorization: Bearer $(head -n 1 '{state.key_file}')"
    key = f'-H "{header}" ' if state.key_file else ""
    trust = f"--cacert '{state.certificate}' " if state.certificate else ""
    return [f"    {key}{trust}\\"] if key or trust else []


def _example_request(model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}]}
    return msgspec.json.encode({**body, "max_tokens": MAX_TOKENS}).decode()
