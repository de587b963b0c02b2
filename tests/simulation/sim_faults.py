"""What may go wrong, by name. Each is done to a world at some moment, and says whether there was
anything to do it to."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from sim_direct import FORGERIES, DirectClient, Params
from sim_engine import SimEngine
from sim_network import Faults
from sim_world import LEASES, LOADS, STATUSES, Moment, World

Fault = Callable[[World, str], bool]
"""Done to a world, at an engine where something is under way; empty: wherever it may be."""


def _engine(world: World, where: str, role: str = "") -> SimEngine | None:
    """Mostly the engine at which something happens, else any of a role that lives."""
    living = [e for e in world.engines.values() if e.alive and role in ("", e.shape.role)]
    if where and world.random.random() < 0.7:
        living = [e for e in living if e.name == where] or living
    return world.random.choice(living) if living else None


def _later(world: World, longest: float, call: Callable[..., None], *args: object) -> None:
    """In a while; or, now and then, not before everything is mended."""
    if world.random.random() < 0.85:
        world.clock.after(world.random.random() ** 2 * longest, call, *args)


# --- clients ------------------------------------------------------------------------------------


def abort(world: World, where: str) -> bool:
    open_streams = [s for s in world.streams.values() if not s.ended]
    if not open_streams:
        return False
    world.abort(world.random.choice(open_streams))
    return True


def burst(world: World, where: str) -> bool:
    for _ in range(4):
        world.submit()
    return True


def proxy(world: World, where: str) -> bool:
    """Somebody else's router, which knows only the public vocabulary, and may change its mind."""
    changes_its_mind = world.random.random() < 0.3

    def lent(client: DirectClient, params: Params) -> bool:
        if changes_its_mind:
            client.reject(params)
        return changes_its_mind

    return _prefill(world, lent)


def forge(world: World, where: str) -> bool:
    """Somebody who gets to know a lease asks a decode engine to use it as she says, instead of its
    owner or beside her."""
    random = world.random
    kind, beside = random.choice(list(FORGERIES)), random.random() < 0.3

    def lent(client: DirectClient, params: Params) -> bool:
        decode = _engine(world, where, "decode")
        if decode is None:
            return True
        world.note(f"forged: {kind}")
        told = random.choice(([random.randrange(1, 1000)], None))
        known = client.stream.prompt if random.random() < 0.2 else None
        stream = world.new_stream(
            after="f",
            prompt=known,
            length=params["remote_num_tokens"] + (told is None),
            first_token_ids=tuple(told or ()),
        )
        thief = world.direct[stream.request_id] = DirectClient(stream, decode, lambda: decode)
        forged = FORGERIES[kind](random.choice([params, *world.lent[-2:]]), random)
        thief.go_on({**forged, "first_token_ids": told})
        return not beside

    return _prefill(world, lent)


def _prefill(world: World, lent: Callable[[DirectClient, Params], bool]) -> bool:
    prefill, decode = _engine(world, "", "prefill"), _engine(world, "", "decode")
    if prefill is None or decode is None:
        return False
    stream = world.new_stream(after="x")
    client = DirectClient(
        stream,
        prefill,
        lambda: world.engines[decode.name],
        lent=lambda params: lent(client, params),
    )
    world.direct[stream.request_id] = client
    client.begin()
    return True


def reject(world: World, where: str) -> bool:
    """A late, early or mistaken word that a lease is not needed, to any engine."""
    engine = _engine(world, where)
    if engine is None or not world.lent:
        return False
    world.call(engine, "reject_kv_transfer", "somebody", world.random.choice(world.lent[-3:]))
    return True


# --- engines and routers ------------------------------------------------------------------------


def crash(world: World, where: str) -> bool:
    engine = _engine(world, where)
    if engine is None:
        return False
    world.note(f"{engine.shape.role} crashed")
    engine.crash()
    _later(world, 3.0, world.restart, engine.name, _model(world.random))
    return True


def leave(world: World, where: str) -> bool:
    """SIGTERM, perhaps after a drain."""
    engine = _engine(world, where)
    if engine is None or engine.stalled:
        return False
    if world.random.random() < 0.5:
        _leave(world, engine)
    else:
        world.call(engine, "drain")
        world.clock.after(world.random.random() * 0.5, _leave, world, engine)
    return True


def _leave(world: World, engine: SimEngine) -> None:
    if engine.alive and not engine.stalled and not world.calm:
        world.note(f"{engine.shape.role} left")
        engine.leave()
        _later(world, 3.0, world.restart, engine.name, _model(world.random))


def _model(random: Random) -> str | None:
    """What starts in its place may not fit the others."""
    return random.choice((None, None, "n"))


def drain(world: World, where: str) -> bool:
    engine = _engine(world, where, "decode")
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
    _later(world, 1.0, world.start_router, name)
    return True


def stall(world: World, where: str) -> bool:
    """SIGSTOP, and SIGCONT some time later."""
    engine = _engine(world, where)
    if engine is None or engine.stalled:
        return False
    world.note(f"{engine.shape.role} stalled")
    engine.stall()
    world.fell_silent(engine.name)
    _later(world, 8.0, engine.resume)
    return True


def pause(world: World, where: str) -> bool:
    engine = _engine(world, where)
    if engine is None:
        return False
    mode = world.random.choice(("abort", "wait", "keep"))
    world.call(engine, "pause_generation", mode, world.random.random() < 0.5)
    world.clock.after(world.random.random() * 3, world.call, engine, "resume_generation")
    return True


def sleep(world: World, where: str) -> bool:
    engine = _engine(world, where)
    if engine is None:
        return False
    mode, level = world.random.choice(("abort", "wait", "keep")), world.random.randrange(3)
    world.call(engine, "sleep", level, mode)
    world.clock.after(world.random.random() * 3, world.call, engine, "wake_up")
    return True


def forget(world: World, where: str) -> bool:
    engine = _engine(world, where)
    if engine is None:
        return False
    running, connector = world.random.random() < 0.5, world.random.random() < 0.5
    world.call(engine, "reset_prefix_cache", running, connector)
    return True


# --- the network --------------------------------------------------------------------------------


def partition(world: World, where: str) -> bool:
    """Between two engines, or between a router and an engine."""
    engine = _engine(world, where)
    if engine is None:
        return False
    others = [*world.engines, *world.routers, "client"]
    others.remove(engine.name)
    other = world.random.choice(others)
    world.network.partition(engine.name, other)
    world.fell_silent(engine.name)
    _later(world, 4.0, world.network.heal, engine.name, other)
    return True


def cut(world: World, where: str) -> bool:
    """A connection between hinges breaks."""
    return world.network.cut_any()


def noise(world: World, where: str) -> bool:
    """The network misbehaves from now on."""
    random = world.random
    name = random.choice(("lose", "duplicate", "reorder", "fail_transfer", "fail_connect",
                          "hang_connect"))  # fmt: skip
    setattr(world.network.faults, name, random.choice((0.05, 0.3)))
    world.clock.after(random.random() * 4, setattr, world.network, "faults", Faults())
    return True


FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        abort, burst, proxy, forge, reject, crash, leave, drain, crash_router, stall, pause, sleep,
        forget, partition, cut, noise,
    )
}  # fmt: skip
MOMENTS: list[Moment] = [
    *(("lease", index) for index in range(len(LEASES))),
    *(("load", index) for index in range(len(LOADS))),
    *(("request", index) for index in range(len(STATUSES))),
]


def plan(world: World, name: str) -> None:
    """Let a fault happen at a random time, or as soon as an engine is in some state."""

    def happen(where: str = "") -> None:
        if world.calm:
            return
        world.say(f"fault: {name} at {where or 'any time'}")
        if FAULTS[name](world, where):
            world.note(name)

    if world.random.random() < 0.5:
        world.clock.after(world.random.random() * 0.5, happen)
    else:
        world.armed.append((world.random.choice(MOMENTS), happen))
