"""Requests on the good path: from prefill to decode, with a lease and an announcement."""

from __future__ import annotations

from typing import Any

import pytest
from router_kit.request_world import PROMPT, World, prefilled

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVTransferParams,
)
from diptych_protocol.wire import ErrorKind
from diptych_router.requests.table_interface import (
    Abort,
    Add,
    Announce,
    Deliver,
    Release,
)


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
    assert [type(action) for action in world.log] == [Deliver, Add]


def test_what_happened_is_in_the_record() -> None:
    world = World("p", "d")
    world.submit("r")
    world.now = 1.0
    prefilled(world)
    for world.now in (2.0, 3.0):
        world.say("d", world.answer("r/2"))
    world.now = 4.0
    world.say("d", world.answer("r/2", FinishReason.LENGTH))
    record = world.table.records.by_id["r"]
    [attempt] = record.attempts
    assert [
        (x.core_id, x.engine, x.sent_s, x.first_word_s, x.first_tokens, x.num_tokens)
        for x in attempt.placements
    ] == [("r/1", "p", 0.0, 1.0, 1, 1), ("r/2", "d", 1.0, 2.0, 1, 3)]
    assert (record.first_token_s, record.tokens.total) == (1.0, 4)
    assert (record.ended_s, record.outcome, record.error) == (4.0, "length", "")


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
    ]
    record = world.table.records.by_id["r"]
    assert (record.outcome, record.tokens.total) == ("abort", 1)
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
    assert [type(action) for action in world.log] == [Abort, Release]
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
    before, _ = world.table.records.by_id["r"].attempts
    assert before.again
    assert before.setback is not None
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
