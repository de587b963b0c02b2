"""What becomes of requests while engines answer, fail, lie and vanish: the table's invariants."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_pools import EngineView, choose, successor

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineOverloadedError,
    FinishReason,
    InvalidRequestError,
    KVTransferParams,
    SamplingParams,
    Slo,
)
from diptych_protocol.wire import ErrorKind
from diptych_router.actions import (
    Abort,
    Action,
    Add,
    Announce,
    AskHandOff,
    Deliver,
    Ended,
    Explain,
    Fail,
    Heard,
    Interrupted,
    Release,
    WakeAt,
)
from diptych_router.health.health_book import Failure
from diptych_router.health.patience import LEAST_S
from diptych_router.placing import tenant_places
from diptych_router.policy import Decision, RequestView
from diptych_router.request_table import RequestTable
from diptych_router.routed_request import MAX_LATE
from diptych_router.slo.first_token import FirstToken
from diptych_router.slo.promises import Promises

PROMPT = 10


@dataclass
class ToyEngine:
    """Holds what was added; tests decide what it says."""

    key: str
    fingerprint: str = "f"
    up: bool = True
    withdrawn: bool = False
    silent: bool = False
    open_tokens: int = 0
    planned: int = 0
    open: dict[str, EngineCoreRequest] = field(default_factory=dict)
    announced: dict[str, EngineCoreRequest] = field(default_factory=dict)
    """What it was told to expect."""

    def plan(self, more: int) -> None:
        self.planned += more

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

    def views(self, role: str) -> list[EngineView]:
        return [
            EngineView(e.key, e.fingerprint, e.open_tokens, e.up and not e.withdrawn, e.silent)
            for e in self.engines.values()
            if e.key.startswith(role) and e.up
        ]

    def choose(self, request: RequestView, full: Collection[str] = ()) -> Decision | None:
        return choose(request, self.views("p"), self.views("d"), full)

    def first_token(self, request: RequestView, decision: Decision) -> FirstToken | None:
        return self.first

    def placed(self, request: RequestView, decision: Decision) -> None:
        pass

    def successor(self, fingerprint: str) -> ToyEngine | None:
        key = successor([v for v in self.views("d") if not v.silent], fingerprint)
        return self.engines[key] if key is not None else None

    def num_decoding(self) -> int:
        return sum(view.usable for view in self.views("d"))

    def draining(self) -> Sequence[ToyEngine]:
        return [e for e in self.engines.values() if e.key[0] == "d" and e.up and e.withdrawn]


class World:
    """A table, its engines, and a user who remembers everything."""

    def __init__(self, *engines: str, hold_seconds: float = 30.0, slo: Slo | None = None) -> None:
        self.fleet = ToyFleet({key: ToyEngine(key) for key in engines})
        self.table = RequestTable(
            self.fleet, hold_seconds=hold_seconds, max_held=100, promises=Promises(slo or Slo())
        )
        self.now = 0.0
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
        **params: Any,
    ) -> None:
        request = EngineCoreRequest(
            name, list(range(PROMPT)), None, SamplingParams(**{"max_tokens": 4, **params}),
            None, 2, arrival, None, None, None, tenant=tenant, priority=priority,
        )  # fmt: skip
        self.delivered[name] = []
        self.carry_out(self.table.submit(request, 100, self.now, leader))

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

    def change(self, engine: str, **facts: bool) -> None:
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
            case Explain() | Interrupted() | Heard() | Ended():
                pass

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


def test_the_good_path() -> None:
    world = World("p", "d")
    world.submit("r")
    assert world.placements() == [("p", "r/1")]
    prefilled(world)
    assert world.placements() == [("d", "r/2")]
    world.say("d", world.answer("r/2"))
    world.say("d", world.answer("r/2", FinishReason.LENGTH, tokens=2))
    assert not any(isinstance(action, Abort) for action in world.log)
    assert (world.ended["r"], world.delivered["r"]) == ("length", [0, 1, 2, 3])
    assert world.released == set()
    world.check_end()


def test_the_first_token_is_delivered_before_the_hand_off() -> None:
    world = World("p", "d")
    world.submit("r")
    world.log.clear()
    prefilled(world)
    assert [type(action) for action in world.log] == [Heard, Deliver, Add]


def test_each_placement_is_heard_of_once_and_the_end_is_told() -> None:
    world = World("p", "d")
    world.submit("r")
    prefilled(world)
    for _ in range(2):
        world.say("d", world.answer("r/2"))
    world.say("d", world.answer("r/2", FinishReason.LENGTH))
    told = [action for action in world.log if isinstance(action, Heard | Ended)]
    assert [type(action) for action in told] == [Heard, Heard, Ended]
    assert [action.engine for action in told if isinstance(action, Heard)] == ["p", "d"]
    assert told[-1] == Ended("r", "length", 4)


def test_whom_the_first_token_ends_needs_no_decode_engine() -> None:
    """As a stop string does, which is found while the token is delivered."""
    world = World("p", "d")
    world.submit("r")
    output = world.answer("r/1", FinishReason.LENGTH, lease="L1")
    world.carry_out(world.table.receive("p", [output], world.now))
    world.fleet.engines["p"].open.clear()
    world.ended["r"] = "stop string"
    assert world.table.withdraw(["r"], 0.0) == [
        Release("r/1", {"lease_id": "L1", "do_remote_prefill": True, "compat": "f"}),
        Abort("d", ["r/2"]),  # the announcement
        Ended("r", "abort", 1),
    ]
    assert world.table.take_turns(0.0) == []
    assert not world.table.requests


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_a_lease_for_which_there_is_no_more_use_is_given_back(reason: FinishReason) -> None:
    world = World("p", "d")
    world.submit("r", max_tokens=1)
    world.say("p", world.answer("r/1", reason, lease="L1"))
    assert world.released == {"L1"}
    world.check_end()


def test_a_user_who_leaves_during_the_hand_off_frees_both_sides() -> None:
    world = World("p", "d")
    world.submit("r")
    prefilled(world)
    world.log.clear()
    world.leave("r")
    assert [type(action) for action in world.log] == [Abort, Release, Ended]
    world.check_end()


def params_of(request: EngineCoreRequest) -> dict[str, Any]:
    return dict((request.sampling.extra_args or {})["kv_transfer_params"])


def test_decode_is_told_of_a_request_while_prefill_computes_it() -> None:
    world = World("p", "d")
    world.submit("r")
    [told] = world.fleet.engines["d"].announced.values()
    asked, lease = params_of(world.fleet.engines["p"].open["r/1"]), params_of(told)
    assert asked["do_remote_decode"]
    assert len(bytes.fromhex(asked["lease_id"])) == 16
    assert KVTransferParams.parse(lease).do_remote_prefill
    assert (lease["lease_id"], lease["remote_num_tokens"]) == (asked["lease_id"], PROMPT)
    prefilled(world)
    later = world.fleet.engines["d"].open[told.request_id]
    assert (later.sampling.max_tokens, later.prompt_token_ids) == (4, told.prompt_token_ids)
    world.leave("r")
    world.check_end()


def test_each_attempt_draws_a_lease_of_its_own_and_announces_what_the_user_has() -> None:
    world = World("p", "d")
    world.submit("r")
    prefilled(world)
    world.say("d", EngineCoreOutput("r/2", [], finish_reason=FinishReason.ERROR))
    [told] = world.fleet.engines["d"].announced.values()
    assert told.generated_token_ids == [0]
    assert params_of(told)["remote_num_tokens"] == PROMPT + 1
    asked = [params_of(a.request)["lease_id"] for a in world.log
             if isinstance(a, Add) and a.engine == "p"]  # fmt: skip
    assert len(set(asked)) == 2
    world.leave("r")
    world.check_end()


@pytest.mark.parametrize("end", ["left", "first token ends it", "prefill fails", "another takes"])
def test_an_announcement_is_withdrawn_when_the_request_does_not_come(end: str) -> None:
    world = World("p", "d", "d2")
    world.submit("r")
    assert world.fleet.engines["d"].announced.keys() == {"r/2"}
    match end:
        case "left":
            world.leave("r")
        case "first token ends it":
            world.say("p", world.answer("r/1", FinishReason.STOP))
        case "prefill fails":
            world.lose("p")
            assert world.placements() == [("d", "r/3")], "the id of the announcement is used up"
            world.leave("r")
        case "another takes":
            world.change("d", withdrawn=True)
            prefilled(world)
            assert world.placements() == [("d2", "r/3")]
            world.leave("r")
    assert Abort("d", ["r/2"]) in world.log
    world.check_end()


def test_what_is_not_handed_off_is_not_announced() -> None:
    world = World("p", "d")
    world.submit("r", max_tokens=1)
    assert not any(isinstance(action, Announce) for action in world.log)
    world.leave("r")
    world.check_end()


def test_what_has_been_read_is_not_released() -> None:
    world = World("p", "d")
    world.submit("r")
    prefilled(world)
    world.say("d", world.answer("r/2"))
    world.leave("r")
    assert world.released == set()
    world.check_end()


@pytest.mark.parametrize("late", ["lost", "error", "given up", "full"])
def test_what_ends_a_hand_off_releases_the_lease_and_begins_again(late: str) -> None:
    world = World("p", "d", "d2")
    world.submit("r")
    prefilled(world)
    assert world.placements() == [("d", "r/2")]
    match late:
        case "lost":
            world.lose("d")
        case "error":
            world.say("d", EngineCoreOutput("r/2", [], finish_reason=FinishReason.ERROR))
        case "given up":
            world.say("d", EngineCoreOutput("r/2", [], finish_reason=FinishReason.ABORT))
        case "full":
            full = EngineCoreOutput(
                "r/2", [], finish_reason=FinishReason.ERROR, error_kind=ErrorKind.OVERLOADED
            )
            world.say("d", full)
    assert [(x.request_id, x.again) for x in world.log if isinstance(x, Interrupted)] == [
        ("r", True)
    ]
    assert world.released == {"L1"}
    assert world.placements() == [("p", "r/3")]
    prefilled(world, lease="L2")
    [(engine, core_id)] = world.placements()
    assert engine == ("d2" if late in ("lost", "full") else "d")
    world.say(engine, world.answer(core_id, FinishReason.LENGTH, tokens=2))
    assert world.delivered["r"] == [0, 1, 2, 3]
    world.check_end()


def test_what_an_engine_says_after_its_last_word_is_not_heard() -> None:
    """The same message again, or one that was on its way when the request went elsewhere."""
    world = World("p", "d")
    world.submit("r")
    first = world.answer("r/1", FinishReason.LENGTH, lease="L1")
    again = world.answer("r/1", FinishReason.LENGTH, lease="L2")
    world.say("p", first, again)
    assert (world.delivered["r"], world.released) == ([0], {"L2"})
    world.say("p", world.answer("r/1"))
    world.say("p", EngineCoreOutput("r/2", [7]))  # another engine's placement is none of its affair
    assert world.delivered["r"] == [0]
    world.say("d", world.answer("r/2", FinishReason.STOP))
    world.check_end()


def test_a_request_that_nobody_knows_is_aborted_where_it_runs() -> None:
    world = World("p", "d")
    world.say("d", EngineCoreOutput("ghost/1", [1]))
    assert world.log[-1] == Abort("d", ["ghost/1"])


def test_a_request_waits_for_an_engine_and_no_longer_than_it_may() -> None:
    world = World("p", "d")
    world.change("p", up=False)
    world.change("d", up=False)
    world.submit("r1")
    world.now = 10.0
    world.submit("r2")
    assert world.wake_at == [30.0, 40.0]
    world.carry_out(world.table.tick(30.0))
    assert world.ended == {"r1": "failed"}
    world.change("d", up=True)
    assert world.placements() == [("d", "r2/1")]
    world.carry_out(world.table.tick(40.0))
    world.say("d", world.answer("r2/1", FinishReason.STOP))
    world.check_end()


def test_full_engines_turn_away_who_has_nothing_yet() -> None:
    world = World("p", "d")
    world.submit("r")
    full = EngineCoreOutput(
        "r/1", [], finish_reason=FinishReason.ERROR, error_kind=ErrorKind.OVERLOADED
    )
    world.say("p", full)
    failed = [action for action in world.log if isinstance(action, Fail)]
    assert isinstance(failed[0].error, EngineOverloadedError)
    assert (world.fleet.refused, world.fleet.badly) == (["p"], [])
    world.check_end()


def test_a_request_that_is_wrong_as_written_is_tried_once_and_blames_nobody() -> None:
    world = World("p", "d")
    world.submit("r")
    refusal = EngineCoreOutput(
        "r/1", [], finish_reason=FinishReason.ERROR, error="no", error_kind=ErrorKind.REFUSED
    )
    world.say("p", refusal)
    [failed] = [action for action in world.log if isinstance(action, Fail)]
    assert isinstance(failed.error, InvalidRequestError)
    assert (str(failed.error), world.placements(), world.fleet.badly) == ("no", [], [])
    world.check_end()


def test_a_stream_is_asked_once_to_move_and_begins_again_if_it_cannot() -> None:
    world = World("p", "d", "d2")
    world.submit("r")
    prefilled(world)
    world.say("d", world.answer("r/2"))
    world.change("d", withdrawn=True)
    world.change("d", withdrawn=True)
    assert world.asked == [AskHandOff("d", "r/2")]
    world.carry_out(world.table.cannot_hand_off("r/2", "it does not answer", 0.0))
    assert world.placements() == [("p", "r/3")]
    assert not world.table.cannot_hand_off("r/2", "it does not answer", 0.0)
    prefilled(world, lease="L2")
    assert world.placements() == [("d2", "r/4")]
    world.leave("r")
    world.check_end()


def test_a_stream_moves_with_its_lease() -> None:
    world = World("p", "d", "d2")
    world.submit("r")
    prefilled(world)
    world.say("d", world.answer("r/2"))
    world.change("d", withdrawn=True)
    world.say("d", world.answer("r/2", FinishReason.ABORT, tokens=0, lease="L2"))
    assert world.placements() == [("d2", "r/3")]
    world.say("d2", world.answer("r/3", FinishReason.LENGTH, tokens=2))
    assert world.delivered["r"] == [0, 1, 2, 3]
    world.check_end()


def test_sending_may_find_out_first_that_an_engine_is_gone() -> None:
    world = World("p", "p2", "d")
    world.fleet.engines["d"].open_tokens = 0
    world.submit("r1")
    world.submit("r2")
    assert world.placements() == [("p", "r1/1"), ("p2", "r2/1")]
    actions = world.table.engine_lost("p", "lost", 0.0)
    world.fleet.engines["p"].open.clear()
    world.fleet.engines["p"].up = False
    world.carry_out(actions)  # goes to p2, or to p again, which is found to be gone
    assert {at for at, _ in world.placements()} == {"p2"}
    world.leave("r1")
    world.leave("r2")
    world.check_end()


@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_what_hangs_begins_again_elsewhere_and_its_engine_is_told(where: str) -> None:
    world = World("p1", "p2", "d1", "d2")
    world.submit("r")
    engine = "p1"
    if where == "decode":
        prefilled(world)
        world.say("d1", world.answer("r/2"))
        engine = "d1"
    [(_, core_id)] = world.placements()
    world.hang(engine)
    assert Abort(engine, [core_id]) in world.log
    assert [key for key, _ in world.placements()] == ["p2" if where == "prefill" else "p1"]
    world.say(engine, world.answer(core_id))  # it goes on before it hears that
    assert world.delivered["r"] == ([] if where == "prefill" else [0, 1])
    again = "p2" if where == "prefill" else "p1"
    world.say(again, world.answer(world.placements()[0][1], FinishReason.LENGTH, lease="L2"))
    assert [key for key, _ in world.placements()] == ["d1" if where == "prefill" else "d2"]
    world.leave("r")
    world.check_end()


def test_what_hangs_stays_where_it_is_while_nobody_else_can_take_it() -> None:
    world = World("p", "d1", "d2")
    world.submit("r")
    prefilled(world)
    world.hang("d1")
    assert world.placements() == [("p", "r/3")]
    world.say("p", world.answer("r/3", FinishReason.LENGTH, lease="L2"))
    assert world.placements() == [("d2", "r/4")]
    world.hang("d2")
    assert world.placements() == [("d2", "r/4")]
    world.change("d1", silent=False)
    world.hang("d2")
    assert [key for key, _ in world.placements()] == ["p"]
    world.leave("r")
    world.check_end()


def fails(core_id: str, error: str = "no", param: str | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(
        core_id, [], finish_reason=FinishReason.ERROR, error=error, error_param=param
    )


def test_an_engine_is_blamed_when_another_does_what_it_failed_at() -> None:
    world = World("p1", "p2", "d1", "d2")
    world.submit("r")
    world.say("p1", fails("r/1"))
    assert world.fleet.badly == []
    [(engine, core_id)] = world.placements()
    assert engine == "p2", "it is not given to the same one again"
    world.say("p2", world.answer(core_id, FinishReason.LENGTH, lease="L1"))
    assert world.fleet.badly == [("p1", "error")]
    [(engine, core_id)] = world.placements()
    world.say(engine, fails(core_id))  # the hand-off fails: either side may be to blame
    assert world.fleet.badly == [("p1", "error")]
    prefilled(world, lease="L2")
    [(other, core_id)] = world.placements()
    assert {engine, other} == {"d1", "d2"}
    world.say(other, world.answer(core_id))
    assert sorted(world.fleet.badly[1:]) == [(engine, "error"), ("p2", "error")]
    world.say(other, world.answer(core_id, FinishReason.STOP))
    assert world.fleet.well == [other, "p1"]
    world.check_end()


@pytest.mark.parametrize("param", [None, "lora_request"])
def test_a_request_that_fails_everywhere_is_to_blame_itself(param: str | None) -> None:
    world = World("p1", "p2", "p3", "d")
    world.submit("r")
    while world.placements():
        [(engine, core_id)] = world.placements()
        world.say(engine, fails(core_id, "wrong", param))
    assert world.ended == {"r": "failed"}
    assert not world.fleet.badly
    assert not world.fleet.well
    world.check_end()


def test_the_only_engine_is_tried_again() -> None:
    world = World("p", "d")
    world.submit("r")
    world.say("p", fails("r/1"))
    assert [key for key, _ in world.placements()] == ["p"]
    world.leave("r")
    world.check_end()


def test_a_refusal_of_the_request_is_nobodys_fault() -> None:
    world = World("p1", "p2", "d")
    world.submit("r")
    world.say("p1", fails("r/1", param="sampling_params"))
    [(engine, core_id)] = world.placements()
    world.say(engine, world.answer(core_id, FinishReason.LENGTH, lease="L1"))
    assert world.fleet.badly == []
    world.leave("r")


def test_the_loss_of_an_engine_is_one_failure_however_much_was_there() -> None:
    world = World("p1", "p2", "d")
    for name in "abcdef":
        world.submit(name)
    world.lose("p1")
    world.lose("p1")
    assert world.fleet.badly == [("p1", "lost")]


def test_who_is_late_with_a_first_token_loses_the_request() -> None:
    world = World("p1", "p2", "d")
    world.submit("r")
    world.look_for_late_ones(LEAST_S - 1.0)
    assert world.placements() == [("p1", "r/1")]
    world.look_for_late_ones(LEAST_S + 1.0)
    assert world.fleet.badly == [("p1", "late")]
    [(engine, core_id)] = world.placements()
    assert engine == "p2"
    prefilled(world)
    [(engine, core_id)] = world.placements()
    world.say("d", world.answer(core_id))
    world.look_for_late_ones(100 * LEAST_S)
    assert world.placements() == [("d", core_id)], "only the first token has a deadline"
    world.leave("r")
    world.check_end()


def test_a_request_stays_with_a_late_engine_that_is_the_only_one() -> None:
    world = World("p", "d")
    world.submit("r")
    world.look_for_late_ones(2 * LEAST_S)
    world.look_for_late_ones(9 * LEAST_S)
    assert world.fleet.badly == [("p", "late")]
    assert world.placements() == [("p", "r/1")]
    world.leave("r")
    world.check_end()


def test_where_all_are_late_a_request_moves_only_a_few_times_and_does_not_fail() -> None:
    world = World("p1", "p2", "p3", "p4", "d")
    world.submit("r")
    for turn in range(20):
        world.look_for_late_ones(turn * 2 * LEAST_S)
    assert len(world.fleet.badly) == MAX_LATE
    assert not world.ended
    world.leave("r")
    world.check_end()


def test_another_answer_to_a_prompt_begins_when_the_first_decodes_and_takes_its_way() -> None:
    world = World("p", "p2", "d", "d2")
    world.submit("a")
    world.submit("b", leader="a")
    assert world.placements() == [("p", "a/1")]
    prefilled(world, "a")
    assert world.placements() == [("d", "a/2")]
    world.say("d", world.answer("a/2"))
    assert world.placements() == [("p", "b/1"), ("d", "a/2")]
    world.leave("a")
    world.leave("b")
    world.check_end()


@pytest.mark.parametrize("end", ["leaves", "finds nobody", "is not sent", "fails"])
def test_whoever_waits_for_another_answer_goes_on_when_that_one_is_over(end: str) -> None:
    world = World("p", "p2", "d")
    if end == "finds nobody":
        world.change("d", up=False)
    world.submit("a", max_tokens=2)
    world.submit("b", leader="a")
    match end:
        case "leaves":
            world.leave("a")
        case "finds nobody":
            world.now = world.wake_at[0]
            world.carry_out(world.table.tick(world.now))
            assert world.ended == {"a": "failed"}
            world.change("d", up=True)
        case "is not sent":
            world.fleet.engines["p"].open.clear()
            world.carry_out(world.table.not_sent("a/1", "not connected", world.now))
        case "fails":
            for attempt in range(1, 4):
                [at] = [e for e, core_id in world.placements() if core_id.startswith("a/")]
                error = FinishReason.ERROR
                world.say(at, EngineCoreOutput(f"a/{attempt}", [], finish_reason=error))
                if "b" in {core_id[0] for _, core_id in world.placements()}:
                    break
    assert "b" in {core_id[0] for _, core_id in world.placements()}
    world.leave("a")
    world.leave("b")
    world.check_end()


# --- any order of events --------------------------------------------------------------------------


class TestTenants:
    """One API key with many requests leaves the engines, and the wait for them, to others too."""

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tenant_places, "MAX_PLACED", 3)

    def greedy(self, count: int = 10, **options: Any) -> World:
        """A tenant with so many requests, and another one that is active."""
        world = World("p", "d", **options)
        world.submit("o", tenant="other")
        for number in range(count):
            world.submit(f"g{number}", tenant="greedy")
        return world

    def placed(self, world: World) -> list[str]:
        return sorted(core_id.partition("/")[0] for _, core_id in world.placements())

    def end(self, world: World, name: str) -> None:
        [(engine, core_id)] = [at for at in world.placements() if at[1].startswith(f"{name}/")]
        world.say(engine, world.answer(core_id, FinishReason.STOP))

    def test_what_one_places_is_bounded_while_another_is_active(self) -> None:
        world = self.greedy()
        assert self.placed(world) == ["g0", "g1", "g2", "o"]
        assert world.table.held.num_crowded == 7
        world.submit("third", tenant="third")
        assert "third" in self.placed(world), "who has few goes at once"
        self.end(world, "g1")
        assert self.placed(world) == ["g0", "g2", "g3", "o", "third"]
        for name in ("o", "third"):
            world.leave(name)
        assert len(self.placed(world)) == 9, "nobody else wants anything"
        for name in list(world.delivered):
            world.leave(name)
        world.check_end()

    def test_more_engines_take_more_of_one_tenant(self) -> None:
        world = World("p", "d1", "d2", "d3")
        world.carry_out(world.table.fleet_changed(0.0))
        world.submit("o", tenant="other")
        for number in range(10):
            world.submit(f"g{number}", tenant="greedy")
        assert world.table.held.num_crowded == 1

    def test_who_had_to_wait_for_his_turn_may_wait_for_an_engine_later(self) -> None:
        world = self.greedy(4, hold_seconds=5.0)
        world.now = 4.0
        world.leave("g0")
        assert "g3" in self.placed(world)
        assert world.table.requests["g3"].hold_until is None

    @pytest.mark.parametrize("tenant", ["", "greedy"])
    def test_a_lone_tenant_places_all(self, tenant: str) -> None:
        world = World("p", "d")
        for number in range(10):
            world.submit(f"g{number}", tenant=tenant)
        assert len(self.placed(world)) == 10

    def test_who_waits_waits_no_longer_than_for_an_engine(self) -> None:
        world = self.greedy(4, hold_seconds=5.0)
        world.now = 5.0
        world.carry_out(world.table.tick(5.0))
        assert world.ended == {"g3": "failed"}
        [fail] = [action for action in world.log if isinstance(action, Fail)]
        assert isinstance(fail.error, EngineOverloadedError)
        assert "no turn within 5 s" in str(fail.error)

    def test_among_those_who_wait_it_is_the_turn_of_who_was_served_least(self) -> None:
        world = self.greedy(8)
        for number in range(8):
            world.submit(f"h{number}", tenant="hasty")
        world.table.requests["h0"].account.served += 50
        order = []
        for _ in range(4):
            before = set(self.placed(world))
            for name in ("g", "h"):
                mine = next(n for n in sorted(before) if n.startswith(name))
                world.table.requests[mine].account.served += 10
                self.end(world, mine)
            order.append(sorted(set(self.placed(world)) - before))
        assert order == [["g3", "h3"], ["g4", "h4"], ["g5", "h5"], ["g6", "h6"]]

    def test_those_who_wait_are_not_all_of_one_tenant(self) -> None:
        world = World()
        for number in range(150):
            world.submit(f"g{number}", tenant="greedy")
        assert (len(world.table.held), len(world.ended)) == (100, 50)
        for number in range(60):
            world.submit(f"o{number}", tenant="other")
        failed = set(world.ended)
        assert len(world.table.held) == 100
        assert sum(name.startswith("o") for name in failed) == 10
        assert {f"g{number}" for number in range(50, 150)} <= failed

    def test_without_tenants_who_was_taken_on_turns_nobody_away(self) -> None:
        world = World("p", "d")
        world.submit("first")
        world.change("p", up=False)
        world.change("d", up=False)
        for number in range(100):
            world.submit(f"r{number}")
        world.carry_out(world.table.engine_lost("p", "lost", 0.0))
        assert len(world.table.held) == 101
        assert not world.ended


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=300)
def test_the_invariants_hold_whatever_happens(seed: int) -> None:
    play(seed, [""])


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_the_invariants_hold_for_several_tenants(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tenant_places, "MAX_PLACED", 2)
        play(seed, ["a", "a", "a", "b", "c"])


def play(seed: int, tenants: list[str]) -> None:
    """A random history of a small service; then nothing bad happens any more, and all ends."""
    random = Random(seed)
    world = World("p1", "p2", "d1", "d2")
    for step in range(60):
        world.now += 1.0
        happen(world, random, step, random.choice(tenants))
        assert {core_id for _, core_id in world.placements()} >= {
            routed.core_id for routed in world.table.requests.values() if routed.engine
        }
    for engine in world.fleet.engines:
        world.change(engine, up=True, withdrawn=False, silent=False)
    for step in range(200):
        if not world.placements():
            break
        progress(world, random, f"end-{step}")
    world.check_end()


def happen(world: World, random: Random, step: int, tenant: str) -> None:
    """One event."""
    engine = random.choice(list(world.fleet.engines))
    link = world.fleet.engines[engine]
    match random.randrange(15):
        case 0 | 1 if step < 40:
            ahead = random.choice([None, *world.delivered])
            world.submit(f"r{step}", ahead, tenant, max_tokens=random.choice([1, 2, 5]))
        case 2 if world.delivered:
            world.leave(random.choice(list(world.delivered)))
        case 3 if link.up:
            world.lose(engine)
        case 4 if link.up:
            link.up, link.open, link.announced = False, {}, {}  # gone, and nobody has noticed yet
            world.carry_out(world.table.engine_lost(engine, "silent", world.now))
        case 5:
            world.change(engine, up=True, withdrawn=random.random() < 0.3)
        case 6 if world.wake_at:
            world.carry_out(world.table.tick(world.wake_at.pop(0)))
        case 7 if world.asked:
            asked = world.asked.pop()
            world.carry_out(world.table.cannot_hand_off(asked.core_id, "no", world.now))
        case 8 if link.up:
            world.say(engine, EngineCoreOutput(f"r{random.randrange(40)}/0", [999],
                                               kv_transfer_params=None))  # fmt: skip
        case 9 if link.up:
            world.hang(engine)
        case 10:
            link.silent = False
        case 11 if random.random() < 0.3:
            world.look_for_late_ones(world.now + 2 * LEAST_S)
        case _:
            progress(world, random, f"L{step}", faults=True)


def progress(world: World, random: Random, lease: str, *, faults: bool = False) -> None:
    """Some engine says something about one of its requests."""
    placements = world.placements()
    if not placements:
        return
    engine, core_id = random.choice(placements)
    request = world.fleet.engines[engine].open[core_id]
    wants_lease = bool((request.sampling.extra_args or {}).get("kv_transfer_params", {}).get(
        "do_remote_decode"))  # fmt: skip
    left = (request.sampling.max_tokens or 0) - len(world.delivered[core_id.partition("/")[0]])
    fault = random.randrange(8) if faults else 7
    if fault == 0:
        kind = random.choice(list(ErrorKind))
        output = EngineCoreOutput(
            core_id, [], finish_reason=FinishReason.ERROR, error="no", error_kind=kind
        )
        if random.random() < 0.2:
            output.kv_transfer_params = {"lease_id": lease}
    elif fault == 1:
        output = EngineCoreOutput(core_id, [], finish_reason=FinishReason.ABORT)
    elif fault == 2 and engine[0] == "d":
        output = world.answer(core_id, FinishReason.ABORT, tokens=0, lease=lease)
    elif fault == 3:
        output = world.answer(core_id, FinishReason.STOP, lease=lease)
    elif wants_lease:
        output = world.answer(core_id, FinishReason.LENGTH, lease=lease)
    else:
        output = world.answer(core_id, FinishReason.LENGTH if left <= 1 else None)
    outputs = [output]
    if fault == 4 and output.finished:  # what was its last word is not heard twice
        outputs += [EngineCoreOutput(core_id, [998]), copy(output)]
    world.say(engine, *outputs)


# --- prefixes that other engines remember ---------------------------------------------------------


def fetching(world: World, **changes: Any) -> None:
    """Have every decision name a holder."""
    honest = world.fleet.choose

    def choose_and_fetch(request: RequestView, full: Collection[str] = ()) -> Decision | None:
        decision = honest(request, full)
        return None if decision is None else replace(decision, **changes)

    world.fleet.choose = choose_and_fetch  # type: ignore[method-assign]


def source_given(world: World, engine: str) -> KVTransferParams | None:
    [request] = world.fleet.engines[engine].open.values()
    return request.prefix_source


@pytest.mark.parametrize("holder", ["d0", "p1"])
def test_who_computes_the_prompt_is_told_who_remembers_it(holder: str) -> None:
    world = World("p0", "d0", "p1")
    world.fleet.engines["p1"].withdrawn = True
    fetching(world, fetch=holder, fetch_tokens=6)
    world.submit("r")
    source = source_given(world, "p0")
    assert source is not None
    assert (source.remote_engine_id, source.remote_num_tokens) == (holder, 6)
    assert source.lease_id is None, "the engines make the lease between them"
    [explained] = [x for x in world.log if isinstance(x, Explain)]
    assert explained.facts["fetches"] == f"6 tokens from {holder}"
    [announced] = world.fleet.engines["d0"].announced.values()
    assert announced.prefix_source is None


def test_a_decode_engine_that_does_everything_may_fetch_too() -> None:
    world = World("d0", "d1")
    world.fleet.engines["d1"].withdrawn = True
    fetching(world, fetch="d1", fetch_tokens=6)
    world.submit("r")
    assert source_given(world, "d0") is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"fetch": "p0", "fetch_tokens": 6},
        {"fetch": "nobody", "fetch_tokens": 6},
        {"fetch": "d0", "fetch_tokens": 0},
        {"fetch": "other", "fetch_tokens": 6},
    ],
    ids=["itself", "gone", "nothing", "another fingerprint"],
)
def test_a_source_that_is_none_is_not_told(changes: dict[str, Any]) -> None:
    world = World("p0", "d0", "other")
    world.fleet.engines["other"].fingerprint = "g"
    fetching(world, **changes)
    world.submit("r")
    assert source_given(world, "p0") is None


class TestPromises:
    """A first token is promised within a second."""

    SLO = Slo(ttft_ms=1000, inter_token_ms=50)

    def test_a_new_request_that_would_be_late_leaves_nothing_behind(self) -> None:
        world = World("p", "d", slo=self.SLO)
        world.fleet.first = FirstToken(5.0, 5.0, 0.1)
        world.submit("late")
        assert world.ended == {"late": "failed"}
        assert not list(world.placements())
        world.fleet.first = FirstToken(0.5, 0.5, 0.1)
        world.submit("early")
        assert len(list(world.placements())) == 1
        world.leave("early")
        world.check_end()

    @pytest.mark.parametrize(("slo", "first"), [(SLO, None), (Slo(), FirstToken(5.0, 5.0, 0.1))])
    def test_where_nothing_is_promised_or_known_nobody_is_refused(
        self, slo: Slo, first: FirstToken | None
    ) -> None:
        world = World("p", "d", slo=slo)
        world.fleet.first = first
        world.submit("r")
        assert "r" not in world.ended

    def test_who_was_taken_on_is_not_refused_later(self) -> None:
        """Not when an engine is lost, nor when it waited for one."""
        world = World("p1", "p2", "d", slo=self.SLO)
        world.submit("r")
        world.fleet.first = FirstToken(50.0, 50.0, 0.1)
        [(engine, _)] = world.placements()
        world.lose(engine)
        assert "r" not in world.ended
        assert len(list(world.placements())) == 1

    def test_engines_are_told_when_the_first_token_is_due_and_not_after_it(self) -> None:
        world = World("p", "d", slo=self.SLO)
        world.submit("r")
        [(engine, core_id)] = world.placements()
        assert world.fleet.engines[engine].open[core_id].deadline_ms == 1000
        world.say(engine, world.answer(core_id, FinishReason.LENGTH, lease=f"l{core_id}"))
        [(engine, core_id)] = world.placements()
        assert engine == "d"
        assert world.fleet.engines[engine].open[core_id].deadline_ms is None

    def test_first_tokens_and_answers_are_counted_when_they_come(self) -> None:
        world = World("p", "d", slo=self.SLO)
        for name, waited in (("soon", 0.5), ("late", 1.5)):
            world.submit(name)
            world.now += waited
            [(engine, core_id)] = world.placements()
            world.say(engine, world.answer(core_id, FinishReason.LENGTH, lease=f"l{core_id}"))
            world.now += waited / 20
            [(engine, core_id)] = world.placements()
            world.say(engine, world.answer(core_id, FinishReason.STOP))
        assert {tuple(kind): n for kind, n in world.table.promises.counts.items()} == {
            ("prefill", "first_token", "kept"): 1,
            ("prefill", "first_token", "missed"): 1,
            ("decode", "inter_token", "kept"): 1,
            ("decode", "inter_token", "missed"): 1,
        }

    def test_who_waits_goes_on_by_priority_and_deadline(self) -> None:
        world = World("p", "d", slo=self.SLO)
        world.change("p", up=False)
        world.change("d", up=False)
        for name, priority, arrival in (("a", 0, 3.0), ("b", 0, 1.0), ("c", -1, 4.0)):
            world.submit(name, priority=priority, arrival=arrival)
        for engine in ("p", "d"):
            world.fleet.engines[engine].up = True
        world.carry_out(world.table.fleet_changed(world.now))
        begun = [a.request.request_id[0] for a in world.log if isinstance(a, Add)]
        assert begun == ["c", "b", "a"]
