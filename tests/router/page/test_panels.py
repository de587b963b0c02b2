"""What pages are told of the pools: all at first, then what changed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from diptych_router.telling.page.panels import (
    MOST_ENGINES,
    Change,
    EngineFigures,
    HolderFigures,
    MoveFigures,
    Panels,
    change,
    panels_of,
    whose,
)


def engine(name: str, role: str = "decode", **figures: Any) -> EngineFigures:
    return EngineFigures(**{"id": name, "name": name, "role": role, "state": "ok", **figures})


def panels(*engines: EngineFigures, open_requests: int = 0, held: int = 0) -> Panels:
    return panels_of(engines, open_requests, held)


def told(known: Panels | None, now: Panels) -> Change:
    news = change(known, now)
    assert news is not None
    return news


P, D = engine("p", "prefill"), engine("d", blocks_used=3)


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


def move(number: int, sender: str = "p", receiver: str = "d") -> MoveFigures:
    return MoveFigures(
        number=number, sender=sender, receiver=receiver, whose="w", blocks=3, bytes=300, ms=0.5
    )


def test_a_move_is_told_once_and_none_that_was_before_the_page() -> None:
    there, back = move(1), move(1, "d", "p")
    before = panels_of([P, D], 0, 0, [there])
    assert told(None, before).moves == []
    assert told(before, panels_of([P, D], 0, 0, [there, back])).moves == [back]
    assert change(before, panels_of([P, D], 0, 0, [there])) is None


def test_a_request_has_the_same_name_at_all_engines_and_it_is_not_its_id() -> None:
    assert whose("r") == whose("r/1") == whose("r/2") != whose("s/1")
    assert "r" not in whose("r")


def test_an_event_of_two_working_engines_has_a_few_hundred_bytes() -> None:
    busy: dict[str, Any] = {
        "running": 64, "waiting": 100, "queued_tokens": 100_000, "blocks_used": 10_000,
        "blocks_total": 12_000, "block_tokens": 16, "blocks_sent": 10**7, "blocks_received": 10**7,
        "bytes_received": 10**13, "leases": 64, "blocks_lent": 1000, "blocks_arriving": 100,
        "blocks_remembered": 9000, "blocks_pinned": 9000, "tokens_computed": 10**9,
        "tokens_generated": 10**9,
        "holders": [HolderFigures(whose=whose("r"), blocks=900)],
    }  # fmt: skip
    name = "a-service-with-a-long-name-prefill-0"
    news = told(None, panels(engine(name, "prefill", **busy), engine(f"{name}1", **busy)))
    assert len(msgspec.json.encode(news)) < 1200


def test_a_large_fleet_is_cut_and_the_rest_is_counted() -> None:
    many = panels(*(engine(f"d{n:03}") for n in range(MOST_ENGINES + 5)))
    assert (len(many.engines), many.left_out) == (MOST_ENGINES, 5)
