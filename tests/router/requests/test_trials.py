"""Requests while a revision is tried: to which one they go, and what is counted."""

from __future__ import annotations

from router_kit.request_world import World

from diptych_protocol import EngineCoreOutput, FinishReason, Slo
from diptych_protocol.router_settings import Serving
from diptych_protocol.wire import REVISION_HEADER
from diptych_router.engines.serving import RevisionShare
from diptych_router.requests.promises import Promises


def tried(weight: int) -> World:
    world = World("p", "d")
    world.trial = RevisionShare(Serving(("a", "b"), canary="b", weight=weight))
    return world


def given_to(world: World, name: str) -> tuple[str, ...]:
    return world.table.requests[name].view.revisions


def test_a_failed_attempt_counts_and_the_next_one_stays_in_the_revision() -> None:
    world = tried(100)
    assert world.trial is not None
    world.submit("r")
    world.say("p", EngineCoreOutput("r/1", [], finish_reason=FinishReason.ERROR))
    assert given_to(world, "r") == ("b",)
    assert +world.trial.counts == {"failed": 1}
    world.say("p", world.answer("r/3", FinishReason.LENGTH, lease="L"))
    world.say("d", world.answer("r/4", FinishReason.STOP))
    assert +world.trial.counts == {"failed": 1, "requests": 1, "ended": 1}
    world.check_end()


def test_what_waits_for_its_turn_in_vain_is_not_the_canarys_failure() -> None:
    world = tried(100)
    assert world.trial is not None
    for engine in ("p", "d"):
        world.lose(engine)
    world.submit("r")
    world.carry_out(world.table.tick(world.now + 60))
    assert world.ended == {"r": "failed"}
    assert not +world.trial.counts


def test_a_canary_that_clients_do_not_wait_for_is_late_and_slow() -> None:
    world = tried(100)
    assert world.trial is not None
    world.table.promises = Promises(Slo(ttft_ms=1000, inter_token_ms=50))
    for name in ("early", "late", "slow"):
        world.submit(name)
    world.say("p", world.answer("slow/1", FinishReason.LENGTH, lease="L"))
    world.table.withdraw(["early"], world.now + 0.5)
    world.table.withdraw(["late", "slow"], world.now + 1.5)
    assert +world.trial.counts == {"requests": 2, "late": 1, "ended": 1, "slow": 1}


def test_answers_that_go_on_are_not_judged_yet() -> None:
    world = tried(100)
    assert world.trial is not None
    for name in ("over", "breaks"):
        world.submit(name)
        world.say("p", world.answer(f"{name}/1", FinishReason.LENGTH, lease=name))
        world.say("d", world.answer(f"{name}/2"))
    other = RevisionShare(Serving(("a", "b"), canary="b", weight=50))
    open_of = world.table.num_answering_for
    assert (open_of(world.trial), open_of(other)) == (2, 0)
    world.say("d", world.answer("over/2", FinishReason.STOP))
    assert open_of(world.trial) == 1
    world.say("d", EngineCoreOutput("breaks/2", [], finish_reason=FinishReason.ERROR))
    world.leave("breaks")
    assert open_of(world.trial) == 0


def test_a_pooled_prompt_counts_when_it_ends_well() -> None:
    world = tried(100)
    assert world.trial is not None
    world.submit("r")
    world.say("p", EngineCoreOutput("r/1", [], finish_reason=FinishReason.STOP))
    assert +world.trial.counts == {"requests": 1}


def test_what_goes_to_the_stable_revision_is_not_counted() -> None:
    world = tried(0)
    assert world.trial is not None
    world.submit("r")
    assert given_to(world, "r") == ("a",)
    world.say("p", world.answer("r/1", FinishReason.STOP))
    assert not +world.trial.counts


def test_testers_choose_and_answers_to_one_prompt_go_to_one_revision() -> None:
    world = tried(50)
    world.submit("chosen", headers={REVISION_HEADER: "canary"})
    world.submit("first")
    world.submit("second")
    world.submit("its sibling", leader="second")
    names = ("chosen", "first", "second", "its sibling")
    assert [given_to(world, name) for name in names] == [("b",), ("a",), ("b",), ("b",)]
