"""Both hinges of engines of different geometry, or with their KV on devices, real memory between
them, and faults: D's blocks change only when a lease was held, and then they hold P's KV."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from engine_kit.copied_memory import CopiedMemory
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from diptych_kv_transfer.memory.layout import GEOMETRY, Layout
from diptych_kv_transfer.memory.repack import repack
from diptych_kv_transfer.memory.shard import MemoryKind, MemoryRegion, Shard
from diptych_kv_transfer.regions import Regions
from diptych_kv_transfer.tables.actions import (
    Action,
    Connect,
    Connected,
    Event,
    Fence,
    LeaseEnded,
    LoadEnded,
    PeerLost,
    ReceiveBlocks,
    Received,
    ReceiveKey,
    Send,
    SendBlocks,
    SendKey,
    Stage,
    TransferEnded,
    Unpack,
)
from diptych_kv_transfer.tables.hinge import Hinge
from diptych_kv_transfer.tables.leases import LeaseTable
from diptych_kv_transfer.tables.load import LeaseRef
from diptych_kv_transfer.tables.loads import LoadTable
from diptych_kv_transfer.tables.messages import Hello, encode
from diptych_kv_transfer.tables.send_room import SendRoom

ADDRESS = ("p", 1)
LEASE_SECONDS, LOAD_SECONDS = 30.0, 60.0
LAYERS, HEADS, ROW_BYTES = 2, 4, 2
COMPAT: dict[str, str | int] = {
    "num_layers": LAYERS, "kv_heads": HEADS, "head_dim": 1, "dtype": "bfloat16",
}  # fmt: skip
FOREIGN, UNUSED = 238, 239


@dataclass
class Request:
    """One prompt on its way from P to D."""

    tokens: int
    cached: int
    """How many of D's blocks it has already."""
    early: bool
    kv: NDArray[np.uint8]
    """What P computes: a single block of all tokens."""
    theirs: list[int]
    """P's blocks."""
    ours: list[int]
    """D's blocks."""
    computed: int = 0
    """How many of P's blocks are computed."""
    ends: list[bool] = field(default_factory=list)

    @property
    def layout(self) -> Layout:
        """The layout of `kv`."""
        return Layout(LAYERS, HEADS, ROW_BYTES, self.tokens, 1)


class End:
    """One engine: its hinge, and what a driver does for it."""

    def __init__(
        self, name: str, geometry: tuple[int, int], blocks: int, room: int, *, on_device: bool
    ) -> None:
        said = dict(zip(GEOMETRY, geometry, strict=True))
        me = Hello(name, name, COMPAT, geometry=said)
        layout = Layout.of(COMPAT, said)
        assert layout is not None
        self.layout = layout
        copied = layout.block_bytes * layout.num_ranks if on_device else 0
        loads = LoadTable(me, LOAD_SECONDS, room, copied)
        self.hinge = Hinge(me, LeaseTable(LEASE_SECONDS), loads)
        self.memory = [
            np.full((blocks, layout.block_bytes), UNUSED, np.uint8) for _ in range(layout.num_ranks)
        ]
        shards = [
            CopiedMemory(blocks).shard if on_device else Shard.of(blocks) for blocks in self.memory
        ]
        self.regions = Regions(shards, layout, {MemoryKind.HOST})
        self.send_room = SendRoom(room // self.regions.block_bytes)
        self.inbox: deque[bytes] = deque()
        self.transfers: dict[int, tuple[Hashable, list[MemoryRegion]]] = {}
        """First tag -> key and regions."""
        self.incoming: Counter[str] = Counter()
        """Bytes that were received for each load."""


class World:
    """P, D and one connection at a time."""

    def __init__(
        self,
        giver: tuple[int, int],
        taker: tuple[int, int],
        prompts: list[tuple[int, int, bool]],
        room: int,
        on_device: tuple[bool, bool] = (False, False),
    ) -> None:
        """on_device: P's KV, and D's."""
        self.now, self.connection, self.up = 0.0, 0, False
        self.room, self.random = room, np.random.default_rng(len(prompts))
        self.requests: dict[str, Request] = {}
        used, filled = 1, 1
        for index, (tokens, cached, early) in enumerate(prompts):
            num_theirs, num_ours = -(-tokens // giver[0]), -(-tokens // taker[0])
            kv = self.random.integers(1, 200, (1, LAYERS * 2 * tokens * HEADS * ROW_BYTES))
            theirs = used + self.random.permutation(num_theirs)
            ours = filled + self.random.permutation(num_ours)
            cached = min(cached, (tokens - 1) // taker[0])
            self.requests[f"r{index}"] = Request(
                tokens, cached, early, kv.astype(np.uint8), theirs.tolist(), ours.tolist()
            )
            used, filled = used + num_theirs, filled + num_ours
        self.p = End("p", giver, used, room, on_device=on_device[0])
        self.d = End("d", taker, filled, room, on_device=on_device[1])
        self.staged = giver != taker or on_device[1]
        """Else blocks go straight to their places in D."""
        self.expected = [shard.copy() for shard in self.d.memory]
        self.received = self.sent = 0

    # --- what the engines ask -----------------------------------------------------------------

    def compute(self, name: str) -> None:
        """One of P's blocks more; the first time it is promised, the last time granted."""
        request, leases = self.requests[name], self.p.hinge.leases
        if request.computed == len(request.theirs):
            return
        if not request.computed:
            blocks = len(request.theirs)
            self.do(self.p, leases.promise(name, name, blocks, "digest", self.now))
        request.computed += 1
        tokens = min(request.tokens, request.computed * self.p.layout.block_size)
        source, target = [Shard.of(request.kv)], [Shard.of(memory) for memory in self.p.memory]
        repack(source, request.layout, target, self.p.layout, request.theirs, 0, tokens)
        if request.computed < len(request.theirs):
            self.do(self.p, leases.lend(name, request.theirs[: request.computed]))
        else:
            self.do(self.p, leases.grant(name, request.theirs, self.now))

    def start(self, name: str) -> None:
        request = self.requests[name]
        lease = LeaseRef(name, ADDRESS, "p", "p", LEASE_SECONDS)
        wanted = {i: request.ours[i] for i in range(request.cached, len(request.ours))}
        tag = 1000 * int(name[1:])
        start = partial(self.d.hinge.loads.start, name, lease, "digest", tag, wanted)
        self.do(self.d, start(request.tokens, self.now, early=request.early))

    def do(self, end: End, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Connect(address):
                    self.connection += 1
                    self.up = True
                    self.tell(self.p, Connected(self.connection, None))
                    self.tell(end, Connected(self.connection, address))
                case Send(peer, message):
                    if self.up and peer == self.connection:
                        (self.d if end is self.p else self.p).inbox.append(encode(message))
                case SendBlocks():
                    self.send([action] if not end.regions.on_device else end.send_room.ask(action))
                case ReceiveBlocks(_, name, tag, runs, staged):
                    targets = end.regions.incoming(runs, name if staged else None)
                    end.incoming[name] += sum(target.length for target in targets)
                    end.transfers[tag] = action.key, targets
                case Stage(name, staging):
                    end.regions.stage(name, staging)
                    held = [staging.num_bytes for staging, _ in end.regions._staged.values()]
                    assert sum(held) <= self.room or sum(held) - max(held) <= self.room
                case Unpack(name):
                    end.regions.unpack(name)
                case Fence():
                    self.cut()
                case LeaseEnded():
                    assert not self.sends_of(action.lease_id), "given back while they are sent"
                    for shard in self.p.memory:
                        shard[self.requests[action.request_id].theirs] = FOREIGN
                case LoadEnded(name, ok):
                    self.load_ended(name, ok=ok)

    def send(self, ready: list[SendBlocks]) -> None:
        regions = self.p.regions
        for action in ready:
            self.p.transfers[action.tag] = action.key, regions.outgoing(action.key, action.runs)
        assert len(regions._outgoing) <= 1 or regions.staged_bytes <= self.room

    def sends_of(self, lease_id: str) -> list[SendKey]:
        waiting = [send.key for send in self.p.send_room._waiting]
        keys = [*(key for key, _ in self.p.transfers.values()), *waiting]
        return [key for key in keys if isinstance(key, SendKey) and key.lease_id == lease_id]

    def load_ended(self, name: str, *, ok: bool) -> None:
        request = self.requests[name]
        keys = [key for key, _ in self.d.transfers.values() if isinstance(key, ReceiveKey)]
        assert name not in [key.request_id for key in keys]
        request.ends.append(ok)
        self.d.regions.drop(name)
        num_bytes = self.d.incoming.pop(name, 0)
        if ok:
            self.received += num_bytes
            start = request.cached * self.d.layout.block_size
            whole, blocks = request.layout, request.ours[request.cached :]
            ours = self.d.layout
            expected = [Shard.of(memory) for memory in self.expected]
            source = [Shard.of(request.kv)]
            repack(source, whole, expected, ours, blocks, start, request.tokens)

    # --- what the world does ------------------------------------------------------------------

    def tell(self, end: End, event: Event) -> None:
        match event:
            case TransferEnded(key) if end is self.p and end.regions.on_device:
                end.regions.sent(key)
                self.send(end.send_room.ended(key))
            case PeerLost(peer) if end is self.p:
                self.send(end.send_room.peer_lost(peer))
            case _:
                pass
        self.do(end, end.hinge.handle(event, self.now))

    def deliver(self, end: End, times: int = 1) -> None:
        if self.up and end.inbox:
            data = end.inbox.popleft()
            for _ in range(times):
                self.tell(end, Received(self.connection, data))

    def move(self, *, torn: bool = False) -> None:
        """Move the blocks of one transfer; torn: a part of them, and then the connection breaks."""
        both = self.p.transfers.keys() & self.d.transfers.keys()
        if not self.up or not both:
            return
        tag = min(both)
        (send, sources), (receive, targets) = self.p.transfers[tag], self.d.transfers[tag]
        assert [s.length for s in sources] == [t.length for t in targets]
        for source, target in zip(sources, targets, strict=True):
            count = source.length // 2 if torn else source.length
            target.array()[:count] = source.array()[:count]
            self.sent += count
        if torn:
            self.cut()
            return
        del self.p.transfers[tag], self.d.transfers[tag]
        self.tell(self.p, TransferEnded(send, True))
        self.tell(self.d, TransferEnded(receive, True))

    def cut(self) -> None:
        if not self.up:
            return
        self.up = False
        for end in (self.p, self.d):
            end.inbox.clear()
            transfers, end.transfers = end.transfers, {}
            for key, _ in transfers.values():
                self.tell(end, TransferEnded(key, False))
            self.tell(end, PeerLost(self.connection))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for end in (self.p, self.d):
            self.do(end, end.hinge.tick(self.now))

    def check(self) -> None:
        """What D has is what was handed over, and nothing else was touched."""
        for found, expected in zip(self.d.memory, self.expected, strict=True):
            np.testing.assert_array_equal(found, expected)
        loads = self.d.hinge.loads
        totals = loads.totals
        ended = totals.loads_completed + totals.loads_failed
        assert totals.loads_started == ended + loads.in_flight

    def settle(self) -> None:
        """Let P finish and everything arrive that still can; then let all deadlines pass."""
        for _ in range(60):
            for name in self.requests:
                self.compute(name)
            for end in (self.p, self.d):
                self.deliver(end)
            self.move()
        for _ in range(6):
            self.wait(LEASE_SECONDS + LOAD_SECONDS)
        self.check()
        assert not self.d.regions._staged
        assert not self.p.regions.staged_bytes
        assert not self.d.hinge.loads.loads
        assert not self.p.hinge.leases.leases


ON_DEVICE = st.tuples(st.booleans(), st.booleans())
GEOMETRIES = st.tuples(st.sampled_from([1, 2, 4, 16]), st.sampled_from([1, 2, 4, 8]))
PROMPTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 40), st.booleans()), min_size=1, max_size=4
)
ROOMS = st.sampled_from([1, 40 * LAYERS * 2 * HEADS * ROW_BYTES, 1 << 30])


def begin(world: World) -> None:
    for name, request in world.requests.items():
        if not request.early:
            for _ in request.theirs:
                world.compute(name)
        world.start(name)


@given(GEOMETRIES, GEOMETRIES, PROMPTS, ROOMS, ON_DEVICE)
@settings(max_examples=100)
def test_undisturbed_hand_offs_all_succeed_whatever_the_geometries_and_the_room(
    giver: tuple[int, int],
    taker: tuple[int, int],
    prompts: list[tuple[int, int, bool]],
    room: int,
    on_device: tuple[bool, bool],
) -> None:
    world = World(giver, taker, prompts, room, on_device)
    begin(world)
    for name, request in world.requests.items():
        if request.early:
            world.do(world.d, world.d.hinge.loads.adopt(name, world.now))
    for _ in range(400):
        for name in world.requests:
            world.compute(name)
        for end in (world.p, world.d):
            world.deliver(end)
        world.move()
        if world.staged:
            world.check()
    assert [request.ends for request in world.requests.values()] == [[True]] * len(prompts)
    if world.staged:
        assert world.received == world.sent, "all bytes were for a load that succeeded"
    world.settle()


FAULTS = [
    "compute", "to P", "to D", "to P twice", "to D twice", "blocks", "torn", "cut", "cancel",
    "adopt", "revoke", "wait 5", "wait 31", "wait 61",
]  # fmt: skip


@given(
    GEOMETRIES,
    GEOMETRIES,
    PROMPTS,
    ROOMS,
    ON_DEVICE,
    st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 3)), max_size=60),
)
@settings(max_examples=200)
def test_whatever_fails_no_block_of_ds_is_touched_but_by_what_was_held(
    giver: tuple[int, int],
    taker: tuple[int, int],
    prompts: list[tuple[int, int, bool]],
    room: int,
    on_device: tuple[bool, bool],
    steps: list[tuple[str, int]],
) -> None:
    if giver == taker and not on_device[1]:
        taker = (taker[0] * 2, taker[1])
    world = World(giver, taker, prompts, room, on_device)
    begin(world)
    for step, which in steps:
        name = f"r{which % len(prompts)}"
        match step.split():
            case ["compute"]:
                world.compute(name)
            case ["to", to, *twice]:
                world.deliver(world.p if to == "P" else world.d, 1 + len(twice))
            case ["blocks" | "torn" as how]:
                world.move(torn=how == "torn")
            case ["cut"]:
                world.cut()
            case ["cancel"]:
                world.do(world.d, world.d.hinge.loads.cancel(name, world.now))
            case ["adopt"]:
                world.do(world.d, world.d.hinge.loads.adopt(name, world.now))
            case ["revoke"]:
                world.do(world.p, world.p.hinge.leases.revoke(name))
            case ["wait", seconds]:
                world.wait(float(seconds))
        world.check()
    world.settle()
    for request in world.requests.values():
        first, *more = request.ends
        assert more in ([], [False]), "a kept load may end once more"
        assert not more or (request.early and first)
