"""A small service with all its machines in one thread, and everything that happens to it decided
by one seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from sim_checks import check_engine_at_rest, check_memory, check_router_at_rest
from sim_clock import Clock
from sim_direct import DirectClient, Params
from sim_driver import SimDriver
from sim_engine import MAX_LEASE_S, MAX_LOAD_TIMEOUT_S, MAX_MODEL_LEN, Shape, SimEngine
from sim_model import blocks_of
from sim_network import Faults, Network
from sim_return import come_back
from sim_router import SimRouter
from sim_session import PATIENCE_S, Call, Session
from sim_stranger import Liar, Stranger
from sim_streams import Stream

from diptych_engine.scheduling.request import RequestStatus
from diptych_kv_transfer.tables.lease import LeaseState
from diptych_kv_transfer.tables.load import LoadState
from diptych_protocol import DiptychError, EngineCoreOutput

BOUND_S = 90.0
"""P3: after so long every request has come to an end. Eight losses of an engine, each noticed after
`PATIENCE_S` or the hinge's own time limits, with waits for another engine in between."""
REST_S = 3 * (MAX_LEASE_S + MAX_LOAD_TIMEOUT_S)
NUMBERS = {name: number for number, name in enumerate(("p0", "p1", "d0", "d1", "r0", "r1"))}
SALTS = (None, None, "a", "b")

LEASES = list(LeaseState)
LOADS = list(LoadState)
STATUSES = list(RequestStatus)
Moment = tuple[str, int]
"""`lease`, `load` or `request`, and which of its states some of an engine's have."""


class World:
    """Engines, routers and clients. Everything that happens raises `AssertionError` at once if it
    breaks a property."""

    def __init__(self, seed: int, note: Callable[[str], None] | None = None) -> None:
        """`note` is told what happens, with the time."""
        self.random = Random(seed)
        self.clock = Clock()
        self.seen: Counter[str] = Counter()
        """What has happened, by kind."""
        self.states: set[int] = set()
        """Hashes of the states that the world was in: those of all leases, loads and requests at
        engines, and of all requests at routers."""
        self.network = Network(self.clock, self.random, self.note)
        self.liar = Liar(self.network)
        self.network.hosts[self.liar.address] = self.liar
        self.engines: dict[str, SimEngine] = {}
        self.incarnations: list[SimEngine] = []
        """All engines that there ever were."""
        self.routers: dict[str, SimRouter] = {}
        self.streams: dict[str, Stream] = {}
        self.direct: dict[str, DirectClient] = {}
        self.router_of: dict[str, SimRouter] = {}
        self.lent: list[Params] = []
        """The parameters of every lease that was granted."""
        self.contents: dict[bytes, tuple[int, ...]] = {}
        """What must stand in every block that somebody may remember."""
        self.armed: list[tuple[Moment, Callable[[str], object]]] = []
        """What is to happen when some engine has a lease, load or request in a state."""
        self.calm = False
        """No further fault is to happen."""
        self._say = note
        self._abstract: dict[int, tuple[tuple[int, ...], ...]] = {}
        """The state of each engine and router, by its number: names hash differently each time."""
        random = self.random
        lease_s = random.choice((0.2, MAX_LEASE_S))
        load_timeout_s = random.choice((0.1, 0.4, MAX_LOAD_TIMEOUT_S))
        models = random.choice(("m", "m", "m", "m", "mn"))
        self._stems = [self._tokens(5) for _ in range(2)]
        for role, letter in (("prefill", "p"), ("decode", "d")):
            for number in range(1 + (random.random() < 0.4)):
                self._start(
                    Shape(
                        f"{letter}{number}",
                        "prefill" if role == "prefill" else "decode",
                        num_blocks=random.choice((7, 7, 8, 10, 14)),
                        max_num_seqs=random.randrange(1, 4),
                        max_num_batched_tokens=random.choice((3, 5, 16)),
                        max_num_waiting=random.randrange(1, 4),
                        max_model_len=MAX_MODEL_LEN,
                        lease_seconds=lease_s,
                        load_timeout_s=load_timeout_s,
                        prefix_caching=random.random() < 0.9,
                        model=random.choice(models),
                        runs_ahead=random.random() < 0.4,
                    )
                )
        for number in range(1 + (random.random() < 0.3)):
            self.start_router(f"r{number}")

    def note(self, what: str) -> None:
        """Something of this kind has happened."""
        self.seen[what] += 1
        self.say(what)

    def say(self, what: str) -> None:
        """For the trace."""
        if self._say is not None:
            self._say(f"{self.clock.now:9.4f} {what}")

    # --- machines come and go -----------------------------------------------------------------

    def _start(self, shape: Shape) -> None:
        engine = SimEngine(shape, len(self.incarnations) + 1, self.network, self.lent)
        self.incarnations.append(engine)
        engine.saw = self._saw_engine
        engine.driver.saw = self._saw_driver
        engine.driver.validate = partial(self._must_be_validated, engine)
        self.engines[shape.name] = engine

    def restart(self, name: str, changes: Mapping[str, Any] | None = None) -> None:
        """Somebody new at the address of one who is gone, perhaps of another shape."""
        engine = self.engines[name]
        if engine.alive:
            return
        for what in changes or {}:
            self.note(f"restarted with another {what}")
        self._start(replace(engine.shape, **(changes or {})))
        self.note(f"{engine.shape.role} restarted")
        self.say(f"{name} starts as {self.engines[name].driver.hinge.me.epoch}")

    def resume(self, engine: SimEngine) -> None:
        """SIGCONT."""
        if engine.stalled:
            self.note(f"{engine.shape.role} resumed")
            engine.resume()

    def start_router(self, name: str) -> None:
        """A new incarnation, if there is none."""
        if name in self.routers:
            if self.routers[name].alive:
                return
            self.note("router restarted")
        self.routers[name] = SimRouter(name, self.network, self, self.engines, self.note)
        self.routers[name].saw = self._saw_router

    def crash_router(self, name: str) -> None:
        """Its clients see their connections break; some come back."""
        self.note("router crashed")
        router = self.routers[name]
        router.crash()
        for request_id, owner in self.router_of.items():
            stream = self.streams[request_id]
            if owner is router and not stream.ended:
                if stream.kept_as:
                    come_back(self, stream)
                else:
                    stream.end("lost: its router crashed")

    def admit_stranger(self, engine: SimEngine, kind: str) -> None:
        """Somebody connects to an engine's hinge."""
        self.note(f"stranger: {kind}")
        self.network.connect(Stranger(self.network, kind, engine.driver), engine.address)

    def call(self, engine: SimEngine, method: str, *args: object) -> None:
        """An operator's utility call."""
        if engine.alive:
            session = Session(b"operator", "operator", engine, lambda *_: None, lambda *_: None)
            engine.post(session, Call(method, args))

    # --- clients ------------------------------------------------------------------------------

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(1, 1000) for _ in range(count))

    def new_stream(
        self,
        after: str = "",
        prompt: tuple[int, ...] | None = None,
        length: int | None = None,
        first_token_ids: tuple[int, ...] = (),
    ) -> Stream:
        """What some client wants; prompts share beginnings."""
        random = self.random
        own = random.choice(self._stems)[: random.choice((5, 5, random.randrange(6)))]
        own += self._tokens(random.choice((1, 2, 3, 6)) if length is None else length)
        salt = random.choice(SALTS)
        if prompt is None and length is None and self.streams and random.random() < 0.4:
            former = random.choice(list(self.streams.values()))
            own, salt = self._next_turn(former), former.cache_salt
        prompt = prompt or own[-(length or 0) :]
        max_tokens = random.randrange(1, max(2, min(6, MAX_MODEL_LEN - len(prompt))))
        name = f"q{len(self.streams)}{after}"
        stream = Stream(name, prompt, max_tokens, salt, None, first_token_ids)
        if random.random() < 0.15 and not first_token_ids:
            stream = Stream(name, prompt, max_tokens, salt, random.choice(stream.expected))
        self.streams[stream.request_id] = stream
        self.expect(stream)
        self.clock.after(BOUND_S, self._must_have_ended, stream)
        return stream

    def _next_turn(self, former: Stream) -> tuple[int, ...]:
        """The conversation so far, and what its user says next."""
        so_far = former.prompt + tuple(former.delivered)
        return so_far[: MAX_MODEL_LEN - 3] + self._tokens(self.random.randrange(1, 3))

    def expect(self, stream: Stream) -> None:
        """Its blocks may be remembered from now on."""
        known = stream.prompt + stream.first_token_ids
        self.contents.update(blocks_of(known, stream.max_tokens, stream.identity))

    def submit(self) -> Stream:
        """A client asks a router."""
        stream = self.new_stream()
        router = self.random.choice(list(self.routers.values()))
        if not router.alive:
            stream.end("refused: no router")
            return stream
        self.router_of[stream.request_id] = router
        if len(self.streams) % 2:
            stream.kept_as = f"{len(self.streams):032x}"
        self.say(f"{stream.request_id} asks {router.name}: {stream.prompt} + {stream.max_tokens}")
        router.submit(stream.request(), MAX_MODEL_LEN)
        return stream

    def abort(self, stream: Stream) -> None:
        """The client has left."""
        self.note(f"aborted: {self._whereabouts(stream.request_id)}")
        self.say(f"{stream.request_id} is aborted")
        if stream.request_id in self.direct:
            self.direct[stream.request_id].abort()
            return
        router = self.router_of[stream.request_id]
        stream.end("aborted")
        if router.alive:
            router.withdraw(stream.request_id)

    def _whereabouts(self, request_id: str) -> str:
        for engine in self.engines.values():
            for request in engine.core.scheduler.requests.values():
                if request.request_id.split("/")[0] == request_id:
                    return f"{request.status.name.lower()} on {engine.shape.role}"
        router = self.router_of.get(request_id)
        held = router is not None and any(x.request_id == request_id for x in router.table.held)
        return "held by its router" if held else "between engines"

    def tell(self, output: EngineCoreOutput) -> None:
        """A router delivers a part of an answer."""
        self.streams[output.request_id].tell(output)

    def fail(self, request_id: str, error: DiptychError) -> None:
        """A router says that there will be no answer."""
        self.streams[request_id].fail(error)
        self.say(f"{request_id} fails: {error}")

    def _must_have_ended(self, stream: Stream) -> None:
        assert stream.ended, f"P3: {stream.request_id} has not ended after {BOUND_S:g} s"

    def fell_silent(self, name: str) -> None:
        """An engine cannot be heard; its clients give it up if that lasts."""
        self.clock.after(PATIENCE_S * self.random.random(), self._suspect, name)
        self.clock.after(PATIENCE_S, self._give_up, name)

    def _suspect(self, name: str) -> None:
        for router in self.routers.values():
            router.suspect(name)

    def _give_up(self, name: str) -> None:
        for router in self.routers.values():
            router.check(name)
        for client in self.direct.values():
            client.check(name)

    def _must_be_validated(self, engine: SimEngine, request_id: str, lease_id: str) -> None:
        """P2: whoever lent it says that it was held throughout, if there is anybody to ask."""
        scheduler = engine.core.scheduler
        early = scheduler.early.loads.get(request_id)
        request = scheduler.loading.get(request_id) if early is None else early.announced
        params = None if request is None else request.prefix_source or request.kv_transfer
        owner = self.engines.get(str(params and params.remote_engine_id))
        if params is None or owner is None or owner.driver.hinge.me.epoch != params.epoch:
            return
        held = (lease_id or params.lease_id) in owner.driver.confirmed
        assert held, f"P2: {request_id} uses KV before its lease is known to have been held"

    # --- watching -----------------------------------------------------------------------------

    def _saw_engine(self, engine: SimEngine) -> None:
        check_memory(engine, self.contents)
        self._saw(engine.name)

    def _saw_driver(self, driver: SimDriver) -> None:
        self._saw(self.network.machine(driver.address))

    def _saw(self, name: str) -> None:
        engine = self.engines[name]
        hinge, scheduler = engine.driver.hinge, engine.core.scheduler
        now = (
            tuple(sorted([LEASES.index(x.state) for x in hinge.leases.leases.values()])),
            tuple(sorted([LOADS.index(x.state) for x in hinge.loads.loads.values()])),
            tuple(sorted([STATUSES.index(x.status) for x in scheduler.requests.values()])),
        )
        if not self._is_new(name, now):
            return
        for entry in list(self.armed):
            (what, state), act = entry
            if state in now[("lease", "load", "request").index(what)]:
                self.armed.remove(entry)
                delay = self.random.choice((0.0, self.random.random() * 0.01))
                self.clock.after(delay, act, name)

    def _saw_router(self, router: SimRouter) -> None:
        table = router.table
        placed = tuple(
            sorted(
                x.stage.value * 8 + 4 * bool(x.engine) + 2 * bool(x.lease) + bool(x.announced)
                for x in table.requests.values()
            )
        )
        self._is_new(router.name, (placed, (len(table.held),)))

    def _is_new(self, name: str, state: tuple[tuple[int, ...], ...]) -> bool:
        """Take down the state of an engine or router; False if it is as before."""
        number = NUMBERS[name]
        if self._abstract.get(number) == state:
            return False
        self._abstract[number] = state
        self.states.add(hash(tuple(sorted(self._abstract.items()))))
        if self._say is not None and name in self.engines:
            self.say(f"{name}: {_words(state)}")
        return True

    # --- time ---------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.run_until(self.clock.now + seconds)

    def run_until(self, time: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Let what happens until then happen."""
        clock = self.clock
        while clock.next_time <= time and not enough():
            clock.step()
        if not enough():
            clock.now = max(clock.now, time)

    def all_ended(self) -> bool:
        """Nobody waits for an answer."""
        return all(stream.ended for stream in self.streams.values())

    def come_to_rest(self) -> None:
        """Mend everything, wait for all requests to end and for all leases to run out, and look
        whether anything is left."""
        self.calm = True
        self.network.faults = Faults()
        self.armed.clear()
        for pair in sorted(map(sorted, self.network.cut_off)):
            self.network.heal(pair[0], pair[1])
        for name in self.routers:
            self.start_router(name)
        for name, engine in list(self.engines.items()):
            self.resume(engine)
            self.restart(name)
            self.call(self.engines[name], "wake_up")
            self.call(self.engines[name], "resume_generation")
        self.run_until(self.clock.now + BOUND_S, self.all_ended)
        self.run(REST_S)
        self.check_at_rest()

    def check_at_rest(self) -> None:
        """P1, P3 and P6, when nothing is under way any more."""
        for stream in self.streams.values():
            assert stream.ended, f"P3: {stream.request_id} has not ended"
        for engine in self.engines.values():
            check_memory(engine, self.contents)
            check_engine_at_rest(engine)
        for router in self.routers.values():
            check_router_at_rest(router)


def _words(state: tuple[tuple[int, ...], ...]) -> str:
    leases, loads, requests = state
    return " ".join(
        f"{what} [{' '.join(names)}]"
        for what, names in (
            ("leases", [LEASES[i].value for i in leases]),
            ("loads", [LOADS[i].value for i in loads]),
            ("requests", [STATUSES[i].name.lower() for i in requests]),
        )
        if names
    )
