"""KV that outlives a core: which blocks the next one goes on with, and which it never takes."""

from __future__ import annotations

import gc
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_kit.block_checks import check_blocks
from engine_kit.core import CLIENT, DUMMY, core_request, make_core, run, step, tokens
from engine_kit.handoff import prompt_of
from engine_kit.toy_engine import make_request
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from model_kit.families import published
from waits import Deadline

from diptych_engine.control.controls import Controls
from diptych_engine.control.core import EngineCore
from diptych_engine.execution.kv_memory import KVMemory
from diptych_engine.handoff.kept_blocks import ORDER, RECORD, KeptBlocks, KeptFiles
from diptych_engine.handoff.kept_leases import LONGEST_S, SUM_BYTES, KeptLeases, Record, _sum
from diptych_engine.handoff.part_filled_blocks import record_of
from diptych_engine.scheduling.block_pool import BlockPool, Name
from diptych_engine.scheduling.request import Request
from diptych_engine.serving import build_core
from diptych_kernels.made_once import clear
from diptych_protocol import (
    EngineConfig,
    EngineDeadError,
    InvalidRequestError,
    KVTransferConfig,
    KVTransferParams,
)

BLOCKS, BYTES, RANKS = 16, 96, 2
BLOCK = 16
PARTS = 3
PROMPT, OTHER = prompt_of(3, 4 * BLOCK + 5), prompt_of(4, 4 * BLOCK + 5)
EXTENSION = "engine_kit.worker_extension:Extension"
NUM_DAMAGED = 1000
NAMES: list[Name] = [bytes([n]) * 16 for n in range(12)]
NAMES += [(name, 1) for name in NAMES[:4] if isinstance(name, bytes)]


@dataclass
class Part:
    """What is known of a block that is not full: its place, tokens, and their KV."""

    block: int
    token_ids: list[int]
    rows: bytes


class Life:
    """One core's pool, memory and seals, until it is killed."""

    holds_leases = True
    """It is not killed before it holds the blocks of the leases that it has found."""

    def __init__(
        self, folder: Path, blocks: int = BLOCKS, recipe: bytes = b"same", *, looks: bool = True
    ) -> None:
        """looks: until it has seen all that the last core has left."""
        self.pool, self.files = BlockPool(blocks), KeptFiles(folder, RANKS)
        self.memory = [
            KVMemory(blocks * BYTES, torch.uint8, torch.device("cpu"), fd, kept=True)
            .tensor.numpy()
            .reshape(blocks, BYTES)
            for fd in self.files.memory_fds
        ]
        with pytest.MonkeyPatch.context() as patch:
            if not looks:  # at more than one at once
                patch.setattr("diptych_engine.handoff.kept_blocks.BYTES_AT_ONCE", 0)
            self.kept = KeptBlocks(self.files, self.memory, self.pool, recipe, (PARTS, BLOCK))
        for lease in self.kept.left if self.holds_leases else ():
            self.pool.take(lease.block_ids)
        if looks:
            self.look()
        else:
            self.kept._at_once = blocks

    def lend(self, name: str, block_ids: list[int], expires_at: float = 1e10) -> None:
        self.pool.take(block_ids)
        lease = KVTransferParams(
            lease_id=name, epoch="e", tokens_digest="d" * 32, expires_at=int(expires_at)
        )
        lease.remote_block_ids = [block_ids]
        self.kept.granted(lease)

    def end_lease(self, name: str, block_ids: list[int]) -> None:
        self.kept.leases.ended(name)
        self.pool.release(block_ids)

    def leases(self) -> dict[str, tuple[list[int], bytes]]:
        """The open leases that the last core has left, and the contents of their blocks."""
        for lease in self.kept.left:
            assert (lease.epoch, lease.digest) == ("e", "d" * 32)
        return {x.lease_id: (x.block_ids, self.contents(x.block_ids)) for x in self.kept.left}

    def contents(self, block_ids: list[int]) -> bytes:
        return b"".join(map(self.content, block_ids))

    def look(self) -> None:
        while self.kept.unseen:
            self.kept.seal_more()

    def compute(self, block: int, content: bytes) -> None:
        for rank, part in enumerate(np.frombuffer(content, np.uint8).reshape(RANKS, BYTES)):
            self.memory[rank][block] = part

    def content(self, block: int) -> bytes:
        return b"".join(rank[block].tobytes() for rank in self.memory)

    def compute_row(self, block: int, row: int, rng: random.Random) -> None:
        for rank in self.memory:
            part = np.frombuffer(rng.randbytes(BYTES // BLOCK), np.uint8).reshape(PARTS, -1)
            rank[block].reshape(PARTS, BLOCK, -1)[:, row] = part

    def rows(self, block: int, count: int) -> bytes:
        """The KV of a block's first tokens."""
        return b"".join(
            rank[block].reshape(PARTS, BLOCK, -1)[:, :count].tobytes() for rank in self.memory
        )

    def parts(self) -> dict[bytes, Part]:
        """By the hash before them: what the pool knows of blocks that are not full."""
        found = self.pool._parts.items()
        return {
            parent: Part(block, token_ids, self.rows(block, len(token_ids)))
            for parent, (block, token_ids) in found
        }

    def begin(self, block: int, parent: bytes, count: int, rng: random.Random) -> Request:
        """A running request whose second block this is, and has so many tokens."""
        request = make_request("", [0] * BLOCK, 0, block_hashes=[parent], block_ids=[-1, block])
        request.num_computed_tokens = BLOCK
        for _ in range(count):
            self.go_on(request, rng)
        return request

    def go_on(self, request: Request, rng: random.Random) -> None:
        self.compute_row(request.block_ids[1], request.num_computed_tokens - BLOCK, rng)
        request.token_ids.append(rng.randrange(1 << 32))
        request.num_computed_tokens += 1

    def remembered(self) -> dict[Name, int]:
        return dict(self.pool._block_of)

    def fill(self, names: Sequence[Name], rng: random.Random) -> dict[Name, bytes]:
        """Compute, seal and release blocks of these names. Returns their contents."""
        contents = {name: rng.randbytes(RANKS * BYTES) for name in names}
        for name, block in zip(names, self.pool.allocate(len(names)), strict=True):
            self.compute(block, contents[name])
            block_hash, group = (name, 0) if isinstance(name, bytes) else name
            self.pool.remember(block, block_hash, group)
            self.pool.release([block])
        self.kept.seal()
        return contents

    def kill(self) -> None:
        """As the system does: no code of it runs any more, and its locks are free."""
        os.close(self.kept.wake_fd)
        self.pool.seals = None
        self.files.close()
        del self.kept, self.memory  # the mappings


class Lives(RuleBasedStateMachine):
    """What a core goes on with is exactly what the last one had sealed and not forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm"))  # where engines keep theirs
        self.rng = random.Random(0)
        self.sealed: dict[Name, int] = {}
        self.running: dict[int, Request] = {}
        self.parts: dict[int, tuple[bytes, Part]] = {}
        """By the block: the hash before it, and what was sealed of it."""
        self.granted: dict[str, list[int]] = {}
        self.leases: dict[str, tuple[list[int], bytes]] = {}
        """Those that were granted before blocks were sealed last, and have not ended."""
        self.begin({})

    @initialize(count=st.integers(0, 8), begun=st.integers(0, 4))
    def fill(self, count: int, begun: int) -> None:
        self.life.fill(NAMES[:count], self.rng)
        self.held += self.life.pool.allocate(begun)
        for n, block in enumerate(self.held):
            self.running[block] = self.life.begin(block, bytes([n]) * 16, 1 + n, self.rng)
        self.seal()

    def begin(self, sealed: dict[Name, bytes], taken: int = 0) -> None:
        """taken: how many blocks it takes before it looks at those that were not in use."""
        self.life = Life(self.folder, looks=False)
        assert self.life.leases() == self.leases
        lent = {block for blocks, _ in self.leases.values() for block in blocks}
        self.granted = {name: blocks for name, (blocks, _) in self.leases.items()}
        self.held = self.life.pool.allocate(min(taken, self.life.pool.num_free))
        places = self.sealed
        self.life.look()
        here = self.life.remembered()
        expected = {name: sealed[name] for name in sealed if places[name] not in self.held}
        assert {name: self.life.content(block) for name, block in here.items()} == expected
        assert set(self.life.kept.adopted) >= set(here.values())
        parts: dict[bytes, Part] = {}
        for block, (parent, part) in sorted(self.parts.items()):
            if block not in lent:
                parts.setdefault(parent, part)  # the first of several
        parts = {parent: part for parent, part in parts.items() if part.block not in self.held}
        assert self.life.parts() == parts
        self.sealed, self.running = here, {}
        self.parts = {part.block: (parent, part) for parent, part in parts.items()}

    @invariant()
    def blocks_are_sound(self) -> None:
        if hasattr(self, "life"):
            check_blocks(self.life.pool)

    @precondition(lambda self: self.life.pool.num_free)
    @rule(count=st.integers(1, 4), computed=st.booleans())
    def allocate(self, count: int, computed: bool) -> None:
        taken = self.life.pool.allocate(min(count, self.life.pool.num_free))
        self.sealed = {name: block for name, block in self.sealed.items() if block not in taken}
        for block in taken:
            self.parts.pop(block, None)
            content = self.rng.randbytes(RANKS * BYTES)
            self.life.compute(block, content if computed else content[:BYTES] + bytes(BYTES))
        self.held += taken

    @precondition(lambda self: self.held)
    @rule(name=st.sampled_from(NAMES), data=st.data())
    def remember(self, name: Name, data: st.DataObject) -> None:
        block_hash, group = (name, 0) if isinstance(name, bytes) else name
        block = data.draw(st.sampled_from(self.held))
        self.life.pool.remember(block, block_hash, group)
        if self.life.pool._hash_of[block] is not None:
            self.running.pop(block, None)
            self.parts.pop(block, None)

    @precondition(lambda self: self.held)
    @rule(parent=st.sampled_from(NAMES[:4]), count=st.integers(1, BLOCK - 1), data=st.data())
    def go_on(self, parent: bytes, count: int, data: st.DataObject) -> None:
        """A request computes more of the block that it has begun."""
        block = data.draw(st.sampled_from(self.held))
        lent = any(block in blocks for blocks in self.granted.values())
        if lent or self.life.pool._hash_of[block] is not None:
            return
        if block not in self.running:
            self.running[block] = self.life.begin(block, parent, 0, self.rng)
            self.parts.pop(block, None)
        request = self.running[block]
        for _ in range(min(count, 2 * BLOCK - 1 - request.num_computed_tokens)):
            self.life.go_on(request, self.rng)

    @precondition(lambda self: self.life.parts())
    @rule(data=st.data())
    def take_part(self, data: st.DataObject) -> None:
        """A request goes on with what the last core had begun, or with some of it."""
        parent, part = data.draw(st.sampled_from(sorted(self.life.parts().items(), key=repr)))
        self.life.pool.take([part.block])
        self.held.append(part.block)
        known = data.draw(st.integers(1, len(part.token_ids)))
        request = self.life.begin(part.block, parent, 0, self.rng)
        request.token_ids += part.token_ids[:known]
        request.num_computed_tokens += known
        self.running[part.block] = request

    @rule()
    def seal(self) -> None:
        self.life.kept.seal(self.running.values())
        self.sealed = self.life.remembered()
        for block, request in self.running.items():
            token_ids = request.token_ids[BLOCK:]
            if token_ids:
                part = Part(block, token_ids, self.life.rows(block, len(token_ids)))
                self.parts[block] = request.block_hashes[0], part
        for name, block_ids in self.granted.items():
            self.leases[name] = block_ids, self.life.contents(block_ids)

    @precondition(lambda self: self.held)
    @rule(count=st.integers(1, 4), data=st.data())
    def grant(self, count: int, data: st.DataObject) -> None:
        """Blocks that nobody computes any more, of which some are not full."""
        block_ids = data.draw(st.permutations(self.held))[:count]
        name = f"{len(self.granted):032x}"
        if name not in self.granted:
            self.life.lend(name, block_ids)
            self.granted[name] = block_ids
        for block in block_ids:
            self.running.pop(block, None)

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.granted)))
        block_ids = self.granted.pop(name)
        self.life.end_lease(name, block_ids)
        self.leases.pop(name, None)
        for block in block_ids:
            if block not in self.held and not self.life.pool._holders[block]:
                self.parts.pop(block, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.life.pool.release([block])
        if block not in self.held:
            self.running.pop(block, None)
            self.parts.pop(block, None)

    @rule(name=st.sampled_from(NAMES))
    def take(self, name: Name) -> None:
        block = self.life.remembered().get(name)
        if block is not None:
            self.life.pool.take([block])
            self.held.append(block)

    @rule(name=st.sampled_from(NAMES[:12]), seconds=st.sampled_from([0.0, 100.0]))
    def pin(self, name: bytes, seconds: float) -> None:
        self.life.pool.pin([name], "tenant", seconds)

    @rule()
    def forget(self) -> None:
        self.life.pool.forget_all(even_held=True)
        self.sealed, self.parts = {}, {}

    @rule(taken=st.integers(0, BLOCKS), hasty=st.booleans())
    def kill(self, taken: int, hasty: bool) -> None:
        left = {name: self.life.content(block) for name, block in self.sealed.items()}
        self.life.kill()
        if hasty:  # one that is killed before it has looked
            Life(self.folder, looks=False).kill()
        self.begin(left, taken)

    def teardown(self) -> None:
        self.life.kill()
        shutil.rmtree(self.folder)


TestLives = Lives.TestCase


def test_blocks_are_forgotten_in_the_order_in_which_the_last_core_would_have(
    tmp_path: Path,
) -> None:
    life, rng = Life(tmp_path), random.Random(1)
    life.fill(NAMES[:8], rng)
    pool, blocks = life.pool, life.remembered()
    for name in (NAMES[2], NAMES[0]):  # used again, and no more
        pool.take([blocks[name]])
        pool.release([blocks[name]])
    pool.take([blocks[NAMES[5]]])  # in use at the end, as what the last request computed
    head, tail = pool.allocate(2)
    for name, block in zip(NAMES[8:10], (head, tail), strict=True):
        assert isinstance(name, bytes)
        pool.remember(block, name)
    life.kept.seal()
    life.kill()
    life = Life(tmp_path)
    order: list[Name] = []
    for _ in range(BLOCKS):
        before = set(life.remembered())
        life.pool.allocate(1)
        order += before - set(life.remembered())
    assert order == [NAMES[n] for n in (1, 3, 4, 6, 7, 2, 0, 9, 8, 5)]


@dataclass
class Damage:
    """What is in a folder, as bytes that may be changed."""

    seals: bytearray
    size: int
    """The bytes of a seal."""
    memory: list[bytearray]
    stale: list[bytes]
    """The memory before the last blocks were computed."""

    def do(self, rng: random.Random) -> None:
        block, other = rng.sample(range(BLOCKS), 2)
        one, two = slice(block * BYTES, (block + 1) * BYTES), slice(other * BYTES, None)
        two = slice(two.start, two.start + BYTES)
        rank = rng.randrange(RANKS)
        memory = self.memory[rank]
        begin = len(self.seals) - BLOCKS * self.size
        first, second = (begin + self.size * number for number in (block, other))
        record, another = slice(first, first + self.size), slice(second, second + self.size)
        match rng.randrange(8):
            case 0:  # torn: the end is what was there before
                cut = block * BYTES + rng.randrange(BYTES)
                memory[cut : one.stop] = self.stale[rank][cut : one.stop]
            case 1:
                memory[rng.randrange(len(memory))] ^= 1 << rng.randrange(8)
            case 2:  # foreign
                memory[one] = rng.randbytes(BYTES)
            case 3:  # stale
                memory[one] = self.stale[rank][one]
            case 4:  # swapped
                memory[one], memory[two] = memory[two], memory[one]
            case 5:  # seals swapped
                self.seals[record], self.seals[another] = self.seals[another], self.seals[record]
            case 6:
                self.seals[first + rng.randrange(self.size)] ^= 1 << rng.randrange(8)
            case _:  # truncated, and as long as before when it is opened again
                cut = rng.randrange(len(memory) * 7 // 8, len(memory))
                memory[cut:] = bytes(len(memory) - cut)


@pytest.mark.parametrize(
    ("table", "size"), [("seals", RECORD.size), ("part-filled", record_of(BLOCK).size)]
)
def test_blocks_that_are_not_as_they_were_sealed_are_never_served(
    tmp_path: Path, table: str, size: int
) -> None:
    rng = random.Random(7)
    life = Life(tmp_path)
    folder = life.files.folder
    places = [folder / table, *(folder / f"memory-{rank}" for rank in range(RANKS))]

    def fill() -> tuple[dict[Name, bytes], dict[bytes, Part]]:
        life.pool.forget_all(even_held=True)
        if table == "seals":
            return life.fill(NAMES, rng), {}
        held = life.pool.allocate(BLOCKS)
        begun = [life.begin(n, bytes([n]) * 16, 1 + n % (BLOCK - 1), rng) for n in held]
        life.kept.seal(begun)
        life.pool._holders[:BLOCKS] = [0] * BLOCKS  # as the next core will find them
        life.pool._free.update(dict.fromkeys(held))
        return {}, {
            request.block_hashes[0]: Part(n, request.token_ids[BLOCK:], life.rows(n, 1 + n % 15))
            for n, request in zip(held, begun, strict=True)
        }

    fill()
    stale = [rank.tobytes() for rank in life.memory]
    contents, parts = fill()
    life.kill()
    whole = [path.read_bytes() for path in places]
    served = 0
    for _ in range(NUM_DAMAGED // 5):
        seals, *memory = map(bytearray, whole)
        damage = Damage(seals, size, memory, stale)
        for _ in range(5):
            damage.do(rng)
        for path, content in zip(places, (damage.seals, *damage.memory), strict=True):
            path.write_bytes(content)
        life = Life(tmp_path)
        for name, block in life.remembered().items():
            assert life.content(block) == contents[name]
        for parent, part in life.parts().items():
            assert (part.token_ids, part.rows) == (parts[parent].token_ids, parts[parent].rows)
            rest = life.content(part.block).count(0) - part.rows.count(0)
            assert rest == RANKS * BYTES - len(part.rows), "nothing else of it is left"
        served += len(life.kept.adopted) + len(life.parts())
        check_blocks(life.pool)
        life.kill()
    assert served > NUM_DAMAGED  # others were sound


def three_leases(life: Life, rng: random.Random) -> dict[str, tuple[list[int], bytes]]:
    """Each of two full blocks and one that is not full."""
    life.fill(NAMES[:6], rng)
    full, granted = life.remembered(), {}
    for n in range(3):
        [last] = life.pool.allocate(1)
        life.compute(last, rng.randbytes(RANKS * BYTES))
        block_ids = [full[NAMES[2 * n]], full[NAMES[2 * n + 1]], last]
        life.lend(f"{n:032x}", block_ids)
        life.pool.release([last])
        granted[f"{n:032x}"] = block_ids, life.contents(block_ids)
    life.kept.seal()
    return granted


def test_leases_that_are_not_as_they_were_granted_are_never_adopted(tmp_path: Path) -> None:
    rng = random.Random(7)
    life = Life(tmp_path)
    granted = three_leases(life, rng)
    folder = life.files.folder
    life.kill()
    records = sorted((folder / "leases").iterdir())
    others = folder / "seals", folder / "memory-0", folder / "memory-1"
    whole = {path: path.read_bytes() for path in (*records, *others)}
    num_adopted = 0
    for _ in range(NUM_DAMAGED // 5):
        for path in whole:
            content = bytearray(whole[path])
            match rng.randrange(12) if path in records else rng.randrange(8, 12):
                case 0 | 8:
                    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
                case 1:  # torn
                    del content[rng.randrange(len(content)) :]
                case 2:
                    content = bytearray(rng.randbytes(rng.randrange(300)))
                case 3:  # another one's
                    content = bytearray(whole[rng.choice(records)])
                case 4:
                    content += b"\0"
                case _:
                    pass
            path.write_bytes(content)
        life = Life(tmp_path)
        found = life.leases()
        assert found.items() <= granted.items()
        assert {path.name for path in (folder / "leases").iterdir()} == set(found)
        held = {block for block_ids, _ in found.values() for block in block_ids}
        assert life.pool.num_free == BLOCKS - len(held)
        check_blocks(life.pool)
        num_adopted += len(found)
        life.kill()
    assert num_adopted > NUM_DAMAGED // 5


@pytest.mark.parametrize(
    "change",
    [
        lambda _: {"block_ids": [BLOCKS]},
        lambda record: {"block_ids": [BLOCKS, *record.block_ids[1:]]},
        lambda record: {"block_ids": [*record.block_ids, 0]},
        lambda record: {"block_ids": record.block_ids[::-1]},
        lambda _: {"block_ids": [-1]},
        lambda record: {"seals": record.seals[:2]},
        lambda record: {"seals": [*record.seals[:2], (b"", 1 << 32, 0)]},
        lambda record: {"seals": [*record.seals[:2], (b"x" * 99, 0, 0)]},
        lambda _: {"expires_at": time.time() - LONGEST_S},
        lambda _: {"epoch": "e" * 300},
    ],
)
def test_a_lease_that_says_what_cannot_be_is_not_adopted(
    tmp_path: Path, change: Callable[[Record], dict[str, Any]]
) -> None:
    """Its checksum is right."""
    life = Life(tmp_path)
    name, *others = three_leases(life, random.Random(3))
    life.kill()
    path = life.files.leases / name
    record = msgspec.msgpack.decode(path.read_bytes()[SUM_BYTES:], type=Record)
    content = msgspec.msgpack.encode(msgspec.structs.replace(record, **change(record)))
    path.write_bytes(_sum(name, content) + content)
    life = Life(tmp_path)
    assert sorted(life.leases()) == others
    assert not path.exists()
    life.kill()


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_lease_makes_way(tmp_path: Path, make: Callable[[Path], None]) -> None:
    life = Life(tmp_path)
    first, second, third = three_leases(life, random.Random(3))
    life.kill()
    clear(life.files.leases / first)
    for name in (first, "other", second + "0"):
        make(life.files.leases / name)
    life = Life(tmp_path)
    assert sorted(life.leases()) == [second, third]
    life.kill()
    clear(life.files.leases)
    make(life.files.leases)
    life = Life(tmp_path)
    assert not life.leases()
    life.lend("f" * 32, life.pool.allocate(1))
    life.kept.seal()
    life.kill()
    life = Life(tmp_path)
    assert list(life.leases()) == ["f" * 32]
    life.kept.close(failed=False)
    assert not list(life.files.folder.iterdir())


def test_leases_of_another_recipe_are_left_to_nobody(tmp_path: Path) -> None:
    life = Life(tmp_path)
    three_leases(life, random.Random(3))
    life.kill()
    for recipe in (b"other", b"same"):
        life = Life(tmp_path, recipe=recipe)
        assert not life.leases()
        life.kill()


def test_a_core_that_is_killed_before_it_holds_lent_blocks_leaves_the_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path)
    granted = three_leases(life, random.Random(3))
    life.kill()
    monkeypatch.setattr(Life, "holds_leases", False)
    Life(tmp_path, looks=False).kill()
    monkeypatch.undo()
    life = Life(tmp_path, looks=False)
    assert life.leases() == granted
    life.look()
    check_blocks(life.pool)
    life.kill()


def test_a_lease_without_room_for_its_record_ends_with_its_core(tmp_path: Path) -> None:
    life = Life(tmp_path)
    (life.files.leases / f"{0:032x}").mkdir()  # where nothing can be written
    _, *others = three_leases(life, random.Random(3))
    life.kill()
    life = Life(tmp_path)
    assert sorted(life.leases()) == others
    life.kill()


@pytest.mark.parametrize("cut", ["seals", "memory-1"])
def test_files_that_are_too_short_cost_what_they_lack(tmp_path: Path, cut: str) -> None:
    life = Life(tmp_path)
    contents = life.fill(NAMES[:8], random.Random(3))
    place = life.files.folder / cut
    life.kill()
    os.truncate(place, place.stat().st_size // 4)
    life = Life(tmp_path)
    assert 2 <= len(life.kept.adopted) < 8
    for name, block in life.remembered().items():
        assert life.content(block) == contents[name]
    life.kill()


@pytest.mark.parametrize("place", ["seals", "memory-0", "memory-1", ""])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_makes_way_for_one(
    tmp_path: Path, place: str, make: Callable[[Path], None]
) -> None:
    life = Life(tmp_path)
    life.fill(NAMES[:4], random.Random(3))
    life.kill()
    path = life.files.folder / place
    clear(path)
    make(path)
    life = Life(tmp_path)
    assert not life.kept.adopted
    life.fill(NAMES[:4], random.Random(3))
    life.kill()
    life = Life(tmp_path)
    assert len(life.kept.adopted) == 4
    (life.files.folder / "others").mkdir()
    life.kept.close(failed=False)
    assert not list(life.files.folder.iterdir())


def test_another_recipe_or_geometry_finds_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    rng = random.Random(3)
    for other in ({"recipe": b"other"}, {"blocks": BLOCKS // 2}):
        life = Life(tmp_path)
        life.fill(NAMES[:4], rng)
        life.kept.seal([life.begin(life.pool.allocate(1)[0], bytes(16), 3, rng)])
        life.kill()
        for changed in (other, other, {}):
            life = Life(tmp_path, **changed)
            assert not life.kept.adopted
            assert not life.parts()
            life.kill()


def test_a_core_that_lives_keeps_its_files_to_itself(tmp_path: Path) -> None:
    first = Life(tmp_path)
    first.fill(NAMES[:4], random.Random(3))
    second = Life(tmp_path)
    assert not second.kept.adopted
    assert first.files.folder != second.files.folder
    first.kill()
    third = Life(tmp_path)
    assert len(third.kept.adopted) == 4
    third.kill()
    second.kill()


def test_memory_that_a_rank_of_the_last_core_may_still_write_to_is_not_taken(
    tmp_path: Path,
) -> None:
    life = Life(tmp_path)
    life.fill(NAMES[:4], random.Random(3))
    rank = os.dup(life.files.memory_fds[1])
    life.kill()
    life = Life(tmp_path)
    assert not life.kept.adopted
    os.pwrite(rank, b"\1" * BYTES, 0)
    assert not life.memory[1].any()
    os.close(rank)
    life.kill()


def test_a_folder_that_others_may_write_to_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / f"diptych-{os.geteuid()}").mkdir(mode=0o777)
    (tmp_path / f"diptych-{os.geteuid()}").chmod(0o777)
    with pytest.raises(InvalidRequestError, match="others may write") as caught:
        make_core(kv_keep=str(tmp_path))
    assert caught.value.param == "kv_keep"


def test_much_is_sealed_between_several_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych_engine.handoff.kept_blocks.BYTES_AT_ONCE", 3 * RANKS * BYTES)
    life = Life(tmp_path)
    life.fill(NAMES[:8], random.Random(3))
    for _ in range(2):
        assert os.eventfd_read(life.kept.wake_fd) == 1
        os.eventfd_write(life.kept.wake_fd, 1)
        life.kept.seal_more()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(life.kept.wake_fd)
    life.kill()
    life = Life(tmp_path)
    assert len(life.kept.adopted) == 8
    life.kill()


# --- cores --------------------------------------------------------------------------------------


def answer(core: EngineCore, prompt: list[int] = PROMPT) -> tuple[list[int], int | None]:
    """Return the tokens, and how many of the prompt were cached."""
    [outputs] = run(core, core_request("r", prompt, max_tokens=8, ignore_eos=True)).values()
    return tokens(outputs), outputs[0].num_cached_tokens


def fail(cores: list[EngineCore]) -> None:
    """End a core because of an error, and give its mappings back as the end of a process does."""
    cores[0].failed = True
    cores.pop().close()
    gc.collect()


@pytest.mark.parametrize(
    "kind", ["one group", "windows", pytest.param("two ranks", marks=pytest.mark.slow)]
)
def test_a_core_goes_on_with_what_the_one_before_it_had_computed(tmp_path: Path, kind: str) -> None:
    model = DUMMY + "&num_attention_heads=4&num_key_value_heads=2"
    if kind == "windows":
        model = str(tmp_path / "model")
        published("gemma3_text", Path(model))
    keep = tmp_path / "keep"
    settings: dict[str, Any] = {"kv_keep": str(keep), "block_size": BLOCK}
    settings["tensor_parallel_size"] = 2 if kind == "two ranks" else 1
    cores = [make_core(model, **settings)]
    expected, cached = answer(cores[0])
    assert not cached
    fail(cores)
    core = make_core(model, **settings)
    assert answer(core) == (expected, 4 * BLOCK)
    assert core.scheduler.stats.prompt_tokens_computed == len(PROMPT) - 4 * BLOCK
    core.close()
    core = make_core(model, **settings)
    assert answer(core) == (expected, 0), "an orderly end leaves nothing"
    core.close()
    assert not [path for path in keep.rglob("*") if path.is_file()]


def test_streams_of_a_killed_core_compute_one_token_before_they_go_on(tmp_path: Path) -> None:
    """Each token's KV of a block that was not full is found; so is that of a client that was not
    told of the last one, and of one that asks for something else from some token on."""
    prompts = {f"r{n}": prompt_of(n, 2 * BLOCK + 5 * n) for n in range(1, 4)}
    asked = {name: core_request(name, x, max_tokens=24) for name, x in prompts.items()}
    told = {name: list[int]() for name in prompts}
    cores = [make_core(kv_keep=str(tmp_path))]
    expected = {name: tokens(made) for name, made in run(cores[0], *asked.values()).items()}
    cores[0].call("reset_prefix_cache", [])
    for request in asked.values():
        cores[0].add(request, CLIENT)
    while min(map(len, told.values())) < 9:
        for output in step(cores[0]):
            told[output.request_id] = told[output.request_id] + output.new_token_ids
    fail(cores)
    core = make_core(kv_keep=str(tmp_path))
    told["r1"].pop()
    told["r3"][-4] += 1
    lost = {"r1": 0, "r2": 0, "r3": 3}
    answers = run(
        core,
        *(
            core_request(name, prompts[name], max_tokens=24, generated_token_ids=had)
            for name, had in told.items()
        ),
    )
    stats = core.scheduler.stats
    assert stats.prefix_cache_queries - stats.prefix_cache_hits == sum(1 + n for n in lost.values())
    for name in ("r1", "r2"):
        assert told[name] + tokens(answers[name]) == expected[name]
    core.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda controls: controls.forget_everything(),
        lambda controls: controls.collective_rpc("echo", [], {}),
    ],
)
def test_weights_that_may_be_new_end_what_was_kept(
    tmp_path: Path, change: Callable[[Controls], object]
) -> None:
    settings: dict[str, Any] = {"kv_keep": str(tmp_path), "worker_extension": EXTENSION}
    cores = [make_core(**settings)]
    answer(cores[0])
    change(Controls(cores[0]))
    answer(cores[0], OTHER)
    fail(cores)
    core = make_core(**settings)
    assert answer(core)[1] == 0
    assert answer(core, OTHER)[1] == 0
    core.close()


def test_a_pause_that_clears_the_cache_keeps_what_is_computed_then(tmp_path: Path) -> None:
    cores = [make_core(kv_keep=str(tmp_path))]
    answer(cores[0], OTHER)
    expected, _ = answer(cores[0])
    controls = Controls(cores[0])
    controls.pause_generation(clear_cache=True)
    cores[0].deferred.settle()
    controls.resume_generation()
    assert answer(cores[0]) == (expected, 0)
    del controls
    fail(cores)
    core = make_core(kv_keep=str(tmp_path))
    assert answer(core) == (expected, 4 * BLOCK)
    assert answer(core, OTHER)[1] == 0
    core.close()


def test_a_core_that_slept_keeps_what_it_computes_then(tmp_path: Path) -> None:
    cores = [make_core(kv_keep=str(tmp_path))]
    expected, _ = answer(cores[0])
    controls = Controls(cores[0])
    controls.sleep(1)
    cores[0].deferred.settle()
    controls.wake_up()
    assert answer(cores[0]) == (expected, 0)
    del controls
    fail(cores)
    core = make_core(kv_keep=str(tmp_path))
    assert answer(core) == (expected, 4 * BLOCK)
    core.close()


def test_a_stream_that_was_handed_off_outlives_its_core(tmp_path: Path) -> None:
    """Its last block is not full, and was recorded with fewer tokens before."""
    keeps: dict[str, Any] = {"kv_keep": str(tmp_path), "engine_id": "e"}
    lends = {**keeps, "kv_transfer": KVTransferConfig()}
    cores = [make_core(**lends)]
    cores[0].add(core_request("r", PROMPT, max_tokens=40, ignore_eos=True), CLIENT)
    for _ in range(6):
        step(cores[0])
    assert cores[0].call("hand_off", ["r"])
    [[output]] = cores[0].take_outputs().values()
    params = output.kv_transfer_params
    assert params is not None
    [blocks] = params["remote_block_ids"]
    cores[0].watched[kept_of(cores[0]).wake_fd]()
    fail(cores)
    cores = [make_core(**lends)]
    [left] = kept_of(cores[0]).left
    assert (left.lease_id, left.block_ids) == (params["lease_id"], blocks)
    stats = cores[0].stats()
    assert stats.kv_transfer is not None
    assert stats.kv_transfer.leases_held == 1
    assert stats.blocks_free == stats.blocks_total - len(blocks)
    fail(cores)
    core = make_core(**keeps)
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks, "it lends to nobody"
    core.close()


def kept_of(core: EngineCore) -> KeptBlocks:
    assert core.hand_offs.kept is not None
    return core.hand_offs.kept


def test_an_adopted_lease_that_ends_frees_its_blocks_and_its_record(tmp_path: Path) -> None:
    lends: dict[str, Any] = {"kv_keep": str(tmp_path), "kv_transfer": KVTransferConfig()}
    cores = [make_core(**lends)]
    lent = core_request(
        "r", PROMPT, max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}}
    )
    assert run(cores[0], lent)["r"][-1].kv_transfer_params
    fail(cores)
    core = make_core(**lends)
    assert len(kept_of(core).left) == 1
    assert core.connector is not None
    core.connector.revoke_all()
    deadline = Deadline("the end of the lease")
    while core.scheduler.pool.num_free < core.scheduler.pool.num_blocks:
        deadline.check()
        core.handle_transfer_events()
    assert not list(tmp_path.glob("*/*/leases/*"))
    core.close()


def test_a_gpu_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_core, "choose_device", lambda _: torch.device("cuda"))
    with pytest.raises(InvalidRequestError, match="kv_keep must be left out on a GPU"):
        make_core(kv_keep=str(tmp_path))


def test_a_folder_without_prefixes_is_refused_by_name() -> None:
    config = EngineConfig(model=DUMMY, kv_keep="/dev/shm", enable_prefix_caching=False)
    with pytest.raises(InvalidRequestError, match="kv_keep must be left out without"):
        config.check()


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"kv_keep": ""}, "needs kv_keep"), ({"data_parallel_size": 2}, "where data_parallel_size")],
)
def test_a_standby_that_could_not_take_over_is_refused(changes: dict[str, Any], what: str) -> None:
    config = EngineConfig(model=DUMMY, **{"kv_keep": "/dev/shm", "standby": True, **changes})
    with pytest.raises(InvalidRequestError, match=f"standby .*{what}"):
        config.check()


def test_a_core_that_stands_by_takes_nothing_before_its_turn(tmp_path: Path) -> None:
    cores = [make_core(kv_keep=str(tmp_path))]
    expected, _ = answer(cores[0])
    core = make_core(kv_keep=str(tmp_path), stand_by=lambda: fail(cores))
    assert answer(core) == (expected, 4 * BLOCK)
    core.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_core_that_stood_by_with_former_weights_never_serves(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    published("llama", folder)
    changed = partial(os.utime, folder / "model.safetensors", (1, 1))
    with pytest.raises(EngineDeadError, match="are others than were loaded"):
        make_core(str(folder), kv_keep=str(tmp_path / "kv"), stand_by=changed)


def test_a_folder_without_room_is_refused_by_name() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        files = KeptFiles(Path(folder), 1)
        with pytest.raises(InvalidRequestError, match="kv_keep: the folder has no room") as caught:
            KVMemory(1 << 43, torch.uint8, torch.device("cpu"), files.memory_fds[0], kept=True)
        assert caught.value.param == "kv_keep"
        files.close()


def test_an_order_is_the_beginning_of_a_record() -> None:
    """An empty record is one whose order is 0, whatever follows it."""
    assert RECORD.format.startswith(ORDER.format)


@pytest.mark.parametrize("lease_id", ["", ".", "..", "../precious"])
def test_the_end_of_a_lease_whose_id_another_engine_drew_removes_nothing(
    tmp_path: Path, lease_id: str
) -> None:
    (folder := tmp_path / "leases").mkdir()
    (precious := tmp_path / "precious").write_text("kept")
    (record := folder / ("a" * 32)).write_text("another lease")
    KeptLeases(folder).ended(lease_id)
    assert (precious.exists(), record.exists()) == (True, True)
