"""The process of an EngineCore, whether it is started here or elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import msgspec

from diptych_frontend.core_client.curve import read_keys
from diptych_frontend.program import PROGRAMS, become, python_program
from diptych_protocol import CurveKeys, EngineConfig, EngineDeadError, InvalidRequestError

START_TIMEOUT_S = 600.0
"""How long a core may take to load its model."""
TERMINATE_GRACE_S = 5.0
CORE = "diptych_engine.serving.core_process"
LONGEST_FOLDER: Final = 70
"""In bytes: the name of a socket may have 107, with all that is below the folder."""


class Core(Protocol):
    """The interface of a core's process for its client."""

    @property
    def endpoint(self) -> str: ...

    @property
    def keys(self) -> CurveKeys | None: ...

    def ended(self) -> EngineDeadError | None:
        """How the process ended; None while it is alive."""

    async def wait(self) -> EngineDeadError:
        """Wait until the process has ended, and return how."""

    def unlink(self) -> None:
        """Remove the socket's directory, because the client is connected and nobody else has to
        find it."""

    def terminate(self) -> None:
        """Ask the process to end, if it is ours; does not wait for it."""

    def stop(self, timeout_s: float = TERMINATE_GRACE_S) -> None:
        """End the process if it is ours. Safe to call twice."""


class ForkedCore:
    """A fork of this process, which has imported what a core needs, as a `subprocess.Popen`."""

    stdin = None

    def __init__(self, arguments: list[str]) -> None:
        fork = multiprocessing.get_context("fork")
        self._process = fork.Process(target=_be_core, args=(arguments,), daemon=True)
        self._process.start()
        self.pid = self._process.ident or 0

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(CORE, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _be_core(arguments: list[str]) -> None:
    multiprocessing.current_process().daemon = False  # others' code may start processes there
    become(CORE, arguments)


@dataclass
class CoreProcess:
    """A core of our own, reached over a socket in a private directory."""

    config: EngineConfig
    public_endpoint: str | None = None
    """A tcp:// endpoint for routers; needs `keys_dir`."""
    keys_dir: Path | None = None
    stands_by: bool = False
    """It loads the model, and serves from `take_over` on; needs `kv_keep`."""
    process: subprocess.Popen[bytes] | ForkedCore = field(init=False)
    keys: CurveKeys | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._directory: Path | None = None
        self.endpoint = ""
        arguments = [
            *("--config", msgspec.json.encode(self.config).decode()),
            *("--parent-pid", str(os.getpid())),
        ]
        if not self.stands_by:
            arguments += ["--local", self._make_endpoint()]
        if self.public_endpoint is not None:
            arguments += ["--public", self.public_endpoint]
        if self.keys_dir is not None:
            arguments += ["--keys", str(self.keys_dir)]
        if CORE in PROGRAMS and not self.stands_by and len(os.listdir("/proc/self/task")) == 1:
            self.process = ForkedCore(arguments)  # threads would be missing in it
        else:
            stdin = subprocess.PIPE if self.stands_by else subprocess.DEVNULL
            command, environment = python_program(CORE, *arguments)
            self.process = subprocess.Popen(command, stdin=stdin, env=environment)

    def _make_endpoint(self) -> str:
        self._directory = socket_folder("diptych-core-")
        self.endpoint = f"ipc://{self._directory}/core"
        return self.endpoint

    def take_over(self) -> None:
        """Let a core that stands by serve, since the one before it has ended."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError), self.process.stdin as pipe:
                pipe.write(f"{self._make_endpoint()}\n".encode())

    def ended(self) -> EngineDeadError | None:
        """How the process ended; None while it is alive."""
        code = self.process.poll()
        if code is None:
            return None
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return EngineDeadError(f"the engine core (pid {self.process.pid}) {how}")

    async def wait(self) -> EngineDeadError:
        """Wait until the process has ended, and return how."""
        while (cause := self.ended()) is None:
            with _owned(os.pidfd_open(self.process.pid)) as watch:
                await _readable(watch)
        return cause

    def unlink(self) -> None:
        """Remove the socket's directory: existing connections stay, and there can be no others.

        Nothing is left behind then, however this process ends.
        """
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def terminate(self) -> None:
        """Ask the process to end; does not wait for it."""
        if self.process.poll() is None:
            self.process.terminate()

    def stop(self, timeout_s: float = TERMINATE_GRACE_S) -> None:
        """End the process: ask it first, then kill it. Safe to call twice."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s + self.config.shutdown_timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.unlink()


class AdoptedCore:
    """A core that somebody else started, and will end."""

    def __init__(
        self, endpoint: str, pid: int | None = None, keys: CurveKeys | None = None
    ) -> None:
        """Without a process id (a core on another machine) only its connection shows its end."""
        self.endpoint = endpoint
        self.keys = keys
        self._pid = pid
        self._watch: int | None = None
        self._gone = False
        if pid is not None:
            # Opened now, it stands for this process even if its id is given to another one later.
            try:
                self._watch = os.pidfd_open(pid)
            except ProcessLookupError:
                self._gone = True

    def ended(self) -> EngineDeadError | None:
        """How the process ended. A zombie, which only its parent can reap, has ended too."""
        if self._watch is not None and select.select([self._watch], [], [], 0)[0]:
            self._gone = True
        return EngineDeadError(f"Engine process (pid {self._pid}) died.") if self._gone else None

    async def wait(self) -> EngineDeadError:
        """Wait until the process has ended; without a process id, for ever."""
        while (cause := self.ended()) is None:
            if self._watch is None:
                await asyncio.get_running_loop().create_future()
            else:
                with _owned(os.dup(self._watch)) as watch:
                    await _readable(watch)
        return cause

    def unlink(self) -> None:
        """Do nothing: its socket is not ours."""

    def terminate(self) -> None:
        """Do nothing: we may not end it."""

    def stop(self, timeout_s: float = TERMINATE_GRACE_S) -> None:
        """Release the process, which stays alive. Safe to call twice."""
        if self._watch is not None:
            os.close(self._watch)
            self._watch = None


def socket_folder(prefix: str) -> Path:
    """Make a folder for sockets that only this user can enter."""
    short = len(os.fsencode(tempfile.gettempdir())) <= LONGEST_FOLDER
    return Path(tempfile.mkdtemp(prefix=prefix, dir=None if short else "/tmp"))


@contextlib.contextmanager
def _owned(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def _readable(descriptor: int) -> None:
    """Wait until there is something to read; for a process's descriptor, until it ends."""
    loop = asyncio.get_running_loop()
    seen = asyncio.Event()
    loop.add_reader(descriptor, seen.set)
    try:
        await seen.wait()
    finally:
        loop.remove_reader(descriptor)


def adopted(addresses: Mapping[str, str], keys_dir: Path | None) -> AdoptedCore:
    """Return the core that `AsyncLLM`'s `client_addresses` name, with the keys of the directory."""
    if set(addresses) != {"input_address"}:
        raise InvalidRequestError(
            "client_addresses needs input_address, and nothing else: one socket carries both "
            "directions",
            param="client_addresses",
        )
    keys = None if keys_dir is None else read_keys(keys_dir)
    return AdoptedCore(addresses["input_address"], keys=keys)
