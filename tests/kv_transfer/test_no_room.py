"""Memory that cannot be had, or a device that fails, ends one transfer, and the hinge goes on."""

from __future__ import annotations

import select
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest
from engine_kit.copied_memory import CopiedMemory
from numpy.typing import NDArray
from waits import PATIENCE_S, Deadline

from diptych_kv_transfer import KVConnector, LeaseEnded, LoadEnded, open_connector
from diptych_kv_transfer.tables.actions import Report
from diptych_protocol import KVTransferConfig

GEOMETRY = {"block_size": 16, "tensor_parallel_size": 1}
COMPAT: dict[str, str | int] = {"num_layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
BLOCK_BYTES = 2 * 2 * 16 * 2 * 8 * 4
TOKENS = list(range(64))
BLOCKS = [0, 1, 2, 3]


class Failing(CopiedMemory):
    """Fails as it is told to."""

    fails: str = ""

    def _try(self, what: str) -> None:
        if self.fails == what:
            raise MemoryError(f"no memory: {what}")

    def host_room(self, num_bytes: int) -> NDArray[np.uint8]:
        self._try("room")
        return super().host_room(num_bytes)

    def gather(
        self, block_ids: Sequence[int], room: NDArray[np.uint8], index: int = 0, count: int = 1
    ) -> None:
        self._try("gather")
        super().gather(block_ids, room, index, count)

    def scatter(
        self, room: NDArray[np.uint8], block_ids: Sequence[int], index: int = 0, count: int = 1
    ) -> None:
        self._try("scatter")
        super().scatter(room, block_ids, index, count)


@dataclass
class End:
    """An engine's hinge, with its KV on a device."""

    memory: Failing
    connector: KVConnector
    events: list[Report] = field(default_factory=list)
    """They have come, and nobody has asked for them yet."""

    def next_event(self) -> Report:
        deadline = Deadline("an event", PATIENCE_S)
        while not self.events:
            deadline.check()
            self.events += self.connector.poll_events()
            if not self.events:
                select.select([self.connector.wake_fd], [], [], deadline.left_s)
        return self.events.pop(0)


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with ExitStack() as stack:
        made = []
        for name in ("p", "d"):
            memory = Failing(np.random.default_rng(1).integers(0, 256, (8, BLOCK_BYTES), np.uint8))
            connector = open_connector(
                KVTransferConfig(), engine_id=name, epoch="1", compat=COMPAT, geometry=GEOMETRY,
                kv_memory=[memory.shard],
            )  # fmt: skip
            stack.callback(connector.close)
            made.append(End(memory, connector))
        yield made[0], made[1]


def load(prefill: End, decode: End, name: str) -> LoadEnded:
    params = prefill.connector.grant(name, BLOCKS, TOKENS, [1], None)
    decode.connector.hold(name, params)
    decode.connector.start_load(name, params, BLOCKS, BLOCKS, TOKENS, None)
    ended = decode.next_event()
    assert isinstance(ended, LoadEnded)
    assert isinstance(prefill.next_event(), LeaseEnded), "its blocks are free"
    return ended


@pytest.mark.parametrize(
    ("side", "what"),
    [("p", "room"), ("p", "gather"), ("d", "room"), ("d", "scatter")],
    ids=["to send", "the copy to send", "to receive", "the copy to the device"],
)
def test_what_fails_costs_one_transfer(ends: tuple[End, End], side: str, what: str) -> None:
    prefill, decode = ends
    decode.memory.blocks[:] = 0
    assert load(prefill, decode, "before").ok
    failing = prefill if side == "p" else decode
    failing.memory.fails = what
    ended = load(prefill, decode, "hopeless")
    assert (ended.ok, bool(ended.reason)) == (False, True)
    failing.memory.fails = ""
    decode.memory.blocks[:] = 0
    assert load(prefill, decode, "after").ok
    assert np.array_equal(decode.memory.blocks[:4], prefill.memory.blocks[:4])
    for end in ends:
        assert end.connector.stats().staging_bytes == 0
    assert decode.connector.stats().loads_in_flight == 0
