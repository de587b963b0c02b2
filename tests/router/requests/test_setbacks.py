"""Requests whose engines are full, lost, late or hanging, and who is to blame."""

from __future__ import annotations

import pytest
from router_kit.request_world import World, prefilled

from diptych_protocol import (
    EngineCoreOutput,
    EngineOverloadedError,
    FinishReason,
    InvalidRequestError,
)
from diptych_protocol.kv_transfer_params import EXPIRY
from diptych_protocol.wire import ErrorKind
from diptych_router.engines.health_book import FIRST_CLOSED_S
from diptych_router.requests.attempts import LEAST_PATIENCE_S
from diptych_router.requests.routed_request import MAX_LATE
from diptych_router.requests.table_interface import (
    Abort,
    Add,
    AskHandOff,
    Fail,
    Release,
)


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
        "r/1", [], finish_reason=FinishReason.ERROR, error="no", error_kind=ErrorKind.REFUSED,
        error_param="structured_outputs",
    )  # fmt: skip
    world.say("p", refusal)
    [failed] = [action for action in world.log if isinstance(action, Fail)]
    assert isinstance(failed.error, InvalidRequestError)
    assert failed.error.param == "structured_outputs"
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


def test_a_stream_leaves_an_engine_that_prefills_now_and_its_prompts_stay() -> None:
    world = World("p", "d", "d2")
    world.submit("r")
    prefilled(world)
    world.say("d", world.answer("r/2"))
    world.submit("waits")
    world.change("p", withdrawn=True)
    world.change("d", role="prefill")
    world.submit("new")
    world.change("d", role="prefill")
    assert world.asked == [AskHandOff("d", "r/2")]
    assert ("d", "new/1") in world.placements()
    world.say("d", world.answer("r/2", FinishReason.ABORT, tokens=0, lease="L2"))
    assert ("d2", "r/3") in world.placements()
    for name in ("r", "waits", "new"):
        world.leave(name)
    world.check_end()


def test_an_engine_that_turned_goes_on_with_its_own_prompt_without_a_lease_of_itself() -> None:
    world = World("p", "d")
    world.submit("r")
    world.change("d", withdrawn=True)
    world.change("p", role="decode")
    prefilled(world)
    assert world.placements() == [("p", "r/3")]
    assert [type(action) for action in world.log[-3:]] == [Release, Abort, Add]
    added = world.log[-1]
    assert isinstance(added, Add)
    assert added.request.sampling_params is not None
    assert added.request.sampling_params.extra_args is None
    world.leave("r")
    world.check_end()


@pytest.mark.parametrize("announced", [True, False])
def test_an_engine_that_turned_meanwhile_takes_over_only_what_it_fetches_by_now(
    announced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("p", "d", "d2")
    if not announced:  # as while the prefill engine's terms are unknown
        monkeypatch.setattr(type(world.fleet.engines["p"]), "lends", None)
    world.submit("r")
    world.change("d", role="prefill")
    prefilled(world)
    assert [engine for engine, _ in world.placements()] == ["d" if announced else "d2"]
    world.leave("r")
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


@pytest.mark.parametrize("param", [None, EXPIRY])
def test_the_only_decode_engine_computes_the_prompt_when_two_hand_offs_to_it_have_failed(
    param: str | None,
) -> None:
    """Both engines are well; it is the network between them that is not, or their clocks: then one
    refuses the other's leases, which name a parameter and are none of the request's."""
    world = World("p", "d")
    world.submit("r")
    for lease in ("L1", "L2"):
        prefilled(world, lease=lease)
        [(engine, core_id)] = world.placements()
        world.say(engine, fails(core_id, param=param))
    [(engine, core_id)] = world.placements()
    assert engine == "d"
    world.say("d", world.answer(core_id, FinishReason.STOP))
    assert world.ended == {"r": "stop"}
    world.check_end()


def test_a_way_on_which_nothing_gets_through_is_tried_by_one_request_at_a_time() -> None:
    """Each would wait for two time-outs before its prompt is computed where it is decoded."""
    world = World("p", "d")
    world.submit("former")
    prefilled(world, "former", "L0")
    world.say("d", world.answer("former/2"))
    world.submit("r")
    for lease in ("L1", "L2"):
        prefilled(world, lease=lease)
        world.say("d", fails(world.placements()[-1][1]))
        world.say("d", world.answer("former/2"))  # its KV came while the way was open
    world.leave("r")
    world.submit("next")
    assert ("d", "next/1") in world.placements()
    world.leave("next")
    world.leave("former")
    world.now = FIRST_CLOSED_S
    world.submit("tries")
    world.submit("meanwhile")
    assert world.placements() == [("p", "tries/1"), ("d", "meanwhile/1")]
    prefilled(world, "tries", "L3")
    world.say("d", world.answer("tries/2"))
    world.submit("after")
    assert ("p", "after/1") in world.placements()
    for name in ("tries", "meanwhile", "after"):
        world.leave(name)
    world.check_end()


def test_requests_that_fail_together_close_a_way_once_and_a_new_engine_has_all_open() -> None:
    world = World("p", "d")
    for name in "abcdef":
        world.submit(name)
        prefilled(world, name, f"L{name}")
    for _, core_id in world.placements():
        world.say("d", fails(core_id))
    ways = world.table._ways
    assert ways.of["p", "d"].closed_until == FIRST_CLOSED_S
    world.lose("p")
    assert not ways.of
    world.change("p", up=True)
    world.submit("g")
    assert ("p", "g/1") in world.placements()


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
    world.look_for_late_ones(LEAST_PATIENCE_S - 1.0)
    assert world.placements() == [("p1", "r/1")]
    world.look_for_late_ones(LEAST_PATIENCE_S + 1.0)
    assert world.fleet.badly == [("p1", "late")]
    [(engine, core_id)] = world.placements()
    assert engine == "p2"
    prefilled(world)
    [(engine, core_id)] = world.placements()
    world.say("d", world.answer(core_id))
    world.look_for_late_ones(100 * LEAST_PATIENCE_S)
    assert world.placements() == [("d", core_id)], "only the first token has a deadline"
    world.leave("r")
    world.check_end()


def test_a_request_stays_with_a_late_engine_that_is_the_only_one() -> None:
    world = World("p", "d")
    world.submit("r")
    world.look_for_late_ones(2 * LEAST_PATIENCE_S)
    world.look_for_late_ones(9 * LEAST_PATIENCE_S)
    assert world.fleet.badly == [("p", "late")]
    assert world.placements() == [("p", "r/1")]
    world.leave("r")
    world.check_end()


def test_where_all_are_late_a_request_moves_only_a_few_times_and_does_not_fail() -> None:
    world = World("p1", "p2", "p3", "p4", "d")
    world.submit("r")
    for turn in range(20):
        world.look_for_late_ones(turn * 2 * LEAST_PATIENCE_S)
    assert len(world.fleet.badly) == MAX_LATE
    assert not world.ended
    world.leave("r")
    world.check_end()
