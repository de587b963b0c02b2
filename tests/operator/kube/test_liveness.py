"""When a leader calls itself deaf or at a standstill, by a clock that the test holds."""

from __future__ import annotations

import pytest

from diptych_operator.kube.client import RIGHTS
from diptych_operator.kube.cluster import Cluster
from diptych_operator.kube.liveness import (
    SILENCE_S,
    STANDSTILL_S,
    START_S,
    WATCH_TURN_S,
    WatchLiveness,
)
from diptych_operator.kube.watch import watched_paths

PODS, SERVICES = "/api/v1/pods", "/apis/diptych.dev/v1alpha1/inferenceservices"


@pytest.fixture
def alive() -> WatchLiveness:
    found = WatchLiveness()
    found.hindrance = ""
    found.expect([PODS, SERVICES], now=100.0)
    return found


def test_a_watch_that_answers_in_its_turns_is_heard(alive: WatchLiveness) -> None:
    now = 100.0
    while now < 2000.0:
        now += WATCH_TURN_S
        for watch in (PODS, SERVICES):
            alive.answered(watch, 200, now)
        assert alive.unready(now, 0.0) == []


def test_a_watch_that_never_began_is_deaf_though_the_others_are_heard(alive: WatchLiveness) -> None:
    """So it is with one that could not be resolved: nobody asks for it."""
    alive.answered(PODS, 200, 101.0)
    assert alive.faults(100.0 + START_S, 0.0) == []
    (words,) = alive.faults(100.1 + START_S, 0.0)
    assert words == f"nothing was heard of {SERVICES} for 60 s"
    alive.answered(SERVICES, 200, 101.0 + START_S)
    assert alive.faults(102.0 + START_S, 0.0) == []


def test_a_watch_that_is_not_begun_anew_is_deaf(alive: WatchLiveness) -> None:
    for watch in (PODS, SERVICES):
        alive.answered(watch, 200, 101.0)
    alive.answered(PODS, 200, 101.0 + SILENCE_S)
    assert alive.faults(101.0 + SILENCE_S, 0.0) == []
    (words,) = alive.faults(101.1 + SILENCE_S, 0.0)
    assert words == f"nothing was heard of {SERVICES} for 180 s"


@pytest.mark.parametrize("status", [403, 404])
def test_a_watch_that_is_refused_is_told_at_once(alive: WatchLiveness, status: int) -> None:
    alive.answered(SERVICES, status, 101.0)
    (words,) = alive.faults(101.0, 0.0)
    told = f"{SERVICES} can no longer be watched: the API server answers {status}"
    assert words == told + (f". {RIGHTS}" if status == 403 else "")
    alive.answered(SERVICES, 200, 102.0)
    assert alive.faults(102.0, 0.0) == []


def test_an_outage_of_the_api_server_is_waited_for(alive: WatchLiveness) -> None:
    for status in (429, 500, 503):
        alive.answered(SERVICES, status, 101.0)
    assert alive.faults(101.0, 0.0) == []


def test_answers_to_other_requests_do_not_count(alive: WatchLiveness) -> None:
    alive.answered("/version", 404, 101.0)
    alive.answered("/version", 200, 100.0 + SILENCE_S)
    assert len(alive.faults(100.1 + SILENCE_S, 0.0)) == 2


def test_a_queue_that_does_not_move_is_told(alive: WatchLiveness) -> None:
    assert alive.faults(100.0, STANDSTILL_S) == []
    (words,) = alive.faults(100.0, STANDSTILL_S + 1)
    assert words == "no service was looked at for 600 s, and some wait"


def test_what_no_restart_mends_makes_it_unready_only(alive: WatchLiveness) -> None:
    alive.hindrance = "apply the CRD"
    assert alive.faults(100.0, 0.0) == []
    assert alive.unready(100.0, 0.0) == ["apply the CRD"]


def test_each_kind_is_heard_in_each_namespace() -> None:
    everywhere = watched_paths(Cluster(), [])
    assert {PODS, SERVICES, "/apis/policy/v1/poddisruptionbudgets"} < set(everywhere)
    here = watched_paths(Cluster(), ["a", "b"])
    assert {"/api/v1/namespaces/a/pods", "/apis/apps/v1/namespaces/b/deployments"} < set(here)
    assert len(here) == 2 * len(everywhere) == len(set(here))
