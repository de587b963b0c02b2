"""What may go wrong with machines and the network, by name, and when it does."""

from __future__ import annotations

from random import Random
from typing import Any

from sim_choice import Fault, later, some_engine
from sim_clients import CLIENT_FAULTS, abort
from sim_engine import SimEngine
from sim_network import Faults
from sim_world import LEASES, LOADS, STATUSES, Moment, World

from diptych_engine.scheduling.request import RequestStatus
from diptych_kv_transfer.tables.messages import VERSION

# --- engines and routers ------------------------------------------------------------------------


def crash(world: World, where: str) -> bool:
    engine = some_engine(world, where)
    if engine is None:
        return False
    _crash(world, engine)
    _come_back(world, engine)
    return True


def _crash(world: World, engine: SimEngine) -> None:
    world.note(f"{engine.shape.role} crashed")
    engine.crash()


def _come_back(world: World, engine: SimEngine) -> None:
    """What starts in its place may not fit the others."""
    changes: dict[str, Any] = world.random.choice(
        ({}, {}, {}, {"model": "n"}, {"model": "n"}, {"version": VERSION + 1})
    )
    later(world, 3.0, world.restart, engine.name, changes)


def plague(world: World, where: str) -> bool:
    """Engines die of requests, one after the other, a dozen times; or leave, to be there again."""
    end, deaths = world.random.choice((_crash, _leave)), 12

    def strike(name: str) -> None:
        nonlocal deaths
        engine = world.engines[name]
        if world.calm or not deaths:
            return
        deaths -= 1
        if engine.alive and not engine.stalled:
            end(world, engine)
            world.clock.after(0.01, world.restart, name)
        world.armed.append((AT_WORK, strike))

    world.armed.append((AT_WORK, strike))
    return True


def leave(world: World, where: str) -> bool:
    """SIGTERM, perhaps after a drain."""
    engine = some_engine(world, where)
    if engine is None or engine.stalled:
        return False

    def go() -> None:
        if engine.alive and not engine.stalled and not world.calm:
            _leave(world, engine)
            _come_back(world, engine)

    if world.random.random() < 0.5:
        go()
    else:
        world.call(engine, "drain")
        world.clock.after(world.random.random() * 0.5, go)
    return True


def _leave(world: World, engine: SimEngine) -> None:
    world.note(f"{engine.shape.role} left")
    engine.leave()


def drain(world: World, where: str) -> bool:
    engine = some_engine(world, where, "decode")
    if engine is None:
        return False
    world.call(engine, "drain")
    return True


def crash_router(world: World, where: str) -> bool:
    living = [name for name, router in world.routers.items() if router.alive]
    if not living:
        return False
    name = world.random.choice(living)
    world.crash_router(name)
    later(world, 1.0, world.start_router, name)
    return True


def turn(world: World, where: str) -> bool:
    """A router gives an engine the other role, and mostly its own again some time later."""
    engine = some_engine(world, where)
    living = [router for router in world.routers.values() if router.alive]
    if engine is None or not living:
        return False
    router = world.random.choice(living)
    router.turn(engine.name)
    later(world, 1.0, router.turn, engine.name)
    return True


def stall(world: World, where: str) -> bool:
    """SIGSTOP, and SIGCONT some time later."""
    engine = some_engine(world, where)
    if engine is None or engine.stalled:
        return False
    world.note(f"{engine.shape.role} stalled")
    engine.stall()
    world.fell_silent(engine.name)
    later(world, 8.0, world.resume, engine)
    return True


def pause(world: World, where: str) -> bool:
    engine = some_engine(world, where)
    if engine is None:
        return False
    mode = world.random.choice(("abort", "wait", "keep"))
    world.call(engine, "pause_generation", mode, world.random.random() < 0.5)
    world.clock.after(_a_while(world), world.call, engine, "resume_generation")
    if world.random.random() < 0.5:  # who is preempted is so for long only during a pause
        world.clock.after(world.random.random() * 0.2, abort, world, engine.name)
    return True


def sleep(world: World, where: str) -> bool:
    engine = some_engine(world, where)
    if engine is None:
        return False
    mode, level = world.random.choice(("abort", "wait", "keep")), world.random.randrange(3)
    world.call(engine, "sleep", level, mode)
    world.clock.after(_a_while(world), world.call, engine, "wake_up")
    return True


def _a_while(world: World) -> float:
    """Long enough for the call before to have arrived: an operator's calls may overtake each
    other."""
    return 0.01 + world.random.random() * 3


def forget(world: World, where: str) -> bool:
    engine = some_engine(world, where)
    if engine is None:
        return False
    running, connector = world.random.random() < 0.7, world.random.random() < 0.5
    world.call(engine, "reset_prefix_cache", running, connector)
    return True


# --- the network --------------------------------------------------------------------------------


def partition(world: World, where: str) -> bool:
    """Between two engines, or between a router or another client and an engine."""
    engine = some_engine(world, where)
    if engine is None:
        return False
    others = [*world.engines, *world.routers, "client"]
    others.remove(engine.name)
    other = world.random.choice(others)
    kind = "engines" if other in world.engines else "client" if other == "client" else "router"
    world.note(f"partition: {kind}")
    world.network.partition(engine.name, other)
    world.fell_silent(engine.name)
    later(world, 4.0, _heal, world, engine.name, other)
    return True


def _heal(world: World, one: str, other: str) -> None:
    if not world.network.reaches(one, other):
        world.note("partition healed")
        world.network.heal(one, other)


def cut(world: World, where: str) -> bool:
    """A connection between hinges breaks, or that of a router to an engine."""
    random = world.random
    if random.random() < 0.7:
        happened, what = world.network.cut_any(), "connection cut"
    else:
        router = random.choice(list(world.routers.values()))
        happened, what = router.cut(where or random.choice(list(world.engines))), "line cut"
    if happened:
        world.note(what)
    return happened


def noise(world: World, where: str) -> bool:
    """The network misbehaves from now on."""
    random = world.random
    name = random.choice(list(Faults.__dataclass_fields__))
    setattr(world.network.faults, name, random.choice((0.05, 0.3, 0.3, 1.0)))
    world.clock.after(random.random() * 4, setattr, world.network, "faults", Faults())
    return True


FAULTS: dict[str, Fault] = {
    **CLIENT_FAULTS,
    **{
        fault.__name__: fault
        for fault in (
            crash, plague, leave, drain, crash_router, stall, pause, sleep, forget, partition, cut,
            noise, turn,
        )
    },
}  # fmt: skip
NEVER_SEEN = {
    RequestStatus.FINISHED,
    RequestStatus.WAITING_FOR_GRAMMAR,
    RequestStatus.WAITING_FOR_STREAMING_REQ,
}
"""No table has finished requests, and nobody asks for a form or sends a prompt in pieces."""
MOMENTS: dict[Moment, str] = {
    **{("lease", index): f"a lease is {state.value}" for index, state in enumerate(LEASES)},
    **{("load", index): f"a load is {state.value}" for index, state in enumerate(LOADS)},
    **{("request", index): f"a request is {status.name.lower()}"
       for index, status in enumerate(STATUSES) if status not in NEVER_SEEN},
}  # fmt: skip


AT_WORK: Moment = ("request", STATUSES.index(RequestStatus.RUNNING))
WEIGHTS = {
    "a lease is promised": 3, "a lease is expired": 80, "a lease is withdrawn": 32,
    "a lease is released": 8, "a lease is revoked": 6, "a load is holding": 3,
    "a load is opening": 4, "a load is stopping": 2, "a load is kept": 24,
    "a request is running": 5, "a request is preempted": 12,
}  # fmt: skip
"""Moments that are seldom reached are chosen more often."""


def plan(world: World, name: str) -> None:
    """Let a fault happen at a random time, or as soon as an engine is in some state."""
    random = world.random
    moment = None if random.random() < 0.3 else _some_moment(random)
    when = "any time" if moment is None else MOMENTS[moment]

    def happen(where: str = "") -> None:
        if world.calm:
            return
        world.say(f"fault: {name} when {when}{where and f', at {where}'}")
        if FAULTS[name](world, where):
            world.note(at_moment(name, when))

    if moment is None:
        world.clock.after(world.random.random() * 0.5, happen)
    else:
        world.armed.append((moment, happen))


def _some_moment(random: Random) -> Moment:
    weights = [WEIGHTS.get(when, 1) for when in MOMENTS.values()]
    return random.choices(list(MOMENTS), weights)[0]


def at_moment(name: str, when: str) -> str:
    """The name under which a fault is counted."""
    return f"{name} when {when}"
