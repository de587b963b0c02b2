"""What processor time a decision of the router takes, with its look-up in the index.

    python -m benchmarks.routing_decision --engines 1000 --prompt 2048

The engines report, as real ones do, between decisions; half of them are prefill engines.
"""

from __future__ import annotations

import argparse
import time
from random import Random

import numpy as np

from diptych_protocol.engine_stats import SchedulerStats
from diptych_protocol.wire import PrefixChanges
from diptych_router.choosing.fleet_table import FleetTable
from diptych_router.choosing.policies import POLICIES
from diptych_router.choosing.policy import RequestView
from diptych_router.engines.block_holders import Keys
from diptych_router.engines.engine_table import Role
from diptych_router.engines.known_prefixes import BlockNaming

BLOCK_SIZE = 16
BLOCKS = 4096
"""Blocks that each engine has."""
PREFIXES = 64


def fleet(engines: int, policy: str) -> FleetTable:
    """Engines that have reported, and remember some of the common prefixes."""
    random = Random(0)
    table = FleetTable(POLICIES[policy], random.randrange)
    roles: tuple[Role, Role] = ("prefill", "decode")
    for number in range(engines):
        row = table.add(roles[number % 2], f"engine-{number}")
        row["usable"], row["block_size"] = True, BLOCK_SIZE
        table.is_up(row, "same")
        row.report(statistics(random), 0, 0.0)
        held = [prefix(random.randrange(PREFIXES), BLOCKS).tobytes() for _ in range(2)]
        table.known.take(row.key, PrefixChanges(0, b"".join(held), whole=True), 2 * BLOCKS)
    return table


def prefix(number: int, blocks: int) -> Keys:
    """Keys as those of a prompt's blocks: nothing tells one from another."""
    return np.random.default_rng(number).integers(1, 1 << 64, BLOCKS, np.uint64)[:blocks]


def statistics(random: Random) -> SchedulerStats:
    return SchedulerStats(
        num_running=random.randrange(64), blocks_total=50_000, blocks_free=random.randrange(50_000),
        queued_prompt_tokens=random.randrange(20_000),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="prefix_aware")
    parser.add_argument("--decisions", type=int, default=2000)
    args = parser.parse_args()
    table, random = fleet(args.engines, args.policy), Random(1)
    rows = [row for each in table.tables.values() for row in each.rows]
    deciding, reporting = [], []
    for turn in range(args.decisions):
        hashed = prefix(random.randrange(PREFIXES), args.prompt // BLOCK_SIZE)

        def keys(_: BlockNaming, hashed: Keys = hashed) -> Keys:
            return hashed

        view = RequestView(args.prompt, 200.0, keys=keys)
        begin = time.thread_time()
        decision = table.choose(view, turn * 1e-3)
        chosen = time.thread_time()
        if decision is not None:
            table.placed(view, decision, turn * 1e-3)
        placed = time.thread_time()
        random.choice(rows).report(statistics(random), turn, turn * 1e-3)
        deciding.append((chosen - begin, placed - chosen))
        reporting.append(time.thread_time() - placed)
    choice, placing = (np.median([pair[at] for pair in deciding]) * 1e6 for at in (0, 1))
    print(f"{args.engines} engines, prompts of {args.prompt} tokens, {args.policy}; medians:")
    print(f"decision with look-up {choice:.0f} us, to account for it {placing:.0f} us,")
    print(f"an engine's report {np.median(reporting) * 1e6:.0f} us")


if __name__ == "__main__":
    main()
