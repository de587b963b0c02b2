"""The whole hinge between two real processes over UCX."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
from engine_kit.copied_memory import CopiedMemory
from waits import PATIENCE_S, Deadline, source_of

from diptych_kv_transfer import LeftLease, LoadEnded, open_connector
from diptych_kv_transfer.memory.shard import Shard
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_kv_transfer.tables.actions import Connected, Event
from diptych_kv_transfer.transports.ucx.ucx_transport import UcxTransport
from diptych_protocol import InvalidRequestError, KVTransferConfig, KVTransferParams

SEED = 20
"""Fills the prefill process's memory; see prefill_process.py."""
NUM_BLOCKS, BLOCK_BYTES = 64, 96 << 10
SCRIPT = Path(__file__).with_name("prefill_process.py")
GEOMETRY = {"block_size": 16, "tensor_parallel_size": 1}
Where = Literal["host", "device"]
"""Where an engine has its KV; a device's is copied."""


def tokens_of(num_tokens: int) -> list[int]:
    """The prompt of that length."""
    return list(range(num_tokens))


def signed(params: KVTransferParams, **changes: Any) -> KVTransferParams:
    """A changed reference, signed by a rogue engine that has the key."""
    return References(PUBLIC_KEY).sign(msgspec.structs.replace(params, **changes), 30.0)


def compat_of(block_bytes: int) -> dict[str, str | int]:
    """The configuration of a model whose blocks have that size."""
    row_bytes = block_bytes // (2 * 2 * GEOMETRY["block_size"] * 4)
    return {"num_layers": 2, "kv_heads": 4, "head_dim": row_bytes // 4, "dtype": "float32"}


class Prefill:
    """A prefill engine's hinge in another process."""

    def __init__(
        self,
        port: int = 0,
        lease_seconds: float = 30.0,
        big: bool = False,
        where: Where = "host",
        left: list[LeftLease] | None = None,
    ) -> None:
        self.block_bytes = BLOCK_BYTES * (40 if big else 1)
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(port), str(NUM_BLOCKS), str(self.block_bytes),
             str(lease_seconds), json.dumps(compat_of(self.block_bytes)), json.dumps(GEOMETRY),
             where, json.dumps(left and [astuple(lease) for lease in left])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.granted = 0
        self.port: int = self._answer()["port"]

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the prefill process died"
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def grant(self, blocks: list[int]) -> KVTransferParams:
        self.granted += 1
        request = f"request-{self.granted}"
        tokens = tokens_of(GEOMETRY["block_size"] * len(blocks))
        answer = self.ask("grant", request=request, blocks=blocks, tokens=tokens)
        return KVTransferParams.parse(answer)

    def ended(self, params: KVTransferParams, timeout_s: float = PATIENCE_S) -> str | None:
        """How that lease ended; None if it has not."""
        request = params.remote_request_id
        outcome: str | None = self.ask("wait_lease_ended", request=request, timeout_s=timeout_s)
        return outcome

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Decode:
    """A decode engine's hinge in this process."""

    def __init__(
        self,
        block_bytes: int = BLOCK_BYTES,
        load_timeout_s: float = 30.0,
        where: Where = "host",
    ) -> None:
        self.memory = np.zeros((NUM_BLOCKS, block_bytes), np.uint8)
        self.connector = open_connector(
            KVTransferConfig(load_timeout_s=load_timeout_s),
            engine_id="decode",
            epoch="d1",
            compat=compat_of(block_bytes),
            geometry=GEOMETRY,
            kv_memory=[
                Shard.of(self.memory) if where == "host" else CopiedMemory(self.memory).shard
            ],
        )

    def start(
        self,
        params: KVTransferParams,
        indices: list[int],
        local: list[int],
        *,
        request_id: str = "request",
        tokens: list[int] | None = None,
    ) -> None:
        self.connector.hold(request_id, params)
        tokens = tokens_of(params.remote_num_tokens or 0) if tokens is None else tokens
        self.connector.start_load(request_id, params, indices, local, tokens, None)

    def wait(self, timeout_s: float = PATIENCE_S) -> LoadEnded:
        select.select([self.connector.wake_fd], [], [], timeout_s)
        [event] = self.connector.poll_events()
        assert isinstance(event, LoadEnded)
        return event

    def load(self, *args: Any, **kwargs: Any) -> LoadEnded:
        self.start(*args, **kwargs)
        return self.wait()


@pytest.fixture(
    params=[
        ("default transports", "host", "host"),
        ("tcp", "host", "host"),
        ("default transports", "device", "device"),
        ("tcp", "device", "device"),
        ("tcp", "device", "host"),
        ("default transports", "host", "device"),
    ],
    ids=lambda case: f"{case[0]}, {case[1]} to {case[2]}",
    scope="module",
)
def way(request: pytest.FixtureRequest) -> tuple[str, Where, Where]:
    """How blocks travel: UCX's transports, and where P and D have them."""
    found: tuple[str, Where, Where] = request.param
    return found


@pytest.fixture(scope="module")
def prefill(way: tuple[str, Where, Where]) -> Iterator[Prefill]:
    with pytest.MonkeyPatch.context() as patch:
        if way[0] == "tcp":
            patch.setenv("UCX_TLS", "tcp")
        engine = Prefill(where=way[1])
        yield engine
        engine.kill()


@pytest.fixture
def decode(prefill: Prefill, way: tuple[str, Where, Where]) -> Iterator[Decode]:
    engine = Decode(where=way[2])
    yield engine
    engine.connector.close()


@pytest.fixture
def kv() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What stands in the prefill process's blocks."""
    return np.random.default_rng(SEED).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)


@pytest.mark.parametrize(
    ("blocks", "local"),
    [
        ([3], [9]),
        (list(range(16)), list(range(20, 36))),
        ([8, 2, 3, 4, 60], [1, 30, 31, 32, 0]),
        ([7, 6, 5], [5, 6, 7]),
    ],
    ids=["one", "one run", "scattered", "backwards"],
)
def test_blocks_arrive_bit_exact_and_nothing_else_is_touched(
    prefill: Prefill, decode: Decode, kv: Any, blocks: list[int], local: list[int]
) -> None:
    params = prefill.grant(blocks)
    ended = decode.load(params, list(range(len(blocks))), local)
    assert ended.ok, ended.reason
    expected = np.zeros_like(decode.memory)
    expected[local] = kv[blocks]
    assert np.array_equal(decode.memory, expected)
    assert prefill.ended(params) == "released"


def test_only_the_missing_blocks_travel(prefill: Prefill, decode: Decode, kv: Any) -> None:
    params = prefill.grant([1, 2, 3, 4])
    ended = decode.load(params, [2, 3], [10, 11])
    assert (ended.ok, ended.num_blocks) == (True, 2)
    assert np.array_equal(decode.memory[10:12], kv[3:5])
    assert decode.connector.stats().bytes_received == 2 * BLOCK_BYTES
    assert prefill.ended(params) == "released"


def test_a_load_of_nothing_still_frees_the_prefill_engine(prefill: Prefill, decode: Decode) -> None:
    params = prefill.grant([1, 2])
    assert decode.load(params, [], []).ok
    assert prefill.ended(params) == "released"


@pytest.mark.parametrize("case", ["consumed", "forged", "other prompt", "other epoch"])
def test_a_reference_that_is_not_good_is_refused_and_moves_nothing(
    prefill: Prefill, decode: Decode, case: str
) -> None:
    params = prefill.grant([1, 2])
    tokens = tokens_of(params.remote_num_tokens or 0)
    match case:
        case "consumed":
            assert decode.load(params, [0, 1], [0, 1]).ok
            assert prefill.ended(params) == "released"
            decode.memory[:] = 0
        case "forged":
            params = signed(params, lease_id="f" * 32)
        case "other prompt":
            tokens = [*tokens[:-1], 99]
        case "other epoch":
            params = signed(params, epoch="before")
    ended = decode.load(params, [0, 1], [0, 1], tokens=tokens, request_id="bad")
    assert not ended.ok
    assert ended.reason
    assert not decode.memory.any()


def test_a_reject_frees_the_prefill_engine(prefill: Prefill, decode: Decode) -> None:
    """Itself: a lease that only its end frees has expired."""
    assert decode.load(prefill.grant([1]), [0], [0]).ok  # so there is a connection
    params = prefill.grant([1, 2, 3])
    decode.connector.reject(params)
    assert prefill.ended(params) == "revoked"


def test_a_cancelled_load_ends_once_and_frees_the_prefill_engine(
    prefill: Prefill, decode: Decode
) -> None:
    params = prefill.grant(list(range(32)))
    decode.start(params, list(range(32)), list(range(32)))
    decode.connector.cancel_load("request")
    assert not decode.wait().ok
    assert prefill.ended(params) == "revoked"
    assert decode.connector.poll_events() == []


def test_an_idle_connection_costs_no_cpu(prefill: Prefill, decode: Decode) -> None:
    assert decode.load(prefill.grant([1]), [0], [0]).ok
    unread = prefill.grant([2])
    theirs, ours = prefill.ask("cpu"), time.process_time()
    assert prefill.ended(unread, timeout_s=1.5) is None
    assert time.process_time() - ours < 0.3, "who looks again and again takes most of a processor"
    assert prefill.ask("cpu") - theirs < 0.3


@pytest.mark.parametrize("tls", ["all", "tcp"])
def test_a_prefill_engine_killed_in_mid_read_fails_the_load_and_its_successor_serves(
    tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks come straight into ours: some have come, and are used no more than the others."""
    monkeypatch.setenv("UCX_TLS", tls)
    first = Prefill(big=True)
    decode = Decode(first.block_bytes)
    second = None
    try:
        everything = list(range(NUM_BLOCKS))
        stale = first.grant(everything)
        decode.start(stale, everything, everything)
        deadline = Deadline("the first bytes")
        while not decode.memory[0, 0]:
            deadline.check()
            time.sleep(0.001)
        first.kill()
        assert not decode.wait().ok
        untouched = decode.memory.copy()

        second = Prefill(port=first.port, big=True)
        assert not decode.load(stale, [0], [0], request_id="stale").ok
        assert np.array_equal(decode.memory, untouched)
        assert decode.load(second.grant([1, 2]), [0, 1], [8, 9], request_id="fresh").ok
    finally:
        first.kill()
        decode.connector.close()
        if second is not None:
            second.kill()


@pytest.mark.parametrize("tls", ["all", "tcp"])
def test_a_load_goes_on_with_the_engine_that_has_the_leases_of_a_killed_one(
    tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything comes again, over a new connection, from memory that is registered anew."""
    monkeypatch.setenv("UCX_TLS", tls)
    monkeypatch.setattr("diptych_kv_transfer.tables.loads.RETURN_SECONDS", PATIENCE_S)
    first = Prefill(big=True, left=[LeftLease("0" * 32, "none", "", [0])])
    decode = Decode(first.block_bytes, load_timeout_s=PATIENCE_S)
    second = None
    try:
        everything = list(range(NUM_BLOCKS))
        lease = first.grant(everything)
        decode.start(lease, everything, everything)
        deadline = Deadline("the first bytes")
        while not decode.memory[0, 0]:
            deadline.check()
            time.sleep(0.001)
        first.kill()
        left = LeftLease(
            lease.lease_id or "", lease.epoch or "", lease.tokens_digest or "", everything
        )
        decode.memory[:] = 0
        second = Prefill(port=first.port, big=True, left=[left])
        ended = decode.wait()
        assert ended.ok, ended.reason
        size = NUM_BLOCKS, first.block_bytes
        assert np.array_equal(
            decode.memory, np.random.default_rng(SEED).integers(0, 256, size, np.uint8)
        )
    finally:
        first.kill()
        decode.connector.close()
        if second is not None:
            second.kill()


@pytest.mark.parametrize("where", ["host", "device"])
def test_a_stalled_prefill_engine_is_fenced_at_the_deadline_and_cannot_write_later(
    where: Where,
) -> None:
    prefill = Prefill(big=where == "host", where=where)
    decode = Decode(prefill.block_bytes, load_timeout_s=1.0, where=where)
    try:
        params = prefill.grant(list(range(NUM_BLOCKS)))
        decode.connector.hold("request", params)
        prefill.process.send_signal(signal.SIGSTOP)
        everything, tokens = list(range(NUM_BLOCKS)), tokens_of(params.remote_num_tokens or 0)
        decode.connector.start_load("request", params, everything, everything, tokens, None)
        assert not decode.wait().ok
        before = decode.memory.copy()
        prefill.process.send_signal(signal.SIGCONT)
        assert prefill.ended(params, timeout_s=3.0) in (None, "revoked")
        assert np.array_equal(decode.memory, before)
    finally:
        prefill.kill()
        decode.connector.close()


def test_a_lease_that_nobody_reads_expires() -> None:
    prefill = Prefill(lease_seconds=0.3)
    try:
        assert prefill.ended(prefill.grant([1])) == "expired"
    finally:
        prefill.kill()


def test_a_queued_request_keeps_its_lease_alive() -> None:
    prefill = Prefill(lease_seconds=4.0)
    decode = Decode()
    try:
        params = prefill.grant([1])
        decode.connector.hold("request", params)
        assert prefill.ended(params, timeout_s=6.0) is None
        tokens = tokens_of(params.remote_num_tokens or 0)
        decode.connector.start_load("request", params, [0], [0], tokens, None)
        assert decode.wait().ok
    finally:
        decode.connector.close()
        prefill.kill()


def test_a_taken_port_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=str(port)):
            open_connector(
                KVTransferConfig(listen_port=port),
                engine_id="d", epoch="1", compat={},
                kv_memory=[Shard.of(np.zeros((1, 1), np.uint8))],
            )  # fmt: skip


def tasks_and_descriptors() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_closing_leaves_no_thread_or_descriptor_behind() -> None:
    Decode().connector.close()  # UCX keeps some for the process on first use
    before = tasks_and_descriptors()
    for _ in range(3):
        decode = Decode()
        decode.connector.close()
        decode.connector.close()
    del decode
    tasks, descriptors = tasks_and_descriptors()
    assert tasks <= before[0]  # what other tests have left may end meanwhile
    assert descriptors <= before[1]


def test_connections_that_are_gone_leave_no_descriptor_behind() -> None:
    """Whatever was under way on them, and without help of the garbage collector."""

    def meet() -> None:
        ours, visitor = (UcxTransport("127.0.0.1", 0, PUBLIC_KEY) for _ in range(2))
        visitor.connect(("127.0.0.1", ours.port))
        arrived: list[Event] = []
        deadline = Deadline("a connection")
        while not any(isinstance(event, Connected) for event in arrived):
            deadline.check()
            visitor.poll(0.0)
            arrived += ours.poll(0.001)
        ours.close()
        visitor.close()

    gc.disable()
    try:
        meet()  # UCX keeps some for the process on first use
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            meet()
        assert len(os.listdir("/proc/self/fd")) <= before
    finally:
        gc.enable()


def run_python(code: str) -> str:
    """A child process's output: what it does may kill threads of its own."""
    result = subprocess.run(
        [sys.executable, "-c", PREAMBLE + code],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return result.stdout


PREAMBLE = """
import msgspec, numpy as np, os, select, socket, subprocess, sys, time
from diptych_kv_transfer import open_connector
from diptych_kv_transfer.memory.shard import Shard
from diptych_kv_transfer.signing.references import PUBLIC_KEY
from diptych_kv_transfer.signing.references import References
from diptych_protocol import KVTransferConfig

def signed(params, **changes):
    return References(PUBLIC_KEY).sign(msgspec.structs.replace(params, **changes), 30.0)

def connector(name):
    return open_connector(KVTransferConfig(), engine_id=name, epoch="1", compat={},
                       kv_memory=[Shard.of(np.ones((64, 1 << 20), np.uint8))])

p, d = connector("p"), connector("d")

def load(name, params, blocks):
    d.hold(name, params)
    d.start_load(name, params, blocks, blocks, [1], None)

def results(count):
    found, end = {}, time.monotonic() + 60
    while len(found) < count and time.monotonic() < end:
        select.select([d.wake_fd], [], [], 0.2)
        found.update((event.request_id, event.ok) for event in d.poll_events())
    return found
"""


def test_the_preamble_hands_off_when_nothing_is_wrong() -> None:
    assert "{'good': True}" in run_python(
        "load('good', p.grant('r', [0, 1], [1], [2], None), [0, 1]); print(results(1))"
    )


def test_an_impossible_port_fails_one_load_only() -> None:
    out = run_python("""
good = p.grant("r", [0], [1], [2], None)
load("bad", signed(good, remote_port=70000), [0])
time.sleep(0.5)
load("good", good, [0])
print(results(2))
""")
    assert "'bad': False" in out
    assert "'good': True" in out


def test_a_malformed_lease_id_fails_one_load_only() -> None:
    out = run_python("""
good = p.grant("r", list(range(64)), [1], [2], None)
d.hold("good", good)
time.sleep(0.3)
load("bad", signed(good, lease_id="f" * 65), [0])
d.start_load("good", good, list(range(64)), list(range(64)), [1], None)
print(results(2))
""")
    assert "'bad': False" in out
    assert "'good': True" in out


def test_a_peer_that_is_gone_before_it_is_looked_at_harms_nobody() -> None:
    ours, visitor = (UcxTransport("127.0.0.1", 0, PUBLIC_KEY) for _ in range(2))
    try:
        visitor.connect(("127.0.0.1", ours.port))
        visitor.poll(0.0)
        progress_until(lambda: bool(ours._listener._requests), ours, visitor)
        [peer] = visitor._connections
        visitor.fence(peer)
        visitor.poll(0.0)
        deadline = Deadline("the end of a connection")
        while ours._listener._requests or ours._connections:
            deadline.check()
            assert ours.poll(0.05) == []
    finally:
        ours.close()
        visitor.close()


def progress_until(done: Callable[[], bool], *transports: UcxTransport) -> None:
    """Let UCX work while its owners look away."""
    deadline = Deadline(source_of(done))
    while not done():
        deadline.check()
        for transport in transports:
            transport._worker.progress()


def test_a_closed_connector_gives_its_port_back() -> None:
    out = run_python("""
p.close()
with socket.socket() as again:
    again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection may still time out
    again.bind(("0.0.0.0", p.port))
    print("bound")
""")
    assert "bound" in out


def test_a_transport_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(InvalidRequestError, match="one of ucx, not 'pigeon'") as caught:
        open_connector(
            KVTransferConfig(transport="pigeon"),
            engine_id="d", epoch="1", compat={}, kv_memory=[Shard.of(np.zeros((1, 1), np.uint8))],
        )  # fmt: skip
    assert caught.value.param == "transport"
