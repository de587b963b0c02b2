"""When an upgrade may begin: by the days and clocks of a time zone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import TZPATH, ZoneInfo, reset_tzpath

import pytest
from cases import each
from hypothesis import assume, given
from hypothesis import strategies as st

from diptych_operator.arguments import parser
from diptych_operator.upgrades import DAYS, EXAMPLE, RolloutWindow, opens

OPEN = None


@each(
    ("window", "now", "begins"),
    [
        (EXAMPLE, "2026-12-04T23:59:59", "2026-12-05T00:00:00"),  # a Friday; Berlin is at +01:00
        (EXAMPLE, "2026-12-05T00:00:00", OPEN),
        (EXAMPLE, "2026-12-05T03:59:59", OPEN),
        (EXAMPLE, "2026-12-05T04:00:00", "2026-12-06T00:00:00"),
        (EXAMPLE, "2026-12-06T04:00:00", "2026-12-12T00:00:00"),
        ("Fri 22:00-06:00 UTC", "2026-12-05T05:59:59", OPEN),
        ("Fri 22:00-06:00 UTC", "2026-12-05T06:00:00", "2026-12-11T22:00:00"),
        ("Fri 22:00-06:00 UTC", "2026-12-04T05:00:00", "2026-12-04T22:00:00"),
        ("Fri 22:00-24:00 UTC", "2026-12-05T00:00:00", "2026-12-11T22:00:00"),
        ("Sat-Mon 00:00-24:00 UTC", "2026-12-06T12:00:00", OPEN),
        ("Sat-Mon 00:00-24:00 UTC", "2026-12-08T00:00:00", "2026-12-12T00:00:00"),
        ("Mon-Fri,Sun 00:00-00:00 UTC", "2026-12-06T12:00:00", OPEN),
        ("Mon-Sun 00:00-24:00 Asia/Kolkata", "2026-12-06T12:00:00", OPEN),
        ("Mon 00:00-01:00 Pacific/Auckland", "2026-12-06T11:30:00", OPEN),  # a Sunday in UTC
        # The night in which clocks go from 02:00 to 03:00.
        ("Sun 01:00-05:00 Europe/Berlin", "2026-03-29T02:59:59", OPEN),
        ("Sun 01:00-05:00 Europe/Berlin", "2026-03-29T03:00:00", "2026-04-04T23:00:00"),
        ("Sun 02:00-02:30 Europe/Berlin", "2026-03-29T00:59:59", "2026-03-29T01:00:00"),
        ("Sun 02:00-02:30 Europe/Berlin", "2026-03-29T01:30:00", "2026-04-05T00:00:00"),
        # Half past two is an hour later then, and a quarter past three is before it.
        ("Sun 02:30-03:15 Europe/Berlin", "2026-03-29T00:00:00", "2026-04-05T00:30:00"),
        # The night in which they go from 03:00 back to 02:00.
        ("Sun 02:00-02:30 Europe/Berlin", "2026-10-25T00:29:59", OPEN),
        ("Sun 02:00-02:30 Europe/Berlin", "2026-10-25T01:00:00", "2026-11-01T01:00:00"),
        ("Sun 01:00-05:00 Europe/Berlin", "2026-10-25T03:59:59", OPEN),
    ],
)
def test_a_window_goes_by_the_clocks_of_its_zone(window: str, now: str, begins: str | None) -> None:
    found = opens([RolloutWindow.read(window)], datetime.fromisoformat(f"{now}+00:00"))
    assert found == (begins and datetime.fromisoformat(f"{begins}+00:00"))


def test_without_windows_it_is_always_open() -> None:
    assert opens([], datetime(2026, 12, 5, tzinfo=UTC)) is OPEN


days = st.lists(
    st.one_of(st.sampled_from(DAYS), st.tuples(*[st.sampled_from(DAYS)] * 2).map("-".join)),
    min_size=1, max_size=3,
).map(",".join)  # fmt: skip
times = st.builds("{:02}:{:02}".format, st.integers(0, 23), st.integers(0, 59))
texts = st.builds(
    "{} {}-{} {}".format, days, times, times,
    st.sampled_from(["UTC", "Asia/Kolkata", "Europe/Berlin", "America/New_York"]),
)  # fmt: skip
moments = st.datetimes(datetime(2024, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC)).map(
    lambda found: found.replace(microsecond=0)
)


@given(st.lists(texts, min_size=1, max_size=3), moments, st.floats(0, 0.999))
def test_it_is_closed_until_the_time_that_is_told_and_open_then(
    words: list[str], now: datetime, part: float
) -> None:
    windows = [RolloutWindow.read(each) for each in words]
    begins = opens(windows, now)
    if begins is not None:
        assert begins > now
        assert opens(windows, begins) is OPEN
        assert opens(windows, now + part * (begins - now)) == begins
        assert any(opens([each], begins) is OPEN for each in windows)
    assert (begins is OPEN) == any(opens([each], now) is OPEN for each in windows)


@given(texts, moments)
def test_it_is_open_when_a_look_at_the_wall_says_so(text: str, now: datetime) -> None:
    window = RolloutWindow.read(text)
    there = now.astimezone(window.zone)
    offsets = {(there + timedelta(days)).utcoffset() for days in (-2, 2)}
    assume(len(offsets) == 1)  # the table above has the nights in which clocks are changed
    clock = timedelta(hours=there.hour, minutes=there.minute, seconds=there.second)
    spans = ((there.weekday(), clock), ((there.weekday() - 1) % 7, clock + timedelta(days=1)))
    seen = any(day in window.days and window.begin <= at < window.end for day, at in spans)
    assert (opens([window], now) is OPEN) == seen


def test_zones_are_known_where_the_system_has_none() -> None:
    before = TZPATH
    reset_tzpath(to=[])
    ZoneInfo.clear_cache()
    try:
        assert RolloutWindow.read(EXAMPLE).zone.key == "Europe/Berlin"
    finally:
        reset_tzpath(to=before)


@pytest.mark.parametrize("text", ["Mon 00:00-01:00 UTC", "Fri-Sun 00:00-01:00 UTC"])
def test_days_are_read(text: str) -> None:
    (only,) = parser().parse_args(["--rollout-window", text]).rollout_windows
    assert only.days == {"Mon": {0}, "Fri": {4, 5, 6}}[text[:3]]
    assert only.zone == ZoneInfo("UTC")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sat 1-5 Europe/Berlin",
        "sat 01:00-05:00 UTC",
        "Sat 01:00-05:00",
        "01:00-05:00 UTC",
        "Sat 01:00-25:00 UTC",
        "Sat 24:00-01:00 UTC",
        "Sat 01:00-05:00 UTC\n",
        "Sat 0١:00-05:00 UTC",
        "Sat 01:00-05:00 Europe/Berln",
        "Sat 01:00-05:00 Europe",
        "Sat 01:00-05:00 /etc/localtime",
    ],
)
def test_a_wrong_window_is_refused_by_name_with_an_example(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--rollout-window", text])
    said = capsys.readouterr().err
    assert f"argument --rollout-window: {text!r}" in said
    assert said.rstrip().endswith(repr(EXAMPLE))
