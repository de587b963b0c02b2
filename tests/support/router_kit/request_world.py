"""A request table and toy engines, which say what a test wants them to say."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from toy_pools import EngineView, choose, successor

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVTransferParams,
    SamplingParams,
    Slo,
)
from diptych_router.choosing.first_token import FirstToken
from diptych_router.choosing.policy import Decision, RequestView
from diptych_router.engines.engine_table import Role
from diptych_router.engines.health_book import Failure
from diptych_router.engines.serving import RevisionShare
from diptych_router.requests.promises import Promises
from diptych_router.requests.request_table import RequestTable
from diptych_router.requests.table_interface import (
    Abort,
    Action,
    Add,
    Announce,
    AskHandOff,
    Deliver,
    Fail,
    Release,
    WakeAt,
)

PROMPT = 10
"""Tokens of a prompt."""


@dataclass
class ToyEngine:
    """Holds what was added; tests decide what it says."""

    key: str
    fingerprint: str = "f"
    role: Role = "decode"
    up: bool = True
    withdrawn: bool = False
    silent: bool = False
    open_tokens: int = 0
    planned: int = 0
    open: dict[str, EngineCoreRequest] = field(default_factory=dict)
    announced: dict[str, EngineCoreRequest] = field(default_factory=dict)
    """What it was told to expect."""

    def charge(self, tokens: int, planned: int = 0) -> None:
        self.open_tokens += tokens
        self.planned += planned

    @property
    def lends(self) -> KVTransferParams | None:
        return KVTransferParams(
            do_remote_prefill=True, remote_engine_id=self.key, remote_host="10.0.0.1",
            remote_port=1, epoch="e", compat=self.fingerprint, proof="00",
        )  # fmt: skip

    @property
    def name(self) -> str:
        return self.key


@dataclass
class ToyFleet:
    engines: dict[str, ToyEngine]
    first: FirstToken | None = None
    """When the next request's first token is expected."""
    refused: list[str] = field(default_factory=list)
    well: list[str] = field(default_factory=list)
    badly: list[tuple[str, str]] = field(default_factory=list)

    def was_full(self, key: str) -> None:
        self.refused.append(key)

    def went_well(self, *keys: str) -> None:
        self.well += filter(None, keys)

    def went_badly(self, key: str, failure: Failure) -> None:
        self.badly.append((key, failure.value))

    def get(self, key: str) -> ToyEngine | None:
        return self.engines.get(key)

    def may_begin_at(self, key: str) -> bool:
        engine = self.engines[key]
        return engine.up and not engine.withdrawn and not engine.silent

    def views(self, role: Role) -> list[EngineView]:
        return [
            EngineView(e.key, e.fingerprint, e.open_tokens, e.up and not e.withdrawn, e.silent)
            for e in self.engines.values()
            if e.role == role and e.up
        ]

    def choose(self, request: RequestView, full: Collection[str] = ()) -> Decision | None:
        return choose(request, self.views("prefill"), self.views("decode"), full)

    def first_token(self, request: RequestView, decision: Decision) -> FirstToken | None:
        return self.first

    def placed(self, request: RequestView, decision: Decision, now: float) -> None:
        pass

    def successor(self, fingerprint: str) -> ToyEngine | None:
        key = successor([v for v in self.views("decode") if not v.silent], fingerprint)
        return self.engines[key] if key is not None else None

    def num_decoding(self) -> int:
        return sum(view.usable for view in self.views("decode"))

    def draining(self) -> Sequence[ToyEngine]:
        return [e for e in self.engines.values() if e.up and (e.withdrawn or e.role == "prefill")]


class World:
    """A table, its engines, and a user who remembers everything."""

    def __init__(self, *engines: str, hold_seconds: float = 30.0, slo: Slo | None = None) -> None:
        roles: dict[str, Role] = {"p": "prefill"}
        self.fleet = ToyFleet(
            {key: ToyEngine(key, role=roles.get(key[0], "decode")) for key in engines}
        )
        self.table = RequestTable(
            self.fleet, hold_seconds=hold_seconds, max_held=100, promises=Promises(slo or Slo())
        )
        self.now = 0.0
        self.trial: RevisionShare | None = None
        self.delivered: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.offered: set[str] = set()
        """Leases that engines' outputs brought."""
        self.released: set[str] = set()
        self.readers: dict[str, list[str]] = {}
        """Which placements were given each lease."""
        self.asked: list[AskHandOff] = []
        self.wake_at: list[float] = []
        self.log: list[Action] = []
        self.to_do: deque[Action] = deque()
        self.busy = False

    def submit(
        self,
        name: str,
        leader: str | None = None,
        tenant: str = "",
        priority: int = 0,
        arrival: float = 0.0,
        headers: dict[str, str] | None = None,
        prefetches: bool = False,
        **params: Any,
    ) -> None:
        request = EngineCoreRequest(
            name, list(range(PROMPT)), None, SamplingParams(**{"max_tokens": 4, **params}),
            None, 2, arrival, None, None, None, tenant=tenant, priority=priority,
            trace_headers=headers, prefetches=prefetches,
        )  # fmt: skip
        self.delivered[name] = []
        self.carry_out(self.table.submit(request, 100, self.now, leader, trial=self.trial))

    def say(self, engine: str, *outputs: EngineCoreOutput) -> None:
        for output in outputs:
            if output.kv_transfer_params is not None:
                self.offered.add(output.kv_transfer_params["lease_id"])
            if output.finished:
                self.fleet.engines[engine].open.pop(output.request_id, None)
        self.carry_out(self.table.receive(engine, outputs, self.now))
        self.carry_out(self.table.take_turns(self.now))

    def lose(self, engine: str) -> None:
        link = self.fleet.engines[engine]
        link.up, link.open, link.announced = False, {}, {}
        self.carry_out(self.table.engine_lost(engine, "lost", self.now))

    def hang(self, engine: str) -> None:
        """Its heartbeats are overdue for long."""
        self.fleet.engines[engine].silent = True
        self.carry_out(self.table.engine_hangs(engine, self.now))

    def look_for_late_ones(self, now: float) -> None:
        self.now = now
        self.carry_out(self.table.give_up_late(now))

    def change(self, engine: str, **facts: bool | Role) -> None:
        for name, value in facts.items():
            setattr(self.fleet.engines[engine], name, value)
        self.carry_out(self.table.fleet_changed(self.now))

    def leave(self, name: str) -> None:
        if name not in self.ended:
            self.ended[name] = "left"
            self.carry_out(self.table.withdraw([name], self.now))

    def carry_out(self, actions: Iterable[Action]) -> None:
        self.to_do.extend(actions)
        while self.to_do and not self.busy:
            action = self.to_do.popleft()
            self.log.append(action)
            self.busy = True
            self.do(action)
            self.busy = False

    def do(self, action: Action) -> None:
        match action:
            case Deliver(outputs):
                for output in outputs:
                    assert output.request_id not in self.ended, "nothing comes after the end"
                    self.delivered[output.request_id] += output.new_token_ids
                    if output.finished:
                        self.ended[output.request_id] = str(output.finish_reason)
            case Add(key, request):
                self._add(key, request)
            case Abort(key, core_ids):
                for core_id in core_ids:
                    self.fleet.engines[key].open.pop(core_id, None)
                    self.fleet.engines[key].announced.pop(core_id, None)
            case Announce(key, request):
                self.fleet.engines[key].announced[request.request_id] = request
            case Release(_, params):
                self.released.add(params["lease_id"])
            case Fail(request_id, _):
                assert request_id not in self.ended, "a request ends once"
                self.ended[request_id] = "failed"
            case AskHandOff():
                self.asked.append(action)
            case WakeAt(time):
                self.wake_at.append(time)

    def _add(self, key: str, request: EngineCoreRequest) -> None:
        engine = self.fleet.engines[key]
        name = request.request_id.partition("/")[0]
        assert name not in self.ended
        others = [core_id for _, core_id in self.placements() if core_id.startswith(f"{name}/")]
        assert not others, "a request is at one engine at most"
        assert list(request.generated_token_ids or ()) == self.delivered[name]
        params = (request.sampling.extra_args or {}).get("kv_transfer_params") or {}
        if "lease_id" in params and params.get("do_remote_prefill"):
            self.readers.setdefault(params["lease_id"], []).append(request.request_id)
        for other in self.fleet.engines.values():
            told = other.announced.pop(request.request_id, None)
            assert told is None or other is engine, "an id that was announced is used nowhere else"
        if engine.up:
            engine.open[request.request_id] = request
        else:
            self.carry_out(self.table.not_sent(request.request_id, "not connected", self.now))

    # --- what engines may say -----------------------------------------------------------------

    def answer(self, core_id: str, reason: FinishReason | None = None, *, tokens: int = 1,
               lease: str = "") -> EngineCoreOutput:  # fmt: skip
        """Tokens count up from 0, so that order and completeness are plain to see."""
        begin = len(self.delivered[core_id.partition("/")[0]])
        params = {"lease_id": lease, "do_remote_prefill": True, "compat": "f"} if lease else None
        return EngineCoreOutput(
            core_id, list(range(begin, begin + tokens)), finish_reason=reason,
            kv_transfer_params=params,
        )  # fmt: skip

    def placements(self) -> list[tuple[str, str]]:
        return [(e.key, core_id) for e in self.fleet.engines.values() for core_id in e.open]

    def check_end(self) -> None:
        """What must hold when every request is over."""
        assert not self.table.requests
        assert not self.placements()
        assert (len(self.table.tenants), len(self.table.held), self.table.held.num_crowded) == (
            0, 0, 0,
        )  # fmt: skip
        assert not any(e.announced for e in self.fleet.engines.values())
        assert set(self.ended) == set(self.delivered)
        assert all(e.open_tokens == e.planned == 0 for e in self.fleet.engines.values())
        for tokens in self.delivered.values():
            assert tokens == list(range(len(tokens)))
        for lease in self.offered:
            assert len(self.readers.get(lease, [])) <= 1
            assert lease in self.released or self.readers.get(lease)


def prefilled(world: World, name: str = "r", lease: str = "L1") -> None:
    """The request has crossed from p to d."""
    [(engine, core_id)] = [at for at in world.placements() if at[1].startswith(f"{name}/")]
    world.say(engine, world.answer(core_id, FinishReason.LENGTH, lease=lease))
