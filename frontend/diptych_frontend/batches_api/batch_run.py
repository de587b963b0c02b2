"""Processes one batch: sends its requests until all have ended, or it has to stop."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge
from starlette.types import ASGIApp

from diptych_frontend.batches_api import states
from diptych_frontend.batches_api.api_types import BatchError, LineError, LineResponse, LineResult
from diptych_frontend.batches_api.batch_store import BatchStore
from diptych_frontend.batches_api.folder import Disk
from diptych_frontend.batches_api.in_process import Answer, Asker, ask
from diptych_frontend.batches_api.journal import DONE, ERROR, Journal
from diptych_frontend.batches_api.lines import Checked, Line, check, lines_of, read_line
from diptych_frontend.batches_api.states import End, Record
from diptych_frontend.observability.metrics import PREFIX
from diptych_protocol import EngineOverloadedError, InvalidRequestError


class BatchMetrics:
    """Counts for one registry."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        labels = ("model_name",)
        lines = Counter(
            f"{PREFIX}batch_requests",
            "Requests of batches that have ended: completed or failed.",
            (*labels, "outcome"),
            registry=registry,
        )
        self.completed = lines.labels(model_name, "completed")
        self.failed = lines.labels(model_name, "failed")
        self.retries = Counter(
            f"{PREFIX}batch_retries",
            "Requests of batches that were refused for overload or failed, and are asked again.",
            labels,
            registry=registry,
        ).labels(model_name)
        self.running = Gauge(
            f"{PREFIX}batches_running",
            "Batches that this router works on.",
            labels,
            registry=registry,
        ).labels(model_name)
        self._ended = Counter(
            f"{PREFIX}batches", "Batches that ended, by status.", (*labels, "status"),
            registry=registry,
        )  # fmt: skip
        self._model_name = model_name

    def count_end(self, status: str) -> None:
        """Count a batch that has ended."""
        self._ended.labels(self._model_name, status).inc()


log = logging.getLogger(__name__)

TICK_S: Final = 1.0
"""How often the run checks whether the batch has to stop, and writes its progress."""
TICKS_A_ROOM: Final = 10
LOOK_S: Final = 0.2
"""How often the run checks whether the engines are free again."""
ABORT_TIMEOUT_S: Final = 40.0
"""How long requests may take to end after they are aborted."""
FIRST_WAIT_S: Final = 1.0
MAX_WAIT_S: Final = 30.0
MAX_FAILURES: Final = 3
"""A request that failed this many times with a server error is not sent again."""
REFUSED: Final = frozenset({429, 503})
"""Statuses by which the server says that it has no capacity now."""
MAX_REFUSED_S: Final = 60.0
"""A client that is refused for longer than this, or for good, leaves its places to others."""
LEAST_ROOM_BYTES: Final = 1 << 20
OPEN_BYTES: Final = 16 << 20
"""A batch has no second request under way that would make its lines larger than this together: a
line that is asked takes several times its size."""


PRIORITY: Final = 1000
"""The most urgent priority of batches' requests, where engines use priorities."""


@dataclass(frozen=True, slots=True)
class Manners:
    """How batches give way to requests of waiting users."""

    is_busy: Callable[[], bool] = lambda: False
    """Whether requests wait for the engines."""
    has_priorities: Callable[[], bool] = lambda: False
    """Whether engines use the priorities of requests."""
    is_client: Callable[[str], bool] = lambda client: True
    """Whether an API key of this name is valid; without keys the name is empty."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a batch needs from its server."""

    store: BatchStore
    disk: Disk
    metrics: BatchMetrics
    slots: asyncio.Semaphore
    """Limits the requests at a time, of all batches together."""
    app: ASGIApp
    """The routes, which requests reach through `ask`."""
    manners: Manners


class BatchRun:
    """Processes a batch whose lock is held."""

    def __init__(self, server: Surroundings, state: Path, record: Record, journal: Journal) -> None:
        """Create it inside a running event loop."""
        self._server = server
        self._state = state
        self._record = record
        self._journal = journal
        self._stop = asyncio.Event()
        self._stopped = asyncio.create_task(self._stop.wait())
        self._asking: dict[asyncio.Task[None], int] = {}
        """The requests under way, with the sizes of their lines."""
        self._end: End | None = None
        """How it ends, if it does not merely stop."""
        self._has_room = True
        self._failure: BaseException | None = None

    def release(self) -> None:
        """Stop. The next owner of the batch repeats the requests that have not ended."""
        self._stop.set()

    async def run(self) -> None:
        """Return when the batch has ended or was released. Raises `OSError` of the disk."""
        disk = self._server.disk
        log.info("%s: the work begins, %d done", self._record.batch.id, len(self._journal.done))
        try:
            await self._run()
        finally:
            self._stopped.cancel()
            await disk.run_long(self._journal.close)

    async def _run(self) -> None:
        if self._record.batch.status == "validating":
            checked = await self._server.disk.run_long(self._check)
            now = int(time.time())
            if checked.errors:
                await self._fail(states.failed(self._record, checked.errors, now))
                return
            await self._write(states.validated(self._record, checked.total, now))
        self._end = states.next_end(self._record, time.time())
        if self._end is None:
            await self._work()
        if self._end is None:
            log.info("%s: stopped, %d done", self._record.batch.id, len(self._journal.done))
            return
        undone = self._expired() if self._end == "expired" else iter(())
        finish = self._server.store.finish
        self._record = await self._server.disk.run_long(
            finish, self._state, self._record, self._journal, self._end, undone
        )
        self._tell_end()

    def _check(self) -> Checked:
        record = self._record
        try:
            with self._server.store.input_of(record) as file:
                return check(file, record.batch.endpoint)
        except InvalidRequestError as exc:
            return Checked(errors=[BatchError("file_not_found", str(exc), "input_file_id")])
        except OSError:
            raise  # the disk may be there again later
        except Exception:  # a defect, which would be there again however often it is tried
            log.exception("%s: its file cannot be checked", record.batch.id)
            message = "internal error while the file was checked; the server's log has it"
            return Checked(errors=[BatchError("internal_error", message, "input_file_id")])

    async def _fail(self, record: Record) -> None:
        await self._write(record)
        await self._server.disk.run_long(self._server.store.close, self._state)
        self._tell_end()

    async def _write(self, record: Record) -> None:
        await self._server.disk.run_long(self._server.store.write, self._state, record)
        self._record = record

    def _tell_end(self) -> None:
        batch = self._record.batch
        counts = batch.request_counts
        self._server.metrics.count_end(batch.status)
        log.info(
            "%s: %s; of %d requests of %s, %d completed and %d failed",
            *(batch.id, batch.status, counts.total, self._record.client or "anybody"),
            *(counts.completed, counts.failed),
        )

    # --- the requests -------------------------------------------------------------------------

    async def _work(self) -> None:
        """Ask until there is nothing left, or it has to stop."""
        watching = asyncio.create_task(self._watch())
        try:
            await self._feed()
            if not self._stop.is_set():
                self._end = "completed"
        finally:
            self._stop.set()
            if self._asking:
                await asyncio.wait(self._asking, timeout=ABORT_TIMEOUT_S)
            await asyncio.wait((watching,))
        if self._failure is not None:
            raise self._failure
        watching.result()
        if self._end == "completed":
            await self._write(states.finalizing(self._record, int(time.time())))

    async def _feed(self) -> None:
        """Send each request that is not done yet, in the order of the file, and await all."""
        disk = self._server.disk
        file = await disk.run_long(self._server.store.input_of, self._record)
        try:
            lines = self._undone(file)
            while (line := await disk.run_long(next, lines, None)) is not None:
                if not await self._turn(len(line.body)):
                    return
                task = asyncio.create_task(self._one(line))
                self._asking[task] = len(line.body)
                task.add_done_callback(self._ended)
            while self._asking and not self._stop.is_set():
                await asyncio.wait(self._asking)
        finally:
            disk.close(file)

    def _undone(self, file: BinaryIO) -> Iterator[Line]:
        for number, raw in lines_of(file):
            line = read_line(number, raw, self._record.batch.endpoint)
            if isinstance(line, Line) and line.custom_id not in self._journal.done:
                yield line

    async def _turn(self, size: int) -> bool:
        """Wait until a request of a line of this size may be sent; False: the batch stops."""
        while await self._slot():
            if not self._gives_way(size):
                return True
            self._server.slots.release()  # others may be luckier
            await self._stops_within(LOOK_S)
        return False

    def _gives_way(self, size: int) -> bool:
        crowded = self._server.manners.is_busy() or sum(self._asking.values()) + size > OPEN_BYTES
        # One at a time it may always have: else it would never end beside busy clients.
        return (bool(self._asking) and crowded) or not self._has_room

    async def _slot(self) -> bool:
        """Wait until there are not too many requests; False: the batch stops."""
        slot = asyncio.create_task(self._server.slots.acquire())
        await asyncio.wait((slot, self._stopped), return_when=asyncio.FIRST_COMPLETED)
        if not self._stop.is_set():
            return True
        slot.cancel()
        await asyncio.wait((slot,))
        if not slot.cancelled():
            self._server.slots.release()
        return False

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._asking[task]
        self._server.slots.release()
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = failure
            self._stop.set()

    async def _one(self, line: Line) -> None:
        request_id = f"{self._record.batch.id}-{line.number}"
        answer = await self._answered(line, request_id)
        if answer is None:
            return
        if answer.status:
            response = LineResponse(answer.status, request_id, msgspec.Raw(answer.body))
            result = _result(line, response, None)
        else:
            result = _result(line, None, LineError("internal_error", "there was no answer"))
        sign = DONE if answer.status == 200 else ERROR
        await self._server.disk.run_long(self._journal.append, sign, result)
        metrics = self._server.metrics
        (metrics.completed if sign == DONE else metrics.failed).inc()

    async def _answered(self, line: Line, request_id: str) -> Answer | None:
        """The answer that counts; None: the batch stops before there is one."""
        server, record = self._server, self._record
        wait_s, failures = FIRST_WAIT_S, 0
        while not self._stop.is_set():
            least = PRIORITY if server.manners.has_priorities() else None
            asker = Asker(record.client, least)
            answer = await ask(
                server.app, record.batch.endpoint, line.body, request_id, asker, self._stop
            )
            if answer.status in REFUSED or not answer.status or answer.status >= 500:
                if self._stop.is_set():
                    return None
            else:
                return answer
            if answer.status not in REFUSED:
                failures += 1
                if failures >= MAX_FAILURES or answer.status == 501:
                    return answer
            if answer.status == 429 and not 0 < answer.retry_after_s <= MAX_REFUSED_S:
                raise EngineOverloadedError("its API key has used the tokens that it may")
            server.metrics.retries.inc()
            await self._stops_within(max(wait_s, answer.retry_after_s) * random.uniform(1, 1.5))
            wait_s = min(2 * wait_s, MAX_WAIT_S)
        return None

    # --- what happens meanwhile ---------------------------------------------------------------

    async def _watch(self) -> None:
        """Write how far it is, and stop it for its client, its window or its key."""
        ticks = 0
        while not await self._stops_within(TICK_S):
            ticks += 1
            await self._look(with_room=ticks % TICKS_A_ROOM == 0)

    async def _look(self, *, with_room: bool) -> None:
        store, disk = self._server.store, self._server.disk
        before = self._record
        try:
            known = await disk.run(store.read, self._state) or before
            journal = self._journal
            record = states.counted(known, journal.completed, journal.failed, journal.usage)
            if with_room:
                room = await disk.run(store.files.room, record.client)
                self._has_room = room >= LEAST_ROOM_BYTES
            if record != before:
                await self._write(record)
        except Exception as exc:
            self._failure = exc
            self._stop.set()
            return
        self._end = self._end or states.next_end(record, time.time())
        if self._end is not None or not self._server.manners.is_client(record.client):
            self._stop.set()

    async def _stops_within(self, seconds: float) -> bool:
        """Wait so long, or until it has to stop."""
        await asyncio.wait((self._stopped,), timeout=seconds)
        return self._stop.is_set()

    def _expired(self) -> Iterator[bytes]:
        """The lines of the error file for requests that were not asked in time."""
        error = LineError(
            "batch_expired",
            "This request could not be executed before the completion window expired.",
        )
        try:
            with self._server.store.input_of(self._record) as file:
                for line in self._undone(file):
                    yield _result(line, None, error) + b"\n"
        except InvalidRequestError:
            return


def _result(line: Line, response: LineResponse | None, error: LineError | None) -> bytes:
    result = LineResult(f"batch_req_{secrets.token_hex(16)}", line.custom_id, response, error)
    return msgspec.json.encode(result)
