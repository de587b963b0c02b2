"""The loop of a core says that it turns, and for how long a step may keep it from saying so."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from engine_kit.wire import ADD, UTILITY, Client, request, start
from hypothesis import given
from hypothesis import strategies as st
from waits import PATIENCE_S

from diptych_frontend.core_client import heartbeat_timer
from diptych_frontend.core_client.heartbeat_timer import (
    BEAT_S,
    LONGEST_STEP_S,
    WITHIN_S,
    HeartbeatTimer,
    StepTimes,
)
from diptych_protocol import (
    EngineCoreOutputs,
    EngineCoreRequest,
    StructuredOutputsParams,
    UtilityCall,
)
from diptych_protocol.wire import FOLLOW_HEARTBEAT, Heartbeat

# --- pure -----------------------------------------------------------------------------------------


def test_the_first_step_of_a_size_may_take_as_long_as_any() -> None:
    steps = StepTimes()
    steps.took(1, 0.01)
    assert steps.bound_s(1) < 0.1
    assert steps.bound_s(256) == LONGEST_STEP_S


def test_a_bound_follows_the_longest_recent_step_of_the_size() -> None:
    steps = StepTimes()
    for seconds in (0.2, 2.0, 0.3):
        steps.took(256, seconds)
    assert 2.0 < steps.bound_s(300) <= 8.0
    for _ in range(500):
        steps.took(256, 0.2)
    assert steps.bound_s(300) == pytest.approx(0.8)


@given(st.lists(st.tuples(st.integers(1, 1 << 50), st.floats(0.001, 30.0)), max_size=60))
def test_a_step_that_takes_as_long_as_the_one_before_never_breaks_its_bound(
    steps: list[tuple[int, float]],
) -> None:
    times = StepTimes()
    for tokens, seconds in steps:
        times.took(tokens, seconds)
        assert seconds <= times.bound_s(tokens) <= LONGEST_STEP_S


def test_the_next_word_comes_within_what_was_promised() -> None:
    """Whatever the lengths of steps: as the loop calls it, in virtual time."""
    timer, now, promised = HeartbeatTimer(), 100.0, 100.0
    timer.follow(b"a")
    for index in range(2000):
        seconds = 3.0 if index % 97 == 0 else 0.02 + 0.1 * (index % 5)
        told = timer.before_silence(now, 1.5 * seconds)
        if told is not None:
            promised = now + told.within_s
        now += seconds
        assert now <= promised
        told = timer.beat(now)
        if told is not None:
            promised = now + told.within_s


def test_a_promise_ends_as_soon_as_the_loop_turns() -> None:
    timer = HeartbeatTimer()
    timer.follow(b"a")
    assert timer.beat(1.0) == Heartbeat(WITHIN_S)
    assert timer.before_silence(1.1, 0.2) is None
    assert timer.before_silence(1.1, 600.0, in_call=True) == Heartbeat(600.0, True)
    assert timer.wait_s(1.2) == 0.0
    assert timer.beat(1.2) == Heartbeat(WITHIN_S)
    assert timer.wait_s(1.2) == pytest.approx(BEAT_S)


def test_what_one_follower_says_of_the_role_all_hear_at_once_until_another_says_otherwise() -> None:
    timer = HeartbeatTimer()

    def heard() -> list[str]:
        beat = timer.beat(1.0)
        assert beat is not None, "the next one is due at once"
        return [beat.role for _ in timer.addressed(beat, lambda _: 0)]

    timer.follow(b"1", "a")
    timer.follow(b"2", "b", "prefill")
    assert heard() == ["prefill", "prefill"]
    timer.follow(b"3", "c")
    assert heard() == ["prefill"] * 3
    timer.follow(b"1", "a", "decode")
    assert heard() == ["decode"] * 3


def test_the_number_of_followers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_timer, "MAX_FOLLOWERS", 2)
    timer = HeartbeatTimer()
    assert [timer.follow(x) for x in (b"a", b"b", b"c", b"a")] == [True, True, False, True]


def test_followers_are_told_apart_by_their_names() -> None:
    timer = HeartbeatTimer()
    for client, name in ((b"1", "c"), (b"2", "a"), (b"3", "b")):
        timer.follow(client, name)
    assert list(timer.followers) == [b"2", b"3", b"1"]
    timer.follow(b"2", "z" * 1000)
    timer.forget(b"3")
    timer.forget(b"3")
    assert list(timer.followers) == [b"1", b"2"]
    assert len(timer.followers[b"2"]) < 100


def test_a_router_that_connects_again_is_still_one() -> None:
    timer = HeartbeatTimer()
    for client, name in ((b"old", "a"), (b"1", "b"), (b"new", "a"), (b"2", ""), (b"3", "")):
        timer.follow(client, name)
    assert timer.numbers() == {b"2": 0, b"3": 1, "a": 2, "b": 3}


# --- a real core ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    path = f"ipc://{tmp_path_factory.mktemp('core')}/core"
    process = start(path)
    yield process, path
    process.terminate()
    assert process.wait(PATIENCE_S) == 0


def following(path: str, *name: str) -> Client:
    client = Client(path)
    call = UtilityCall(0, -1, FOLLOW_HEARTBEAT, [*name])
    client.send(UTILITY, msgspec.msgpack.encode(call))
    return client


MANY = 8
"""More requests than the clients of earlier tests have sent."""


def next_beat(client: Client) -> EngineCoreOutputs:
    while (message := client.receive()).heartbeat is None:
        pass
    return message


def beat_of(message: EngineCoreOutputs) -> Heartbeat:
    assert message.heartbeat is not None
    return message.heartbeat


def test_an_idle_core_beats_with_its_statistics(core: tuple[subprocess.Popen[bytes], str]) -> None:
    client = following(core[1])
    for _ in range(3):
        message = next_beat(client)
        assert beat_of(message).within_s == WITHIN_S
        assert message.scheduler_stats is not None
    client.socket.close()


def test_a_core_tells_each_router_which_one_it_is_and_what_all_have_sent(
    core: tuple[subprocess.Popen[bytes], str],
) -> None:
    clients = [following(core[1], name) for name in ("b", "c", "a")]
    for client in clients[:2]:
        client.send(ADD, msgspec.msgpack.encode(request("r" + str(clients.index(client)))))
    for client, number, own in zip(clients, (1, 2, 0), (1, 1, 0), strict=True):
        while (message := next_beat(client)).heartbeat is not None:
            beat = beat_of(message)
            if beat.followers >= 3 and beat.requests >= 2:
                break
        # Clients of earlier tests, which have no name, come first until they are found gone.
        assert beat.follower == number + beat.followers - 3
        assert message.requests_received == own
    for client in clients:
        client.socket.close()


def test_a_core_counts_a_router_once_that_has_connected_again(
    core: tuple[subprocess.Popen[bytes], str],
) -> None:
    clients = [following(core[1], name) for name in ("x", "x", "y")]
    for client in clients:
        next_beat(client)
    for index in range(MANY):
        clients[2].send(ADD, msgspec.msgpack.encode(request(f"y{index}")))
    for client, behind in zip(clients, (2, 2, 1), strict=True):
        while (beat := beat_of(next_beat(client))).requests < MANY:
            pass
        assert beat.follower == beat.followers - behind
    for client in clients:
        client.socket.close()


def test_a_stopped_core_misses_its_heartbeat_and_goes_on(
    core: tuple[subprocess.Popen[bytes], str],
) -> None:
    process, path = core
    client = following(path)
    next_beat(client)
    process.send_signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        while time.monotonic() < begin + 2 * WITHIN_S:
            if client.socket.poll(100):
                begin = time.monotonic()  # what was under way
                client.receive()
    finally:
        process.send_signal(signal.SIGCONT)
    assert beat_of(next_beat(client)).within_s == WITHIN_S
    client.socket.close()


def test_a_core_tells_that_a_step_of_a_new_size_may_take_long(
    core: tuple[subprocess.Popen[bytes], str],
) -> None:
    client = following(core[1])
    next_beat(client)
    client.send(ADD, msgspec.msgpack.encode(request("long", [5] * 40, max_tokens=1)))
    assert beat_of(next_beat(client)).within_s == LONGEST_STEP_S
    assert beat_of(next_beat(client)).within_s == WITHIN_S
    client.socket.close()


def test_a_core_tells_that_a_control_call_begins_and_before_its_answer_that_it_has_ended(
    core: tuple[subprocess.Popen[bytes], str],
) -> None:
    client = following(core[1])
    next_beat(client)
    client.call_id += 1
    call = UtilityCall(0, client.call_id, "reset_prefix_cache", [False, False])
    client.send(UTILITY, msgspec.msgpack.encode(call))
    while not beat_of(next_beat(client)).in_call:
        pass
    ended = client.receive()
    assert ended.utility_output is None
    assert not beat_of(ended).in_call
    client.socket.close()


def promises_during(client: Client, asked: EngineCoreRequest) -> list[float]:
    """For how long the core said that it may be silent, until the request has ended."""
    client.send(ADD, msgspec.msgpack.encode(asked))
    promised: list[float] = []
    while True:
        message = client.receive()
        if message.heartbeat is not None:
            promised.append(message.heartbeat.within_s)
        if message.finished_requests:
            return promised


def test_a_core_tells_that_its_first_form_may_take_long(smollm2: str, tmp_path: Path) -> None:
    path = f"ipc://{tmp_path}/core"
    # The server from which cores of tests are forked has the vocabulary for "auto" prepared.
    process = start(path, model=smollm2, reasoning_parser="none")
    client = following(path)
    next_beat(client)
    promises_during(client, request("free"))  # steps of its size, the first of which may be long
    first, second = (
        promises_during(client, request(regex, structured_outputs=form))
        for regex in ("[a-y]{3}", "[a-z]{3}")
        for form in [StructuredOutputsParams(regex=regex)]
    )
    assert max(first) == LONGEST_STEP_S
    assert max(second, default=0.0) < LONGEST_STEP_S
    client.socket.close()
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
