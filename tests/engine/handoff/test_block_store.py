"""KV blocks on disk: what is found again, and what is never served."""

from __future__ import annotations

import os
import random
import resource
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from select import POLLIN, poll
from typing import Any

import msgspec
import pytest
from engine_kit.block_checks import check_blocks
from engine_kit.core import CLIENT, core_request, make_core, step, tokens
from engine_kit.handoff import prompt_of, save_toy
from waits import PATIENCE_S, Deadline

from diptych_engine.control.controls import Controls
from diptych_engine.control.core import EngineCore
from diptych_engine.handoff import block_store
from diptych_engine.handoff.block_files import BlockFiles
from diptych_kernels.made_once import PART
from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
)
from diptych_protocol.block_hashes import extend_block_hashes

BLOCK = 16
PROMPT = prompt_of(3, 4 * BLOCK + 5)
NUM_STORED = 4 * BLOCK
ROOM = 1 << 30
NUM_DAMAGED = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_toy(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "diptych" / "kv"


class Engine:
    """A core whose threads on the disk are heard."""

    def __init__(self, model: str, num_blocks: int = 64, kv_disk_bytes: int = ROOM) -> None:
        self.core: EngineCore = make_core(
            model, num_blocks=num_blocks, block_size=BLOCK, kv_disk_bytes=kv_disk_bytes
        )
        self._poll = poll()
        for descriptor in self.core.watched:
            self._poll.register(descriptor, POLLIN)

    def hear(self, timeout_ms: int = 0) -> None:
        for descriptor, _ in self._poll.poll(timeout_ms):
            self.core.watched[descriptor]()

    def run(self, request: EngineCoreRequest) -> list[EngineCoreOutput]:
        """Return the outputs, when all that the request has left is written."""
        outputs = self.until_finished(request)
        self.settle()
        return outputs

    def until_finished(self, request: EngineCoreRequest) -> list[EngineCoreOutput]:
        self.core.add(request, CLIENT)
        outputs: list[EngineCoreOutput] = []
        deadline = Deadline("the end of the request")
        while not (outputs and outputs[-1].finished):
            deadline.check()
            self.hear(0 if self.core.has_work else 100)
            outputs += step(self.core) if self.core.has_work else ()
        return outputs

    def settle(self) -> None:
        store, deadline = self.core.hand_offs.store, Deadline("threads at rest")
        while store is not None and not store.at_rest:
            deadline.check()
            self.hear(100)

    def answer(self, prompt: list[int] = PROMPT, name: str = "r") -> tuple[list[int], int]:
        """Return the tokens of an answer, and how many of its prompt were read from disk."""
        before = self.core.stats().disk_tokens
        outputs = self.run(core_request(name, prompt, max_tokens=8, ignore_eos=True))
        return tokens(outputs), self.core.stats().disk_tokens - before


@contextmanager
def started(model: str, **settings: int) -> Iterator[Engine]:
    engine = Engine(model, **settings)
    yield engine
    engine.core.close()


@pytest.fixture
def engine(model: str) -> Iterator[Engine]:
    with started(model) as made:
        yield made


@pytest.fixture
def expected(model: str) -> list[int]:
    """What an engine answers that computes everything; its blocks are on disk now."""
    with started(model) as engine:
        answer, read = engine.answer()
    assert read == 0
    return answer


def test_an_engine_that_is_started_again_finds_its_prefixes(
    model: str, expected: list[int]
) -> None:
    with started(model) as engine:
        outputs = engine.run(core_request("r", PROMPT, max_tokens=8, ignore_eos=True))
        assert tokens(outputs) == expected
        stats = engine.core.stats()
        assert stats.disk_tokens == NUM_STORED
        assert stats.prompt_tokens_computed == len(PROMPT) - NUM_STORED
        assert outputs[0].num_cached_tokens == NUM_STORED
        assert outputs[0].num_received_tokens == 0
        assert (stats.disk_reads, stats.disk_blocks_read) == (1, NUM_STORED // BLOCK)
        assert stats.seconds_reading_disk > 0


def prefetch(name: str, **told: Any) -> EngineCoreRequest:
    request = core_request(name, PROMPT, max_tokens=1)
    return msgspec.structs.replace(request, prefetches=True, session="s", **told)


def test_a_prefetch_computes_nothing_and_the_turn_after_it_reads_nothing(
    model: str, expected: list[int]
) -> None:
    with started(model, num_blocks=10) as engine:
        unknown = core_request("unknown", prompt_of(8, NUM_STORED), max_tokens=1)
        [nothing] = engine.run(msgspec.structs.replace(unknown, prefetches=True))
        [output] = engine.run(prefetch("ahead", pin_s=300))
        assert (nothing.num_cached_tokens, output.num_cached_tokens) == (0, NUM_STORED)
        assert output.finish_reason is nothing.finish_reason is FinishReason.LENGTH
        stats = engine.core.stats()
        assert (stats.prompt_tokens_computed, tokens([nothing, output])) == (0, [])
        assert (stats.disk_tokens, stats.blocks_pinned) == (NUM_STORED, NUM_STORED // BLOCK)
        engine.answer(prompt_of(4, 5 * BLOCK), "other")
        assert engine.answer() == (expected, 0), "what was pinned is still here"


def test_a_prefetch_ends_with_its_session_and_takes_no_blocks_that_are_in_use(
    model: str, expected: list[int]
) -> None:
    with started(model, num_blocks=10) as engine:
        engine.core.add(prefetch("ahead", pin_s=300), CLIENT)
        step(engine.core)
        last = core_request("last", prompt_of(4, BLOCK), max_tokens=1)
        engine.core.add(msgspec.structs.replace(last, session="s"), CLIENT)
        outputs = [*step(engine.core), *step(engine.core)]
        assert {each.request_id for each in outputs if each.finished} == {"ahead", "last"}
        engine.settle()
        assert (engine.core.stats().blocks_pinned, engine.core.stats().disk_tokens) == (0, 0)
        long = core_request("long", prompt_of(5, 6 * BLOCK), max_tokens=BLOCK, ignore_eos=True)
        engine.core.add(long, CLIENT)
        step(engine.core)
        [ahead] = engine.run(prefetch("late", pin_s=300))[-1:]
        assert ahead.num_cached_tokens == 0
        assert engine.core.scheduler.stats.num_preemptions == 0


def test_what_is_on_disk_is_not_read_where_the_router_has_found_it_slower(
    model: str, expected: list[int]
) -> None:
    with started(model) as engine:
        request = core_request("r", PROMPT, max_tokens=8, ignore_eos=True)
        outputs = engine.run(msgspec.structs.replace(request, leaves_disk=True))
        assert tokens(outputs) == expected
        assert engine.core.stats().disk_tokens == 0
        assert engine.core.stats().prompt_tokens_computed == len(PROMPT)


def test_what_is_on_disk_goes_on_where_memory_ends(
    model: str, expected: list[int], cache: Path
) -> None:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, PROMPT, BLOCK, None)
    for path in blocks_in(cache):
        if any(path.name.endswith(known.hex()) for known in hashes[:2]):
            path.unlink()
    with started(model) as engine:
        engine.core.scheduler.pool.unsaved = None
        engine.answer(PROMPT[: 2 * BLOCK + 1], "the beginning")
        assert engine.answer() == (expected, NUM_STORED - 2 * BLOCK)


def test_followers_hear_of_blocks_on_disk_as_of_those_in_memory_and_which_are_there_only(
    model: str, expected: list[int], cache: Path
) -> None:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, PROMPT, BLOCK, None)
    with started(model) as engine:
        pool = engine.core.scheduler.pool
        pool.record_changes(True)
        assert set(hashes) <= set(pool.remembered_hashes())
        assert set(hashes) <= set(pool.only_stored.remembered_hashes())
        for path in blocks_in(cache):
            flip(path)
        assert engine.answer() == (expected, 0)
        assert pool.take_changes().get(hashes[0], True), "it was computed again"
        assert not set(hashes) & set(pool.only_stored.remembered_hashes())
        Controls(engine.core).forget_everything()
        assert pool.remembered_hashes() == pool.only_stored.remembered_hashes() == []


def test_what_memory_has_forgotten_is_read_and_what_it_has_is_not(model: str) -> None:
    with started(model, num_blocks=10) as engine:
        expected, _ = engine.answer()
        assert engine.answer() == (expected, 0)
        engine.answer(prompt_of(4, 9 * BLOCK), "other")
        assert engine.answer() == (expected, NUM_STORED)


def blocks_in(cache: Path) -> list[Path]:
    return sorted(path for path in cache.glob("*/*") if path.is_file())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def rotate(paths: list[Path]) -> None:
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink(missing_ok=True)
    (path / "within").mkdir(parents=True)


def each(damage: Callable[[Path], object]) -> Callable[[list[Path]], object]:
    return lambda paths: [damage(path) for path in paths]


DAMAGES: dict[str, Callable[[list[Path]], object]] = {
    "torn": each(lambda path: os.truncate(path, path.stat().st_size // 2)),
    "empty": each(lambda path: os.truncate(path, 0)),
    "longer": each(lambda path: path.write_bytes(path.read_bytes() + b"x")),
    "flipped": each(flip),
    "under another's name": rotate,
    "a link": each(link),
    "a pipe": each(pipe),
    "a folder": each(folder),
    "gone": each(lambda path: path.unlink()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_as_it_was_written_is_computed(
    model: str, expected: list[int], cache: Path, damage: str
) -> None:
    DAMAGES[damage](blocks_in(cache))
    with started(model) as engine:
        assert engine.answer() == (expected, 0)
        assert engine.answer(name="again") == (expected, 0)
    assert not list(cache.glob(f"*/*{PART}"))


def test_a_prefix_is_read_up_to_the_first_block_that_is_damaged(
    model: str, expected: list[int], cache: Path
) -> None:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, PROMPT, BLOCK, None)
    (damaged,) = (path for path in blocks_in(cache) if path.name.endswith(hashes[2].hex()))
    flip(damaged)
    with started(model) as engine:
        assert engine.answer() == (expected, 2 * BLOCK)
        assert engine.core.stats().disk_blocks_damaged == 1


def test_blocks_of_others_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    files, others = BlockFiles(tmp_path, ROOM, b"this"), BlockFiles(tmp_path, ROOM, b"another")
    rng, hashes = random.Random(7), [bytes([number]) * 16 for number in range(8)]
    for block_hash in hashes:
        block = [memoryview(rng.randbytes(64))]
        for store in (files, others):
            store.write(store.name(block_hash), block)
    names = [files.name(block_hash) for block_hash in hashes]
    whole = [(files.folder / name).read_bytes() for name in names]
    foreign = [(others.folder / others.name(block_hash)).read_bytes() for block_hash in hashes]
    for number in range(NUM_DAMAGED):
        place = number % len(names)
        content = bytearray(whole[place])
        match rng.randrange(4):
            case 0:
                del content[rng.randrange(len(content)) :]
            case 1:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            case 2:
                content[:] = whole[place - 1]
            case _:
                content[:] = foreign[place]
        (files.folder / names[place]).write_bytes(content)
        assert not files.read(names[place], [memoryview(bytearray(64))])
    files.close()
    others.close()


def test_files_take_no_more_than_the_room_and_those_used_last_stay(
    model: str, expected: list[int], cache: Path
) -> None:
    size = blocks_in(cache)[0].stat().st_size
    with started(model, kv_disk_bytes=6 * size, num_blocks=24) as engine:
        assert engine.answer()[1] == NUM_STORED
        engine.answer(prompt_of(9, 3 * BLOCK), "newer")
        assert engine.core.stats().disk_blocks <= 6
    assert sum(path.stat().st_size for path in blocks_in(cache)) <= 6 * size
    with started(model, kv_disk_bytes=2 * size):
        assert sum(path.stat().st_size for path in blocks_in(cache)) <= 2 * size


@pytest.mark.parametrize("begins_anew", [False, True])
def test_of_a_prefix_that_was_used_long_ago_the_end_is_removed_first(
    model: str, expected: list[int], cache: Path, *, begins_anew: bool
) -> None:
    settings = {"kv_disk_bytes": 6 * blocks_in(cache)[0].stat().st_size}
    shutil.rmtree(cache)
    engine = Engine(model, **settings)
    assert engine.answer() == (expected, 0)
    if begins_anew:
        engine.core.close()
        engine = Engine(model, **settings)
    engine.answer(prompt_of(9, 4 * BLOCK), "other")
    engine.core.scheduler.pool.forget_all()
    assert engine.answer(name="again") == (expected, 2 * BLOCK)
    engine.core.close()


def test_engines_of_one_machine_have_a_folder_each(model: str, cache: Path) -> None:
    first, second = Engine(model), Engine(model)
    first.answer()
    assert second.answer()[1] == 0
    first.core.close()
    with started(model) as third:
        assert third.answer()[1] == NUM_STORED
    second.core.close()
    assert sorted(path.name for path in cache.iterdir()) == ["0", "1"]


CHANGES: dict[str, tuple[Callable[[Controls], object], bool]] = {
    "sleep": (lambda controls: controls.sleep(1), True),
    "forget_everything": (lambda controls: controls.forget_everything(), False),
}
"""Each with whether the weights are still those of the files."""


@pytest.mark.parametrize("change", CHANGES)
def test_when_weights_may_have_changed_nothing_more_is_read_or_written(
    engine: Engine, change: str
) -> None:
    call, same_weights = CHANGES[change]
    expected, _ = engine.answer()
    controls = Controls(engine.core)
    call(controls)
    engine.core.deferred.settle()
    if controls.is_sleeping():
        controls.wake_up()
    assert engine.answer(name="again") == (expected, NUM_STORED if same_weights else 0)
    written = engine.core.stats().disk_blocks_written
    engine.answer(prompt_of(5, 3 * BLOCK), "other")
    assert (engine.core.stats().disk_blocks_written > written) == same_weights


@pytest.mark.parametrize(
    "reset",
    [
        lambda controls: controls.reset_prefix_cache(),
        lambda controls: controls.reset_prefix_cache(reset_running_requests=True),
        lambda controls: controls.pause_generation(clear_cache=True),
    ],
)
def test_a_reset_removes_what_is_on_disk_and_what_comes_is_kept_again(
    engine: Engine, cache: Path, reset: Callable[[Controls], object]
) -> None:
    expected, _ = engine.answer()
    former = {path.stat().st_ino for path in blocks_in(cache)}
    controls = Controls(engine.core)
    done = reset(controls)
    engine.core.deferred.settle()
    assert done is True or (isinstance(done, Future) and done.result(0) is not False)
    controls.resume_generation()
    assert engine.core.stats().disk_blocks == 0
    assert engine.answer(name="again") == (expected, 0)
    later = {path.stat().st_ino for path in blocks_in(cache)}
    assert len(later) == len(former)
    engine.core.scheduler.pool.forget_all()
    assert engine.answer(name="from disk") == (expected, NUM_STORED)


def test_a_reset_that_comes_while_blocks_are_written_leaves_none_of_them(
    engine: Engine,
) -> None:
    engine.core.add(core_request("r", PROMPT, max_tokens=8, ignore_eos=True), CLIENT)
    step(engine.core)
    store = engine.core.hand_offs.store
    assert store is not None
    assert not store.at_rest
    Controls(engine.core).reset_prefix_cache(reset_running_requests=True)
    engine.core.abort(["r"])
    engine.settle()
    assert engine.core.stats().disk_blocks == 0


def test_a_prefix_from_a_disk_that_hangs_is_computed_and_the_next_does_not_wait(
    model: str,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(block_store, "READ_TIMEOUT_S", 0.1)
    goes_on, read = threading.Event(), BlockFiles.read

    def hangs(self: BlockFiles, name: str, parts: Sequence[memoryview]) -> bool:
        return goes_on.wait(PATIENCE_S) and read(self, name, parts)

    monkeypatch.setattr(BlockFiles, "read", hangs)
    with started(model) as engine:
        for name in ("one", "another"):
            request = core_request(name, PROMPT, max_tokens=8, ignore_eos=True)
            assert tokens(engine.until_finished(request)) == expected
            engine.core.scheduler.pool.forget_all(even_held=True)
        assert caplog.text.count("the disk hangs") == 1
        store = engine.core.hand_offs.store
        assert store is not None
        assert not store.at_rest
        goes_on.set()
        engine.settle()
        pool = engine.core.scheduler.pool
        assert pool.num_free == pool.num_blocks
        check_blocks(pool)
        assert engine.core.stats().disk_tokens == 0


def test_a_disk_that_fails_costs_nothing_but_the_tier(
    engine: Engine, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.rename(cache.with_name("away"))
    cache.touch()
    expected, _ = engine.answer()
    assert engine.answer() == (expected, 0)
    assert caplog.text.count("cannot be kept on disk") == 1, "said once, not for each block"
    assert engine.core.stats().disk_blocks_written == 0


def test_a_folder_that_was_removed_is_made_anew(engine: Engine, cache: Path) -> None:
    shutil.rmtree(cache / "0")
    engine.answer()
    assert len(blocks_in(cache)) == engine.core.stats().disk_blocks > 0


def test_a_folder_in_the_place_of_a_file_or_its_part_makes_way(tmp_path: Path) -> None:
    files, block = BlockFiles(tmp_path, ROOM, b"this"), [memoryview(bytes(range(64)))]
    for number, ending in enumerate(("", PART)):
        name = files.name(bytes([number]) * 16)
        folder(files.folder / f"{name}{ending}")
        files.write(name, block)
        found = bytearray(64)
        assert files.read(name, [memoryview(found)])
        assert found == block[0]
    files.close()


def test_a_full_disk_is_said_once_and_leaves_no_parts_of_blocks(
    engine: Engine, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        for seed in range(3):
            engine.answer(prompt_of(seed, NUM_STORED))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caplog.text.count("cannot be kept on disk") == 1, "said once, not for each batch"
    assert list((cache / "0").iterdir()) == []
    engine.answer()
    assert engine.core.stats().disk_blocks_written > 0


def test_a_reader_that_breaks_leaves_no_request_waiting(
    model: str, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bool:
        raise MemoryError

    monkeypatch.setattr(BlockFiles, "read", broken)
    with started(model) as engine:
        assert engine.answer() == (expected, 0)


def test_a_request_that_ends_while_its_prefix_is_read_leaves_nothing(
    model: str, expected: list[int]
) -> None:
    with started(model) as engine:
        engine.core.add(core_request("r", PROMPT, max_tokens=8), CLIENT)
        step(engine.core)
        engine.core.abort(["r"])
        engine.settle()
        engine.core.take_outputs()
        pool = engine.core.scheduler.pool
        assert pool.num_free == pool.num_blocks
        check_blocks(pool)
        assert engine.answer(name="next") == (expected, NUM_STORED)


def test_an_engine_that_ends_while_a_prefix_is_read_leaves_no_timer(
    model: str, expected: list[int]
) -> None:
    with started(model) as engine:
        engine.core.add(core_request("r", PROMPT, max_tokens=8), CLIENT)
        step(engine.core)
        store = engine.core.hand_offs.store
        assert store is not None
        assert not store.at_rest
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)


def test_a_folder_that_others_may_write_to_is_refused_by_name(model: str, cache: Path) -> None:
    (cache / "0").mkdir(parents=True)
    (cache / "0").chmod(0o777)
    with pytest.raises(InvalidRequestError, match=r"kv_disk_bytes.*others may write"):
        Engine(model)
