"""What pages are told of the pools: all at first, then what changed; several processes as one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diptych_router.page.panels import (
    MOST_ENGINES,
    Change,
    EngineFigures,
    Panels,
    change,
    panels_of,
    panels_of_all,
)


def engine(name: str, role: str = "decode", **figures: Any) -> EngineFigures:
    return EngineFigures(**{"id": name, "name": name, "role": role, "state": "ok", **figures})


def panels(*engines: EngineFigures, open_requests: int = 0, held: int = 0) -> Panels:
    return panels_of(engines, open_requests, held)


def told(known: Panels | None, now: Panels) -> Change:
    news = change(known, now)
    assert news is not None
    return news


P, D = engine("p", "prefill", steps=1), engine("d", steps=1, blocks_used=3)


def test_a_new_page_is_told_everything() -> None:
    news = told(None, panels(D, P, open_requests=2))
    assert [x.id for x in news.engines] == ["p", "d"], "prefill engines come first"
    assert news.open_requests == 2


def test_an_empty_service_is_news_to_a_new_page_only() -> None:
    assert told(None, panels()).engines == []
    assert change(panels(), panels()) is None


@pytest.mark.parametrize(
    ("now", "engines", "gone"),
    [
        (panels(P, engine("d", blocks_used=4)), ["d"], []),
        (panels(P), [], ["d"]),
        (panels(P, D, engine("e")), ["e"], []),
        (panels(P, D, open_requests=1), [], []),
        (panels(P, D, held=1), [], []),
    ],
)
def test_only_what_changed_is_told(now: Panels, engines: list[str], gone: list[str]) -> None:
    news = told(panels(P, D), now)
    assert [x.id for x in news.engines] == engines
    assert news.gone == gone
    assert (news.open_requests, news.held_requests) == (now.open_requests, now.held_requests)


def test_a_step_that_changes_no_figure_is_no_news() -> None:
    later = msgspec.structs.replace(D, steps=99)
    assert change(panels(P, D), panels(P, later)) is None


def test_an_event_of_two_working_engines_has_a_few_hundred_bytes() -> None:
    busy: dict[str, Any] = {
        "running": 64, "waiting": 100, "queued_tokens": 100_000, "blocks_used": 10_000,
        "blocks_total": 12_000, "block_tokens": 16, "blocks_sent": 10**7, "blocks_received": 10**7,
        "bytes_received": 10**13, "leases": 64, "steps": 10**9,
    }  # fmt: skip
    name = "a-service-with-a-long-name-prefill-0"
    news = told(None, panels(engine(name, "prefill", **busy), engine(f"{name}1", **busy)))
    assert len(msgspec.json.encode(news)) < 800
    assert b"steps" not in msgspec.json.encode(news)


def test_a_large_fleet_is_cut_and_the_rest_is_counted() -> None:
    many = panels(*(engine(f"d{n:03}") for n in range(MOST_ENGINES + 5)))
    assert (len(many.engines), many.left_out) == (MOST_ENGINES, 5)


def test_of_several_processes_the_newest_figures_and_the_worst_state_count() -> None:
    joined = panels_of_all(
        [
            panels(P, engine("d", steps=5, running=1), open_requests=2),
            panels(P, engine("d", steps=9, running=2, state="silent"), open_requests=3, held=1),
            panels(P, engine("d", steps=7, running=3)),
        ]
    )
    assert [x.id for x in joined.engines] == ["p", "d"]
    assert joined.engines[1].running == 2
    assert joined.engines[1].state == "silent"
    assert (joined.open_requests, joined.held_requests) == (5, 1)


def test_who_sees_an_engine_away_knows_less_of_it_than_who_sees_it() -> None:
    away = EngineFigures(id="d", name="", role="decode", state="away")
    for order in ([away, D], [D, away]):
        (seen,) = panels_of_all([panels(each) for each in order]).engines
        assert (seen.name, seen.blocks_used, seen.state) == ("d", 3, "away")


def test_no_process_is_an_empty_router() -> None:
    assert panels_of_all([]) == panels()
