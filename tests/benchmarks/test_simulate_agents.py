"""Who says that a next turn will come finds more of what it had before."""

from __future__ import annotations

from benchmarks.simulate.agents import Engine, Traffic


def test_agents_that_tell_of_their_next_turns_find_more_where_others_flood_the_cache() -> None:
    traffic = Traffic(load=0.05, flood=2.0, seconds=150.0, warm_up=30.0)
    untold, told = (Engine(traffic, 2000, told=told, lies=False).run() for told in (False, True))
    assert untold.hit / untold.ideal < 0.97 <= told.hit / told.ideal
