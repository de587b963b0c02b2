"""Hand-offs between different geometries, of real processes over UCX, when one of these fails."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_kit.copied_memory import CopiedMemory
from waits import PATIENCE_S, Deadline, source_of

from diptych_kv_transfer import LoadEnded, open_connector
from diptych_kv_transfer.memory.layout import GEOMETRY, Layout
from diptych_kv_transfer.memory.repack import repack
from diptych_kv_transfer.memory.shard import Shard
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_protocol import KVTransferConfig, KVTransferParams

SEED = 20
"""Fills the prefill process's memory; see prefill_process.py."""
SCRIPT = Path(__file__).with_name("prefill_process.py")
COMPAT: dict[str, str | int] = {
    "num_layers": 2, "kv_heads": 4, "head_dim": 16, "dtype": "float32",
}  # fmt: skip
THEIRS = dict(zip(GEOMETRY, (32, 2), strict=True))
OURS = dict(zip(GEOMETRY, (16, 1), strict=True))
TOKENS = list(range(1000))
NUM_THEIRS, NUM_OURS = 32, 63
"""Blocks that these tokens take; the last ones are not full."""
LOAD_TIMEOUT_S = 6.0
"""How long a load from an engine that will be frozen may take: enough for it to begin."""


def layout(geometry: dict[str, int]) -> Layout:
    found = Layout.of(COMPAT, geometry)
    assert found is not None
    return found


class Prefill:
    """The hinge of a prefill engine of two ranks, in another process."""

    def __init__(self, where: str = "host") -> None:
        block_bytes = str(layout(THEIRS).block_bytes)
        compat, geometry = json.dumps(COMPAT), json.dumps(THEIRS)
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, "0", str(NUM_THEIRS), block_bytes, "30", compat, geometry,
             where, "null"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._answer()

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def grant(self) -> KVTransferParams:
        blocks = list(range(NUM_THEIRS))
        answer = self.ask("grant", request="whole", blocks=blocks, tokens=TOKENS)
        return KVTransferParams.parse(answer)

    def lend_a_part(self, count: int) -> KVTransferParams:
        """Promise a lease of which only `count` blocks are computed, now and later."""
        whole, blocks = self.grant(), list(range(NUM_THEIRS))
        lease_id = self.ask("lend_a_part", blocks=blocks, count=count, tokens=TOKENS)
        return References(PUBLIC_KEY).sign(msgspec.structs.replace(whole, lease_id=lease_id), 30.0)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class Decode:
    """The hinge of a decode engine of one rank, with room for one load at a time."""

    def __init__(self, where: str = "host", load_timeout_s: float = PATIENCE_S) -> None:
        self.memory = np.full((NUM_OURS, layout(OURS).block_bytes), 7, np.uint8)
        self.connector = open_connector(
            KVTransferConfig(load_timeout_s=load_timeout_s, staging_bytes=1),
            engine_id="decode", epoch="d", compat=COMPAT, geometry=OURS,
            kv_memory=[
                Shard.of(self.memory) if where == "host" else CopiedMemory(self.memory).shard
            ],
        )  # fmt: skip
        driver: Any = self.connector._driver
        self.loads = driver._hinge.loads.loads
        self._events: list[Any] = []

    def start(self, name: str, params: KVTransferParams) -> None:
        blocks = list(range(NUM_OURS))
        self.connector.hold(name, params)
        self.connector.start_load(name, params, blocks, blocks, TOKENS, None)

    def ended(self) -> LoadEnded:
        """The next load that ends; several may have ended when somebody looks."""
        if not self._events:
            select.select([self.connector.wake_fd], [], [], PATIENCE_S)
            self._events += self.connector.poll_events()
        event = self._events.pop(0)
        assert isinstance(event, LoadEnded)
        return event


def handed_over() -> np.ndarray[Any, np.dtype[np.uint8]]:
    """D's memory with what is in P's."""
    random, shape = np.random.default_rng(SEED), (NUM_THEIRS, layout(THEIRS).block_bytes)
    theirs = [Shard.of(random.integers(0, 256, shape, np.uint8)) for _ in range(2)]
    ours = np.zeros((NUM_OURS, layout(OURS).block_bytes), np.uint8)
    blocks = list(range(NUM_OURS))
    repack(theirs, layout(THEIRS), [Shard.of(ours)], layout(OURS), blocks, 0, len(TOKENS))
    return ours


def until(condition: Callable[[], bool]) -> None:
    deadline = Deadline(source_of(condition))
    while not condition():
        deadline.check()
        time.sleep(0.002)


@contextmanager
def closing(*ends: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for end in ends:
            end.close()


@pytest.mark.parametrize(
    ("tls", "blow", "where"),
    [
        pytest.param("tcp", signal.SIGSTOP, "host", marks=pytest.mark.slow),
        ("all", signal.SIGKILL, "host"),
        ("tcp", signal.SIGKILL, "device"),
        pytest.param("all", signal.SIGSTOP, "device", marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_fails_in_mid_load_costs_one_load_and_no_block_is_touched(
    tls: str, blow: signal.Signals, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of its blocks has come. Another engine's load waits for the room, and gets it."""
    monkeypatch.setenv("UCX_TLS", tls)
    timeout_s = LOAD_TIMEOUT_S if blow is signal.SIGSTOP else PATIENCE_S
    failing, sound, decode = Prefill(where), Prefill(where), Decode(where, timeout_s)
    with closing(failing, sound, decode.connector):
        decode.start("a part", failing.lend_a_part(NUM_THEIRS // 2))
        until(lambda: "a part" in decode.loads and bool(decode.loads["a part"].batches))
        until(lambda: not decode.loads["a part"].receiving)
        assert len(decode.loads["a part"].wanted) == NUM_THEIRS // 2
        decode.start("other", sound.grant())
        until(lambda: "other" in decode.loads and decode.loads["other"].waits_for_room)
        stats, area = decode.connector.stats(), NUM_THEIRS * 2 * layout(THEIRS).block_bytes
        assert (stats.loads_in_flight, stats.loads_waiting_for_room) == (2, 1)
        assert stats.staging_bytes == area
        failing.process.send_signal(blow)

        failed = decode.ended()
        assert (failed.request_id, failed.ok) == ("a part", False)
        came = decode.ended()
        assert (came.request_id, came.ok) == ("other", True), came.reason
        assert np.array_equal(decode.memory, handed_over())
        stats = decode.connector.stats()
        assert (stats.loads_completed, stats.loads_failed) == (1, 1)
        assert (stats.loads_in_flight, stats.loads_waiting_for_room) == (0, 0)
        assert (stats.staging_bytes, stats.bytes_received) == (0, area)
        failing.process.send_signal(signal.SIGCONT)
        assert sound.ask("wait_lease_ended", request="whole", timeout_s=PATIENCE_S) == "released"
        assert np.array_equal(decode.memory, handed_over())


def test_a_layout_that_is_not_that_of_the_memory_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="are not those of"):
        open_connector(
            KVTransferConfig(),
            engine_id="decode", epoch="d", compat=COMPAT, geometry=OURS,
            kv_memory=[Shard.of(np.zeros((4, 100), np.uint8))],
        )  # fmt: skip
