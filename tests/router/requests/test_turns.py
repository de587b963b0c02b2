"""Who begins when: answers to one prompt, tenants, promises; and who fetches a prefix."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from router_kit.request_world import World, prefilled

from diptych_frontend.fair_share import OUTPUT_WEIGHT
from diptych_protocol import (
    EngineCoreOutput,
    EngineOverloadedError,
    FinishReason,
    KVTransferParams,
    Slo,
)
from diptych_router.choosing.first_token import FirstToken
from diptych_router.choosing.policy import Decision, RequestView
from diptych_router.requests import placements
from diptych_router.requests.table_interface import (
    Add,
    Announce,
    Fail,
)


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


def test_a_prefetch_goes_to_one_engine_and_ends_without_a_token() -> None:
    world = World("p", "d")
    world.submit("a", prefetches=True)
    assert world.placements() == [("p", "a/1")]
    [added] = [action for action in world.log if isinstance(action, Add)]
    assert added.request.prefetches
    assert added.request.sampling.extra_args is None, "nobody takes over"
    usual = world.table.requests["a"].view.output_tokens
    assert usual > 1, "its turn would go the same way"
    assert not any(isinstance(action, Announce) for action in world.log)
    world.say("p", EngineCoreOutput("a/1", [], finish_reason=FinishReason.LENGTH))
    assert world.placements() == []
    assert next(iter(world.table.records)).outcome == "prefetched"
    world.submit("b")
    assert world.table.requests["b"].usual_output == usual, "it was no answer"
    world.leave("b")
    world.check_end()


class TestTenants:
    """One API key with many requests leaves the engines, and the wait for them, to others too."""

    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placements, "MAX_PLACED", 3)

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

    def test_rows_that_wrong_guesses_took_are_charged_as_engines_charge_them(self) -> None:
        world = World("p", "d")
        world.submit("a", tenant="greedy")
        prefilled(world, "a")
        account = world.table.requests["a"].account
        before = account.served
        output = world.answer("a/2", tokens=2)
        output.num_wrong_guesses = 3
        world.say("d", output)
        assert account.served == before + OUTPUT_WEIGHT * 5

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
    assert world.table.records.by_id["r"].facts["fetches"] == f"6 tokens from {holder}"
    [announced] = world.fleet.engines["d0"].announced.values()
    assert announced.prefix_source is None


@pytest.mark.parametrize("leaves_disk", [True, False])
def test_who_computes_the_prompt_is_told_whether_to_read_its_disk(leaves_disk: bool) -> None:
    world = World("p0", "d0", "p1")
    fetching(world, leaves_disk=leaves_disk)
    world.submit("r")
    [request] = world.fleet.engines["p0"].open.values()
    assert request.leaves_disk == leaves_disk
    fetching(world, leaves_disk=False)
    world.lose("p0")
    [request] = world.fleet.engines["p1"].open.values()
    assert not request.leaves_disk, "that was of the engine that was lost"


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
