"""The simulator's memory of prefixes forgets what the product's block pool forgets."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.simulator.prefixes import Chain, PrefixMemory, PromptPart
from diptych_engine.scheduling.block_pool import BlockPool

SIZE = 16
NUM_BLOCKS = 40
PART_BLOCKS = (1, 3, 2, 4)
"""By the place of a part in its prompt."""
Hashes = list[bytes]


@dataclass(frozen=True)
class Prompt:
    """A prompt whose beginning others may have, and whose end nobody has."""

    path: tuple[int, ...]
    own: int
    """Blocks."""
    stays: int
    """How many prompts come before its blocks are let go of."""

    @property
    def chain(self) -> Chain:
        ends = [sum(PART_BLOCKS[: place + 1]) * SIZE for place in range(len(self.path))]
        return tuple(PromptPart(self.key(place), end) for place, end in enumerate(ends))

    def key(self, place: int) -> int:
        return int("".join(map(str, self.path[: place + 1])))

    def hashes(self, number: int) -> Hashes:
        shared = [
            b"%d/%d" % (self.key(place), block)
            for place in range(len(self.path))
            for block in range(PART_BLOCKS[place])
        ]
        return shared + [b"own %d/%d" % (number, block) for block in range(self.own)]


prompts = st.builds(
    Prompt,
    st.lists(st.integers(1, 2), max_size=len(PART_BLOCKS)).map(tuple),
    st.integers(1, 6),
    st.integers(0, 1),
)


def by_memory(asked: list[Prompt]) -> list[int]:
    """Blocks that each prompt finds."""
    memory, found = PrefixMemory(NUM_BLOCKS, SIZE), []
    leaving: list[tuple[int, dict[int, int], int]] = []
    for number, prompt in enumerate(asked):
        for _, held, private in [each for each in leaving if each[0] < number]:
            memory.release(held, private)
        leaving = [each for each in leaving if each[0] >= number]
        chain, total = prompt.chain, len(prompt.hashes(number))
        expected, idle = memory.find(chain, total - 1)
        before = memory.free
        held = memory.take(chain, total - 1)
        found.append(sum(held.values()))
        assert (expected, idle) == (found[-1], before - memory.free)
        memory.allocate(total - found[-1])
        for place, part in enumerate(chain):
            held[part.key] = memory.remember(part.key, PART_BLOCKS[place], held.get(part.key, 0))
        leaving.append((number + prompt.stays, held, total - sum(held.values())))
    for _, held, private in leaving:
        memory.release(held, private)
    assert memory.free == NUM_BLOCKS
    return found


def by_pool(asked: list[Prompt]) -> list[int]:
    pool, found = BlockPool(NUM_BLOCKS), []
    leaving: list[tuple[int, list[int]]] = []
    for number, prompt in enumerate(asked):
        for _, blocks in [each for each in leaving if each[0] < number]:
            pool.release(blocks)
        leaving = [each for each in leaving if each[0] >= number]
        hashes = prompt.hashes(number)
        known = pool.match(hashes[:-1])
        pool.take(known)
        blocks = known + pool.allocate(len(hashes) - len(known))
        for block, block_hash in zip(blocks, hashes, strict=True):
            pool.remember(block, block_hash)
        found.append(len(known))
        leaving.append((number + prompt.stays, blocks))
    return found


@settings(max_examples=300)
@given(st.lists(prompts, min_size=3, max_size=40))
def test_every_prompt_finds_what_it_would_find_in_the_products_pool(asked: list[Prompt]) -> None:
    assert by_memory(asked) == by_pool(asked)


def test_prompts_are_found_in_part_and_forgotten_among_what_is_compared() -> None:
    first, other = Prompt((1, 1, 1), 6, 0), Prompt((2, 2, 2, 2), 6, 0)
    asked = [first, other, *[Prompt((), 5, 0)] * 4, first]
    assert by_memory(asked) == [0, 0, 0, 0, 0, 0, 4]
