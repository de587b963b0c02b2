"""Several processes' states as that of one router."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diptych_protocol.admin import (
    CanaryReport,
    EngineReport,
    Explanation,
    PromiseCount,
    RequestLine,
    RequestList,
    RequestReport,
    RouterReport,
)
from diptych_router.workers.states import NOBODY, explanation_of_all, newest_of_all, state_of_all

ENGINE = EngineReport(
    engine_id="decode-0", role="decode", revision="a", usable=True, listed=True, draining=False,
    verified=True, open_tokens=100, num_running=1, num_waiting=2, queued_prompt_tokens=3,
    kv_usage=0.5, leases_held=4, blocks_held=5, loads_failed=6, leases_expired=7,
    stale_reads_refused=8,
)  # fmt: skip
STATE = RouterReport(
    ready=True, reason="", open_requests=3, held_requests=1, serving_revisions=["a"],
    engines=[ENGINE], canaries=[],
)  # fmt: skip


def state(**changes: Any) -> RouterReport:
    return msgspec.structs.replace(STATE, **changes)


def engine(**changes: Any) -> EngineReport:
    return msgspec.structs.replace(ENGINE, **changes)


def canary(prefill: str, at: float, *, ok: bool = True) -> CanaryReport:
    return CanaryReport(prefill=prefill, decode="decode-0", revision="a", ok=ok, unix_time=at)


def test_one_process_is_the_router() -> None:
    assert state_of_all([STATE]) == STATE


def test_requests_and_open_work_add_up_and_engines_are_told_once() -> None:
    both = state_of_all([STATE, state(open_requests=4, engines=[engine(open_tokens=50)])])
    assert (both.open_requests, both.held_requests) == (7, 2)
    assert both.engines == [engine(open_tokens=150)]


@pytest.mark.parametrize("counted", ["promises", "recent_promises"])
def test_promises_add_up(counted: str) -> None:
    def count(outcome: str, requests: int) -> PromiseCount:
        return PromiseCount(
            pool="prefill", promise="first_token", outcome=outcome, requests=requests
        )

    both = state_of_all(
        [
            state(**{counted: [count("kept", 3), count("refused", 1)]}),
            state(**{counted: [count("kept", 4)]}),
        ]
    )
    assert getattr(both, counted) == [count("kept", 7), count("refused", 1)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"usable": False}, {"usable": False}),
        ({"verified": False}, {"verified": False}),
        ({"listed": False}, {"listed": True}),
        ({"draining": True}, {"draining": True}),
        ({"paused": True}, {"paused": True}),
        ({"num_waiting": 9}, {"num_waiting": 9}),
        ({"num_waiting": 0}, {"num_waiting": 2}),
        ({"kv_usage": 0.7}, {"kv_usage": 0.7}),
        ({"silent": True}, {"silent": True}),
        ({"breaker": "half-open"}, {"breaker": "half-open"}),
        ({"kept_out": True}, {"kept_out": True}),
        ({"failures": {"lost": 2}}, {"failures": {"lost": 2}}),
    ],
)
@pytest.mark.parametrize("other_first", [False, True])
def test_processes_that_differ_about_an_engine(
    changes: dict[str, Any], expected: dict[str, Any], other_first: bool
) -> None:
    states = [state(engines=[engine(open_tokens=0, **changes)]), STATE]
    [seen] = state_of_all(states[::-1] if other_first else states).engines
    assert seen == engine(**expected)


def test_an_engine_that_one_process_does_not_know_is_not_usable_yet() -> None:
    [seen] = state_of_all([STATE, state(engines=[])]).engines
    assert (seen.usable, seen.verified, seen.listed) == (False, False, True)


@pytest.mark.parametrize(
    ("ready", "expected"),
    [((True, True), ""), ((True, False), ""), ((False, False), "no engine")],
)
def test_a_router_is_ready_if_a_process_is(ready: tuple[bool, bool], expected: str) -> None:
    whole = state_of_all([state(ready=r, reason="" if r else "no engine") for r in ready])
    assert (whole.ready, whole.reason) == (any(ready), expected)


def test_without_processes_it_says_so() -> None:
    nobody = state_of_all([])
    assert (nobody.ready, nobody.reason, nobody.engines) == (False, NOBODY, [])


@pytest.mark.parametrize(
    ("revisions", "expected"),
    [
        ((["a"], ["a"]), ["a"]),
        ((["a"], ["b", "a"]), ["a", "b"]),
        ((["a"], []), []),  # one may still send to all
    ],
)
def test_revisions_that_any_process_may_send_to(
    revisions: tuple[list[str], list[str]], expected: list[str]
) -> None:
    whole = state_of_all([state(serving_revisions=some) for some in revisions])
    assert whole.serving_revisions == expected


def test_failures_that_processes_saw_add_up() -> None:
    seen = [{"error": 2, "late": 1}, {"error": 3}]
    all_states = [state(engines=[engine(failures=failures)]) for failures in seen]
    [told] = state_of_all(all_states).engines
    assert told.failures == {"error": 5, "late": 1}


def test_the_newest_canary_of_each_pair() -> None:
    one = state(canaries=[canary("p0", 1.0, ok=False), canary("p1", 4.0)])
    other = state(canaries=[canary("p0", 3.0)])
    assert state_of_all([one, other]).canaries == [canary("p0", 3.0), canary("p1", 4.0)]


def remembered(*times: float) -> RequestList:
    lines = [
        RequestLine(
            request_id=str(at), unix_time=at, prompt_tokens=1, output_tokens=1, prefill="p",
            decode="d", attempts=1, first_token_s=None, outcome="",
        )
        for at in times
    ]  # fmt: skip
    return RequestList(requests=lines, num_remembered=10, most_remembered=100)


def test_the_newest_requests_of_all_processes_are_listed() -> None:
    found = newest_of_all([remembered(4.0, 1.0), remembered(3.0, 2.0)], 3)
    assert [line.unix_time for line in found.requests] == [4.0, 3.0, 2.0]
    assert (found.num_remembered, found.most_remembered) == (20, 200)


def test_the_process_that_knows_a_request_explains_it() -> None:
    known = RequestReport(request_id="r", core_id="r-1", unix_time=1.0, prompt_tokens=1)
    parts = [
        Explanation(policy="p", disaggregate="auto", requests=requests)
        for requests in ([], [known])
    ]
    assert explanation_of_all(parts, "p", "auto") == parts[1]
    assert explanation_of_all([], "p", "auto") == parts[0]
