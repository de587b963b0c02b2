"""Starts, probes, restarts and ends local pods, as `PodLife` decides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from diptych.laptop import leash
from diptych.laptop.lifecycle import Phase, PodLife
from diptych.laptop.nursery import Nursery, Start
from diptych.laptop.pods import HttpProbe, LocalPod

QUICK_POLL_S = 0.1
"""The period until a pod is ready for the first time, short because somebody waits for it."""
MAX_GRACE_S = 10.0
"""The longest wait for a graceful end: somebody who pressed Ctrl-C will not wait longer."""
LAST_WORDS_S = 2.0
"""So long before its end pods are told again: then they wait for nothing any more, and routers tell
their clients."""
KILL_WAIT_S = 5.0
START_S = 120.0
"""For the imports of a nursery, on a busy machine."""
LOG_TAIL_BYTES = 16384
ERROR_LINE = re.compile(r"\berror: ")
"""The form in which our programs, like most of Unix, print why they end."""


async def answers(client: httpx.AsyncClient, probe: HttpProbe) -> bool:
    """Whether the pod reports within the probe's timeout that it is well."""
    try:
        response = await client.get(probe.url, timeout=probe.timeout_s)
    except httpx.HTTPError:
        return False
    return 200 <= response.status_code < 400


async def watch(client: httpx.AsyncClient, pod: LocalPod, probed: Callable[[bool], None]) -> None:
    """Ask the startup probe until it succeeds, then the readiness probe for ever.

    `probed` is called with each readiness answer. Returns only if the startup probe did not succeed
    in time: then the pod has to be killed.
    """
    if pod.startup is not None and not await _started(client, pod.startup):
        return
    if pod.readiness is None:
        probed(True)
        await asyncio.Event().wait()
    else:
        await _readiness(client, pod.readiness, probed)


async def _started(client: httpx.AsyncClient, probe: HttpProbe) -> bool:
    try:
        async with asyncio.timeout(probe.patience_s):
            while not await answers(client, probe):
                await asyncio.sleep(QUICK_POLL_S)
    except TimeoutError:
        return False
    return True


async def _readiness(
    client: httpx.AsyncClient, probe: HttpProbe, probed: Callable[[bool], None]
) -> None:
    ever_ready = False
    while True:
        ok = await answers(client, probe)
        ever_ready = ever_ready or ok
        probed(ok)
        await asyncio.sleep(probe.period_s if ever_ready else QUICK_POLL_S)


class CrashLoopError(Exception):
    """A pod ended several times before it was ever ready."""

    def __init__(self, pod: RunningPod) -> None:
        super().__init__(pod.spec.name)
        self.pod = pod


class RunningPod:
    """One pod: its plan, its state, and its present process."""

    def __init__(self, spec: LocalPod, log: Path, nursery: Nursery) -> None:
        self.spec = spec
        self._nursery = nursery
        self.log = log
        self.life = PodLife(spec.readiness.failure_threshold if spec.readiness else 1)
        self.pid: int | None = None
        self._control: socket.socket | None = None
        self._log_start = 0
        self._is_late = False
        """The latest process was killed because it did not answer its startup probe."""

    async def start(self) -> None:
        """Start the pod's process under a leash. Its output is appended to the log."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        order = Start(self.spec.command, self.spec.niceness, self.spec.env)
        with theirs, self.log.open("ab") as log:
            self._log_start, self._is_late = log.tell(), False
            self._nursery.start(order, theirs, log.fileno())
        self._control = ours
        async with asyncio.timeout(START_S):
            self.pid = await self._told()

    async def wait(self) -> int:
        """Wait until the process and its group have ended, and return the exit code."""
        code = await self._told()
        if self._control is not None:
            self._control.close()
        self._control = self.pid = None
        return 128 + signal.SIGKILL if code is None else code

    async def _told(self) -> int | None:
        """The next number from the leash; None if that was killed."""
        if self._control is None:
            return None
        try:
            return int(await asyncio.get_running_loop().sock_recv(self._control, 32))
        except (OSError, ValueError):
            return None

    def terminate(self) -> None:
        """Ask the process to end, but not its children, which it has to end itself."""
        if self._control is not None:
            try:
                self._control.send(leash.TERMINATE)
            except OSError:
                self.kill()

    def kill(self) -> None:
        """Let the leash kill the whole process group. Safe to call twice."""
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)

    def give_up(self) -> None:
        """Kill a process that did not start in time."""
        self._is_late = True
        self.kill()

    def last_error(self) -> str:
        """Return why the latest process ended: its last `error: ...` line, else its last line. If
        that is that its core has exited, return why the core has."""
        from diptych_operator.status.diagnose import CORE_EXITED, telling_line  # a start needs none

        lines = self._lines(self._log_start)
        errors = [line for line in lines if ERROR_LINE.search(line)]
        last = (errors or lines or ["no output"])[-1]
        if self._is_late and (probe := self.spec.startup) is not None:
            return f"no answer at {probe.url} within {probe.patience_s:g} s, its log ends: {last}"
        return telling_line("\n".join(lines)) if CORE_EXITED.search(last) else last

    def last_lines(self, count: int) -> list[str]:
        """Return the last non-empty lines of the pod's log, over all its starts."""
        return self._lines(0)[-count:]

    def _lines(self, start: int) -> list[str]:
        try:
            with self.log.open("rb") as log:
                log.seek(max(start, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()]


class Supervisor:
    """Runs pods until it is stopped or one of them cannot start.

    `changed` is called at every change of a pod. `crashed` is called at each unexpected end, with
    the exit code and the seconds until the restart.
    """

    def __init__(
        self,
        pods: Sequence[RunningPod],
        *,
        changed: Callable[[], None],
        crashed: Callable[[RunningPod, int, float], None],
    ) -> None:
        self.pods = pods
        self.ready = asyncio.Event()
        """Set once every pod was ready at the same time."""
        self._changed = changed
        self._crashed = crashed
        self._stopping = asyncio.Event()
        # As a kubelet, that takes any certificate too.
        self._client = httpx.AsyncClient(trust_env=False, verify=False)

    def stop(self) -> None:
        """End everything gracefully. Safe to call twice."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def kill(self) -> None:
        """End everything at once."""
        self._stopping.set()
        for pod in self.pods:
            pod.kill()

    async def run(self) -> None:
        """Run the pods until `stop()`. Raises `CrashLoopError`, or `OSError` if the system starts
        no more processes. In any case no process is left."""
        keepers = [asyncio.create_task(self._keep(pod)) for pod in self.pods]
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            done, _ = await asyncio.wait([*keepers, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
        finally:
            self._stopping.set()
            stopping.cancel()
            await self._end(keepers)
            await self._client.aclose()

    async def _keep(self, pod: RunningPod) -> None:
        """Start one pod again and again until the supervisor stops."""
        while not self._stopping.is_set():
            await pod.start()
            if self._stopping.is_set():
                pod.terminate()
            pod.life.started(time.monotonic())
            self._changed()
            prober = asyncio.create_task(self._probe(pod))
            try:
                code = await pod.wait()
            finally:
                prober.cancel()
            if self._stopping.is_set():
                return
            delay = pod.life.exited(time.monotonic())
            self._changed()
            if delay is None:
                raise CrashLoopError(pod)
            self._crashed(pod, code, delay)
            await self._sleep(delay)

    async def _probe(self, pod: RunningPod) -> None:
        def probed(ok: bool) -> None:
            before = pod.life.phase
            pod.life.probed(ok, time.monotonic())
            if pod.life.phase is not before:
                if all(each.life.phase is Phase.READY for each in self.pods):
                    self.ready.set()
                self._changed()

        await watch(self._client, pod.spec, probed)
        pod.give_up()

    async def _sleep(self, seconds: float) -> None:
        """Until the time is over or the supervisor stops."""
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _end(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        """SIGTERM to every pod, again to what is left, then SIGKILL; bounded in time."""
        grace = min(MAX_GRACE_S, max((pod.spec.grace_s for pod in self.pods), default=0.0))
        for seconds in (grace - LAST_WORDS_S, LAST_WORDS_S):
            for pod in self.pods:
                pod.terminate()
            await asyncio.wait(keepers, timeout=max(0.0, seconds))
        for pod in self.pods:
            pod.kill()
        await asyncio.wait(keepers, timeout=KILL_WAIT_S)
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
