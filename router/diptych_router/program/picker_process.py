"""The process of a router's endpoint picker, which alone has gRPC.

Anybody may reach the picker, and begin messages that never end: gRPC keeps them, and bounds their
sum by nothing. So a picker that has too much memory is killed, and begins anew. Meanwhile gateways
go on without one, and the router does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from diptych_frontend.confined.processes import KEPT_VARIABLES, START_S
from diptych_router.requests.pool_client import PoolClient

log = logging.getLogger(__name__)

MODULE: Final = "diptych_router.program.endpoint_picker"
MAX_BYTES: Final = 512 << 20
"""The memory that a picker may have."""
LOOK_S: Final = 0.1
"""How often it is told what has changed, and its memory is looked at."""
RETRY_S: Final = 1.0
LAST_STREAMS_S: Final = 5.0
"""How long streams may go on after the last answer over HTTP, which their gateway still reads."""
READY: Final = b"ready\n"


class RouterState(msgspec.Struct, frozen=True):
    """Whether a router takes requests."""

    refusal: str = ""
    """Why it would refuse one now."""
    full: bool = False
    """It is because of the load."""
    leaving: bool = False
    """It would take one, but wants no more to come."""


def state_of(client: PoolClient) -> RouterState:
    if client.is_full:
        return RouterState("too many requests are open already; retry later", full=True)
    return RouterState(client.why_unable(), leaving=client.leaving)


def bracketed(host: str) -> str:
    """An address as it stands before a port."""
    return f"[{host}]" if ":" in host else host


@asynccontextmanager
async def picking(client: PoolClient, own: str, host: str, port: int | None) -> AsyncIterator[None]:
    """Answer gateways at this address while the block lasts, if there is a port. own: where they
    reach this router's API. Exits with a message if the port is not free."""
    if port is None:
        yield
        return
    picker = _Picker(client, own, host, port)
    if not await picker.start():
        raise SystemExit("the endpoint picker does not start")
    keeping = asyncio.create_task(picker.keep())
    try:
        yield
    finally:
        keeping.cancel()
        await picker.end()


class _Picker:
    def __init__(self, client: PoolClient, own: str, host: str, port: int) -> None:
        self._client, self._arguments = client, (own, host, str(port))
        self._process: Process | None = None
        self._told: RouterState | None = None

    async def start(self) -> bool:
        """Whether it has begun; if not, it has said why. Raises `OSError` if no process can be."""
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", MODULE, *self._arguments),
            stdin=PIPE,
            stdout=PIPE,
            env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
        )
        self._told = None
        self._tell(process)
        assert process.stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                if await process.stdout.readline() == READY:
                    return True
        await self.end()
        return False

    async def keep(self) -> None:
        """Tell it what changes, and have another when it ends or has too much memory."""
        while True:
            await asyncio.sleep(LOOK_S)
            process = self._process
            if process is None or process.returncode is not None:
                log.warning("the endpoint picker has ended; gateways do without until it is back")
                try:
                    again = await self.start()
                except OSError as exc:
                    log.warning("no endpoint picker can be started: %s", exc)
                    again = False
                if not again:
                    await asyncio.sleep(RETRY_S)
            elif _memory(process.pid) > MAX_BYTES:
                log.warning("the endpoint picker has more than %d MB", MAX_BYTES >> 20)
                process.kill()
                await process.wait()
            else:
                self._tell(process)

    def _tell(self, process: Process) -> None:
        state = state_of(self._client)
        if state != self._told:
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(state) + b"\n")
            self._told = state

    async def end(self) -> None:
        """It ends when nobody tells it more, and has time for its streams."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(2 * LAST_STREAMS_S):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _memory(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except OSError:  # it has just ended
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
