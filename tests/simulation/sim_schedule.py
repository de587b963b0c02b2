"""One schedule: a few requests and faults, and whether anything is left or lies in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sim_faults import FAULTS, plan
from sim_world import BOUND_S, World


def run_schedule(
    seed: int,
    note: Callable[[str], None] | None = None,
    *,
    faults: Sequence[str] = tuple(FAULTS),
) -> World:
    """Run the schedule that a seed stands for, to the end. Raises whatever it finds wrong.

    `note` is told everything that happens. `faults`: names of those to choose from.
    """
    world = World(seed, note)
    random = world.random
    for _ in range(random.choice((0, 1, 2, 2, 3, 4, 6))):
        plan(world, random.choice(faults))
    pause_s = random.choice((0.02, 0.1, 0.5))
    for _ in range(random.randrange(2, 9)):
        world.submit()
        world.run(random.random() ** 2 * pause_s)
    world.run(0.3)
    # P3 holds while faults last, too: nothing is mended before all have got their answers.
    world.run_until(world.clock.now + BOUND_S, world.all_ended)
    world.come_to_rest()
    _count(world)
    return world


def _count(world: World) -> None:
    """Note what the world's parts have counted themselves."""
    for engine in world.incarnations:
        role, scheduler = engine.shape.role, engine.core.scheduler
        world.seen[f"preempted on {role}"] += scheduler.stats.num_preemptions
        world.seen[f"prefix evicted on {role}"] += engine.pool.evictions
        fetches = engine.core.hand_offs.fetches
        world.seen["prefix fetched"] += fetches.completed
        world.seen["prefix not fetched"] += fetches.failed
        world.seen["step launched ahead"] += engine.runner.steps_ahead
        world.seen.update(engine.driver.reports)
    for stream in world.streams.values():
        world.seen[next((ENDS[x] for x in ENDS if stream.ended.startswith(x)), stream.ended)] += 1


ENDS = {
    "whole": "request whole",
    "error": "request ended with an error",
    "aborted": "request aborted",
    "lost": "request lost with who served it",
    "refused": "request refused: no router",
    "given up": "request given up by its engine",
    "went no further": "request given away",
}
"""How requests end."""
