"""What the router's index of prefixes takes: memory for each block, and time for each look-up.

    python -m benchmarks.prefix_index --blocks 10000000 --engines 1000

Engines tell what they remember as a fleet does: each prefix of 128 blocks is held by a few engines.
The prompt of the look-up has 32,768 tokens, and a part of it is held by every tenth engine.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from sys import getsizeof

import numpy as np

from diptych_protocol.block_hashes import extend_block_hashes
from diptych_protocol.wire import PrefixChanges
from diptych_router.engines.block_holders import BlockHolders
from diptych_router.engines.known_prefixes import KnownPrefixes, keys_of, lengths

PREFIX_BLOCKS = 128
HOLDERS = 3
"""Engines that hold each prefix."""
BLOCK_SIZE = 16
PROMPT_TOKENS = 32_768
REPETITIONS = 200
MIB = 1 << 20


def filled(blocks: int, engines: int) -> tuple[KnownPrefixes, list[str], float]:
    """An index that knows so many different blocks; the engines' names; seconds to tell it."""
    random = np.random.default_rng(0)
    known, names = KnownPrefixes(), [f"engine-{number}" for number in range(engines)]
    messages: list[list[bytes]] = [[] for _ in names]
    for _ in range(blocks // PREFIX_BLOCKS):
        prefix = random.integers(1, 1 << 63, PREFIX_BLOCKS, dtype=np.uint64).tobytes()
        for holder in random.integers(0, engines, HOLDERS):
            messages[holder].append(prefix)
    begin = time.perf_counter()
    for name, prefixes in zip(names, messages, strict=True):
        known.take(name, PrefixChanges(0, b"".join(prefixes), whole=True))
        prefixes.clear()
    return known, names, time.perf_counter() - begin


def memory_of(held: BlockHolders) -> int:
    """Bytes of the table, and of its sets: each is an integer, and has a place in a list and in a
    dict."""
    table, sets = held._table, held._sets
    of_sets = sum(map(getsizeof, sets.bits)) + 8 * len(sets.bits) + getsizeof(sets._number_of)
    return table._keys.nbytes + table.values.nbytes + of_sets


def look_up(known: KnownPrefixes, names: list[str]) -> tuple[float, float]:
    """Milliseconds, at the median, to name a prompt's blocks, and to find who has how many."""
    tokens = list(range(PROMPT_TOKENS))
    hashes: list[bytes] = []
    extend_block_hashes(hashes, tokens, BLOCK_SIZE, None)
    for number, name in enumerate(names[::10]):
        held = hashes[: len(hashes) * (number % 7) // 7]
        known.take(name, PrefixChanges(1, keys_of(held).tobytes()))
    naming, finding = [], []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        fresh: list[bytes] = []
        extend_block_hashes(fresh, tokens, BLOCK_SIZE, None)
        keys = keys_of(fresh)
        named = time.perf_counter()
        lengths(known.index.match(keys).soon, known.num_places)
        naming.append(named - begin)
        finding.append(time.perf_counter() - named)
    return statistics.median(naming) * 1e3, statistics.median(finding) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=10_000_000)
    parser.add_argument("--engines", type=int, default=1000)
    args = parser.parse_args()
    known, names, seconds = filled(args.blocks, args.engines)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    named, found = look_up(known, names)
    held = known.index.held
    print(f"{held.num_blocks} blocks of {args.engines} engines, told in {seconds:.1f} s")
    memory = memory_of(held)
    print(f"index: {memory / MIB:.0f} MiB, {memory / held.num_blocks:.1f} bytes")
    print(f"a block; the process at its peak, messages included: {peak / MIB:.0f} MiB")
    print(f"{PROMPT_TOKENS} tokens: {named:.2f} ms to hash, {found:.2f} ms to look up")


if __name__ == "__main__":
    main()
