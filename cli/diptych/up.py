"""`diptych up`: runs the rendered objects as processes of this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from diptych.board.board import Board
from diptych.errors import BadInputError, RunError
from diptych.known_models import Source
from diptych.laptop.api_access import ApiAccess
from diptych.laptop.kill_switch import KillSwitch
from diptych.laptop.nursery import Nursery
from diptych.laptop.pod_spec import UnsupportedPodError
from diptych.laptop.pods import (
    LOOPBACK,
    PACKAGES_FOLDER,
    files,
    local_pods,
    port_runs,
)
from diptych.laptop.ports import free_ports, is_free
from diptych.laptop.programs import connector_packages
from diptych.laptop.rundir import PodState, RunDirectory, RunState, process_start_s
from diptych.laptop.supervisor import CrashLoopError, RunningPod, Supervisor
from diptych.manifest import check_model, rendered
from diptych_frontend.openai.server import Site, listen, serve_aside
from diptych_frontend.processors import usable_processors
from diptych_operator.api.service import InferenceService
from diptych_protocol.admin import ADMIN_TOKEN_FILE
from diptych_protocol.threads import model_threads
from diptych_router.telling.page.control import CONTROL_VARIABLE

READY_TIMEOUT_S = 900.0
MOST_PODS = 64
"""A machine that starts thousands of processes answers nobody, and cannot be told to stop."""
CRASH_LINES = 15
CONTROL_FILE = "page-control.json"
"""The file in the run directory that contains the address of the kill switch."""

WhileReady = Callable[[RunState], Awaitable[None]]
"""What to do once the service is ready. `up` ends when it returns, or cancels it to end early."""


async def up(
    source: Source,
    service: InferenceService,
    api: ApiAccess,
    programs: Mapping[str, str],
    nursery: Nursery,
    board: Board,
    while_ready: WhileReady,
) -> None:
    """Run a service, read from `source`, from start to end. `programs`: see `local_pods`.

    Returns when `while_ready` does, or on SIGINT or SIGTERM. In any case no process is left.

    Raises:
        BadInputError: the file is wrong, its model is not here, or the API cannot have its address.
        RunError: the port is taken, a pod cannot start, or the service never became ready.
        OSError: the run's files cannot be written, or pods have no ports.
    """
    service = api.fit(source, service)
    objects = rendered(source, service)
    check_model(source, service)
    packages = connector_packages(source, service)
    _check_address(api)
    with RunDirectory(service.metadata.name) as run_dir:
        try:
            spare = free_ports(port_runs(objects), besides={api.port})
            plans = local_pods(objects, run_dir.path, spare, api.port, api.host, programs)
        except UnsupportedPodError as exc:
            raise BadInputError(f"{source}: {exc}") from exc
        if len(plans) > MOST_PODS:
            most = f"at most {MOST_PODS} run on one machine; lower replicas"
            raise BadInputError(f"{source}: these are {len(plans)} pods, and {most}")
        pods = [RunningPod(pod, run_dir.log_path(pod.name), nursery) for pod in plans]
        threads = model_threads(usable_processors())
        token_file = ""
        for relative, content in files(objects, threads).items():
            run_dir.write(relative, content)
            if Path(relative).name == ADMIN_TOKEN_FILE:
                token_file = str(run_dir.path / relative)
        for name, folder in packages.items():
            run_dir.link(f"{PACKAGES_FOLDER}/{name}", folder)
        async with _kill_switch(api, pods, run_dir):
            run = _Run(service, api, pods, run_dir, board, token_file)
            await run.until_done(while_ready)


def ends(number: signal.Signals) -> bool:
    """Whether a signal ends this program: `nohup` has it outlive its terminal."""
    return signal.getsignal(number) is not signal.SIG_IGN


@contextlib.asynccontextmanager
async def _kill_switch(
    api: ApiAccess, pods: list[RunningPod], run_dir: RunDirectory
) -> AsyncIterator[None]:
    """Let the routers' page kill engines during the block, if it is for this machine only."""
    if not api.on_loopback:
        yield
        return
    switch = KillSwitch(pods, api.url)
    listener = listen(LOOPBACK, 0)
    control = switch.reached_at(listener.getsockname()[1])
    run_dir.write(CONTROL_FILE, msgspec.json.encode(control))
    for pod in pods:
        if pod.spec.role == "router":
            pod.spec.env[CONTROL_VARIABLE] = str(run_dir.path / CONTROL_FILE)
    serving = asyncio.create_task(serve_aside(Site(switch.app(), listener)))
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.wait((serving,))


def _check_address(api: ApiAccess) -> None:
    port = api.port
    try:
        if not is_free(port, api.host):
            raise RunError(
                f"port {port} is in use; stop what listens there, or choose another --port"
            )
    except (OSError, UnicodeError) as exc:
        raise BadInputError(
            f"--host {api.host}, --port {port}: {exc}; give an address of this machine, and a port "
            "that you may use"
        ) from exc


class _Run:
    """One service between its start and its end."""

    def __init__(
        self,
        service: InferenceService,
        api: ApiAccess,
        pods: list[RunningPod],
        run_dir: RunDirectory,
        board: Board,
        admin_token_file: str,
    ) -> None:
        self._service = service
        self._admin_token_file = admin_token_file
        self._api = api
        self._key_file = api.furnish(run_dir)
        self._access = api.access()
        self._pods = pods
        self._run_dir = run_dir
        self._board = board
        self._started_at = time.time()
        self._pid_start_s = process_start_s(os.getpid())
        self._supervisor = Supervisor(pods, changed=self._changed, crashed=board.crashed)

    async def until_done(self, while_ready: WhileReady) -> None:
        loop = asyncio.get_running_loop()
        signals = [signal.SIGINT, *filter(ends, (signal.SIGTERM, signal.SIGHUP))]
        for number in signals:
            loop.add_signal_handler(number, self._interrupted)
        with self._board.showing(self._pods):
            running = asyncio.create_task(self._supervisor.run())
            work = asyncio.create_task(self._work(while_ready))
            try:
                await asyncio.wait({running, work}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                work.cancel()
                self._supervisor.stop()
                await asyncio.wait({running, work})
                for number in signals:
                    loop.remove_signal_handler(number)
        try:
            running.result()
        except CrashLoopError as exc:
            raise RunError(_last_words(exc.pod)) from exc
        except OSError as exc:
            raise RunError(f"cannot start processes: {exc}") from exc
        if not work.cancelled():
            work.result()

    async def _work(self, while_ready: WhileReady) -> None:
        begun = time.monotonic()
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await self._supervisor.ready.wait()
        except TimeoutError as exc:
            waiting = [pod.spec.name for pod in self._pods if not pod.life.ever_ready]
            raise RunError(f"not ready within {READY_TIMEOUT_S:g} s: {', '.join(waiting)}") from exc
        self._board.say(f"ready in {time.monotonic() - begun:.1f} s: {self._api.url}")
        key = self._key_file.read_text().strip() if self._key_file is not None else ""
        self._board.say(f"the API: {self._api.access(key)}")
        self._board.say(f"the page: {self._api.url.removesuffix('/v1')}/")
        await while_ready(self._state())

    def _interrupted(self) -> None:
        if self._supervisor.stopping:
            self._supervisor.kill()
            return
        self._board.say("stopping (Ctrl-C again kills at once)")
        self._supervisor.stop()

    def _changed(self) -> None:
        self._board.changed()
        try:
            self._run_dir.save(self._state())
        except OSError as exc:
            if not self._supervisor.ready.is_set():
                raise
            # A full disk ends no service that runs; until there is room, `status` tells old news.
            self._board.say(f"this run's state cannot be written: {exc}")

    def _state(self) -> RunState:
        return RunState(
            service=self._service.metadata.name,
            model=self._service.served_name,
            url=self._api.url,
            ready=self._supervisor.ready.is_set(),
            started_at=self._started_at,
            pid=os.getpid(),
            pid_start_s=self._pid_start_s,
            pods=[
                PodState(
                    name=pod.spec.name,
                    role=pod.spec.role,
                    phase=pod.life.phase.value,
                    pid=pod.pid,
                    restarts=pod.life.restarts,
                    ports=pod.spec.ports,
                    log=str(pod.log),
                )
                for pod in self._pods
            ],
            access=self._access,
            key_file=str(self._key_file or ""),
            certificate=str(self._api.certificate or ""),
            admin_token_file=self._admin_token_file,
        )


def _last_words(pod: RunningPod) -> str:
    lines = "\n".join(f"  {line}" for line in pod.last_lines(CRASH_LINES)) or "  (empty)"
    return f"{pod.spec.name} cannot start: {pod.last_error()}\nthe end of its log:\n{lines}"
