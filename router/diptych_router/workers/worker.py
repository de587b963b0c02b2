"""One of a router's processes: `python -m diptych_router.workers.worker INDEX PORT ARGUMENT...`.

Its standard input is a socket to the process that started it. When that is gone, so is this one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from functools import partial
from typing import Final

import msgspec

from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai.server import Site, listen, serve_sites
from diptych_frontend.program import run_program
from diptych_protocol import EngineOverloadedError, RouterConfig
from diptych_protocol.admin import Explanation
from diptych_router.page.panels import Panels
from diptych_router.page.view import own_panels
from diptych_router.pool_client import PoolClient
from diptych_router.process.arguments import parse_arguments
from diptych_router.process.program import Program, drain_timeout_s, started
from diptych_router.report import router_report
from diptych_router.workers.channel import Channel, ChannelError
from diptych_router.workers.messages import (
    Listening,
    Look,
    Scrape,
    ToParent,
    Why,
    WorkerReport,
    encode,
    explanation_of,
    exposition_of,
    panels_of,
    to_worker,
)
from diptych_router.workers.sums import families_of

log = logging.getLogger(__name__)

LISTEN_WITHIN_S: Final = 5.0
"""A process takes connections when it can serve them. If there are no engines, it takes them
nevertheless after this time: requests can wait here, and probes must find somebody."""
LOOK_S: Final = 0.05
PARENT_TIMEOUT_S: Final = 5.0


class SharedMetrics(ServerMetrics):
    """This process counts for itself; who scrapes any process gets the sums of all."""

    channel: Channel | None = None
    """Set before the process takes connections."""

    async def scraped(self, accept: str) -> tuple[bytes, str]:
        if self.channel is None:
            return await super().scraped(accept)
        whole = exposition_of(await _ask(self.channel, Scrape(accept)))
        return whole.text, whole.content_type


class SharedView:
    """The whole router, as its parent knows it."""

    channel: Channel | None = None
    """Set before the process takes connections."""

    async def panels(self) -> Panels:
        """See `RouterView.panels`."""
        return panels_of(await self._ask(Look()))

    async def explained(self, request_id: str) -> Explanation:
        """See `RouterView.explained`."""
        return explanation_of(await self._ask(Why(request_id)))

    async def _ask(self, question: Look | Why) -> bytes:
        if self.channel is None:
            raise EngineOverloadedError("the router starts; retry later")
        return await _ask(self.channel, question)


async def _ask(channel: Channel, question: ToParent) -> bytes:
    """The parent's answer. Raises `EngineOverloadedError`."""
    try:
        return await channel.ask(encode(question), PARENT_TIMEOUT_S)
    except (ChannelError, TimeoutError) as exc:
        raise EngineOverloadedError("the router's processes are busy; retry later") from exc


async def run(args: argparse.Namespace, parent: socket.socket) -> None:
    """Serve until SIGTERM."""
    config = msgspec.json.decode(args.config.read_bytes(), type=RouterConfig)
    metrics, view = SharedMetrics(config.name), SharedView()
    async with started(config, args, lambda _: metrics, lambda _: view) as program:
        metrics.channel = view.channel = channel = await Channel.over(
            parent, partial(_answer, program)
        )
        leash = asyncio.create_task(channel.run())
        leash.add_done_callback(_end_with_parent)
        try:
            await _serve(program, config, args, channel)
        finally:
            leash.remove_done_callback(_end_with_parent)
            leash.cancel()


async def _serve(
    program: Program, config: RouterConfig, args: argparse.Namespace, channel: Channel
) -> None:
    await _until_ready(program.client)
    certificate = program.certificate
    tls = certificate.context if certificate is not None else None
    site = Site(program.leaving, listen(args.host, args.port, shared=True), tls)
    await channel.ask(encode(Listening()), PARENT_TIMEOUT_S)
    await serve_sites(
        site,
        drain=program.leaving.drain,
        drain_timeout_s=drain_timeout_s(config, args),
        on_lag=program.metrics.loop_lag.observe,
    )


async def _answer(program: Program, question: bytes) -> bytes:
    client = program.client
    if question:
        asked = to_worker(question)
        if isinstance(asked, Why):
            return encode(client.explanations.explanation(asked.request_id, client.name_of))
        if isinstance(asked, Look):
            return encode(own_panels(client))
        return encode(client.explanations.newest(asked.limit))
    metrics = families_of(program.metrics.registry)
    return encode(WorkerReport(router_report(client), metrics, client.stats_by_engine()))


async def _until_ready(client: PoolClient) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LISTEN_WITHIN_S):
            while client.why_not_ready():
                await asyncio.sleep(LOOK_S)


def _end_with_parent(leash: asyncio.Task[None]) -> None:
    """Nobody would ever end this process, nor count it."""
    log.error("the process that started this one is gone")
    os._exit(1)


def main() -> None:
    # A terminal sends it to the whole group; the parent turns it into one SIGTERM for each.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    index, port, *argv = sys.argv[1:]
    args = parse_arguments(argv)
    args.port = int(port)
    run_program(f"router {index}", run(args, socket.socket(fileno=0)))


if __name__ == "__main__":
    main()
