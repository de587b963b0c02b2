"""What is believed of the KV events of vLLM's core, and what followers are told of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from cases import each
from free_ports import free_port
from hypothesis import given
from hypothesis import strategies as st
from vllm_kit.sent import request
from waits import PATIENCE_S

from diptych_protocol import EngineCoreRequest, LoRARequest
from diptych_protocol.wire import PREFIX_KEY_BYTES
from diptych_router.engines.known_prefixes import BlockNamer, BlockNaming
from diptych_vllm.serve.event_socket import EventSource, follow, source_of
from diptych_vllm.serve.kv_events import EventsError, RememberedBlocks

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
    found = BlockNamer().keys(prompt(salt), TOKENS, BlockNaming(SIZE)).tobytes()
    return cut(found)[:blocks]


def cut(found: bytes) -> list[bytes]:
    return [found[at : at + PREFIX_KEY_BYTES] for at in range(0, len(found), PREFIX_KEY_BYTES)]


def known(blocks: RememberedBlocks) -> set[bytes]:
    """The keys of all that is remembered."""
    return {mine[:PREFIX_KEY_BYTES] for mine in blocks.remembered_hashes()}


def changes(blocks: RememberedBlocks) -> tuple[set[bytes], set[bytes]]:
    """The keys that were added and removed since this was last asked."""
    told = blocks.take_changes()
    added = {mine[:PREFIX_KEY_BYTES] for mine, is_here in told.items() if is_here}
    return added, {mine[:PREFIX_KEY_BYTES] for mine, is_here in told.items() if not is_here}


def remembered(*payloads: bytes) -> RememberedBlocks:
    blocks = RememberedBlocks(SIZE, 8)
    blocks.record_changes(True)
    for payload in payloads:
        blocks.take(payload)
    return blocks


@pytest.mark.parametrize("salt", [None, "salt"])
def test_blocks_get_the_keys_that_prompts_are_looked_up_by(salt: str | None) -> None:
    first = [[salt], None] if salt else None
    blocks = remembered(
        batch(stored(b"a", b"b", extra_keys=first)), batch(stored(b"c", parent=b"b", start=8))
    )
    assert known(blocks) == set(keys(salt))
    assert set(keys(None)).isdisjoint(keys("salt"))


@pytest.mark.parametrize("salt", [None, "salt"])
def test_blocks_of_an_adapter_get_the_keys_of_its_name_and_content(salt: str | None) -> None:
    own = ["sql@1f"]
    news = batch(
        stored(b"a", b"b", lora_name=own[0], extra_keys=[[*own, salt] if salt else own, own]),
        stored(b"c", parent=b"b", start=8, lora_name=own[0], extra_keys=[own]),
    )
    with_it = msgspec.structs.replace(prompt(salt), lora_request=LoRARequest("sql", 3, "/sql"))
    expected = BlockNamer().keys(with_it, TOKENS, BlockNaming(SIZE, "1f")).tobytes()
    assert b"".join(sorted(known(remembered(news)))) == b"".join(sorted(cut(expected)))


@each(
    "event",
    [
        stored(b"c", parent=b"unknown"),
        stored(b"a", medium="CPU"),
        stored(b"a", lora_name="sql", extra_keys=[["sql"]]),
        stored(b"a", lora_name="sql@1f", extra_keys=[["sql@1f", "salt", "more"]]),
        stored(b"a", b"b", lora_name="sql@1f", extra_keys=[["sql@1f"], None]),
        stored(b"a", group_idx=1, kv_cache_spec_kind=WINDOW),
        stored(b"a", extra_keys=[["image", 3]]),
        stored(b"a", b"b", extra_keys=[None, [["image", 3]]]),
        removed(b"unknown"),
    ],
)
def test_what_a_prompt_of_text_cannot_use_is_left_out(event: Any) -> None:
    assert remembered(batch(event)).remembered_hashes() == []


def test_of_several_groups_the_first_that_keeps_whole_prefixes_is_followed() -> None:
    blocks = remembered(batch(stored(b"w", kv_cache_spec_kind=WINDOW)))
    assert known(blocks) == set(keys(blocks=1)), "until another is known"
    for event in (
        stored(b"a", b"b", group_idx=1),
        removed(b"w", group_idx=0),
        stored(b"x", b"y", b"z", group_idx=2),
        removed(b"b", group_idx=2),
    ):
        blocks.take(batch(event))
    assert known(blocks) == set(keys(blocks=2))
    blocks.take(batch(removed(b"b", group_idx=1)))
    assert known(blocks) == set(keys(blocks=1))


def test_a_model_with_windows_alone_is_followed_by_its_first_group() -> None:
    events = [stored(b"a", kv_cache_spec_kind=WINDOW), removed(b"b", group_idx=1)]
    assert known(remembered(batch(*events))) == set(keys(blocks=1))


def test_each_change_is_told_once_and_what_was_undone_is_not() -> None:
    blocks = remembered(batch(stored(b"a", b"b")))
    assert changes(blocks)[0] == set(keys(blocks=2))
    blocks.take(
        batch(removed(b"b"), stored(b"c", parent=b"b", start=8), stored(b"b", parent=b"a", start=4))
    )
    assert changes(blocks) == (set(), set()), "nobody knows what follows b while it is gone"
    blocks.take(batch(CLEARED))
    assert changes(blocks)[1] == set(keys(blocks=2))
    assert blocks.remembered_hashes() == []


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
        added, gone = changes(blocks)
        assert not added & told
        assert gone <= told
        told = (told - gone) | added
    assert told == known(blocks)


def published(**fields: Any) -> Any:
    """vLLM's `KVEventsConfig`."""
    usual = {
        "endpoint": "tcp://*:5557", "enable_kv_cache_events": True, "publisher": "zmq",
        "replay_endpoint": None, "topic": "",
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **fields})


def test_a_source_is_reached_where_vllm_has_bound_it() -> None:
    told = published(replay_endpoint="tcp://10.9.9.9:5558", topic="kv")
    expected = EventSource("tcp://127.0.0.1:5557", "tcp://10.9.9.9:5558", b"kv")
    assert source_of([told]) == expected
    assert source_of([published(endpoint="ipc:///x")]) == EventSource("ipc:///x", None, b"")


@pytest.mark.parametrize(
    "told",
    [
        [],
        [published(publisher="null")],
        [published(enable_kv_cache_events=False)],
        [published(), published()],
    ],
)
def test_an_engine_without_events_of_one_core_has_no_source(told: list[Any]) -> None:
    assert source_of(told) is None


@pytest.mark.parametrize("endpoint", ["inproc://x", "tcp://*:0"])
def test_a_source_that_cannot_be_reached_is_refused(endpoint: str) -> None:
    with pytest.raises(EventsError):
        source_of([published(endpoint=endpoint)])


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
    blocks, told = remembered(), list[set[bytes]]()
    task = asyncio.create_task(follow(publisher.source, blocks, lambda: told.append(known(blocks))))
    try:
        await eventually(lambda: told and publisher.has_subscriber())
        assert told == [set(keys(blocks=1))]
        publisher.publish(0, a)
        publisher.publish(1, b)
        await eventually(lambda: len(told) == 2)
        assert told[1] == set(keys(blocks=2))
        publisher.kept += [(1, b), (2, c), (3, batch(removed(b"c")))]
        publisher.publish(3, publisher.kept[-1][1])
        await eventually(lambda: len(told) == 3)
        assert publisher.times_asked == 2
        assert told[2] == set(keys(blocks=2))
        publisher.publish(9, a)
        await eventually(lambda: len(told) == 4)
        assert told[3] == {keys()[0]}, "nobody has the missed"
    finally:
        task.cancel()


async def test_a_follower_ends_at_what_it_cannot_believe(publisher: Publisher) -> None:
    publisher.kept = [(0, b"\xc1")]
    with pytest.raises(EventsError, match="cannot be read"):
        await asyncio.wait_for(follow(publisher.source, remembered(), lambda: None), PATIENCE_S)
