"""A request's timeline: which bars there are, and their picture."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from drawn_svg import paper_and_colors
from hypothesis import given
from hypothesis import strategies as st

from diptych_frontend.timeline.lanes import Timeline, timeline
from diptych_frontend.timeline.picture import COLORS, INK, LINE, PAPER, described, milliseconds, svg
from diptych_protocol.admin import AttemptReport, PlacementReport, RequestReport, StationReport


def station(name: str, at_s: float, tokens: int = 0) -> StationReport:
    return StationReport(name=name, at_s=at_s, prompt_tokens=tokens)


def attempt(**facts: Any) -> AttemptReport:
    return AttemptReport(
        **{"unix_time": 100.0, "reason": "any", "prefill": "p", "decode": "d", **facts}
    )


PREFILL = PlacementReport(
    engine="p", attempt=1, sent_s=0.1, first_word_s=1.0,
    stations=[
        station("queued", 0.15), station("scheduled", 0.2, 16), station("chunk", 0.5, 528),
        station("first_token", 0.9, 900), station("finished", 0.9, 900),
    ],
)  # fmt: skip
DECODE = PlacementReport(
    engine="d", attempt=1, sent_s=1.0, first_word_s=1.3, received_tokens=900,
    stations=[
        station("queued", 1.05), station("kv_wait", 1.1), station("kv_done", 1.2, 900),
        station("scheduled", 1.25, 900), station("first_token", 1.3, 900), station("finished", 2.0),
    ],
)  # fmt: skip


def request(*placements: PlacementReport, **facts: Any) -> RequestReport:
    common = {
        "request_id": "r", "core_id": "c", "unix_time": 100.0, "prompt_tokens": 900,
        "output_tokens": 5, "waited_s": 0.1, "seconds": 2.0, "outcome": "stop",
        "attempts": [attempt()], "token_times_s": [1.0, 1.3, 1.5, 1.7, 1.9],
        "token_counts": [1, 2, 3, 4, 5],
    }  # fmt: skip
    return RequestReport(**{**common, "placements": list(placements), **facts})


def bars(found: Timeline, lane: str) -> list[tuple[str, float, float, str]]:
    (there,) = [one for one in found.lanes if one.name == lane]
    return [(bar.kind, bar.began_s, bar.ended_s, bar.label) for bar in there.bars]


def marks(found: Timeline) -> list[tuple[float, str, bool]]:
    return [(mark.at_s, mark.label, mark.is_bad) for mark in found.lanes[0].marks]


def test_a_request_passes_through_both_pools() -> None:
    found = timeline(request(PREFILL, DECODE))
    assert [lane.name for lane in found.lanes] == ["router", "p", "d"]
    assert bars(found, "router") == [("wait", 0.0, 0.1, "waits for engines")]
    assert bars(found, "p") == [
        ("queue", 0.1, 0.2, "waits at an engine"),
        ("prefill", 0.2, 0.5, "512 tokens of the prompt"),
        ("prefill", 0.5, 0.9, "372 tokens of the prompt"),
    ]
    assert bars(found, "d") == [
        ("queue", 1.0, 1.1, "waits at an engine"),
        ("kv", 1.1, 1.2, "KV of 900 tokens"),
        ("queue", 1.2, 1.25, "waits at an engine"),
        ("decode", 1.25, 2.0, "4 tokens, 5/s"),
    ]
    assert (found.lanes[1].ticks_s, found.lanes[2].ticks_s) == ([1.0], [1.3, 1.5, 1.7, 1.9])
    assert marks(found) == [(1.0, "first token", False), (2.0, "stop", False)]


def test_engines_that_tell_nothing_have_what_the_router_saw() -> None:
    silent = [
        PlacementReport(engine="p", attempt=1, sent_s=0.1, first_word_s=1.0),
        PlacementReport(engine="d", attempt=1, sent_s=1.0, first_word_s=1.3, received_tokens=900),
    ]
    found = timeline(request(*silent))
    assert bars(found, "p") == [("prefill", 0.1, 1.0, "prompt")]
    assert bars(found, "d") == [
        ("kv", 1.0, 1.3, "KV of 900 tokens"),
        ("decode", 1.3, 2.0, "3 tokens, 4/s"),
    ]


def test_one_engine_does_everything_if_there_is_no_other() -> None:
    alone = PlacementReport(engine="d", attempt=1, sent_s=0.1, first_word_s=1.0)
    found = timeline(request(alone, attempts=[attempt(prefill="")]))
    assert [bar[:3] for bar in bars(found, "d")] == [("prefill", 0.1, 1.0), ("decode", 1.0, 2.0)]


def test_a_lost_engine_ends_its_bar_and_another_attempt_begins() -> None:
    lost = attempt(setback="loss", why="it is gone", setback_s=1.5)
    again = PlacementReport(engine="d2", attempt=2, sent_s=1.7, first_word_s=1.9)
    found = timeline(request(PREFILL, DECODE, again, attempts=[lost, attempt(unix_time=101.7)]))
    assert bars(found, "d")[-1][:3] == ("decode", 1.25, 1.5)
    assert bars(found, "d2") == [
        ("prefill", 1.7, 1.9, "the prompt, and the answer so far"),
        ("decode", 1.9, 2.0, "tokens"),
    ]
    assert bars(found, "router")[-1][:3] == ("wait", 1.5, 1.7)
    assert (1.5, "loss: it is gone", True) in marks(found)


def test_a_move_is_no_failure_and_kv_that_did_not_come_is_one() -> None:
    moved = attempt(setback="move", why="d leaves", setback_s=1.5)
    failed = PlacementReport(
        engine="d", attempt=1, sent_s=1.0, first_word_s=1.6,
        stations=[station("kv_wait", 1.1), station("kv_fail", 1.2), station("scheduled", 1.3)],
    )  # fmt: skip
    found = timeline(request(PREFILL, failed, attempts=[moved]))
    assert (1.5, "moves: d leaves", False) in marks(found)
    assert [bar[0] for bar in bars(found, "d")] == ["queue", "kv", "queue", "prefill", "decode"]
    (lane,) = [one for one in found.lanes if one.name == "d"]
    assert [(mark.label, mark.is_bad) for mark in lane.marks] == [("KV did not come", True)]


def test_kv_that_was_fetched_before_the_request_came_is_a_mark() -> None:
    stations = [each for each in DECODE.stations if each.name != "kv_wait"]
    early = msgspec.structs.replace(DECODE, stations=stations)
    found = timeline(request(PREFILL, early))
    assert [bar[0] for bar in bars(found, "d")] == ["queue", "decode"]
    (lane,) = [one for one in found.lanes if one.name == "d"]
    assert [mark.label for mark in lane.marks] == ["KV of 900 tokens came before"]


def test_a_preempted_request_waits_and_computes_again() -> None:
    stations = [
        *DECODE.stations[:5], station("preempted", 1.4), station("scheduled", 1.6),
        station("finished", 1.9),
    ]  # fmt: skip
    placement = PlacementReport(engine="d", attempt=1, sent_s=1.0, stations=stations)
    found = timeline(request(PREFILL, placement))
    assert [bar[:3] for bar in bars(found, "d")[-2:]] == [
        ("preempted", 1.4, 1.6),
        ("decode", 1.6, 1.9),
    ]


def test_a_request_that_waits_has_an_open_end() -> None:
    found = timeline(request(attempts=[], waited_s=None, seconds=None, outcome=""))
    assert found.title == "r: 900 + 5 tokens, not ended"
    assert found.seconds == 1.9


NAMES = ["queued", "kv_wait", "kv_done", "kv_fail", "scheduled", "chunk", "first_token",
         "preempted", "finished", "nonsense"]  # fmt: skip
times = st.floats(0, 10)
stations = st.builds(station, st.sampled_from(NAMES), times, st.integers(0, 2000))
placements = st.builds(
    PlacementReport,
    engine=st.sampled_from(["p", "d", "e"]),
    attempt=st.integers(1, 3),
    sent_s=times,
    first_word_s=st.none() | times,
    received_tokens=st.integers(0, 900),
    stations=st.lists(stations, max_size=8),
)


@given(st.lists(placements, max_size=4), st.none() | times, st.text(max_size=20))
def test_whatever_is_told_bars_do_not_overlap_and_the_picture_is_xml(
    told: list[PlacementReport], seconds: float | None, why: str
) -> None:
    given_up = attempt(setback="error", why=why, setback_s=0.5)
    found = timeline(request(*told, seconds=seconds, attempts=[given_up, attempt()]))
    for placement in told:
        alone = timeline(request(placement, seconds=seconds))
        for lane in alone.lanes[1:]:
            assert all(a.ended_s <= b.began_s for a, b in pairwise(lane.bars))
            assert all(bar.began_s < bar.ended_s for bar in lane.bars)
    ElementTree.fromstring(svg(found))


def test_the_picture_names_lanes_bars_and_marks_for_eyes_and_for_readers() -> None:
    found = timeline(request(PREFILL, DECODE, request_id="<r&>"))
    text = svg(found)
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    shown = "\n".join("".join(each.itertext()) for each in root.iter())
    for word in ("router", "512 tokens of the prompt", "first token", "stop", "KV comes over"):
        assert word in shown
    assert root.findtext(f"{space}title") == "<r&>: 900 + 5 tokens, stop"
    assert root.findtext(f"{space}desc") == described(found)
    assert "p: 512 tokens of the prompt from 200 ms to 500 ms." in described(found)
    assert "d: KV of 900 tokens from 1100 ms to 1200 ms." in described(found)
    assert "prefers-color-scheme: dark" in text
    assert "<script" not in text


def test_the_picture_has_its_colors_in_viewers_that_are_no_browsers() -> None:
    paper, colors = paper_and_colors(svg(timeline(request(PREFILL, DECODE))))
    assert paper == PAPER
    assert {COLORS["prefill"], COLORS["decode"], INK, LINE} <= colors


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0.0 ms"), (0.0123, "12.3 ms"), (1.5, "1500 ms"), (75.25, "75.2 s")]
)
def test_times_are_as_people_read_them(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text
