"""The engine cores behind one front-end: one, or several that share its requests."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from diptych_frontend.core_client.client import UTILITY_TIMEOUT_S
from diptych_frontend.core_client.launcher import TERMINATE_GRACE_S, Core, CoreProcess
from diptych_frontend.core_client.member import CoreMember
from diptych_protocol import (
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineDescription,
    EngineOverloadedError,
    InvalidRequestError,
    SchedulerStats,
)
from diptych_protocol.admin import DrainReport

WAITING_WEIGHT = 3
"""How much a waiting request counts as load, compared with a running one: a new request would wait
behind it."""


@dataclass(slots=True)
class WaveCoordinator:
    """Methods that return a pair ask the caller to send START_DP_WAVE(wave, exclude)
    to all cores."""

    wave: int = 0
    """The wave with which requests are stamped."""
    running: bool = False

    def on_request(self, rank: int) -> tuple[int, int] | None:
        """Record that a request goes to a core, stamped with `wave`; that starts the
        core itself."""
        if self.running:
            return None
        self.running = True
        return self.wave, rank

    def on_start_wave(self, wave: int, rank: int) -> tuple[int, int] | None:
        """Record that a core has begun to run unasked."""
        if wave < self.wave or (wave == self.wave and self.running):
            return None
        self.wave, self.running = wave, True
        return wave, rank

    def on_wave_complete(self, wave: int) -> None:
        """Record that no core has anything left of a wave."""
        if wave >= self.wave:
            self.wave, self.running = wave + 1, False


class CoreGroup:
    """Starts cores, distributes requests to them, and sends calls to all of them.

    Every core has the whole model, and a request stays with its core. The death of a core ends the
    group.

    The event loop keeps open connections alive, and so this group, but the group holds its owner's
    methods weakly. So an unused owner is garbage-collected, and its finalizer can close the group.
    """

    def __init__(
        self,
        config: EngineConfig,
        public_endpoint: str | None,
        keys_dir: Path | None,
        *,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_death: Callable[[EngineDeadError], None],
        adopted: Core | None = None,
    ) -> None:
        """Start the processes, unless one is adopted; `connect` waits until they can serve.

        `on_outputs` and `on_death` are methods of the owner.

        Raises `InvalidRequestError` for a configuration that cannot work.
        """
        if config.data_parallel_size > 1 and public_endpoint is not None:
            raise InvalidRequestError(
                "data_parallel_size must be 1 in an engine that routers reach: "
                "to them, every replica is an engine of its own",
                param="data_parallel_size",
            )
        self._config = config
        self._public_endpoint = public_endpoint
        self._keys_dir = keys_dir
        self._on_outputs = weakref.WeakMethod(on_outputs)
        self._on_death = weakref.WeakMethod(on_death)
        self._adopted = adopted is not None and not isinstance(adopted, CoreProcess)
        self._coordinator: WaveCoordinator | None = None
        self._store = ""
        self._meeting_place: Path | None = None
        """Where cores in lock-step find each other."""
        if config.data_parallel_lockstep and config.data_parallel_size > 1:
            self._coordinator = WaveCoordinator()
            self._meeting_place = Path(tempfile.mkdtemp(prefix="diptych-group-"))
            self._store = str(self._meeting_place / "ranks")
        self._died = asyncio.Event()
        self._cause = EngineDeadError("the engine is alive")
        self.members: list[CoreMember] = []
        """In the order of their ranks."""
        try:
            if adopted is not None:
                self.members.append(self._member(adopted, 0))
            else:
                for rank in range(config.data_parallel_size):
                    self.members.append(self.start_member(rank, config.data_parallel_size))
        except BaseException:
            self.stop()
            raise

    def start_member(self, rank: int, size: int) -> CoreMember:
        """Start a core for a group of `size`. It is not in `members` yet."""
        config = self._config
        if size > 1:
            name = f"{config.engine_id}-{rank}" if config.engine_id else ""
            config = msgspec.structs.replace(
                config,
                data_parallel_rank=rank,
                data_parallel_size=size,
                data_parallel_store=self._store,
                engine_id=name,
            )
        return self._member(CoreProcess(config, self._public_endpoint, self._keys_dir), rank)

    def _member(self, core: Core, rank: int) -> CoreMember:
        take = self.hand_over if self._coordinator is None else self._coordinate
        return CoreMember(core, rank, on_outputs=take, on_death=self._lose)

    def check_elastic(self) -> None:
        """Raise `InvalidRequestError` unless the number of cores may change."""
        for obstacle, is_there in (
            ("its core was started by somebody else", self._adopted),
            ("routers reach its core", self._public_endpoint is not None),
            ("it takes part in hand-offs", self._config.kv_transfer is not None),
            ("its cores step together", self._config.data_parallel_lockstep),
        ):
            if is_there:
                raise InvalidRequestError(
                    f"this engine keeps its number of cores: {obstacle}",
                    param="new_data_parallel_size",
                )

    def hand_over(self, message: EngineCoreOutputs) -> None:
        """Pass outputs to the owner, if it still exists."""
        on_outputs = self._on_outputs()
        if on_outputs is not None:
            on_outputs(message)

    def _lose(self, cause: EngineDeadError) -> None:
        if not self._died.is_set():
            self._cause = cause
            self._died.set()
        on_death = self._on_death()
        if on_death is not None:
            on_death(cause)

    @property
    def is_ready(self) -> bool:
        """Whether every core has described itself."""
        return all(member.is_ready for member in self.members)

    def ended_unseen(self) -> EngineDeadError | None:
        """The end of a core that nobody watches yet."""
        unwatched = (m.process for m in self.members if not m.is_watched)
        return next((cause for core in unwatched if (cause := core.ended())), None)

    def open(self) -> None:
        """Begin to connect to every core; harmless if that was done."""
        for member in self.members:
            member.begin_to_connect()

    async def connect(self, timeout_s: float) -> None:
        """Wait until every core can serve. Raises what `CoreMember.connect` raises."""
        await asyncio.gather(*(member.connect(timeout_s) for member in self.members))
        self._unlink()

    def _unlink(self) -> None:
        """The cores have met; nothing is left behind then, however this process ends."""
        if self._meeting_place is not None:
            shutil.rmtree(self._meeting_place, ignore_errors=True)

    async def died(self) -> EngineDeadError:
        """Wait for the first core that ends unasked, and return the cause."""
        await self._died.wait()
        return self._cause

    @property
    def description(self) -> EngineDescription:
        """The first core's description; the others differ by name only."""
        return self.members[0].description

    # --- requests -----------------------------------------------------------------------------

    def add(self, request: EngineCoreRequest) -> None:
        """Send a request to the core that it names, or else to the one with the least load.

        Raises `InvalidRequestError` if there is no core of that rank.
        """
        member = self._choose(request)
        coordinator = self._coordinator
        if coordinator is not None:
            self._start_wave(coordinator.on_request(member.rank))
            request.current_wave = coordinator.wave
        member.add(request)

    def _choose(self, request: EngineCoreRequest) -> CoreMember:
        members, rank = self.members, request.data_parallel_rank
        if len(members) > 1:
            for member in members:
                if request.request_id in member.open:  # the next piece of its prompt
                    return member
        if rank is None:
            return members[0] if len(members) == 1 else min(members, key=_load)
        return self.member_of(rank)

    def member_of(self, rank: int) -> CoreMember:
        """Return the core of a rank. Raises `InvalidRequestError` if there is none."""
        members = self.members
        if type(rank) is not int or not 0 <= rank < len(members) or members[rank].leaving:
            raise InvalidRequestError(
                f"data_parallel_rank {rank!r} is not one of the {len(members)} ranks here",
                param="data_parallel_rank",
            )
        return members[rank]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests at their cores; ids of no open request are ignored."""
        by_member: defaultdict[CoreMember, list[str]] = defaultdict(list)
        for request_id in request_ids:
            for member in self.members:
                if request_id in member.open:
                    by_member[member].append(request_id)
        for member, ids in by_member.items():
            member.abort(ids)

    # --- waves --------------------------------------------------------------------------------

    def _coordinate(self, message: EngineCoreOutputs) -> None:
        """Cores in lock-step say when a wave begins or is complete."""
        coordinator = self._coordinator
        if coordinator is not None and message.start_wave is not None:
            self._start_wave(coordinator.on_start_wave(message.start_wave, message.engine_index))
        if coordinator is not None and message.wave_complete is not None:
            coordinator.on_wave_complete(message.wave_complete)
        self.hand_over(message)

    def _start_wave(self, start: tuple[int, int] | None) -> None:
        if start is not None:
            for member in self.members:
                member.client.start_wave(*start)

    # --- control ------------------------------------------------------------------------------

    async def call(self, method: str, *args: Any, timeout_s: float = UTILITY_TIMEOUT_S) -> Any:
        """Make a utility call to every core.

        Returns the first core's answer or, for truth values, whether all are true. Raises what
        `CoreClient.call` raises.
        """
        answers = await self.call_each(method, *args, timeout_s=timeout_s)
        if all(isinstance(answer, bool) for answer in answers):
            return all(answers)
        return answers[0]

    async def call_each(
        self, method: str, *args: Any, timeout_s: float = UTILITY_TIMEOUT_S
    ) -> list[Any]:
        """Do the same, and return the answers of all cores in the order of their ranks."""
        calls = (m.client.call(method, *args, timeout_s=timeout_s) for m in self.members)
        return await asyncio.gather(*calls)

    async def ask_to_drain(self, method: str, timeout_s: float) -> DrainReport:
        """Call `drain` or `drain_report`, and return the sum of the cores' reports.

        Raises `EngineOverloadedError` if one does not answer in time, and what `call` raises.
        """
        try:
            answers = await self.call_each(method, timeout_s=timeout_s)
        except TimeoutError as exc:
            raise EngineOverloadedError("the engine core does not answer; ask again") from exc
        return _sum_up(msgspec.convert(answers, list[DrainReport]))

    def stats_by_engine(self) -> dict[str, SchedulerStats]:
        """The newest statistics of every core, by its name."""
        ready = (member for member in self.members if member.is_ready)
        return {member.description.engine_id: member.stats for member in ready}

    @property
    def draining(self) -> bool:
        """Whether any core was told to drain."""
        return any(member.stats.draining for member in self.members)

    async def refresh_stats(self) -> None:
        """Ask every core for its present statistics."""
        await asyncio.gather(*(member.refresh_stats() for member in self.members))

    def doubtful_s(self) -> float:
        """For how many seconds some core has shown no progress."""
        return max(member.doubtful_s() for member in self.members)

    def excuse_silence(self) -> None:
        """Record that there was a reason for the silence of every core."""
        for member in self.members:
            member.excuse_silence()

    # --- the end ------------------------------------------------------------------------------

    def finish_requests(self, timeout_s: float) -> None:
        """Let open requests end, and pass their outputs on, for at most `timeout_s`."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return  # those who wait for outputs will not wake up any more
        deadline = time.monotonic() + timeout_s
        for member in self.members:
            member.finish_requests(deadline)

    def disconnect(self) -> None:
        """Receive no more from any core. Safe to call twice, and without an event loop."""
        for member in self.members:
            member.disconnect()

    def close(self, timeout_s: float = TERMINATE_GRACE_S) -> None:
        """Disconnect, and end all processes. Safe to call twice."""
        self.disconnect()
        self.stop(timeout_s)

    def stop(self, timeout_s: float = TERMINATE_GRACE_S) -> None:
        """End all processes. Safe to call twice."""
        for member in self.members:
            member.process.terminate()
        for member in self.members:
            member.stop(timeout_s)
        self._unlink()


def _load(member: CoreMember) -> tuple[bool, int]:
    """How much stands between a new request and its first token, as far as known."""
    return member.leaving, len(member.open) + WAITING_WEIGHT * member.stats.num_waiting


def _sum_up(reports: list[DrainReport]) -> DrainReport:
    """What holds the cores together."""
    return DrainReport(
        draining=all(report.draining for report in reports),
        drained=all(report.drained for report in reports),
        num_running=sum(report.num_running for report in reports),
        num_waiting=sum(report.num_waiting for report in reports),
        leases_held=sum(report.leases_held for report in reports),
    )
