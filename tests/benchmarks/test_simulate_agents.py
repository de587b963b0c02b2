"""Who says that a next turn will come finds more of what it had before."""

from __future__ import annotations

import statistics

from benchmarks.simulate.agents import Engine, Traffic


def test_agents_that_tell_of_their_next_turns_find_more_where_others_flood_the_cache() -> None:
    traffic = Traffic(load=0.05, flood=2.0, seconds=150.0, warm_up=30.0)
    untold, told = (Engine(traffic, 2000, told=told, lies=False).run() for told in (False, True))
    assert untold.hit / untold.ideal < 0.97 <= told.hit / told.ideal


def test_with_a_disk_half_of_the_memory_answers_nearly_as_soon_as_all() -> None:
    traffic = Traffic(load=0.12, flood=0.0, seconds=150.0, warm_up=30.0)
    p90 = [
        statistics.quantiles(Engine(traffic, blocks, disk=disk).run().first_s, n=10)[8]
        for blocks, disk in ((800, False), (800, True), (40_000, False))
    ]
    assert p90[0] > 2 * p90[1]
    assert p90[1] < 1.5 * p90[2]
