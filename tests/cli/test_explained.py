"""What `diptych why` shows of what routers say, and how it puts several routers together."""

from __future__ import annotations

import re
import time
from io import StringIO
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from diptych.explained import as_json, explanation, listing
from diptych.router_admin import Get, RouterError, Told, UnknownRequestError, ask_all, path_of
from diptych_protocol.admin import (
    AttemptReport,
    Candidate,
    Choice,
    Duty,
    Explanation,
    RequestLine,
    RequestList,
    RequestReport,
)

AT = 1_700_000_000.0


def text(shown: RenderableType) -> str:
    out = StringIO()
    Console(file=out, width=200).print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def candidate(engine: str, chosen: bool = False, cached: int = 0, **terms: float) -> Candidate:
    return Candidate(
        engine=engine, chosen=chosen, cost=sum(terms.values()), terms=terms, cached_tokens=cached
    )


def choice(duty: Duty, *candidates: Candidate, able: int | None = None) -> Choice:
    able = len(candidates) if able is None else able
    return Choice(duty=duty, num_able=able, candidates=list(candidates))


def request(*attempts: AttemptReport, **facts: Any) -> RequestReport:
    known: dict[str, Any] = {
        "request_id": "abc", "core_id": "abc-1", "unix_time": AT, "prompt_tokens": 100,
        "output_tokens": 7, "waited_s": 0.0, "seconds": 2.5, "outcome": "stop",
    }  # fmt: skip
    return RequestReport(**{**known, **facts, "attempts": list(attempts)})


def told(*requests: RequestReport) -> Told[Explanation]:
    known = Explanation(policy="prefix_aware", disaggregate="auto", requests=list(requests))
    return Told("svc-router-0", known)


PAIR = AttemptReport(
    unix_time=AT,
    reason="cheapest pair",
    prefill="p1",
    decode="d0",
    terms={"wait_s": 0.05, "compute_s": 0.15, "transfer_s": 0.01},
    to_compute=36.0,
    choices=[
        choice(
            "prefill",
            candidate("p1", True, 64, wait_s=0.05, compute_s=0.15),
            candidate("p0", wait_s=0.0, compute_s=0.4),
            able=5,
        ),
        choice("decode", candidate("d0", True, transfer_s=0.01)),
    ],
    first_token_expected_s=0.2,
    first_token_s=0.25,
    cached_tokens=64,
    pinned_tokens=48,
    hand_off_expected_s=0.02,
    hand_off_s=0.015,
    decoded_by=["d0"],
)


def test_a_request_is_shown_whole() -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(AT))
    assert (
        text(explanation([told(request(PAIR))]))
        == f"""\
abc  {when}  svc-router-0
policy    prefix_aware, disaggregate: auto
prompt    100 tokens
answer    7 tokens in 2.50 s, stop

attempt 1: p1 -> d0 (cheapest pair)
   TO COMPUTE THE PROMPT  CACHED TOKENS  WAIT ms  COMPUTE ms  TOTAL ms
>  p1                                64     50.0       150.0     200.0
   p0                                 0      0.0       400.0     400.0
   and 3 more
   TO DECODE  CACHED TOKENS  TRANSFER ms  TOTAL ms
>  d0                     0         10.0      10.0
WHAT CAME TRUE                 PREDICTED      REAL  REAL / PREDICTED
first token                     200.0 ms  250.0 ms              1.25
hand-off                         20.0 ms   15.0 ms              0.75
tokens of the prompt in cache         64        64                 -
of them pinned by a turn               -        48                 -"""
    )


def test_candidates_show_how_near_they_are_if_that_is_known() -> None:
    near = [
        Candidate(engine=f"d{at}", chosen=at == 0, cost=1.0, terms={}, cached_tokens=0, near=how)
        for at, how in enumerate(("same node", "other zone", ""))
    ]
    attempt = msgspec.structs.replace(PAIR, choices=[choice("decode", *near)])
    shown = text(explanation([told(request(attempt))])).splitlines()
    assert next(line for line in shown if "TO DECODE" in line).split()[2] == "PLACE"
    lines = [line for line in shown if re.match(r"[> ]  d\d", line)]
    assert [re.split(r"\s{2,}", line[3:])[1] for line in lines] == ["same node", "other zone", "-"]
    assert "PLACE" not in text(explanation([told(request(PAIR))]))


def test_candidates_show_what_they_have_on_disk_if_any_has_something_there() -> None:
    stored = [
        Candidate(
            engine=f"p{at}", chosen=at == 0, cost=1.0, terms={}, cached_tokens=64, stored_tokens=on
        )
        for at, on in enumerate((320, 0))
    ]
    attempt = msgspec.structs.replace(PAIR, choices=[choice("prefill", *stored)])
    shown = text(explanation([told(request(attempt))])).splitlines()
    head = next(line for line in shown if "TO COMPUTE" in line)
    assert "CACHED TOKENS  ON DISK" in head
    lines = [re.split(r"\s{2,}", line[3:]) for line in shown if re.match(r"[> ]  p\d", line)]
    assert [cells[1:3] for cells in lines] == [["64", "320"], ["64", "0"]]
    assert "ON DISK" not in text(explanation([told(request(PAIR))]))


def test_each_attempt_is_shown_with_what_ended_it() -> None:
    lost = msgspec.structs.replace(
        PAIR, setback="loss", why="engine p1 is lost", choices=[], hand_off_s=None
    )
    moved = msgspec.structs.replace(
        PAIR, prefill="", decoded_by=["d0", "d2"], fetch="p0", fetch_tokens=48
    )
    shown = text(explanation([told(request(lost, moved, attempts_left_out=2, waited_s=0.5))]))
    for line in (
        "waited    500.0 ms until engines were chosen",
        "loss: engine p1 is lost",
        "the other candidates are not remembered",
        "attempt 2: d0 (cheapest pair)",
        "fetches 48 tokens of KV from p0",
        "decoded by d0, d2",
        "2 later attempts are not remembered",
    ):
        assert line in shown.splitlines()


def test_what_is_open_says_so() -> None:
    waits = request(waited_s=None, seconds=None, outcome="", output_tokens=0)
    shown = text(explanation([told(waits)]))
    assert "answer    not ended" in shown
    assert "waits for an engine" in shown


def test_amounts_that_are_no_seconds_have_no_unit() -> None:
    plain = AttemptReport(
        unix_time=AT, reason="least loaded pair", prefill="p0", decode="d0",
        choices=[choice("prefill", candidate("p0", True, open_tokens=120.0))],
    )  # fmt: skip
    shown = text(explanation([told(request(plain))])).splitlines()
    assert next(line.split() for line in shown if "OPEN TOKENS" in line)[-3:] == [
        "OPEN", "TOKENS", "TOTAL",
    ]  # fmt: skip
    assert [line.split() for line in shown if line.startswith(">")] == [
        [">", "p0", "0", "120", "120"]
    ]


def line(name: str, at: float, **facts: Any) -> RequestLine:
    known: dict[str, Any] = {
        "prompt_tokens": 5, "output_tokens": 2, "prefill": "p0", "decode": "d0", "attempts": 1,
        "first_token_s": 0.5, "outcome": "length",
    }  # fmt: skip
    return RequestLine(request_id=name, unix_time=AT + at, **{**known, **facts})


def test_requests_of_several_routers_are_listed_by_time() -> None:
    found = [
        Told(router, RequestList(requests=lines, num_remembered=len(lines), most_remembered=4096))
        for router, lines in (
            ("r0", [line("c", 3.0, outcome="", first_token_s=None), line("a", 1.0)]),
            ("r1", [line("b", 2.0, prefill="")]),
        )
    ]
    rows = [row.split() for row in text(listing(found)).splitlines()]
    assert [row[0] for row in rows] == ["REQUEST", "c", "b", "a"]
    assert rows[1][3:] == ["r0", "p0", "d0", "open", "5", "-", "1", "-"]
    assert rows[2][3:] == ["r1", "d0", "d0", "length", "5", "2", "1", "500.0", "ms"]
    assert "no request has come" in text(listing([]))
    assert [entry["router"] for entry in as_json(found)] == ["r0", "r1"]


def answering(status: int, body: Any) -> Get:
    return lambda path: (status, msgspec.json.encode(body))


def failing(path: str) -> tuple[int, bytes]:
    raise RouterError("connection refused")


KNOWN = answering(200, Explanation(policy="p", disaggregate="auto", requests=[]))
UNKNOWN = answering(404, {"error": {"message": "remembers no request"}})


def test_whoever_knows_it_answers_and_the_others_problems_are_told() -> None:
    routers = [
        ("a", UNKNOWN),
        ("b", KNOWN),
        ("c", failing),
        ("d", answering(401, {"error": {"message": "wrong token"}})),
        ("e", answering(200, "nonsense")),
    ]
    found, problems = ask_all(routers, path_of("x"), Explanation)
    assert [each.router for each in found] == ["b"]
    assert problems[:2] == ["c: connection refused", "d: HTTP 401: wrong token"]
    assert problems[2].startswith("e: ")


def test_when_nobody_knows_it_that_is_said() -> None:
    with pytest.raises(UnknownRequestError, match="remembers no request; c: connection refused"):
        ask_all([("a", UNKNOWN), ("c", failing)], "/", Explanation)
    with pytest.raises(RouterError, match="c: connection refused"):
        ask_all([("c", failing)], "/", Explanation)
    with pytest.raises(RouterError, match="there is no router to ask"):
        ask_all([], "/", Explanation)


def test_an_id_cannot_leave_its_place_in_the_path() -> None:
    assert path_of("../../state?x#y") == "/admin/requests/..%2F..%2Fstate%3Fx%23y/why"
