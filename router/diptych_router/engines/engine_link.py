"""The router's line to one engine, kept up for as long as discovery names its address."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from diptych_frontend.core_client.client import CoreClient, HandshakeFailedError, NotConnectedError
from diptych_protocol import (
    ClientClosedError,
    CurveKeys,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineDescription,
    EngineGenerateError,
    FinishReason,
    InvalidRequestError,
    KVTransferParams,
    SchedulerStats,
    UtilityError,
    fingerprint,
)
from diptych_protocol.config import MAX_PLACE_CHARACTERS
from diptych_protocol.kv_transfer_params import differences
from diptych_protocol.wire import FOLLOW_HEARTBEAT, Heartbeat
from diptych_router.engines.engine_table import ROLES, EngineRow, Role
from diptych_router.engines.health_book import Breaker
from diptych_router.engines.liveness import Liveness
from diptych_router.engines.pair_rates import NOWHERE, Location

log = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 30.0
STATS_TIMEOUT_S = 5.0
STATS_INTERVAL_S = 1.0
"""An engine sends its statistics with its heartbeats. One that does not know what heartbeats are is
asked at this interval."""
RETRY_S = 0.2
PATIENCE_S = 4.0
"""An engine whose node has vanished says no goodbye; its streams wait this long for a new one."""

CALL_ERRORS = (EngineDeadError, UtilityError, TimeoutError)

ReadKeys = Callable[[], list[CurveKeys]]
"""Returns the keys that an engine may have, the likeliest first; called for every connection."""


def key_of(role: Role, endpoint: str) -> str:
    """Return the key under which the router keeps an engine. An address is in only one pool."""
    return f"{role} {endpoint}"


class EngineLink:
    """One engine of a pool. `description` is None while nobody answers at its address."""

    def __init__(
        self,
        role: Role,
        endpoint: str,
        row: EngineRow,
        router: str,
        on_news: Callable[[], None],
        *,
        read_keys: ReadKeys | None,
        on_outputs: Callable[[EngineLink, EngineCoreOutputs], None],
        on_lost: Callable[[EngineLink, EngineDeadError], None],
        on_hang: Callable[[EngineLink], None],
        vocabulary: str = "",
    ) -> None:
        """Connect in the background.

        `router`: a name of this router, the same for all engines and like no other router's.
        `on_news`: the engine is up, began to drain, or was paused or resumed. `on_outputs`: what it
        computed for others than `complete`. `on_lost`: every request on it is gone. `on_hang`: it
        hangs; called again and again until it speaks. `vocabulary`: this router's own
        `EngineDescription.vocabulary`.
        """
        self.role: Role = role
        """What it does now: see `turn`."""
        self.home: Role = role
        """The pool that discovery finds it in."""
        self.given: Role = role
        """The role that it tells all routers."""
        self.has_turned = False
        self.endpoint = self.name = endpoint
        """The name is that of the engine, while one answers."""
        self.key = key_of(role, endpoint)
        self.description: EngineDescription | None = None
        self.known_as = ""
        """The name of the engine that answers here, or answered last; empty: none has."""
        self.fingerprint = ""
        self._vocabulary = vocabulary
        self.speaks_otherwise = False
        """Its tokens are not this router's: while another model rolls out, answers would be
        nonsense. A canary's may cross all the same."""
        self.lends: KVTransferParams | None = None
        """See `EngineAccount.lends`."""
        self.epoch = ""
        """The epoch of the engine that answers here, or answered last."""
        self.former = ""
        """The epoch before that, if it was the same engine; else empty."""
        self.times_up = 0
        """How often an engine has answered here, now and after losses."""
        self.stats = SchedulerStats()
        self.listed = True
        """Discovery still names it; an engine that is not listed gets no new requests."""
        self.row = row
        """Its numbers in the table of its pool."""
        self.charge = row.charge
        self.breaker = Breaker(time.monotonic())
        """It outlasts restarts at this address."""
        self.kept_out = False
        """Its breaker is open; see `keep_out`."""
        self._on_news = on_news
        self._on_outputs = on_outputs
        self._on_lost = on_lost
        self._on_hang = on_hang
        self._router = router
        self._read_keys = read_keys
        self._key: CurveKeys | None = None
        """The key pair that was tried last."""
        self._refusals = 0
        """Connections that failed for their key, one after the other."""
        self._own: dict[str, tuple[list[EngineCoreOutput], asyncio.Future[None]]] = {}
        """What each open request of the router's own has brought, and what awaits its end."""
        self._liveness = Liveness()
        self._gone = asyncio.Event()
        self.client = self._connect()
        self._task = asyncio.create_task(self._keep_described(), name=f"link {endpoint}")

    @property
    def revision(self) -> str:
        return self.description.revision if self.description is not None else ""

    @property
    def up(self) -> bool:
        return self.description is not None

    @property
    def open_tokens(self) -> int:
        """Tokens of work that this router has open or planned here."""
        return int(self.row["open_tokens"])

    @property
    def open_to_work(self) -> bool:
        """Whether it is up, and neither discovery nor the engine itself excludes it."""
        stats = self.stats
        return self.listed and self.description is not None and not (stats.draining or stats.paused)

    @property
    def withdrawn(self) -> bool:
        return self.stats.draining or self.stats.paused

    @property
    def silent(self) -> bool:
        """Whether it may hang. It gets no requests while others can take them."""
        return self._liveness.silent

    def _judge(self, now: float) -> None:
        if change := self._liveness.judge(now):
            log.warning("%s engine %s %s", self.role, self.name, change)
        self._refresh_row()

    @property
    def is_bad(self) -> bool:
        """Whether it hangs, or fails too often."""
        return self._liveness.silent or self.kept_out

    def keep_out(self, kept_out: bool) -> None:
        """Send it no requests while others of its pool can take them, or do so again."""
        if kept_out != self.kept_out:
            self.kept_out = kept_out
            self._refresh_row()

    def turn(self, role: Role) -> None:
        """Treat it as one of another role. Its connection and its requests stay."""
        log.info("engine %s turns from %s to %s", self.name, self.role, role)
        self.role, self.has_turned = role, True

    @property
    def sheds_streams(self) -> bool:
        """Whether what it decodes should move: it is about to leave, or prefills now."""
        return self.stats.draining if self.role == "decode" else self.has_turned

    def _refresh_row(self) -> None:
        self.row["silent"] = self.is_bad or self._liveness.in_call

    @property
    def location(self) -> Location:
        about = self.description
        if about is None:
            return NOWHERE
        return Location(about.node[:MAX_PLACE_CHARACTERS], about.zone[:MAX_PLACE_CHARACTERS])

    def close(self) -> None:
        self._task.cancel()
        self.client.close()

    async def refresh_stats(self, timeout_s: float = STATS_TIMEOUT_S) -> SchedulerStats:
        """Ask for its present statistics. Raises what `CoreClient.call` raises."""
        num_sent = self.row.num_sent  # they come before the question
        self._take_stats(await self.client.fetch_stats(timeout_s), num_sent)
        return self.stats

    def add(self, request: EngineCoreRequest) -> None:
        """Send a request. Raises `NotConnectedError`."""
        self.client.add(request)
        self.row.sent(time.monotonic())

    def abort(self, request_ids: list[str]) -> None:
        """End requests there. If the engine is gone, they have ended with it."""
        with contextlib.suppress(NotConnectedError, ClientClosedError):
            self.client.abort(request_ids)

    def tell(self, method: str, *args: Any) -> None:
        """Make a call that needs no answer, unless the engine is gone. One that misses it, or does
        not know it, works without."""
        with contextlib.suppress(NotConnectedError, ClientClosedError):
            self.client.tell(method, *args)

    async def complete(self, request: EngineCoreRequest) -> list[EngineCoreOutput]:
        """Run a request of the router's own to its end, and return all outputs.

        Raises `EngineGenerateError` if it failed there, `EngineDeadError` if the engine is lost.
        Cancelling the caller aborts the request.
        """
        outputs: list[EngineCoreOutput] = []
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._own[request.request_id] = outputs, ended
        try:
            self.add(request)
            await ended
        except asyncio.CancelledError:
            self.abort([request.request_id])
            raise
        finally:
            del self._own[request.request_id]
        return outputs

    # --- the connection -----------------------------------------------------------------------

    def _connect(self) -> CoreClient:
        """A client with another key than last time: during a rotation, engines have either."""
        if self._read_keys is not None:
            ring = self._read_keys()
            self._key = next((keys for keys in ring if keys != self._key), ring[0])
        return CoreClient(
            self.endpoint,
            self._key,
            on_outputs=self._handle_outputs,
            on_lost=self._handle_lost,
            patience_s=PATIENCE_S,
        )

    def _try_next_key(self, cause: HandshakeFailedError) -> None:
        self._refusals += 1
        if self._refusals == 2:  # neither the current key nor the previous one will do
            log.warning("%s engine at %s: %s", self.role, self.endpoint, cause)
        try:
            client = self._connect()
        except (InvalidRequestError, zmq.ZMQError) as exc:
            log.warning("no other key to try: %s", exc)
            return
        self.client.close()
        self.client = client

    async def _keep_described(self) -> None:
        """Learn who answers at the endpoint, now and after every loss."""
        while True:
            self.stats.draining = False  # whoever answers now may be somebody else
            try:
                description = await self.client.describe(DESCRIBE_TIMEOUT_S)
                stats = await self.client.fetch_stats(STATS_TIMEOUT_S)
            except (*CALL_ERRORS, msgspec.ValidationError) as exc:
                log.debug("%s engine at %s: %s", self.role, self.endpoint, exc)
                if isinstance(exc, HandshakeFailedError):
                    self._try_next_key(exc)
                await asyncio.sleep(RETRY_S)
                continue
            self._refusals = 0
            self._gone.clear()
            was, self.fingerprint = self.fingerprint, fingerprint(description.compat)
            same = (was, self.known_as) == (self.fingerprint, description.shown_name)
            self.former, self.epoch = self.epoch if same else "", description.epoch
            self.speaks_otherwise = (
                bool(description.vocabulary and self._vocabulary)
                and description.vocabulary != self._vocabulary
            )
            # It may have said so meanwhile, and says so once.
            stats.draining |= self.stats.draining
            self.stats = stats
            self.description = description
            if description.kv_transfer_port:
                self.lends = common_to_leases(description, self.fingerprint)
            self.name = self.known_as = description.shown_name
            self.row["block_size"] = description.block_size
            self.row["processors"] = description.processors
            self.row["processors_part"] = description.processors_part
            self.row.restarted()
            self.row["lends"] = (
                bool(description.kv_transfer_port) and description.abilities.lends_prefixes
            )
            self.row.report(stats, 0, time.monotonic())
            self.times_up += 1
            log.info("%s engine %s is up (%s)", self.role, self.name, self.endpoint)
            self._tell_news()
            await self._follow_health()

    async def _follow_health(self) -> None:
        """Keep its statistics fresh until it is lost, so that nobody who reads them has to ask, and
        judge whether it hangs."""
        self._liveness = Liveness()
        self._refresh_row()
        self.tell(FOLLOW_HEARTBEAT, self._router)
        wait_s = STATS_INTERVAL_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._gone.wait()
            if self._gone.is_set():
                return
            now = time.monotonic()
            if self._liveness.sends_heartbeats:
                wait_s = self._liveness.look(now)
            else:
                self._liveness.asked(now)
                try:
                    await self.refresh_stats()
                except (*CALL_ERRORS, msgspec.ValidationError) as exc:
                    log.debug("no statistics from %s: %s", self.name, exc)
            self._judge(now)
            if self._liveness.hangs(now):
                self._on_hang(self)

    def _tell_news(self) -> None:
        try:
            self._on_news()
        except Exception:  # somebody else's mistake must not end this line
            log.exception("news of %s engine %s went unheard", self.role, self.name)

    def _handle_outputs(self, message: EngineCoreOutputs) -> None:
        if message.scheduler_stats is not None:
            self._take_stats(message.scheduler_stats, message.requests_received)
        if message.heartbeat is not None:
            self._take_heartbeat(message.heartbeat, message.requests_received)
            return
        if self._own:
            message.outputs = [output for output in message.outputs if not self._take_own(output)]
        self._on_outputs(self, message)

    def _take_own(self, output: EngineCoreOutput) -> bool:
        """Take an output of a request of the router's own; False if it is of another."""
        if output.request_id not in self._own:
            return False
        outputs, ended = self._own[output.request_id]
        outputs.append(output)
        if output.finished and not ended.done():
            if output.finish_reason is FinishReason.ERROR:
                ended.set_exception(EngineGenerateError(output.error or "no reason given"))
            else:
                ended.set_result(None)
        return True

    def _take_heartbeat(self, heartbeat: Heartbeat, num_received: int) -> None:
        now = time.monotonic()
        self.row.heard(heartbeat, num_received, now)
        self.given = next((role for role in ROLES if role == heartbeat.role), self.home)
        if heartbeat.adapters is not None:
            self.row.adapters.tell(heartbeat.adapters, now)
        if self._liveness.beat(heartbeat, now):
            self._judge(now)

    def _take_stats(self, stats: SchedulerStats, num_received: int) -> None:
        # An answer may be older than what the engine said unasked. None ceases to drain.
        self._liveness.heard(stats)
        if self.silent:
            self._judge(time.monotonic())
        former, self.stats = self.stats, stats
        self.row.report(stats, num_received, time.monotonic())
        stats.draining |= former.draining
        drains = stats.draining and not former.draining
        if self.up and (drains or stats.paused != former.paused):
            news = "drains" if drains else "is paused" if stats.paused else "goes on after a pause"
            log.info("%s engine %s %s", self.role, self.name, news)
            self._tell_news()

    def _handle_lost(self, cause: EngineDeadError) -> None:
        if self.description is None:
            return
        log.warning("%s engine %s is lost: %s", self.role, self.name, cause)
        self.description = self.lends = None
        self.name = self.endpoint
        self.row["usable"] = self.row["lends"] = False
        self._gone.set()
        for _, ended in self._own.values():
            if not ended.done():
                ended.set_exception(EngineDeadError(str(cause)))
        self._on_lost(self, cause)


def compat_mismatch(
    prefill: Sequence[EngineDescription], decode: Sequence[EngineDescription]
) -> str:
    """Return how the pair that differs least differs; empty if one fits, or there is none."""
    closest: list[str] = []
    said = ""
    for source in prefill:
        for target in decode:
            found = differences(source.compat, target.compat, "in prefill", "in decode")
            if not found:
                return ""
            if not said or len(found) < len(closest):
                closest = found
                said = (
                    f"{source.shown_name} and {target.shown_name} cannot exchange KV "
                    f"({'; '.join(found)})"
                )
    return said


def common_to_leases(about: EngineDescription, fingerprint: str) -> KVTransferParams:
    """Return the parameters that all leases of an engine have in common."""
    return KVTransferParams(
        do_remote_prefill=True,
        remote_engine_id=about.engine_id,
        remote_host=about.kv_transfer_host,
        remote_port=about.kv_transfer_port,
        epoch=about.epoch,
        compat=fingerprint,
        remote_block_size=about.block_size,
        proof=about.kv_transfer_proof,
    )
