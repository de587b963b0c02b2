"""One schedule: a few requests and faults, and whether anything is left or lies in the end."""

from __future__ import annotations

from collections.abc import Callable

from sim_faults import FAULTS, plan
from sim_world import BOUND_S, World

from diptych_kv_transfer.leases import LeaseState


def run_schedule(seed: int, note: Callable[[str], None] | None = None) -> World:
    """Run the schedule that a seed stands for, to the end. Raises whatever it finds wrong.

    `note` is told everything that happens.
    """
    world = World(seed, note)
    random = world.random
    for _ in range(random.choice((0, 1, 1, 2, 2, 3, 4))):
        plan(world, random.choice(list(FAULTS)))
    for _ in range(random.randrange(2, 5)):
        world.submit()
        world.run(random.random() ** 2 * 0.1)
    world.run(0.3)
    # P3 holds while faults last, too: nothing is mended before all have got their answers.
    world.run_until(world.clock.now + BOUND_S, world.all_ended)
    world.come_to_rest()
    _count(world)
    return world


def _count(world: World) -> None:
    """Note what the world's parts have counted themselves."""
    for engine in world.engines.values():
        role, scheduler = engine.shape.role, engine.core.scheduler
        world.seen[f"preempted on {role}"] += scheduler.stats.num_preemptions
        world.seen["prefix evicted"] += engine.pool.evictions
        world.seen["stale read refused"] += engine.driver.hinge.leases.stale_reads_refused
        for kind, number in engine.driver.reports.items():
            world.seen[kind] += number
        for state in LeaseState:
            world.seen[f"lease {state.value}"] += 0
    for stream in world.streams.values():
        for mark, kind in ENDS.items():
            if mark in stream.ended:
                world.seen[kind] += 1
                break


ENDS = {
    "whole": "request whole",
    "overloaded": "request refused: overloaded",
    "retry later": "request refused: overloaded",
    "kv_transfer_params": "request refused: invalid",
    "no engine within": "request refused: no engine",
    "lease is for another prompt": "load failed: another prompt",
    "the lease has": "load failed: the lease had ended",
    "ended while its blocks were read": "load failed: ended during the read",
    "restarted or replaced": "load failed: another epoch",
    "cannot exchange KV": "load failed: another fingerprint",
    "cannot connect": "load failed: cannot connect",
    "connection to the prefill engine was lost": "load failed: connection lost",
    "no hand-off within": "load failed: time",
    "aborted": "request aborted",
}
"""Words in how a request ended, and what that shows."""
