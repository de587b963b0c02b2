"""A router: the real request table and policy, and what `PoolClient` and its lines do with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any, Protocol

from sim_engine import SimEngine
from sim_model import BLOCK
from sim_network import Network
from sim_session import Abort, Add, Call, FromEngine, Posture, Session, ToEngine
from sim_tally import ROUTER_FAILURES, named
from toy_pools import EngineView, ForgetfulFleet, choose, successor

from diptych_protocol import (
    DiptychError,
    EngineCoreOutput,
    EngineCoreRequest,
    KeptAnswer,
    KVTransferParams,
    Slo,
    fingerprint,
)
from diptych_protocol.wire import TAKE_KEPT
from diptych_router.choosing.policy import Decision, RequestView
from diptych_router.choosing.roles import OTHER
from diptych_router.engines.engine_link import common_to_leases
from diptych_router.engines.engine_table import Role
from diptych_router.engines.known_prefixes import BlockNaming, keys_of
from diptych_router.requests import table_interface
from diptych_router.requests.promises import Promises
from diptych_router.requests.request_record import RequestRecord, Setback
from diptych_router.requests.request_table import RequestTable

RECONNECT_S = 0.2
HOLD_S = 2.0
MAX_HELD = 2
HAND_OFF_TIMEOUT_S = 1.0
FIND_KEPT_S = 0.3
FIRST_TOKEN_S = 0.8
"""The shortest deadline of a first token, and how often routers look for those that are late."""


class Consumer(Protocol):
    """Who gets the answers."""

    def tell(self, output: EngineCoreOutput) -> None:
        """A part of an answer, under the request's own id."""

    def fail(self, request_id: str, error: DiptychError) -> None:
        """There will be no more of it."""


@dataclass(slots=True, eq=False)
class Link:
    """A router's line to whoever answers at an engine's address."""

    name: str
    role: Role
    session: Session | None = None
    fingerprint: str = ""
    posture: Posture = field(default_factory=lambda: Posture(False, False))
    open_tokens: int = 0
    planned: int = 0
    silent: bool = False
    has_turned: bool = False

    def charge(self, tokens: int, planned: int = 0) -> None:
        self.open_tokens += tokens
        self.planned += planned

    @property
    def key(self) -> str:
        return self.name

    @property
    def up(self) -> bool:
        return self.session is not None

    @property
    def withdrawn(self) -> bool:
        return self.posture.draining or self.posture.paused

    @property
    def usable(self) -> bool:
        return self.up and not self.withdrawn

    @property
    def sheds_streams(self) -> bool:
        return self.posture.draining if self.role == "decode" else self.has_turned

    @property
    def lends(self) -> KVTransferParams | None:
        """What all its leases will say of it."""
        if self.session is None:
            return None
        return common_to_leases(self.session.engine.core.description, self.fingerprint)

    def num_remembered(self, keys: list[int]) -> int:
        """How many blocks of a prompt are remembered there at this very moment."""
        if self.session is None:
            return 0
        known = set(keys_of(list(self.session.engine.pool.remembered())).tolist())
        return next((n for n, key in enumerate(keys) if key not in known), len(keys))

    def send(self, message: ToEngine) -> None:
        """To whoever is there; nobody hears it otherwise."""
        if self.session is not None:
            self.session.engine.post(self.session, message)


class Links(ForgetfulFleet):
    """The `Fleet` of a request table."""

    def __init__(self, links: Iterable[Link], random: Random) -> None:
        self.by_name = {link.name: link for link in links}
        self._random = random

    def of(self, role: Role) -> list[Link]:
        return [link for link in self.by_name.values() if link.role == role and link.up]

    def get(self, key: str) -> Link | None:
        return self.by_name.get(key)

    def may_begin_at(self, key: str) -> bool:
        link = self.by_name.get(key)
        return link is not None and link.usable and not link.silent

    def choose(self, request: RequestView, full: Collection[str] = ()) -> Decision | None:
        prefill, decode = ([_view(link) for link in self.of(r)] for r in ("prefill", "decode"))
        decision = choose(request, prefill, decode, full)
        return None if decision is None else self._with_fetch(decision, request)

    def _with_fetch(self, decision: Decision, request: RequestView) -> Decision:
        """Mostly, whoever computes the prompt is to fetch the beginning from another engine: the
        one that remembers most of it now, or any, which may be gone."""
        computing = decision.prefill or decision.decode
        others = [link for link in self.by_name.values() if link.name != computing]
        if not others:
            return decision
        self._random.shuffle(others)
        if request.keys is not None and self._random.random() < 0.8:
            keys = request.keys(BlockNaming(BLOCK)).tolist()
            others.sort(key=lambda link: -link.num_remembered(keys))
            if not others[0].num_remembered(keys) and self._random.random() < 0.8:
                return decision
        count = self._random.choice((request.prompt_tokens, self._random.randrange(20)))
        return replace(decision, fetch=others[0].key, fetch_tokens=count)

    def successor(self, fingerprint: str) -> Link | None:
        views = [_view(link) for link in self.of("decode") if not link.silent]
        chosen = successor(views, fingerprint)
        return self.by_name[chosen] if chosen is not None else None

    def num_decoding(self) -> int:
        return sum(link.usable for link in self.of("decode"))

    def draining(self) -> list[Link]:
        return [link for link in self.by_name.values() if link.up and link.sheds_streams]


class SimRouter:
    """One incarnation of a router."""

    def __init__(
        self,
        name: str,
        network: Network,
        consumer: Consumer,
        engines: dict[str, SimEngine],
        note: Callable[[str], None],
    ) -> None:
        """`engines`: who answers at each address now. `note` is told what happens to requests."""
        self.name = name
        self.alive = True
        self.links = Links((Link(e.name, e.shape.role) for e in engines.values()), network.random)
        self.table = RequestTable(
            self.links,
            hold_seconds=HOLD_S,
            max_held=MAX_HELD,
            promises=Promises(Slo(ttft_ms=1000, inter_token_ms=50)),
            random_bits=network.random.getrandbits,
            first_token_s=FIRST_TOKEN_S,
        )
        self._to_do: deque[table_interface.Action] = deque()
        self._busy = False
        self._clock = network.clock
        self._consumer = consumer
        self._engines = engines
        self._note = note
        self._identities = count()
        self.saw: Callable[[SimRouter], None] = lambda _: None
        """Called when something has changed."""
        for link in self.links.by_name.values():
            self._connect(link)

    # --- for its clients ----------------------------------------------------------------------

    def submit(self, request: EngineCoreRequest, max_model_len: int) -> None:
        self._carry_out(self.table.submit(request, max_model_len, self._clock.now))

    def withdraw(self, request_id: str) -> None:
        self._carry_out(self.table.withdraw([request_id], self._clock.now))

    def find_kept(self, name: str, answer: Callable[[list[KeptAnswer]], None]) -> None:
        """Ask every engine that is up for what it kept of an answer; `answer` gets what came in
        time."""
        found = list[KeptAnswer]()

        def hear(said: Any) -> None:
            if isinstance(said, KeptAnswer):
                found.append(said)

        for link in self.links.by_name.values():
            link.send(Call(TAKE_KEPT, (name, ""), hear))
        self._clock.after(FIND_KEPT_S, answer, found)

    def crash(self) -> None:
        """Its engines notice when they next send."""
        self.alive = False
        for link in self.links.by_name.values():
            if link.session is not None:
                link.session.open = False

    # --- what the table wants done ------------------------------------------------------------

    def _carry_out(self, wanted: Iterable[table_interface.Action]) -> None:
        """In the order of the decisions, also where carrying out one leads to the next."""
        self._to_do.extend(wanted)
        if self._busy:
            return
        self._busy = True
        while self._to_do:
            self._do(self._to_do.popleft())
        self._busy = False
        self.saw(self)

    def _do(self, action: table_interface.Action) -> None:
        match action:
            case table_interface.Deliver(outputs):
                for output in outputs:
                    self._consumer.tell(output)
            case table_interface.Add(engine, request):
                self._add(engine, request)
            case table_interface.Announce(engine, request):
                self._note("announced")
                self.links.by_name[engine].send(Call("announce_kv_transfer", (request,)))
            case table_interface.Abort(engine, core_ids):
                self.links.by_name[engine].send(Abort(core_ids))
            case table_interface.Release(core_id, params):
                self._release(core_id, params)
            case table_interface.AskHandOff(engine, core_id):
                self._ask_hand_off(engine, core_id)
            case table_interface.Fail(request_id, error):
                self._note(f"failed by a router: {named(str(error), ROUTER_FAILURES)}")
                self._consumer.fail(request_id, error)
            case table_interface.WakeAt(time):
                self._clock.at(time, self._wake, time)

    def _note_choice(self, record: RequestRecord) -> None:
        """What was chosen when a request goes to the first engine of an attempt, and why."""
        attempt = record.newest
        if attempt is None or len(attempt.placements) != 1:
            return
        if record.num_attempts > 1:
            self._note("new attempt")
        if any(before.setback is Setback.LATE for before in record.attempts[-2:-1]):
            self._note("first token too late for a router")
        if "fetches" in attempt.facts:
            self._note("prefix to be fetched")
        if attempt.prefill in ("", attempt.decode):
            self._note("prompt computed by a decode engine")

    def _add(self, engine: str, request: EngineCoreRequest) -> None:
        link = self.links.by_name[engine]
        if request.request_id not in self.table.placed:
            return
        self._note_choice(self.table.records.by_id[request.request_id.rpartition("/")[0]])
        self._clock.after(1.5 * FIRST_TOKEN_S, self._give_up_late)
        if link.up:
            link.send(Add(request))
        else:
            self._carry_out(self.table.not_sent(request.request_id, "not there", self._clock.now))

    def _give_up_late(self) -> None:
        if self.alive:
            self._carry_out(self.table.give_up_late(self._clock.now))

    def _release(self, core_id: str, params: dict[str, Any]) -> None:
        self._note("a router gives a lease back")
        link = self.links.get(str(params.get("remote_engine_id")))
        if link is not None:
            link.send(Call("reject_kv_transfer", (core_id, params)))

    def _ask_hand_off(self, engine: str, core_id: str) -> None:
        self._note("hand_off asked for")
        answered: list[Any] = []

        def answer(moved: Any) -> None:
            if self.alive and not answered:
                answered.append(moved)
                if moved is not True:
                    self._note("hand_off refused or not answered")
                    now = self._clock.now
                    self._carry_out(self.table.cannot_hand_off(core_id, str(moved), now))

        self.links.by_name[engine].send(Call("hand_off", (core_id,), answer))
        self._clock.after(HAND_OFF_TIMEOUT_S, answer, "no answer")

    def _wake(self, now: float) -> None:
        if self.alive:
            self._carry_out(self.table.tick(now))

    # --- lines --------------------------------------------------------------------------------

    def _connect(self, link: Link) -> None:
        """Greet whoever answers there; again and again until somebody does."""
        if not self.alive or link.up:
            return
        engine = self._engines[link.name]
        if not engine.heard_by(self.name):
            self._clock.after(RECONNECT_S, self._connect, link)
            return
        identity = f"{self.name}/{next(self._identities)}".encode()
        link.session = Session(identity, self.name, engine, self._receive, self._lost)
        link.fingerprint = fingerprint(engine.core.description.compat)
        link.posture = engine.accept(link.session)
        self._news()

    def cut(self, name: str) -> bool:
        """A line breaks, though both ends live; False if there is none."""
        session = self.links.by_name[name].session
        if not self.alive or session is None:
            return False
        session.open = False
        self._lost(session, "cut")
        return True

    def turn(self, name: str) -> None:
        """An engine takes the other role, as if load asked for it."""
        if not self.alive:
            return
        link = self.links.by_name[name]
        link.role, link.has_turned = OTHER[link.role], True
        self._note(f"turned to {link.role}")
        self._news()

    def suspect(self, name: str) -> None:
        """Heartbeats of an engine are overdue: if it is still silent, others do its work."""
        link = self.links.by_name[name]
        session = link.session
        if not self.alive or session is None:
            return
        link.silent = not session.engine.heard_by(self.name)
        if link.silent:
            self._note("router suspects an engine")
            self._carry_out(self.table.engine_hangs(name, self._clock.now))
            self._clock.after(RECONNECT_S, self.suspect, name)

    def check(self, name: str) -> None:
        """Some time ago an engine fell silent: if it still is, it is lost."""
        session = self.links.by_name[name].session
        if self.alive and session is not None and not session.engine.heard_by(self.name):
            session.open = False
            self._lost(session, "silent")

    def _lost(self, session: Session, why: str) -> None:
        link = self.links.by_name[session.engine.name]
        if not self.alive or link.session is not session:
            return
        self._note("router lost an engine")
        link.session, link.silent = None, False
        self._carry_out(self.table.engine_lost(link.name, why, self._clock.now))
        self._clock.after(RECONNECT_S, self._connect, link)

    def _receive(self, session: Session, message: FromEngine) -> None:
        link = self.links.by_name[session.engine.name]
        if not self.alive or link.session is not session:
            return
        if isinstance(message, Posture):
            link.posture = message
            self._news()
            return
        self._carry_out(self.table.receive(link.name, message, self._clock.now))
        self._carry_out(self.table.take_turns(self._clock.now))

    def _news(self) -> None:
        self._carry_out(self.table.fleet_changed(self._clock.now))


def _view(link: Link) -> EngineView:
    return EngineView(link.name, link.fingerprint, link.open_tokens, link.usable, link.silent)
