"""What is promised of a request: when it is refused, with which answer, and what is counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych_frontend.openai.errors import error_answer
from diptych_protocol import (
    EngineCoreRequest,
    EngineOverloadedError,
    PoolingParams,
    SamplingParams,
    Slo,
    TenantOverloadedError,
)
from diptych_protocol.admin import RECENT_S
from diptych_router.choosing.first_token import FirstToken, expected
from diptych_router.choosing.policy import Decision
from diptych_router.requests.promises import (
    MOST_FACTOR,
    MOST_RETRY_S,
    SLOT_S,
    Caution,
    Kind,
    Promises,
    RecentCounts,
)
from diptych_router.requests.records import Records, record_of
from diptych_router.requests.request_record import RequestRecord

PROMISED_MS = 1000
seconds = st.floats(0.0, 100.0)
queues = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 10_000))


def recorded(tenant: str = "", *, pooled: bool = False) -> RequestRecord:
    """A request whose engines have just been chosen."""
    sampling = None if pooled else SamplingParams(max_tokens=9)
    pooling = PoolingParams("embed") if pooled else None
    request = EngineCoreRequest(
        "r", [1, 2], None, sampling, pooling, None, 0.0, None, None, None, tenant=tenant
    )
    record = record_of(request, 0.0)
    Records().chose(record, Decision("p", "d", "cheapest"), {}, 9.0, 0.0)
    return record


def promises(ttft_ms: int | None = PROMISED_MS, inter_token_ms: int | None = None) -> Promises:
    return Promises(Slo(ttft_ms, inter_token_ms))


def counted(kept: Promises) -> dict[tuple[str, ...], int]:
    return {tuple(kind): count for kind, count in kept.counts.items()}


class TestRefusals:
    @pytest.mark.parametrize(
        ("tenant", "first", "status", "retry_after"),
        [
            ("", FirstToken(0.5, 0.5, 0.4), None, 0),
            ("", FirstToken(0.5, 0.5, 0.6), 503, 1),
            ("", FirstToken(3.5, 0.0, 0.6), 503, 4),
            ("a", FirstToken(3.5, 0.1, 0.6), 429, 4),
            ("a", FirstToken(3.5, 0.5, 0.6), 503, 4),
            ("", FirstToken(1e6, 1e6, 0.1), 503, MOST_RETRY_S),
            # Longer than the promise on an idle engine: never in time, and not refused for ever.
            ("", FirstToken(0.0, 0.0, 7.0), None, 0),
            ("", FirstToken(0.9, 0.9, 7.0), None, 0),
            ("", FirstToken(1.9, 1.9, 7.0), 503, 1),
        ],
    )
    def test_a_request_that_would_be_late_is_refused(
        self, tenant: str, first: FirstToken, status: int | None, retry_after: int
    ) -> None:
        kept = promises()
        refusal = kept.refusal(recorded(tenant), first, 0.0)
        if status is None:
            assert refusal is None
            assert not kept.counts
            return
        assert refusal is not None
        answer = error_answer(refusal, "r")
        assert answer.status == status
        assert dict(answer.headers)[b"retry-after"] == str(retry_after).encode()
        assert "slo.ttftMs" in answer.detail.message
        assert kept.counts == {Kind("prefill", "first_token", "refused"): 1}

    def test_the_answer_tells_whose_requests_are_the_reason(self) -> None:
        own = promises().refusal(recorded("a"), FirstToken(5.0, 0.0, 0.1), 0.0)
        others = promises().refusal(recorded("a"), FirstToken(5.0, 5.0, 0.1), 0.0)
        assert isinstance(own, TenantOverloadedError)
        assert isinstance(others, EngineOverloadedError)
        assert not isinstance(others, TenantOverloadedError)

    @pytest.mark.parametrize(
        ("kept", "request_"), [(promises(None, 5), recorded()), (promises(), recorded(pooled=True))]
    )
    def test_what_has_no_promise_is_not_refused(
        self, kept: Promises, request_: RequestRecord
    ) -> None:
        assert kept.refusal(request_, FirstToken(1e6, 1e6, 0.1), 0.0) is None


class TestCaution:
    @staticmethod
    def after(ratios: Iterable[float]) -> Caution:
        """First tokens that were expected in half of the promised time, and took so many times as
        long."""
        caution = Caution(1.0)
        for ratio in ratios:
            caution.saw(FirstToken(0.4, 0.4, 0.1), 0.5 * ratio)
        return caution

    def test_it_follows_how_far_predictions_were_off(self) -> None:
        first = FirstToken(0.6, 0.6, 0.1)
        assert self.after([]).late_s(first) <= 0
        careful = self.after([1.8] * 100)
        assert 1.5 < careful.factor < 2.2
        assert careful.late_s(first) > 0
        assert self.after([1.8] * 100 + [1.0] * 1000).late_s(first) <= 0

    @given(st.lists(st.tuples(seconds, seconds, seconds)))
    def test_an_idle_engine_is_never_too_late(self, seen: list[tuple[float, float, float]]) -> None:
        caution = Caution(1.0)
        for wait_s, compute_s, took_s in seen:
            caution.saw(FirstToken(wait_s, wait_s, compute_s), took_s)
        assert 1.0 <= caution.factor <= MOST_FACTOR
        for compute_s in (0.1, 0.9, 5.0):
            assert caution.late_s(FirstToken(0.0, 0.0, compute_s)) <= 0

    def test_waits_of_an_idle_service_teach_nothing(self) -> None:
        caution = Caution(1.0)
        for _ in range(100):
            caution.saw(FirstToken(0.001, 0.001, 0.01), 0.5)
        assert caution.factor == 1.0


class TestExpectation:
    @pytest.mark.parametrize(
        ("tenant", "of_tenants", "queued", "wait_s", "alone_s"),
        [
            ("", {}, 0, 10.0, 10.0),
            ("", {}, 100, 10.0, 10.0),
            ("a", {"a": 100}, 100, 10.0, 0.0),
            ("b", {"a": 100}, 100, 1.0, 1.0),
            ("a", {"a": 50, "b": 50}, 100, 10.0, 1.0),
            ("a", {"a": 90, "b": 10}, 100, 10.0, 1.0),
            ("b", {"a": 90, "b": 10}, 100, 3.0, 1.0),
            ("b", {"a": 50}, 100, 6.0, 6.0),
        ],
    )
    def test_a_request_waits_for_its_tenant_s_turn(
        self, tenant: str, of_tenants: dict[str, int], queued: int, wait_s: float, alone_s: float
    ) -> None:
        """Its own prompt has 10 tokens; the queue takes 10 s."""
        terms = {"wait_s": 10.0, "compute_s": 0.5, "fetch_s": 0.25}
        first = expected(terms, queued, of_tenants, tenant, 10.0)
        assert first is not None
        assert first.wait_s == pytest.approx(wait_s)
        assert first.wait_for_others_s == pytest.approx(alone_s)
        assert first.compute_s == 0.75

    @pytest.mark.parametrize("terms", [{}, {"open_tokens": 3.0}, {"wait_s": 1.0}])
    def test_a_policy_that_does_not_predict_expects_nothing(self, terms: dict[str, float]) -> None:
        assert expected(terms, 10, {}, "", 10.0) is None

    @given(seconds, queues, st.integers(0, 40_000), st.sampled_from("abcde"), seconds)
    def test_nobody_waits_for_more_than_the_queue(
        self, wait_s: float, of_tenants: dict[str, int], queued: int, tenant: str, own: float
    ) -> None:
        terms = {"wait_s": wait_s, "compute_s": 0.5}
        first = expected(terms, queued, of_tenants, tenant, own)
        assert first is not None
        assert 0.0 <= first.wait_for_others_s <= first.wait_s + 1e-9
        assert first.wait_s <= wait_s * (1 + 1e-9)


class TestCounts:
    @pytest.mark.parametrize(
        ("first_at", "ended_at", "tokens", "wanted"),
        [
            (0.9, 1.7, 9, {("prefill", "first_token", "kept"): 1,
                           ("decode", "inter_token", "kept"): 1}),
            (1.1, 2.0, 9, {("prefill", "first_token", "missed"): 1,
                           ("decode", "inter_token", "missed"): 1}),
            (0.9, 0.9, 1, {("prefill", "first_token", "kept"): 1}),
        ],
    )  # fmt: skip
    def test_each_promise_is_kept_or_missed(
        self, first_at: float, ended_at: float, tokens: int, wanted: dict[Any, int]
    ) -> None:
        kept, request = promises(PROMISED_MS, 101), recorded()
        request.first_token_s = first_at
        kept.saw_first(request, first_at)
        request.tokens.came(tokens, first_at)
        kept.saw_end(request, ended_at)
        assert counted(kept) == wanted

    @pytest.mark.parametrize(
        ("begun", "wanted"),
        [
            (False, {("prefill", "first_token", "missed"): 1}),
            (True, {("prefill", "first_token", "kept"): 1, ("decode", "inter_token", "missed"): 1}),
        ],
    )
    def test_a_failure_keeps_no_promise(self, begun: bool, wanted: dict[Any, int]) -> None:
        kept, request = promises(PROMISED_MS, 50), recorded()
        if begun:
            request.first_token_s = 0.1
            kept.saw_first(request, 0.1)
        kept.saw_failure(request, 9.0, of_load=True)
        assert counted(kept) == wanted

    @pytest.mark.parametrize(
        ("first_at", "tokens", "left_at", "wanted"),
        [
            (None, 0, 0.9, []),  # nobody knows whether it would have been late
            (None, 0, 1.1, [("first_token", "missed")]),
            (0.5, 1, 0.54, [("first_token", "kept")]),
            (0.5, 1, 0.56, [("first_token", "kept"), ("inter_token", "missed")]),
            (0.5, 5, 0.69, [("first_token", "kept"), ("inter_token", "kept")]),
            (0.5, 5, 0.71, [("first_token", "kept"), ("inter_token", "missed")]),
        ],
    )
    def test_who_leaves_is_counted_by_what_he_got(
        self, first_at: float | None, tokens: int, left_at: float, wanted: list[tuple[str, str]]
    ) -> None:
        kept, request = promises(PROMISED_MS, 50), recorded()
        if first_at is not None:
            request.first_token_s = first_at
            kept.saw_first(request, first_at)
            request.tokens.came(tokens, first_at)
        kept.saw_leave(request, left_at)
        assert [(kind.promise, kind.outcome) for kind in kept.counts.elements()] == wanted

    def test_a_prompt_that_the_decode_engine_computes_is_counted_there(self) -> None:
        kept, request = promises(), recorded()
        Records().chose(request, Decision(None, "d", "cheapest"), {}, 9.0, 0.0)
        kept.saw_first(request, 0.1)
        assert counted(kept) == {("decode", "first_token", "kept"): 1}

    def test_without_promises_nothing_is_counted(self) -> None:
        kept, request = promises(None, None), recorded()
        kept.saw_first(request, 5.0)
        request.tokens.came(5, 5.0)
        kept.saw_end(request, 9.0)
        kept.saw_failure(request, 9.0, of_load=True)
        assert not kept.counts


LATE = FirstToken(5.0, 5.0, 0.1)
HOPELESS = FirstToken(0.0, 0.0, 5.0)
"""On an idle engine."""


class TestRecent:
    """What an autoscaler is told: what more pods would change, and only of late."""

    def test_a_refusal_and_a_late_first_token_count(self) -> None:
        kept, late = promises(), recorded()
        assert kept.refusal(recorded(), LATE, 1.0) is not None
        assert kept.refusal(late, FirstToken(0.1, 0.1, 0.1), 1.0) is None
        kept.saw_first(late, 3.0)
        assert kept.recent.total(4.0) == {
            Kind("prefill", "first_token", "refused"): 1,
            Kind("prefill", "first_token", "missed"): 1,
        }

    def test_a_prompt_that_no_engine_computes_in_time_counts_only_if_it_is_in_time(self) -> None:
        kept = promises()
        for took_s in (7.0, 0.9):
            request = recorded()
            assert kept.refusal(request, HOPELESS, 0.0) is None
            kept.saw_first(request, took_s)
        assert kept.recent.total(7.0) == {Kind("prefill", "first_token", "kept"): 1}
        assert kept.counts[Kind("prefill", "first_token", "missed")] == 1

    @pytest.mark.parametrize("begun", [False, True])
    @pytest.mark.parametrize("of_load", [False, True])
    def test_a_failure_counts_if_there_was_too_much_to_do(self, begun: bool, of_load: bool) -> None:
        kept, request = promises(PROMISED_MS, 50), recorded()
        if begun:
            request.first_token_s = 0.1
            kept.saw_first(request, 0.1)
        kept.saw_failure(request, 1.0, of_load=of_load)
        missed = [kind for kind in kept.recent.total(1.0) if kind.outcome == "missed"]
        promise = "inter_token" if begun else "first_token"
        assert [kind.promise for kind in missed] == ([promise] if of_load else [])
        assert sum(kept.counts.values()) == 1 + begun

    @given(st.lists(st.floats(0.0, 200.0)), st.floats(0.0, 100.0))
    def test_what_is_older_is_forgotten(self, times: list[float], later: float) -> None:
        counts = RecentCounts[str]()
        for at in sorted(times):
            counts.add("seen", at)
        now = max(times, default=0.0) + later
        seen = counts.total(now)["seen"]
        assert sum(at > now - RECENT_S + SLOT_S for at in times) <= seen
        assert seen <= sum(at >= now - RECENT_S - SLOT_S for at in times)
        assert not counts.total(now + RECENT_S + SLOT_S)
