"""Choices that faults have in common."""

from __future__ import annotations

from collections.abc import Callable

from sim_engine import SimEngine
from sim_world import World

Fault = Callable[[World, str], bool]
"""Done to a world, at an engine where something is under way; empty: wherever it may be. False:
there was nothing to do it to."""


def some_engine(world: World, where: str, role: str = "") -> SimEngine | None:
    """Mostly the engine at which something happens, else any of a role that lives."""
    living = [e for e in world.engines.values() if e.alive and role in ("", e.shape.role)]
    if where and world.random.random() < 0.7:
        living = [e for e in living if e.name == where] or living
    return world.random.choice(living) if living else None


def later(world: World, longest: float, call: Callable[..., None], *args: object) -> None:
    """In a while; or, now and then, not before everything is mended."""
    if world.random.random() < 0.85:
        world.clock.after(world.random.random() ** 2 * longest, call, *args)
