"""The private directory of one `diptych up`: configuration, keys, logs and a state file.

Other commands find running services by these directories, and reach their APIs with the key and the
certificate there. A directory whose owner is dead is removed. The owner holds its lock, because
ids of processes mean nothing to a container that shares the place with another.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import ssl
import stat
import tempfile
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self

import httpx
import msgspec
import psutil

from diptych.errors import RunError
from diptych_protocol import UNREADABLE

PREFIX = "diptych-"
STATE_FILE = "state.json"
SESSIONS: Final = Path("/run/user")
"""Each session's `$XDG_RUNTIME_DIR` is in it."""
SAME_START_S: Final = 0.1
"""The kernel counts in hundredths of a second."""


class PodState(msgspec.Struct, frozen=True):
    name: str
    role: str
    phase: str
    pid: int | None
    restarts: int
    ports: dict[str, int]
    log: str
    cpu: str = ""
    """The instruction level of an engine's kernels, and how many kernels are disabled."""
    health: str = ""
    """The router's judgement of an engine: ok, silent or failing."""


class RunState(msgspec.Struct, frozen=True):
    """What other processes may know of a running service."""

    service: str
    model: str
    """The model's name for clients."""
    url: str
    """Base URL of the OpenAI API, ending in /v1."""
    ready: bool
    started_at: float
    """Unix time."""
    pid: int
    pid_start_s: float
    """See `process_start_s`. With `pid` it names the owner, as ids are reused. A version that wrote
    another time under another name neither finds this run nor removes it, nor this one its."""
    pods: list[PodState] = []
    access: str = ""
    """Who may use the API, without any key."""
    key_file: str = ""
    """A file with a valid key; empty if none is needed."""
    certificate: str = ""
    """The file of the API's certificate; empty without TLS."""
    admin_token_file: str = ""
    """The file with the bearer token for the admin ports of the pods."""


class RunDirectory:
    """A directory that only its owner can read, removed when the run ends."""

    def __init__(self, service: str) -> None:
        remove_litter()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{service}-", dir=base_directory()))
        self._lock = os.open(self.path, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> Self:
        (self.path / "logs").mkdir(mode=0o700)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def log_path(self, pod: str) -> Path:
        return self.path / "logs" / f"{pod}.log"

    def write(self, relative: str, content: bytes) -> None:
        """Write a file that only its owner can read. It appears whole or not at all."""
        target = self.path / relative
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        partial.replace(target)

    def link(self, relative: str, directory: Path) -> None:
        """Link a folder of somebody else into this directory. It outlives the directory."""
        target = self.path / relative
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.symlink_to(directory.resolve(), target_is_directory=True)

    def save(self, state: RunState) -> None:
        self.write(STATE_FILE, msgspec.json.format(msgspec.json.encode(state), indent=2))


def base_directory() -> Path:
    """Return `$XDG_RUNTIME_DIR` if it is set, else the directory for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime)
    return Path(tempfile.gettempdir())


def _places() -> Collection[Path]:
    """Where directories of runs may be. What sessions have in `$XDG_RUNTIME_DIR`, others lack, such
    as cron and sudo, or have another one: services are found wherever either puts them, unless
    somebody has chosen a place of his own."""
    usual = {Path(tempfile.gettempdir()), Path("/tmp"), *SESSIONS.glob("*")}
    return usual if base_directory() in usual else [base_directory()]


def running() -> list[RunState]:
    """Return the running services of this user, the newest first."""
    states = [state for _, state in _runs() if _is_alive(state)]
    return sorted(states, key=lambda state: state.started_at, reverse=True)


def find(service: str | None = None) -> RunState:
    """Return the newest running service, of this name if one is given. Raises `RunError`."""
    states = running()
    found = next((state for state in states if service in (None, state.service)), None)
    if found is not None:
        return found
    if not states:
        raise RunError("no service runs here; start one with `diptych up`")
    names = ", ".join(state.service for state in states)
    raise RunError(f"no service {service} runs here, only {names}")


def remove_litter() -> None:
    """Remove the directories of runs that were killed before they could do it."""
    for directory, state in _runs():
        if not _is_alive(state) and _is_unlocked(directory):
            shutil.rmtree(directory, ignore_errors=True)


def _is_unlocked(directory: Path) -> bool:
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:  # just removed
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _runs() -> Iterator[tuple[Path, RunState]]:
    for directory in chain.from_iterable(place.glob(f"{PREFIX}*") for place in _places()):
        try:
            status = directory.lstat()
            private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
            if private and status.st_uid == os.getuid():
                raw = (directory / STATE_FILE).read_bytes()
                yield directory, msgspec.json.decode(raw, type=RunState)
        except (OSError, *UNREADABLE):
            continue


def _is_alive(state: RunState) -> bool:
    try:
        return abs(process_start_s(state.pid) - state.pid_start_s) < SAME_START_S
    except psutil.Error:
        return False


def process_start_s(pid: int) -> float:
    """Return when a process started, in seconds after the machine did: as Unix time it would move
    when the clock is set. Raises `psutil.Error`."""
    return psutil.Process(pid).create_time() - psutil.boot_time()


METRICS_TIMEOUT_S: Final = 2.0


def read_metrics(state: RunState) -> str:
    """Return a service's /metrics from its router. Raises `httpx.HTTPError` and `OSError`."""
    url = f"{state.url.removesuffix('/v1')}/metrics"
    response = httpx.get(url, timeout=METRICS_TIMEOUT_S, **options(state))
    response.raise_for_status()
    return response.text


def options(state: RunState | None = None, api_key: str | None = None) -> dict[str, Any]:
    """Return keyword arguments for an httpx client or call.

    A service on this machine has its own key and certificate. Others need `api_key`, and a
    certificate that the system trusts. The key of a service that has just ended is empty.
    """
    key, trust = api_key, ssl.create_default_context()
    if state is not None and state.certificate:
        # It is that very one, whoever signed it and whatever name it is for.
        trust.load_verify_locations(state.certificate)
        trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        trust.check_hostname = False
    if state is not None:
        key = _first_line(Path(state.key_file)) if state.key_file else None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return {"trust_env": False, "verify": trust, "headers": headers}


def _first_line(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        return ""
