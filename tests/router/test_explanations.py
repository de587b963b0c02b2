"""What a router remembers of its requests: the candidates, the choice, and what came true."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from cases import each
from engine_kit.core import core_request
from hypothesis import given
from hypothesis import strategies as st
from toy_pools import EngineView, fleet_of

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    RequestJourneyEvent,
    SamplingParams,
)
from diptych_protocol import RequestJourneyEventType as Station
from diptych_protocol.admin import AttemptReport, Candidate, RequestReport
from diptych_protocol.engine_stats import SchedulerStats
from diptych_protocol.wire import time_of_day
from diptych_router.choosing.fleet_table import FleetTable
from diptych_router.choosing.policies import POLICIES
from diptych_router.choosing.policy import Decision, RequestView
from diptych_router.requests.records import MOST_ATTEMPTS, MOST_PLACEMENTS, Records
from diptych_router.requests.request_record import (
    BOUNDS,
    Predictions,
    RequestRecord,
    Setback,
)
from diptych_router.telling.explanations import (
    MOST_CANDIDATES,
    MOST_CHARACTERS,
    MOST_FOUND,
    Explanations,
)
from diptych_router.telling.metrics import of_predictions

OUTPUT_TOKENS = 10.0


def journey(core_id: str, kind: Station, time_s: float, tokens: int = 0) -> RequestJourneyEvent:
    return RequestJourneyEvent(core_id, kind, time_s, None, tokens)


def fleet(engines: int, policy: str = "prefix_aware") -> FleetTable:
    """Two pools whose engines have queues of different lengths."""
    first, second = (
        [EngineView(f"{letter}{number}", "f") for number in range(engines)] for letter in "pd"
    )
    draw = Random(0).randrange
    table: FleetTable = fleet_of(first, second, POLICIES[policy], draw, "always")
    for pool in table.tables.values():
        for at, row in enumerate(pool.rows):
            row["open_tokens"] = 100 - at
            stats = SchedulerStats(
                blocks_total=1000, blocks_free=1000, queued_prompt_tokens=50 * (engines - at)
            )
            row.report(stats, 0, 0.0)
    return table


def choice(table: FleetTable, tokens: int = 50) -> Decision:
    decision = table.choose(RequestView(tokens, OUTPUT_TOKENS), 0.0)
    assert decision is not None
    return decision


class Router:
    """Writes records as a request table does, and answers questions about them."""

    def __init__(self, **bounds: int) -> None:
        self.records, self.predictions = Records(**bounds), Predictions()
        self.explanations = Explanations(
            self.records, lambda key: f"pod {key}", policy="any", disaggregate="always"
        )
        self.open: dict[str, RequestRecord] = {}

    def begin(
        self, name: str = "r", external: str | None = None, now: float = 0.0, tenant: str = ""
    ) -> None:
        made = EngineCoreRequest(
            name, [1] * 50, None, SamplingParams(), None, None, 0.0, None, None, None,
            external_req_id=external, tenant=tenant,
        )  # fmt: skip
        self.open[name] = self.records.begin(made, now)

    def choose(self, decision: Decision, name: str = "r", now: float = 0.0) -> None:
        facts = {"prefill": f"pod {decision.prefill}", "decode": f"pod {decision.decode}"}
        self.records.chose(self.open[name], decision, facts, OUTPUT_TOKENS, now)

    def send(self, engine: str, number: int, now: float, name: str = "r") -> str:
        """To an engine. Returns the id by which it knows the request."""
        core_id = f"{name}/{number}"
        self.records.placed(self.open[name], core_id, engine, f"pod {engine}", now)
        return core_id

    def hear(self, engine: str, now: float, name: str = "r", tokens: int = 1, **facts: Any) -> None:
        """Tokens of an engine, to which the request is sent first unless it is there."""
        record = self.open[name]
        if record.placement is None or record.placement.engine != engine:
            self.send(engine, record.num_placements + 1, now, name)
        output = EngineCoreOutput(f"{name}/1", [5] * tokens, **facts)
        record.brought(output, now, self.predictions)

    def set_back(self, why: str, now: float, name: str = "r") -> None:
        self.open[name].set_back(Setback.LOSS, why, True, now)

    def end(self, now: float, name: str = "r", outcome: str = "length") -> None:
        self.records.ended(self.open[name], outcome, now)

    def ask(self, name: str = "r") -> list[RequestReport]:
        return self.explanations.explanation(name).requests

    def attempt(self) -> AttemptReport:
        return self.ask()[0].attempts[-1]


def counted(router: Router) -> dict[str, tuple[float, float]]:
    """Number and sum of the ratios, by histogram and pool."""
    values = {
        (sample.name, sample.labels.get("pool", "")): sample.value
        for family in of_predictions("m", router.predictions)
        for sample in family.samples
    }
    return {
        f"{name.removesuffix('_count')} {pool}".strip(): (
            number, values[name.replace("_count", "_sum"), pool]
        )
        for (name, pool), number in values.items()
        if name.endswith("_count")
    }  # fmt: skip


def chosen(attempt: AttemptReport, choice: int) -> Candidate:
    (found,) = [x for x in attempt.choices[choice].candidates if x.chosen]
    return found


def test_candidates_are_told_by_their_cost_and_their_terms_add_up() -> None:
    router, decision = Router(), choice(fleet(3))
    router.begin()
    router.choose(decision)
    attempt = router.attempt()
    assert [x.duty for x in attempt.choices] == ["prefill", "decode"]
    for weighed, taken in zip(attempt.choices, (decision.prefill, decision.decode), strict=True):
        costs = [x.cost for x in weighed.candidates]
        assert weighed.num_able == len(costs) == 3
        assert costs == sorted(costs)
        for candidate in weighed.candidates:
            assert candidate.cost == pytest.approx(sum(candidate.terms.values()))
            assert candidate.chosen == (candidate.engine == f"pod {taken}")
    pair = chosen(attempt, 0).terms | chosen(attempt, 1).terms
    assert attempt.terms == pytest.approx(pair)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_happens_to_engines_later_changes_no_explanation(policy: str) -> None:
    table, router = fleet(3, policy), Router()
    router.begin()
    router.choose(choice(table))
    before = router.ask()
    for pool, gone in (("prefill", "p0"), ("decode", "d1")):
        for row in table.tables[pool].rows:  # type: ignore[index]
            row["open_tokens"] = row["given"] = 7777
            row.report(SchedulerStats(queued_prompt_tokens=9999), 0, 1.0)
        table.remove(gone)
    table.add("decode", "d9")
    assert router.ask() == before


def test_the_chosen_one_is_told_though_many_are_cheaper() -> None:
    """As when there is nothing to choose: the cheapest do not fit with anybody."""
    table, router = fleet(MOST_CANDIDATES + 4), Router()
    for row in table.tables["prefill"].rows[1:]:
        row["fingerprint"] = 1.0
    dear = table.tables["prefill"].rows[0]
    assert dear.key == "p0"
    router.begin()
    router.choose(choice(table))
    attempt = router.attempt()
    assert len(attempt.choices[0].candidates) == MOST_CANDIDATES + 1
    assert attempt.choices[0].num_able == MOST_CANDIDATES + 4
    assert chosen(attempt, 0).engine == attempt.prefill == "pod p0"


def test_predictions_are_compared_with_what_came_true() -> None:
    router, decision = Router(), choice(fleet(2))
    router.begin(now=5.0)
    router.choose(decision, now=5.5)
    router.hear("p1", 6.5, num_cached_tokens=32, num_pinned_tokens=16)
    router.hear("d1", 6.75, num_received_tokens=49)
    router.hear("d0", 8.0)  # the stream was moved there
    router.hear("d0", 8.5)
    router.end(9.0)
    (request,) = router.ask()
    terms = decision.terms
    first = terms["wait_s"] + terms["compute_s"]
    second = terms["transfer_s"] + terms["steps_s"] / OUTPUT_TOKENS
    assert (request.waited_s, request.seconds) == (0.5, 4.0)
    assert (request.outcome, request.output_tokens) == ("length", 4)
    attempt = request.attempts[0]
    assert attempt.unix_time == time_of_day(5.5)
    assert (attempt.first_token_s, attempt.hand_off_s) == (1.0, 0.25)
    assert (attempt.cached_tokens, attempt.received_tokens) == (32, 49)
    assert attempt.pinned_tokens == 16
    assert attempt.decoded_by == ["pod d1", "pod d0"]
    assert attempt.first_token_expected_s == pytest.approx(first)
    assert attempt.hand_off_expected_s == pytest.approx(second)
    assert counted(router) == {
        "diptych:first_token_real_over_predicted prefill": pytest.approx((1, 1.0 / first)),
        "diptych:first_token_real_over_predicted decode": (0, 0),
        "diptych:hand_off_real_over_predicted": pytest.approx((1, 0.25 / second)),
    }


def test_an_engine_whose_first_word_brings_no_token_is_compared_once() -> None:
    router = Router()
    router.begin()
    router.choose(choice(fleet(2)))
    router.hear("p1", 1.0, tokens=0)
    router.hear("p1", 2.0)
    assert counted(router)["diptych:first_token_real_over_predicted prefill"][0] == 1


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin"])
def test_a_policy_that_knows_no_seconds_predicts_nothing(policy: str) -> None:
    router = Router()
    router.begin()
    router.choose(choice(fleet(2, policy)))
    router.hear("p1", 1.0)
    router.hear("d1", 2.0)
    attempt = router.attempt()
    assert (attempt.first_token_s, attempt.hand_off_s) == (1.0, 1.0)
    assert attempt.first_token_expected_s is attempt.hand_off_expected_s is None
    assert {number for number, _ in counted(router).values()} == {0}


def test_each_attempt_is_told_with_what_ended_it() -> None:
    table, router = fleet(2), Router()
    router.begin()
    router.choose(choice(table))
    router.hear("p1", 1.0)
    why = "engine d1 is gone " + "x" * 1000
    router.set_back(why, 1.5)
    router.choose(choice(table), now=2.0)
    router.hear("p0", 2.5)
    first, second = router.ask()[0].attempts
    assert (first.setback, first.why) == ("loss", why[:MOST_CHARACTERS])
    assert (first.hand_off_s, second.setback, second.first_token_s) == (None, "", 0.5)
    (line,) = router.explanations.newest(5).requests
    assert (line.attempts, line.first_token_s) == (2, 1.0)


def test_placements_are_told_with_what_their_engines_say_and_when_tokens_came() -> None:
    router = Router()
    router.begin(now=10.0)
    router.choose(choice(fleet(2)), now=10.5)
    at_p = router.send("p", 1, 11.0)
    router.records.told("p", [journey(at_p, Station.SCHEDULED, 70.0, 16)], 11.5)
    router.records.told("d", [journey(at_p, Station.FINISHED, 70.0)], 11.5)
    router.hear("p", 12.0)
    at_d = router.send("d", 2, 12.5)
    router.hear("d", 13.0, tokens=2, num_received_tokens=50)
    (known,) = router.ask()
    first, second = known.placements
    assert (first.engine, first.attempt, first.sent_s, first.first_word_s) == ("pod p", 1, 1.0, 2.0)
    assert [(x.name, x.at_s, x.prompt_tokens) for x in first.stations] == [("scheduled", 1.5, 16)]
    assert (second.engine, second.first_word_s, second.received_tokens) == ("pod d", 3.0, 50)
    assert (known.token_times_s, known.token_counts) == ([2.0, 3.0], [1, 3])
    router.records.told("d", [journey(at_d, Station.QUEUED, math.nan)], 13.0)
    assert router.ask()[0].placements[1].stations == []


def test_a_tenants_request_is_found_behind_many_of_others_with_its_id() -> None:
    router = Router()
    router.begin("own", external="chosen", tenant="alice")
    for number in range(MOST_FOUND):
        router.begin(f"other {number}", external="chosen", tenant="bob")
    for tenant, first in (("alice", "own"), ("bob", f"other {MOST_FOUND - 1}")):
        told = router.explanations.explanation("chosen", tenant).requests
        assert (told[0].core_id, {x.tenant for x in told}) == (first, {tenant})
    assert len(router.ask("chosen")) == MOST_FOUND


def test_engines_of_a_forgotten_request_are_not_heard_and_many_are_not_kept() -> None:
    router = Router(most_requests=1)
    router.begin("a")
    router.choose(choice(fleet(2)), "a")
    for number in range(MOST_PLACEMENTS + 5):
        core_id = router.send("d", number, 1.0, "a")
    assert len(router.ask("a")[0].placements) == MOST_PLACEMENTS
    router.begin("b")
    router.records.told("d", [journey(core_id, Station.QUEUED, 1.0)], 2.0)
    router.send("d", 1, 1.0, "a")
    assert router.ask("a") == []
    router.end(2.0, "a")
    assert router.records._placements == {}


def test_engines_of_attempts_that_are_not_kept_are_forgotten_too() -> None:
    records = Records(most_requests=1)
    record = records.begin(core_request("a", [1]), 0.0)
    for number in range(MOST_ATTEMPTS + 5):
        records.chose(record, Decision(None, "d", ""), {"decode": "d"}, 9.0, 1.0)
        records.placed(record, f"a/{number}", "d", "d", 1.0)
    records.ended(record, "stop", 2.0)
    records.begin(core_request("b", [1]), 3.0)
    assert records._placements == {}


def test_engines_are_heard_as_long_as_a_request_is_open_for_its_spans_are_to_come() -> None:
    router = Router(most_requests=1)
    router.begin("a")
    router.choose(choice(fleet(2)), "a")
    core_id = router.send("p", 1, 1.0, "a")
    router.begin("b")
    router.records.told("p", [journey(core_id, Station.QUEUED, 1.0)], 2.0)
    [placement] = router.open["a"].attempts[0].placements
    assert [kind for kind, *_ in placement.stations()] == [Station.QUEUED]


def test_later_attempts_than_the_first_few_are_counted() -> None:
    table, router = fleet(2), Router()
    router.begin()
    for _ in range(MOST_ATTEMPTS + 3):
        router.choose(choice(table))
        router.hear("p1", 1.0)
    (request,) = router.ask()
    assert (len(request.attempts), request.attempts_left_out) == (MOST_ATTEMPTS, 3)


def test_the_newest_requests_are_remembered() -> None:
    table, router = fleet(2), Router(most_requests=3)
    for number in range(5):
        router.begin(str(number))
        router.choose(choice(table), str(number))
        if number == 2:
            size = router.records.num_bytes
    assert router.records.num_bytes == size, "three have what was weighed"
    known = router.explanations.newest(2)
    assert [x.request_id for x in known.requests] == ["4", "3"]
    assert (known.num_remembered, known.most_remembered) == (3, 3)
    assert router.ask("1") == []
    router.hear("p1", 1.0, "1")  # it is still open
    router.end(2.0, "1")
    assert len(router.records) == 3


def test_the_oldest_candidates_are_forgotten_first_and_the_choice_is_not() -> None:
    table = fleet(100)
    one = Router()
    one.begin()
    one.choose(choice(table))
    size = one.records.num_bytes
    assert size > 100 * 8 * 8  # at least as many numbers as there are terms
    router = Router(most_bytes=2 * size)
    for number in range(4):
        router.begin(str(number))
        router.choose(choice(table), str(number))
    kept = [bool(router.ask(str(number))[0].attempts[0].choices) for number in range(4)]
    assert kept == [False, False, True, True]
    assert router.records.num_bytes == 2 * size
    assert router.ask("0")[0].attempts[0].terms


def test_a_request_is_found_under_every_name_that_users_see() -> None:
    router = Router()
    router.begin("0_req-ab", "req")
    router.begin("1_req-ab", "req")
    router.begin("req-1-cd", "req-1")
    router.begin("other-ef", "other")
    for name, found in (
        ("req", ["req-1-cd", "1_req-ab", "0_req-ab"]),
        ("chatcmpl-req", ["req-1-cd", "1_req-ab", "0_req-ab"]),
        ("cmpl-other", ["other-ef"]),
        ("1_req-ab", ["1_req-ab"]),
        ("req-1", ["req-1-cd"]),
        ("re", []),
    ):
        assert [x.core_id for x in router.ask(name)] == found


def test_a_request_that_waits_says_so() -> None:
    router = Router()
    router.begin("r", "x" * 1000)
    (request,) = router.explanations.explanation("r").requests
    assert request.request_id == "x" * MOST_CHARACTERS
    assert (request.waited_s, request.seconds, request.attempts) == (None, None, [])
    assert router.explanations.newest(1).requests[0].first_token_s is None


NOTES = ["begin", "choose", "hear p1", "hear d1", "set back", "end"]


@given(st.lists(st.tuples(st.sampled_from(NOTES), st.sampled_from("abcde")), max_size=60))
def test_whatever_comes_in_whatever_order_stays_within_bounds(
    notes: list[tuple[str, str]],
) -> None:
    decision = choice(fleet(4))
    size = 3 * 4 * 1000
    router = Router(most_requests=3, most_bytes=size)
    begun = set()
    for now, (note, name) in enumerate(notes):
        match note:
            case "begin" if name not in begun:  # ids are the router's own
                begun.add(name)
                router.begin(name, now=now)
            case "begin":
                pass
            case _ if name not in begun:
                pass
            case "choose":
                router.choose(decision, name, now)
            case "set back":
                router.set_back("why", now, name)
            case "end":
                router.end(now, name)
            case _:
                router.hear(note.split()[1], now, name)
        assert len(router.records) <= 3
        assert 0 <= router.records.num_bytes <= size
    told = [report for name in "abcde" for report in router.ask(name)]
    assert len(told) == router.explanations.newest(10).num_remembered
    assert any(x.choices for report in told for x in report.attempts) == bool(
        router.records.num_bytes
    )


@each("ratio", [0.0, *BOUNDS, 1e9])
def test_a_ratio_is_counted_in_every_bucket_whose_bound_is_not_below_it(ratio: float) -> None:
    predictions = Predictions()
    predictions.hand_off.observe(ratio)
    buckets = {
        float(sample.labels["le"]): sample.value
        for family in of_predictions("m", predictions)
        for sample in family.samples
        if sample.name == "diptych:hand_off_real_over_predicted_bucket"
    }
    assert buckets == {bound: ratio <= bound for bound in (*BOUNDS, math.inf)}
