"""What a router believes of a vLLM server's KV events."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import zmq
from free_ports import free_port
from hypothesis import given
from hypothesis import strategies as st
from vllm_kit.sent import request
from waits import PATIENCE_S

from diptych_protocol import EngineCoreRequest
from diptych_protocol.wire import PREFIX_KEY_BYTES, PrefixChanges
from diptych_router.engines.prefixes.block_keys import BlockNaming, block_keys
from diptych_router.engines.vllm.event_socket import EventSource, follow, source_of
from diptych_router.engines.vllm.kv_events import EventsError, RememberedBlocks

SIZE = 4
TOKENS = list(range(12))
FULL, WINDOW = "full_attention", "sliding_window"


def stored(*hashes: bytes, parent: bytes | None = None, start: int = 0, **more: Any) -> Any:
    """Blocks of `TOKENS` from a place on, as vLLM 0.32 publishes them."""
    tokens = TOKENS[start : start + SIZE * len(hashes)]
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent,
        "token_ids": tokens, "block_size": SIZE, "lora_id": None, "medium": "GPU",
        "lora_name": None, "extra_keys": None, "group_idx": 0, "kv_cache_spec_kind": FULL,
        **more,
    }  # fmt: skip


def removed(*hashes: bytes, **more: Any) -> Any:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def prompt(salt: str | None) -> EngineCoreRequest:
    return msgspec.structs.replace(request(prompt=len(TOKENS)), cache_salt=salt)


def keys(salt: str | None = None, blocks: int = 3) -> list[bytes]:
    """Those that a router looks up for a prompt of `TOKENS`."""
    found = block_keys(prompt(salt), TOKENS, BlockNaming(SIZE)).tobytes()
    cut = [found[at : at + PREFIX_KEY_BYTES] for at in range(0, len(found), PREFIX_KEY_BYTES)]
    return cut[:blocks]


def cut(joined: bytes) -> set[bytes]:
    width = PREFIX_KEY_BYTES
    return {joined[at : at + width] for at in range(0, len(joined), width)}


def remembered(*payloads: bytes) -> RememberedBlocks:
    blocks = RememberedBlocks(SIZE, 8)
    for payload in payloads:
        blocks.take(payload)
    return blocks


@pytest.mark.parametrize("salt", [None, "salt"])
def test_blocks_get_the_keys_that_prompts_are_looked_up_by(salt: str | None) -> None:
    first = [[salt], None] if salt else None
    blocks = remembered(
        batch(stored(b"a", b"b", extra_keys=first)), batch(stored(b"c", parent=b"b", start=8))
    )
    assert cut(blocks.everything()) == set(keys(salt))
    assert set(keys(None)).isdisjoint(keys("salt"))


@pytest.mark.parametrize(
    "event",
    [
        stored(b"c", parent=b"unknown"),
        stored(b"a", medium="CPU"),
        stored(b"a", lora_name="sql"),
        stored(b"a", group_idx=1, kv_cache_spec_kind=WINDOW),
        stored(b"a", extra_keys=[["image", 3]]),
        stored(b"a", b"b", extra_keys=[None, [["image", 3]]]),
        removed(b"unknown"),
    ],
)
def test_what_a_prompt_of_text_cannot_use_is_left_out(event: Any) -> None:
    assert remembered(batch(event)).everything() == b""


def test_of_several_groups_the_first_that_keeps_whole_prefixes_is_followed() -> None:
    blocks = remembered(batch(stored(b"w", kv_cache_spec_kind=WINDOW)))
    assert cut(blocks.everything()) == set(keys(blocks=1)), "until another is known"
    for event in (
        stored(b"a", b"b", group_idx=1),
        removed(b"w", group_idx=0),
        stored(b"x", b"y", b"z", group_idx=2),
        removed(b"b", group_idx=2),
    ):
        blocks.take(batch(event))
    assert cut(blocks.everything()) == set(keys(blocks=2))
    blocks.take(batch(removed(b"b", group_idx=1)))
    assert cut(blocks.everything()) == set(keys(blocks=1))


def test_a_model_with_windows_alone_is_followed_by_its_first_group() -> None:
    events = [stored(b"a", kv_cache_spec_kind=WINDOW), removed(b"b", group_idx=1)]
    assert cut(remembered(batch(*events)).everything()) == set(keys(blocks=1))


def test_each_change_is_told_once_and_what_was_undone_is_not() -> None:
    blocks = remembered(batch(stored(b"a", b"b")))
    assert cut(blocks.changes()[0]) == set(keys(blocks=2))
    blocks.take(
        batch(removed(b"b"), stored(b"c", parent=b"b", start=8), stored(b"b", parent=b"a", start=4))
    )
    assert blocks.changes() == (b"", b""), "nobody knows what follows b while it is gone"
    blocks.take(batch(CLEARED))
    assert cut(blocks.changes()[1]) == set(keys(blocks=2))
    assert blocks.everything() == b""


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"\xc1", "cannot be read"),
        (batch({"type": "Other"}), "cannot be read"),
        (batch(stored(b"a", token_ids=[1])), "are no 1 blocks"),
        (batch(stored(b"a", token_ids=[-1] * SIZE)), "cannot be read"),
        (batch(stored(b"a", block_size=8)), "blocks of 8 and 4"),
        (batch(*(stored(bytes([at])) for at in range(9))), "more than 8 blocks"),
    ],
)
def test_what_cannot_be_is_not_believed(payload: bytes, said: str) -> None:
    with pytest.raises(EventsError, match=said):
        remembered(payload)


@given(st.lists(st.sampled_from(["a", "b", "c", "remove", "clear", "tell"]), max_size=30))
def test_the_changes_told_add_up_to_what_is_remembered(steps: list[str]) -> None:
    blocks, told = remembered(), set[bytes]()
    events = {
        "a": stored(b"a"), "b": stored(b"b", parent=b"a", start=4),
        "c": stored(b"c", parent=b"b", start=8), "remove": removed(b"b"), "clear": CLEARED,
    }  # fmt: skip
    for step in [*steps, "tell"]:
        if step != "tell":
            blocks.take(batch(events[step]))
            continue
        added, gone = map(cut, blocks.changes())
        assert not added & told
        assert gone <= told
        told = (told - gone) | added
    assert told == cut(blocks.everything())


def page(**fields: Any) -> bytes:
    source = {"endpoint": "tcp://*:5557", "enable_kv_cache_events": True, "publisher": "zmq"}
    return msgspec.json.encode({"0": {**source, **fields}})


def test_a_source_is_a_port_of_the_server_itself() -> None:
    told = page(endpoint="tcp://10.9.9.9:5557", replay_endpoint="tcp://*:5558", topic="kv")
    assert source_of(told, "10.0.0.1") == EventSource(
        "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558", b"kv"
    )


@pytest.mark.parametrize(
    "told", [b"{}", page(publisher="null"), page(enable_kv_cache_events=False)]
)
def test_a_server_without_events_has_no_source(told: bytes) -> None:
    assert source_of(told, "h") is None


@pytest.mark.parametrize("told", [b"[]", page(endpoint="ipc:///x"), page(endpoint="tcp://*:0")])
def test_a_source_that_cannot_be_reached_is_refused(told: bytes) -> None:
    with pytest.raises(EventsError):
        source_of(told, "h")


# --- over ZMQ ---------------------------------------------------------------------------------


@dataclass
class Publisher:
    """Publishes as vLLM does; `kept` is what it sends again when asked."""

    ports: tuple[int, int] = field(default_factory=lambda: (free_port(), free_port()))
    kept: list[tuple[int, bytes]] = field(default_factory=list)
    times_asked: int = 0

    def __post_init__(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._events, self._replay = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self._events.bind(f"tcp://127.0.0.1:{self.ports[0]}")
        self._replay.bind(f"tcp://127.0.0.1:{self.ports[1]}")
        asyncio.get_running_loop().add_reader(self._replay.fileno(), self._answer)

    @property
    def source(self) -> EventSource:
        events, replay = (f"tcp://127.0.0.1:{port}" for port in self.ports)
        return EventSource(events, replay, b"")

    def has_subscriber(self) -> bool:
        return bool(self._events.poll(0))

    def publish(self, number: int, payload: bytes) -> None:
        self._events.send_multipart((b"", number.to_bytes(8, "big"), payload))

    def _answer(self) -> None:
        while self._replay.poll(0):
            client, _, _ = self._replay.recv_multipart()
            self.times_asked += 1
            for number, payload in self.kept:
                self._replay.send_multipart((client, b"", b"", number.to_bytes(8, "big"), payload))
            last = (-1).to_bytes(8, "big", signed=True)
            self._replay.send_multipart((client, b"", b"", last, b""))

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._replay.fileno())
        self._events.close(linger=0)
        self._replay.close(linger=0)


@pytest.fixture
async def publisher() -> Any:
    made = Publisher()
    yield made
    made.close()


async def test_a_follower_catches_up_and_notices_a_gap(
    publisher: Publisher, eventually: Any
) -> None:
    a, b = batch(stored(b"a")), batch(stored(b"b", parent=b"a", start=4))
    c = batch(stored(b"c", parent=b"b", start=8))
    publisher.kept = [(0, a)]
    told: list[PrefixChanges] = []
    task = asyncio.create_task(follow(publisher.source, remembered(), told.append))
    try:
        await eventually(lambda: told and publisher.has_subscriber())
        assert (told[0].whole, cut(told[0].added)) == (True, set(keys(blocks=1)))
        publisher.publish(0, a)
        publisher.publish(1, b)
        await eventually(lambda: len(told) == 2)
        assert (told[1].number, cut(told[1].added)) == (1, {keys()[1]}), "the first was known"
        publisher.kept += [(1, b), (2, c), (3, batch(removed(b"c")))]
        publisher.publish(3, publisher.kept[-1][1])
        await eventually(lambda: len(told) == 3)
        assert publisher.times_asked == 2
        assert (told[2].whole, cut(told[2].added)) == (True, set(keys(blocks=2)))
        publisher.publish(9, a)
        await eventually(lambda: len(told) == 4)
        assert (told[3].whole, cut(told[3].added)) == (True, {keys()[0]}), "nobody has the missed"
    finally:
        task.cancel()


async def test_a_follower_ends_at_what_it_cannot_believe(publisher: Publisher) -> None:
    publisher.kept = [(0, b"\xc1")]
    with pytest.raises(EventsError, match="cannot be read"):
        await asyncio.wait_for(
            follow(publisher.source, remembered(), lambda changes: None), PATIENCE_S
        )
