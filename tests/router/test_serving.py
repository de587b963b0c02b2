"""serving.json, as it changes under a running router."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych_protocol.router_settings import Serving
from diptych_router.engines.serving import MAX_BYTES, RevisionShare, ServingFile


def test_no_file_lets_every_revision_serve(tmp_path: Path) -> None:
    for file in (ServingFile(None), ServingFile(tmp_path / "serving.json")):
        assert file.refresh() is False
        assert file.serving == Serving()


def test_what_it_says_is_followed_and_news_are_told_once(tmp_path: Path) -> None:
    path = tmp_path / "serving.json"
    file = ServingFile(path)
    path.write_text('{"revisions": ["a"], "of a newer operator": 1}')
    assert file.refresh() is True
    assert file.refresh() is False
    assert file.serving == Serving(("a",))
    path.write_text('{"revisions": ["a", "b"], "asleep": true}')
    assert file.refresh() is True
    assert file.serving == Serving(("a", "b"), asleep=True)
    path.write_text('{"revisions": []}')
    assert file.refresh() is True
    assert file.serving == Serving()
    path.unlink()
    file.refresh()
    assert file.serving == Serving()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"revisions": "a"}', b"\xff\xfe", b"[1]", b" " * (MAX_BYTES + 1)],
    ids=["empty", "cut off", "a string", "not UTF-8", "a list", "huge"],
)
def test_what_cannot_be_understood_changes_nothing_and_is_said_once(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "serving.json"
    path.write_text('{"revisions": ["a"]}')
    file = ServingFile(path)
    file.refresh()
    path.write_bytes(content)
    with caplog.at_level(logging.ERROR):
        assert [file.refresh() for _ in range(3)] == [False] * 3
    assert file.serving == Serving(("a",))
    assert len(caplog.records) == 1


@given(weight=st.integers(0, 100), requests=st.integers(1, 1000), testers=st.integers(0, 50))
def test_after_any_number_of_requests_a_share_is_less_than_one_request_away(
    weight: int, requests: int, testers: int
) -> None:
    trial = RevisionShare(Serving(("a", "b"), canary="b", weight=weight))
    given_to: list[tuple[str, ...]] = []
    for number in range(requests):
        if number < testers:  # who chooses for themselves change nothing for the others
            assert trial.draw("canary") == ("b",)
            assert trial.draw("stable") == ("a",)
        given_to.append(trial.draw(None))
    assert set(given_to) <= {("a",), ("b",)}
    assert abs(given_to.count(("b",)) - requests * weight / 100) < 1
