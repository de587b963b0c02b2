"""What may befall a service under load: one fault a run, its details drawn from the run's seed.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chaos_kit.faulty_network import BLACK_HOLE, Weather
from chaos_kit.hostile_bytes import knock_without_its_key, pester_core, pester_hinge
from chaos_kit.load import Load
from chaos_kit.service import LEASE_S, Engine, Service, environment
from chaos_kit.stale_references import KINDS, Forger
from engine_kit.wire import Client

from diptych_frontend.core_client.client import CoreClient
from diptych_frontend.core_client.curve import read_keys
from diptych_kv_transfer.signing.references import HingeKey
from diptych_protocol import EngineDeadError, UtilityError

CALL_TIMEOUT_S = 20.0


@dataclass
class Scene:
    """Where a fault plays, and what it has done so far."""

    service: Service
    load: Load
    rng: random.Random
    began: float = field(default_factory=time.monotonic)
    script: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.script.append(f"{time.monotonic() - self.began:.2f} s: {what}")

    def one_of(self, role: str) -> Engine:
        return self.rng.choice(self.service.of(role))

    def anybody(self) -> Engine:
        return self.rng.choice(self.service.engines)

    @contextlib.contextmanager
    def without_memory(self, engine: Engine) -> Iterator[None]:
        """The engine's address space does not grow meanwhile."""
        before = resource.prlimit(engine.pid, resource.RLIMIT_AS)
        pages = int(Path(f"/proc/{engine.pid}/statm").read_text().split()[0])
        limit = pages * resource.getpagesize()
        resource.prlimit(engine.pid, resource.RLIMIT_AS, (limit, before[1]))
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(engine.pid, resource.RLIMIT_AS, before)

    def while_s(self) -> float:
        """A short time most often, sometimes one longer than leases, loads and patience."""
        shortest, longest = self.rng.choice([(0.05, 0.5)] * 4 + [(0.5, 2.5)] * 3 + [(2.5, 6.0)])
        return self.rng.uniform(shortest, longest)


# --- processes ------------------------------------------------------------------------------------


async def _kill(scene: Scene, *engines: Engine) -> None:
    for engine in engines:
        scene.note(f"SIGKILL {engine.name}")
        engine.kill()
    await asyncio.sleep(scene.rng.choice([0.0, scene.rng.random()]))
    for engine in engines:
        scene.note(f"start {engine.name} again")
        engine.start()


async def kill_prefill(scene: Scene) -> None:
    await _kill(scene, scene.one_of("prefill"))


async def kill_decode(scene: Scene) -> None:
    await _kill(scene, scene.one_of("decode"))


async def kill_a_pair(scene: Scene) -> None:
    await _kill(scene, scene.one_of("prefill"), scene.one_of("decode"))


async def _stop(scene: Scene, engine: Engine) -> None:
    seconds = scene.while_s()
    scene.note(f"SIGSTOP {engine.name} for {seconds:.2f} s")
    engine.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        engine.signal(signal.SIGCONT)
    scene.note(f"SIGCONT {engine.name}")


async def stop_prefill(scene: Scene) -> None:
    await _stop(scene, scene.one_of("prefill"))


async def stop_decode(scene: Scene) -> None:
    await _stop(scene, scene.one_of("decode"))


async def out_of_memory(scene: Scene) -> None:
    """The system has no more memory for an engine, which ends of it or manages without; it may not
    do neither, with requests that wait."""
    engine, seconds = scene.anybody(), scene.while_s()
    with scene.without_memory(engine):
        count = scene.rng.randrange(20, 60)
        scene.note(f"{engine.name} gets no memory for {seconds:.2f} s, and {count} requests come")
        scene.load.burst(count)
        await asyncio.sleep(seconds)
    try:
        await engine.stats()
    except EngineDeadError as exc:  # it ends, or has ended
        scene.note(f"{exc}; start {engine.name} again")
        engine.kill()
        engine.start()


async def lose_the_router(scene: Scene) -> None:
    """Its connections end, with requests in all states on them; another one starts."""
    scene.note("the router goes")
    scene.service.close_router()
    await asyncio.sleep(scene.rng.random() * 0.5)
    scene.note("a new router")
    scene.service.open_router()


# --- clients --------------------------------------------------------------------------------------


async def impatient_clients(scene: Scene) -> None:
    scene.load.abort_share = scene.rng.uniform(0.3, 1.0)
    scene.note(f"{scene.load.abort_share:.0%} of the clients leave early")
    await asyncio.sleep(scene.rng.uniform(0.5, 1.5))
    scene.load.abort_share = 0.0


async def slow_readers(scene: Scene) -> None:
    """Clients that take their answers slowly, while an engine is stopped beside them."""
    scene.load.slow_share = scene.rng.uniform(0.3, 1.0)
    scene.note(f"{scene.load.slow_share:.0%} of the clients read slowly")
    await _stop(scene, scene.anybody())
    scene.load.slow_share = 0.0


async def overload(scene: Scene) -> None:
    count = scene.rng.randrange(40, 160)
    scene.note(f"{count} requests at once")
    scene.load.burst(count)


# --- owners ---------------------------------------------------------------------------------------


async def _call(scene: Scene, engine: Engine, method: str, *args: object) -> None:
    scene.note(f"{engine.name}: {method}{args}")
    await engine.probe.call(method, *args, timeout_s=CALL_TIMEOUT_S)


async def pause(scene: Scene) -> None:
    engine, mode = scene.anybody(), scene.rng.choice(["abort", "wait", "keep"])
    await _call(scene, engine, "pause_generation", mode, scene.rng.random() < 0.5)
    await asyncio.sleep(scene.while_s() / 2)
    await _call(scene, engine, "resume_generation")


async def sleep(scene: Scene) -> None:
    engine = scene.anybody()
    await _call(scene, engine, "sleep", 1, scene.rng.choice(["abort", "wait"]))
    await asyncio.sleep(scene.while_s() / 2)
    await _call(scene, engine, "wake_up")


async def forget_prefixes(scene: Scene) -> None:
    engine = scene.anybody()
    for _ in range(scene.rng.randrange(1, 20)):
        await _call(scene, engine, "reset_prefix_cache", scene.rng.random() < 0.5, True)
        await asyncio.sleep(0.02)


async def drain_and_replace(scene: Scene) -> None:
    """As a rollout does: it hands its streams on, and ends by SIGTERM."""
    engine = scene.anybody()
    await _call(scene, engine, "drain")
    await asyncio.sleep(scene.rng.random() * 0.5)
    scene.note(f"SIGTERM {engine.name}")
    engine.signal(signal.SIGTERM)
    await asyncio.sleep(scene.rng.random() * 0.3)
    await _kill(scene, engine)


# --- strangers ------------------------------------------------------------------------------------


async def hostile_bytes(scene: Scene) -> None:
    engine = scene.anybody()
    seed, count = scene.rng.randrange(2**32), 300
    scene.note(f"{count} mutated messages for {engine.name}, seed {seed}")
    pester_core(engine.process.endpoint, random.Random(seed), count)
    await asyncio.to_thread(visit_hinge, engine, random.Random(seed), count // 10)


def visit_hinge(engine: Engine, rng: random.Random, count: int) -> int:
    """`pester_hinge` from the router's host."""
    with environment(engine.ucx_settings(0)):
        return pester_hinge(engine.hinge, HingeKey.of(read_keys(engine.keys_dir)), rng, count)


async def strangers(scene: Scene) -> None:
    """Who has no key comes to a hinge, sends what nobody waits for, and comes again."""
    engine, seconds = scene.anybody(), scene.while_s()
    rng = random.Random(scene.rng.randrange(2**32))
    scene.note(f"strangers at the hinge of {engine.name} for {seconds:.2f} s")

    def knock() -> int:
        with environment(engine.ucx_settings(0)):
            return knock_without_its_key(engine.hinge, rng, seconds)

    scene.note(f"they came {await asyncio.to_thread(knock)} times")


async def stale_rejections(scene: Scene) -> None:
    """Rejections of leases that never were, were others' or are over."""
    engine = scene.one_of("prefill")
    line = CoreClient(
        f"tcp://{engine.address}",
        read_keys(scene.service.folder),
        on_outputs=lambda _: None,
        on_lost=lambda _: None,
    )
    try:
        description = await line.describe(10.0)
        scene.note(f"rejections for {engine.name}")
        for _ in range(50):
            params = {
                "do_remote_prefill": True,
                "lease_id": f"{scene.rng.getrandbits(128):032x}",
                "remote_engine_id": scene.rng.choice([description.engine_id, "somebody"]),
                "remote_host": "127.0.0.1",
                "remote_port": scene.rng.choice([1, 9]),
                "remote_num_tokens": 5,
                "remote_block_ids": [[scene.rng.randrange(1000)]],
                "epoch": scene.rng.choice([description.epoch, "gone"]),
            }
            with contextlib.suppress(UtilityError):
                await line.call("reject_kv_transfer", "nobody", params, timeout_s=10.0)
    except EngineDeadError:
        scene.note("it is not reachable")
    finally:
        line.close()


async def stale_references(scene: Scene) -> None:
    """Somebody takes leases that are another's, over or invented to a decode engine."""
    prefill, decode = scene.one_of("prefill"), scene.one_of("decode")
    rng = random.Random(scene.rng.randrange(2**32))
    kinds = [*KINDS, *scene.rng.choices(KINDS[:-1], k=10)]

    def play() -> list[str]:
        clients = Client(prefill.process.endpoint), Client(decode.process.endpoint)
        forger = Forger(*clients, scene.load.questions, LEASE_S, rng)
        try:
            return [wrong for kind in kinds if (wrong := forger.try_one(kind))]
        finally:
            for client in clients:
                client.socket.close()

    scene.note(f"bad references from {prefill.name} for {decode.name}")
    wrong = await asyncio.to_thread(play)
    if wrong:
        raise AssertionError("; ".join(wrong))


# --- the network ----------------------------------------------------------------------------------


def _link(scene: Scene) -> tuple[int, int, str]:
    """Two hosts that talk to each other: prefill and decode, or the router and an engine."""
    prefill, decode = scene.one_of("prefill"), scene.one_of("decode")
    one = scene.rng.choice([prefill, prefill, None])
    if one is not None:
        return one.host, decode.host, f"{one.name} and {decode.name}"
    other = scene.anybody()
    return 0, other.host, f"the router and {other.name}"


async def _weather(scene: Scene, what: str, weather: Weather, *, both_ways: bool) -> None:
    network = scene.service.network
    if network is None:
        raise RuntimeError("this service has no network of its own")
    one, other, names = _link(scene)
    if scene.rng.random() < 0.5:
        one, other = other, one
    seconds = scene.while_s()
    ways = "both ways" if both_ways else "one way"
    scene.note(f"{what} between {names}, {ways}, for {seconds:.2f} s")
    network.between(one, other, weather, both_ways=both_ways)
    await asyncio.sleep(seconds)
    network.clear_up()
    scene.note("the network is well again")


async def black_hole(scene: Scene) -> None:
    await _weather(scene, "nothing arrives", BLACK_HOLE, both_ways=scene.rng.random() < 0.5)


async def bad_line(scene: Scene) -> None:
    rng = scene.rng
    weather = Weather(
        delay_s=rng.uniform(0, 0.1),
        jitter_s=rng.uniform(0, 0.1),
        loss=rng.choice([0.0, 0.02, 0.2]),
        duplicate=rng.choice([0.0, 0.1]),
    )
    await _weather(scene, f"{weather}", weather, both_ways=True)


async def resets(scene: Scene) -> None:
    await _weather(scene, "connections are reset", Weather(reset=True), both_ways=True)


async def a_node_vanishes(scene: Scene) -> None:
    """With an engine, and nobody says so: no connection of it is closed."""
    network = scene.service.network
    if network is None:
        raise RuntimeError("this service has no network of its own")
    engine = scene.anybody()
    scene.note(f"the host of {engine.name} is cut off")
    for host in (0, *(other.host for other in scene.service.engines)):
        network.between(engine.host, host, BLACK_HOLE)
    engine.kill()
    await asyncio.sleep(scene.while_s())
    network.clear_up()
    scene.note(f"start {engine.name} again")
    engine.start()


Fault = Callable[[Scene], Awaitable[None]]
ANYWHERE: list[Fault] = [
    *[kill_prefill, kill_decode, kill_a_pair, stop_prefill, stop_decode] * 2,
    out_of_memory, lose_the_router, impatient_clients, slow_readers, overload, pause, sleep,
    forget_prefixes, drain_and_replace,
    hostile_bytes, stale_rejections, stale_references, strangers,
]  # fmt: skip
ON_A_NETWORK: list[Fault] = [
    *[black_hole, bad_line, resets] * 3,
    a_node_vanishes, a_node_vanishes, kill_prefill, kill_decode, stop_prefill, stop_decode,
]  # fmt: skip
"""Some stand there more often than others, so that they happen more often."""
