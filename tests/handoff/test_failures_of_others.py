"""What went wrong in other engines' hand-offs, tried on ours; docs/handoff.md says what each is."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from engine_kit.core import CLIENT, tokens
from engine_kit.handoff import (
    Engine,
    LocalRouter,
    drive,
    drive_all,
    engines,
    prompt_of,
    request,
    save_toy,
    signed,
)
from waits import Deadline

from diptych_protocol import EngineCoreOutput, EngineCoreRequest, FinishReason
from diptych_router.requests.routed_request import Stage

PROMPT = prompt_of(3, 38)
LONG: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_toy(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(scope="module")
def trio(model: str) -> Iterator[list[Engine]]:
    with engines(model, alone={}, prefill={"max_num_batched_tokens": 16}, decode={}) as made:
        yield made


@pytest.fixture
def router(trio: list[Engine]) -> LocalRouter:
    for engine in trio:
        engine.forget_prefixes()
    return LocalRouter(None, prefill=[trio[1]], decode=[trio[2]])


@pytest.fixture
def alone(trio: list[Engine]) -> LocalRouter:
    return LocalRouter(None, decode=[trio[0]])


def answers(router: LocalRouter, message: EngineCoreRequest) -> dict[int, list[int]]:
    [outputs] = router.run(message)
    return {answer.index: answer.token_ids for output in outputs for answer in output.outputs}


def asked_to_lend(name: str, prompt: list[int]) -> EngineCoreRequest:
    args = {"kv_transfer_params": {"do_remote_decode": True}}
    return request(name, prompt, max_tokens=1, ignore_eos=True, extra_args=args)


def lend(prefill: Engine, name: str, prompt: list[int]) -> dict[str, Any]:
    params = drive(prefill, asked_to_lend(name, prompt))[-1].kv_transfer_params
    assert params is not None
    return params


def fetching(name: str, prompt: list[int], lent: dict[str, Any], **fields: Any) -> Any:
    return request(name, prompt, extra_args={"kv_transfer_params": lent}, **{**LONG, **fields})


# --- stranded ------------------------------------------------------------------------------------


def test_answers_to_one_prompt_end_each_for_itself(router: LocalRouter, alone: LocalRouter) -> None:
    """One ends with its first token, others go on, and the user leaves before they are done."""
    several = {"n": 4, "temperature": 1.5, "seed": 1, "stop_token_ids": list(range(1, 40))}
    message = request("n", PROMPT, max_tokens=12, **several)
    made = answers(router, message)
    assert made == answers(alone, message)
    lengths = sorted(len(token_ids) for token_ids in made.values())
    assert lengths[0] == 1, "one has ended in prefill"
    assert lengths[-1] > 1, "another was handed off"
    collector = router.send(request("left", PROMPT, n=4, temperature=1.5, seed=1, **LONG))
    router.until(lambda: any(routed.generated for routed in router.table.requests.values()))
    router.abandon(collector)
    router.settle()


def test_a_user_who_leaves_at_any_moment_leaves_nothing_and_harms_nobody(
    router: LocalRouter, alone: LocalRouter
) -> None:
    """Whatever the engines still say of it comes too late, and is heard by nobody."""
    expected = answers(alone, request("r", PROMPT, **LONG))
    for turns in itertools.count():
        for engine in router.engines:
            engine.forget_prefixes()
        collector = router.send(request("leaves", PROMPT, **LONG))
        for _ in range(turns):
            router.turn()
        ended = not router.table.requests
        router.abandon(collector)
        router.settle()
        if turns % 4 == 0 or ended:
            assert answers(router, request("stays", PROMPT, **LONG)) == expected
        if ended:
            break
    assert turns > 10


def test_a_hand_off_that_fails_is_begun_again_with_a_lease_of_its_own(
    router: LocalRouter, alone: LocalRouter
) -> None:
    """The lease goes before decode can open it: none of it is used, and nobody tries again."""
    prefill, decode = router.engines
    expected = answers(alone, request("r", PROMPT, **LONG))
    for seat in router.fleet.seats.values():
        seat.announces = False  # decode would be done before anybody could interfere
    collector = router.send(request("r", PROMPT, **LONG))
    [routed] = router.table.requests.values()
    router.until(lambda: routed.stage is Stage.DECODE)  # and decode has not looked at it yet
    assert prefill.core.connector is not None
    prefill.core.connector.revoke_all()
    deadline = Deadline("nothing is lent any more")
    while prefill.core.scheduler.leased:
        deadline.check()
        assert not prefill.turn(), "it has said everything"
    refused = decode.hinge.loads_failed
    last: list[int] = []

    def finished() -> bool:
        output = collector.take()
        if output is not None:
            last[:] = output.outputs[0].token_ids
        return collector.finished

    router.until(finished)
    router.settle()
    assert last == expected[0]
    assert decode.hinge.loads_failed == refused + 1


# --- one request that ends an engine ------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"remote_block_ids": [[1], [2]]}, "one KV-cache group"),
        ({"remote_num_tokens": None}, "remote_num_tokens"),
        ({"lease_id": None}, "lease_id"),
        ({"epoch": None, "compat": None}, "epoch, compat"),
        ({"remote_port": "5000"}, "remote_port"),
        ({"do_remote_decode": True}, "exclude each other"),
    ],
)
def test_a_reference_that_lacks_something_is_refused_by_the_field(
    trio: list[Engine], router: LocalRouter, changes: dict[str, Any], named: str
) -> None:
    _, prefill, decode = trio
    lent = lend(prefill, "p", PROMPT)
    [output] = drive(decode, fetching("d", PROMPT, {**lent, **changes}), prefill)
    assert output.finish_reason is FinishReason.ERROR
    assert named in (output.error or "")
    prefill.core.call("reject_kv_transfer", ["d", lent])
    router.settle()


# --- wrong answers --------------------------------------------------------------------------------


def test_prefill_that_loses_its_blocks_in_its_last_step_lends_what_it_computed_anew(
    trio: list[Engine], router: LocalRouter, alone: LocalRouter
) -> None:
    _, prefill, decode = trio
    core = prefill.core
    core.add(asked_to_lend("p", PROMPT), CLIENT)
    made: list[EngineCoreOutput] = []
    robbed = False
    while not (made and made[-1].finished):
        plan, result = core.start_step()
        if not robbed and any(share.samples for share in plan.scheduled):
            assert core.call("reset_prefix_cache", [True]) is True
            robbed = True
        core.finish_step(plan, result)
        made += core.take_outputs().get(CLIENT, [])
    assert robbed
    assert core.stats().num_preemptions > 0
    lent = made[-1].kv_transfer_params
    assert lent is not None
    fetched = drive(decode, fetching("d", PROMPT, lent), prefill)
    assert tokens(fetched) == answers(alone, request("r", PROMPT, **LONG))[0]
    router.settle()


# --- stuck ----------------------------------------------------------------------------------------


def silent() -> socket.socket:
    """Takes connections, and says nothing to anybody."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


@pytest.mark.parametrize("dies", [False, True], ids=["never answers", "dies in the handshake"])
def test_a_prefill_engine_that_does_not_shake_hands_costs_one_request_and_its_time(
    model: str, dies: bool
) -> None:
    """The others of the engine go on meanwhile."""
    with ExitStack() as stack:
        [decode] = stack.enter_context(engines(model, decode={"load_timeout_s": 1.0}))
        [prefill] = stack.enter_context(engines(model, prefill={}))
        listener = stack.enter_context(silent())
        there = {"remote_host": "127.0.0.1", "remote_port": listener.getsockname()[1]}
        lost = fetching("lost", PROMPT, signed(lend(prefill, "p", PROMPT), **there))
        if dies:
            listener.close()
        good = fetching("good", prompt_of(4, 30), lend(prefill, "p2", prompt_of(4, 30)))
        made = drive_all(decode, [lost, good], prefill)
        assert made["good"][-1].finish_reason is FinishReason.LENGTH
        assert made["lost"][-1].finish_reason is FinishReason.ERROR
        assert "hand-off" in (made["lost"][-1].error or "")
        assert decode.core.scheduler.pool.num_free == decode.core.scheduler.pool.num_blocks


def test_a_request_larger_than_the_cache_is_refused_and_its_prefill_freed(model: str) -> None:
    small = {"num_blocks": 9, "max_model_len": 96}
    with engines(model, prefill={}, decode=small) as (prefill, decode):
        lent = lend(prefill, "p", PROMPT)
        [output] = drive(decode, fetching("d", PROMPT, lent), prefill)
        assert output.finish_reason is FinishReason.ERROR
        assert "36" in (output.error or ""), "it says how much there is room for"
        LocalRouter(None, prefill=[prefill], decode=[decode]).settle()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("first", ["a large prompt", "a hand-off"])
def test_a_queue_s_head_without_room_does_not_keep_what_was_fetched_from_running(
    model: str, alone: LocalRouter, policy: str, first: str
) -> None:
    """Fetched requests hold the very blocks that the head waits for."""
    cramped = {"num_blocks": 20, "max_model_len": 72, "scheduling_policy": policy}
    large = request("large", prompt_of(7, 60), priority=-1, **LONG)
    with engines(model, prefill={}, decode=cramped) as (prefill, decode):
        lent = {n: lend(prefill, f"p{n}", prompt_of(n, 36)) for n in (1, 2)}
        messages = [fetching(f"d{n}", prompt_of(n, 36), lent[n], priority=n) for n in (1, 2)]
        messages.insert(0 if first == "a large prompt" else 2, large)
        made = drive_all(decode, messages, prefill)
        assert made["large"][-1].finish_reason is FinishReason.LENGTH
        for n in (1, 2):
            expected = answers(alone, request("r", prompt_of(n, 36), **LONG))[0]
            assert tokens(made[f"d{n}"]) == expected
        LocalRouter(None, prefill=[prefill], decode=[decode]).settle()
