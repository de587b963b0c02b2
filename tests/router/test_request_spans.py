"""The spans of a request, by what its record says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from cases import each
from engine_kit.core import core_request

from diptych_protocol import EngineCoreOutput, RequestJourneyEvent
from diptych_protocol import RequestJourneyEventType as Station
from diptych_router.choosing.policy import Decision
from diptych_router.requests.records import Records
from diptych_router.requests.request_record import MOST_STATIONS, MOST_TEXT, Predictions, Setback
from diptych_router.telling.request_spans import SpanFacts, request_attributes, spans_of

PAIR = Decision("p", "d", "least loaded"), {"prefill": "p", "decode": "d"}
ALONE = Decision(None, "d", "no prefill engine"), {"prefill": "d", "decode": "d"}
ATTRIBUTES = request_attributes(core_request("r", [1, 2, 3]), "model")


class Told:
    """A record to which something is added each second, from 1 on."""

    def __init__(self, **request: Any) -> None:
        made = core_request("r", [1, 2, 3], **request)
        self.records = Records()
        self.record = self.records.begin(made, 0.0)
        self.now = 0.0
        self.sent = 0

    def tell(self, *events: str) -> list[SpanFacts]:
        """Events, each a word and what it is about, and the spans of a request that ends then."""
        for event in events:
            self.now += 1
            self._tell(*event.split())
        return self.spans()

    def spans(self) -> list[SpanFacts]:
        return list(spans_of(self.record, 0.0, ATTRIBUTES))

    def _tell(self, kind: str, about: str = "") -> None:
        record, now = self.record, self.now
        match kind:
            case "pair" | "alone":
                decision, facts = PAIR if kind == "pair" else ALONE
                self.records.chose(record, decision, facts, 9.0, now)
            case "sent":
                self.sent += 1
                self.records.placed(record, f"r/{self.sent}", about, about, now)
            case "token":
                record.brought(EngineCoreOutput("r", [5]), now, Predictions())
            case "loss":
                record.set_back(Setback.LOSS, "it is gone", True, now)
            case "move":
                record.set_back(Setback.MOVE, "it leaves", True, now)
            case "over":
                record.set_back(Setback.ERROR, "no luck", False, now)
                self.records.ended(record, "error", now, "no luck", "EngineGenerateError")
            case "end":
                self.records.ended(record, about or "stop", now)
            case station:
                self.station(Station[station], now)

    def station(self, kind: Station, at: float) -> None:
        """The newest placement's engine reports a station."""
        if self.record.placement is not None:
            event = RequestJourneyEvent(self.record.placement.core_id, kind, at)
            self.record.placement.heard(event, self.now)


def brief(spans: list[SpanFacts]) -> list[tuple[str, str, float, float]]:
    """Parent, name, beginning and end."""
    names = {span.key: span.name for span in spans}
    return [
        (names.get(span.parent or "", ""), span.name, span.began_s, span.ended_s) for span in spans
    ]


@each(
    ("events", "expected"),
    [
        pytest.param(
            ["pair", "sent p", "token", "sent d", "token", "token", "end"],
            [
                ("", "request", 0, 7),
                ("request", "queue", 0, 1),
                ("request", "prefill", 2, 3),
                ("request", "hand-off", 4, 5),
                ("request", "decode", 5, 7),
            ],
            id="a pair",
        ),
        pytest.param(
            ["alone", "sent d", "token", "token", "end"],
            [
                ("", "request", 0, 5),
                ("request", "queue", 0, 1),
                ("request", "prefill", 2, 3),
                ("request", "decode", 3, 5),
            ],
            id="one engine does it all",
        ),
        pytest.param(
            ["pair", "sent p", "token", "end"],
            [
                ("", "request", 0, 4),
                ("request", "queue", 0, 1),
                ("request", "prefill", 2, 3),
            ],
            id="its first token is its last",
        ),
        pytest.param(
            ["alone", "sent d", "end"],
            [("", "request", 0, 3), ("request", "queue", 0, 1), ("request", "prefill", 2, 3)],
            id="no tokens, but a vector",
        ),
        pytest.param(
            ["alone", "sent d", "token", "sent e", "token", "end"],
            [
                ("", "request", 0, 6),
                ("request", "queue", 0, 1),
                ("request", "prefill", 2, 3),
                ("request", "decode", 3, 4),
                ("request", "hand-off", 4, 5),
                ("request", "decode", 5, 6),
            ],
            id="a stream moves",
        ),
        pytest.param(
            ["pair", "sent p", "loss", "alone", "sent d", "token", "end"],
            [
                ("", "request", 0, 7),
                ("request", "queue", 0, 1),
                ("request", "prefill", 2, 3),
                ("request", "attempt", 3, 7),
                ("attempt", "queue", 3, 4),
                ("attempt", "prefill", 5, 6),
                ("attempt", "decode", 6, 7),
            ],
            id="a loss",
        ),
        pytest.param(
            ["pair", "sent p", "token", "loss", "end abort"],
            [
                ("", "request", 0, 5),
                ("request", "queue", 0, 1),
                ("request", "prefill", 2, 3),
                ("request", "attempt", 4, 5),
                ("attempt", "queue", 4, 5),
            ],
            id="the client leaves while it waits again",
        ),
        pytest.param(
            ["end abort"],
            [("", "request", 0, 1), ("request", "queue", 0, 1)],
            id="the client leaves while it waits",
        ),
    ],
)
def test_phases(events: list[str], expected: list[tuple[str, str, float, float]]) -> None:
    assert brief(Told().tell(*events)) == expected


def test_a_failure_is_the_error_of_what_failed_and_of_nothing_else() -> None:
    spans = Told().tell("pair", "sent p", "loss", "pair", "sent p", "token", "end")
    assert [(x.name, x.error, x.attributes.get("error.type")) for x in spans if x.error] == [
        ("prefill", "it is gone", "loss")
    ]
    [attempt] = [span for span in spans if span.name == "attempt"]
    assert attempt.attributes == {"diptych.attempt": 2, "diptych.retry_reason": "it is gone"}


def test_an_engine_that_leaves_in_good_order_is_no_error() -> None:
    spans = Told().tell("alone", "sent d", "token", "move", "alone", "sent e", "token", "end")
    assert not [span for span in spans if span.error or "error.type" in span.attributes]
    assert "attempt" in [span.name for span in spans]


def test_a_request_that_failed_is_an_error() -> None:
    spans = Told().tell("pair", "sent p", "over")
    errors = [(x.name, x.error, x.attributes.get("error.type")) for x in spans if x.error]
    assert errors == [
        ("request", "no luck", "EngineGenerateError"),
        ("prefill", "no luck", "error"),
    ]


def test_stations_make_the_engines_spans() -> None:
    spans = Told().tell(
        "pair", "sent p", "QUEUED", "SCHEDULED", "FIRST_TOKEN", "FINISHED", "token",
        "sent d", "QUEUED", "KV_WAIT", "KV_DONE", "SCHEDULED", "FIRST_TOKEN", "token",
        "PREEMPTED", "FINISHED", "DEPARTED", "end",
    )  # fmt: skip
    engines = [
        (x.name, x.engine, x.began_s, x.ended_s, [name for name, _ in x.events])
        for x in spans
        if x.engine
    ]
    assert engines == [
        ("engine prefill", "p", 3, 5, ["QUEUED", "SCHEDULED", "FIRST_TOKEN"]),
        (
            "engine hand-off",
            "d",
            9,
            13,
            ["QUEUED", "KV_WAIT", "KV_DONE", "SCHEDULED", "FIRST_TOKEN"],
        ),
        ("engine decode", "d", 14, 16, ["FIRST_TOKEN", "PREEMPTED", "FINISHED"]),
    ]


def test_an_engine_that_is_lost_was_at_work_until_then() -> None:
    spans = Told().tell("alone", "sent d", "QUEUED", "FIRST_TOKEN", "token", "loss", "end abort")
    [decode] = [span for span in spans if span.name == "engine decode"]
    assert (decode.began_s, decode.ended_s) == (5, 6)


def test_an_engine_may_have_any_clock() -> None:
    """The message that was fastest says what the clocks differ by."""
    told = Told()
    told.tell("alone", "sent d")
    told.now = 10.0
    told.station(Station.QUEUED, 1003.0)  # seven seconds ago, if this message took no time
    told.station(Station.SCHEDULED, 1009.5)
    told.tell("token")
    spans = told.tell("end")
    [prefill] = [span for span in spans if span.name == "engine prefill"]
    assert prefill.events == [("QUEUED", 3.5), ("SCHEDULED", 10.0)]


@pytest.mark.parametrize("time_s", [math.nan, math.inf, -math.inf, 1e308, -1e308])
def test_an_engine_may_say_anything(time_s: float) -> None:
    told = Told()
    told.tell("alone", "sent d")
    for _ in range(MOST_STATIONS + 1):
        told.station(Station.QUEUED, time_s)
    for span in told.tell("token", "end"):
        assert 0 <= span.began_s <= span.ended_s <= told.now
        assert len(span.events) <= MOST_STATIONS


def test_texts_are_cut() -> None:
    told = Told()
    told.tell("alone", "sent " + "e" * 5000, "QUEUED", "FIRST_TOKEN")
    told.record.set_back(Setback.ERROR, "y" * 5000, True, 5.0)
    told.records.ended(told.record, "error", 6.0, "z" * 5000, "EngineGenerateError")
    request = core_request("r", [1, 2, 3], external_req_id="x" * 5000)
    for span in spans_of(told.record, 0.0, request_attributes(request, "model")):
        for text in (span.error, span.engine, *span.attributes.values()):
            assert not isinstance(text, str) or len(text) <= MOST_TEXT
