"""Tokens of keys: counted in windows, by several routers at once, and told by the API."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_kit.echo_engine import EchoEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai.api_keys import SIGNING_KEY, ApiKeys
from diptych_frontend.quotas import books
from diptych_frontend.quotas.books import Books, Wish, verified
from diptych_frontend.quotas.ledger import NO_LIMITS, Bill, Ledger, Limits, read_limits
from diptych_frontend.quotas.quotas import Quotas
from diptych_protocol import EngineOverloadedError, InvalidRequestError

NOON = datetime(2026, 11, 28, 12, tzinfo=UTC).timestamp()
DAY_S = 86_400


class Clock:
    """What a test says that the time is."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


# --- declared ---------------------------------------------------------------------------------


def test_limits_are_the_lines_below_a_key(tmp_path: Path) -> None:
    (tmp_path / "alice").write_text("sesame\ntokensPerMinute: 1000\n tokenBudget : 7\n")
    (tmp_path / "bob").write_text("open-up\n")
    keys = ApiKeys(tmp_path)
    assert keys.limits() == {"alice": Limits(tokens_per_minute=1000, token_budget=7)}
    assert keys.name_of(b"sesame") == "alice"
    (tmp_path / "alice").write_text("sesame\ntokensPerMonth: 5")
    assert keys.refresh()
    assert keys.limits() == {"alice": Limits(tokens_per_month=5)}


def test_a_key_that_stands_twice_has_the_smaller_limits(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("sesame")
    (tmp_path / "b").write_text("sesame\ntokensPerMinute: 9\ntokenBudget: 7")
    (tmp_path / "c").write_text("sesame\ntokensPerMinute: 8")
    keys = ApiKeys(tmp_path)
    assert keys.names == ["a"]
    assert keys.limits() == {"a": Limits(tokens_per_minute=8, token_budget=7)}


@pytest.mark.parametrize(
    "line", ["tokensPerDay: 5", "tokensPerMinute", "tokensPerMinute: many", "tokenBudget: 0",
             "tokenBudget: 1\ntokenBudget: 2", "tokenBudget: \u0661",
             "sk-of-bob", "sk-of-bob\nsk-of-bob"],
)  # fmt: skip
def test_a_key_whose_limits_cannot_be_read_lets_nobody_in(
    tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "alice").write_text(f"sesame\n{line}")
    keys = ApiKeys(tmp_path)
    assert (keys.names, keys.limits()) == ([], {})
    assert "'alice' is left out: its limits" in caplog.text
    assert "sk-of-bob" not in caplog.text + keys.left_out[0], "they may be keys"


def test_routers_that_count_alone_have_equal_parts() -> None:
    assert Limits(tokens_per_minute=100, token_budget=2).part(3) == Limits(33, None, 1)
    assert read_limits(b"") == NO_LIMITS


# --- counted ----------------------------------------------------------------------------------


class Spent:
    """Two routers' books of one folder, and what the requests of a key really did."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.limits, self.now = limits, NOON
        self.routers = [Books(folder), Books(folder)]
        self.open: list[list[tuple[Bill, int]]] = [[], []]
        self.ended: list[tuple[int, int, str]] = []
        """Tokens, the minute of the beginning, the month of the end."""

    def begin(self, router: int, tokens: int) -> bool:
        wish = Wish("alice", tokens, self.limits)
        (grant,) = self.routers[router].post([], [wish], self.now)
        if not grant.lacking:
            self.open[router].append((grant.bill, int(self.now // 60)))
        return not grant.lacking

    def end(self, router: int, part: float) -> None:
        if self.open[router]:
            bill, minute = self.open[router].pop(0)
            bill.prompt = 1
            bill.generated = math.floor(part * (bill.reserved - 1))
            self.routers[router].post([bill], [], self.now)
            self.ended.append((bill.prompt + bill.generated, minute, self.month()))

    def month(self) -> str:
        return f"{datetime.fromtimestamp(self.now, UTC):%Y-%m}"

    def left(self) -> dict[str, int]:
        """By the definition: what no request has used or may use yet."""
        minute, limits = int(self.now // 60), self.limits
        used = [(bill.reserved, begun) for both in self.open for bill, begun in both]
        held = sum(tokens for tokens, _ in used)
        minute_used = sum(t for t, begun in used if begun == minute)
        minute_used += sum(t for t, begun, _ in self.ended if begun == minute)
        month_used = held + sum(t for t, _, month in self.ended if month == self.month())
        ever_used = held + sum(t for t, _, _ in self.ended)
        assert limits.tokens_per_minute
        assert limits.tokens_per_month
        assert limits.token_budget
        return {
            "minute": limits.tokens_per_minute - minute_used,
            "month": limits.tokens_per_month - month_used,
            "ever": limits.token_budget - ever_used,
        }


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 1), st.integers(1, 400)),
        st.tuples(st.just("end"), st.integers(0, 1), st.floats(0, 1)),
        st.tuples(st.just("wait"), st.just(0), st.sampled_from([1.0, 40.0, 3 * DAY_S])),
    ),
    max_size=40,
)


@given(steps=STEPS)
@settings(max_examples=60)
def test_two_routers_grant_what_is_left_to_the_token(
    steps: list[tuple[str, int, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    spent = Spent(tmp_path_factory.mktemp("usage"), Limits(1000, 3000, 9000))
    for step, router, amount in steps:
        if step == "wait":
            spent.now += amount
        elif step == "end":
            spent.end(router, amount)
        else:
            left = spent.left()
            assert spent.begin(router, amount) == (amount <= min(left.values()))
            assert min(spent.left().values()) >= 0
    for each in spent.routers:
        each.close()


@pytest.mark.parametrize("per", ["token_budget", "tokens_per_month", "tokens_per_minute"])
def test_what_a_router_held_that_was_killed_is_given_back(tmp_path: Path, per: str) -> None:
    wish = Wish("alice", 60, Limits(**{per: 100}))
    killed, other = Books(tmp_path), Books(tmp_path)
    [ended] = killed.post([], [wish], NOON)
    ended.bill.prompt = 10
    killed.post([ended.bill], [wish], NOON)
    assert other.post([], [wish], NOON)[0].lacking
    killed.close()  # as the system does when the process ends
    [granted] = other.post([], [wish], NOON)
    assert not granted.lacking
    assert [(window.left, window.limit) for window in granted.windows] == [(30, 100)]
    other.close()


def test_what_it_held_since_an_earlier_minute_is_not_given_back_to_this_one(
    tmp_path: Path,
) -> None:
    wish = Wish("alice", 60, Limits(tokens_per_minute=100))
    killed, other = Books(tmp_path), Books(tmp_path)
    killed.post([], [wish], NOON)
    killed.close()
    assert not other.post([], [wish], NOON + 60)[0].lacking
    [refused] = other.post([], [wish], NOON + 60)
    assert [window.left for window in refused.lacking] == [40]
    other.close()


def test_a_new_router_knows_what_was_used(tmp_path: Path) -> None:
    first = Books(tmp_path)
    held = Wish("alice", 5, Limits(tokens_per_month=100))
    first.post([Bill("alice", prompt=30, generated=40)], [held], NOON)
    first.close()
    second = Books(tmp_path)
    (grant,) = second.post([], [held], NOON)
    assert [window.left for window in grant.windows] == [25], "what the first held is given back"
    second.post([grant.bill], [], NOON)
    (grant,) = second.post([], [Wish("alice", 31, Limits(tokens_per_month=100))], NOON)
    assert [(window.per, window.left) for window in grant.lacking] == [("month", 30)]
    assert len(list(tmp_path.glob("*.runs"))) == 1, "those of former routers are removed"
    second.close()


def test_a_ledger_that_cannot_be_read_is_kept_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ledger.json").write_bytes(b"{?")
    kept = Books(tmp_path)
    kept.post([Bill("alice", prompt=1)], [], NOON)
    assert (tmp_path / "ledger.unreadable").read_bytes() == b"{?"
    assert "usage counts anew" in caplog.text
    kept.close()


def test_a_folder_that_cannot_be_written_to_is_an_error_of_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError, match="usage cannot be kept in"):
        Books(tmp_path / "file")


def test_clocks_that_differ_turn_no_window_back() -> None:
    ledger, limits = Ledger(), Limits(tokens_per_minute=100)
    assert not ledger.reserve("alice", 60, limits, "a", NOON).lacking
    assert ledger.reserve("alice", 60, limits, "b", NOON - 0.5).lacking
    assert not ledger.reserve("alice", 60, limits, "b", NOON + 60).lacking


@pytest.mark.parametrize("ahead_s", [3600.0, 400 * DAY_S])
def test_a_clock_that_was_far_ahead_for_a_moment_locks_nobody_out(ahead_s: float) -> None:
    ledger, limits = Ledger(), Limits(tokens_per_minute=100, tokens_per_month=1000)
    before = ledger.reserve("alice", 60, limits, "b", NOON).bill
    assert not ledger.reserve("alice", 60, limits, "a", NOON + ahead_s).lacking
    grant = ledger.reserve("alice", 100, limits, "b", NOON + 1)
    assert [window.resets_s for window in grant.windows] == [59.0, 60 * 3600 - 1]
    ledger.of("alice").settle(before, "b", NOON + 2)
    assert next(iter(ledger.of("alice").windows(limits, NOON + 2))).left <= 100


# --- exported ---------------------------------------------------------------------------------


def test_a_day_that_a_wrong_clock_has_ended_loses_nothing(tmp_path: Path) -> None:
    kept = Books(tmp_path, lambda: b"secret")
    times = NOON, NOON + 400 * DAY_S, NOON + 1, NOON + DAY_S, NOON + 2 * DAY_S
    for tokens, now in enumerate(times, 1):
        kept.post([Bill("alice", prompt=10**tokens)], [], now)
    kept.close()
    lines = [
        line for file in tmp_path.glob("*.jsonl") for line in verified(file.read_bytes(), b"secret")
    ]
    assert sum(line.prompt_tokens for line in lines) == 11_110
    assert sorted(line.day for line in lines) == [
        "2026-11-28",
        "2026-11-28",
        "2026-11-29",
        "2028-01-02",
    ]


def test_each_day_has_a_signed_line_for_each_key(tmp_path: Path) -> None:
    kept = Books(tmp_path, lambda: b"secret")
    kept.post([Bill("bob", prompt=3), Bill("alice", prompt=10, generated=5)], [], NOON)
    kept.post([Bill("alice", prompt=1, generated=1)], [], NOON)
    kept.post([Bill("alice", prompt=100)], [], NOON + DAY_S)
    content = (tmp_path / "2026-11-28.jsonl").read_bytes()
    lines = verified(content, b"secret")
    assert [(x.key, x.requests, x.prompt_tokens, x.generated_tokens) for x in lines] == [
        ("alice", 2, 11, 6), ("bob", 1, 3, 0),
    ]  # fmt: skip
    kept.post([], [], NOON + 2 * DAY_S)
    (line,) = verified((tmp_path / "2026-11-29.jsonl").read_bytes(), b"secret")
    assert line.prompt_tokens == 100
    kept.close()


def test_a_day_that_somebody_changed_is_found_out(tmp_path: Path) -> None:
    kept = Books(tmp_path, lambda: b"secret")
    kept.post([Bill(name, prompt=3) for name in ("a", "b", "c")], [], NOON)
    kept.post([Bill(name, prompt=9) for name in ("a", "b", "c")], [], NOON + DAY_S)
    kept.post([], [], NOON + 2 * DAY_S)
    kept.close()
    another_day = (tmp_path / "2026-11-29.jsonl").read_bytes().splitlines(keepends=True)[0]
    content = (tmp_path / "2026-11-28.jsonl").read_bytes()
    first, second, third = content.splitlines(keepends=True)
    for wrong in (
        content.replace(b'"prompt_tokens":3', b'"prompt_tokens":2', 1),
        another_day + second + third, first + third, first + second,
        second + first + third, content + third, b"", b"{}\n",
        first + second + json.dumps(json.loads(third)).encode(),
    ):  # fmt: skip
        with pytest.raises(InvalidRequestError):
            verified(wrong, b"secret")
    with pytest.raises(InvalidRequestError, match="signature of line 1"):
        verified(content, b"another")


# --- told by the API --------------------------------------------------------------------------

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BODY = {"model": "echo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


class Served:
    """A router's app for the key of alice, as far as quotas go."""

    def __init__(self, folder: Path, limits: str, clock: Clock, kept: Path | None) -> None:
        (folder / "alice").write_text(f"sesame\n{limits}")
        (folder / "bob").write_text("open-up")
        (folder / SIGNING_KEY).write_text("secret\n")
        keys = ApiKeys(folder)
        assert sorted(keys.names) == ["alice", "bob"]
        self.metrics, self.engine = ServerMetrics("echo"), EchoEngine()
        self.quotas = Quotas(
            keys.limits, Books(kept, keys.signing_key), model_name="echo", clock=clock
        )
        self.metrics.registry.register(self.quotas)
        app = build_app(self.engine, api_keys=keys, metrics=self.metrics, quotas=self.quotas)
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test", timeout=PATIENCE_S
        )

    async def ask(self, path: str = CHAT, key: str = "sesame", **fields: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return await self.http.post(path, json={**BODY, **fields}, headers=headers)


@pytest.fixture(params=[True, False], ids=["folder", "memory"])
def served(tmp_path: Path, clock: Clock, request: pytest.FixtureRequest) -> Callable[[str], Served]:
    (tmp_path / "keys").mkdir()
    kept = tmp_path / "usage" if request.param else None
    return lambda limits: Served(tmp_path / "keys", limits, clock, kept)


async def test_an_answer_tells_what_is_left(served: Callable[[str], Served], clock: Clock) -> None:
    server = served("tokensPerMinute: 1000\ntokensPerMonth: 5000")
    clock.now += 17.5
    first = await server.ask()
    used = first.json()["usage"]["total_tokens"]
    bound = used - first.json()["usage"]["completion_tokens"] + 4
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert first.headers["x-ratelimit-remaining-tokens"] == str(1000 - bound)
    assert first.headers["x-ratelimit-reset-tokens"] == "43s"
    second = await server.ask()
    assert second.headers["x-ratelimit-remaining-tokens"] == str(1000 - used - bound)
    assert "x-ratelimit-limit-tokens" not in (await server.ask(key="open-up")).headers
    await server.quotas.close()


async def test_a_key_that_has_used_its_minute_is_refused_until_the_next(
    served: Callable[[str], Served], clock: Clock
) -> None:
    usage = (await served("").ask()).json()["usage"]
    bound = usage["prompt_tokens"] + 4
    server = served(f"tokensPerMinute: {usage['total_tokens'] + bound - 1}")
    assert (await server.ask()).is_success
    clock.now += 30
    refused = await server.ask()
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
    assert f"has {bound - 1} of" in error["message"]
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-reset-tokens"] == "30s"
    assert refused.headers["x-ratelimit-remaining-tokens"] == str(bound - 1)
    shaped = await server.ask(MESSAGES)
    assert (shaped.status_code, shaped.json()["error"]["type"]) == (429, "rate_limit_error")
    assert shaped.headers["retry-after"] == "30"
    assert (await server.ask(key="open-up")).is_success, "another key has its own"
    clock.now += 30
    assert (await server.ask()).is_success
    await server.quotas.close()


async def test_a_budget_does_not_come_back(served: Callable[[str], Served], clock: Clock) -> None:
    usage = (await served("").ask()).json()["usage"]
    server = served(f"tokenBudget: {usage['total_tokens'] + 8}")
    assert (await server.ask()).is_success
    clock.now += 400 * DAY_S
    refused = await server.ask()
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "insufficient_quota"
    assert not {"retry-after", "x-ratelimit-reset-tokens"} & refused.headers.keys()
    await server.quotas.close()


async def test_a_month_comes_back_with_the_next(
    served: Callable[[str], Served], clock: Clock
) -> None:
    usage = (await served("").ask()).json()["usage"]
    server = served(f"tokensPerMonth: {usage['total_tokens'] + 8}")
    assert (await server.ask()).is_success
    refused = await server.ask()
    assert refused.json()["error"]["code"] == "insufficient_quota"
    assert refused.headers["x-ratelimit-reset-tokens"] == f"{60 * 3600}s"
    clock.now += 3 * DAY_S
    assert (await server.ask()).is_success
    await server.quotas.close()


async def test_a_request_that_never_fits_is_told_what_to_change(
    served: Callable[[str], Served],
) -> None:
    server = served("tokensPerMinute: 20")
    refused = await server.ask(max_tokens=100)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    await server.quotas.close()


async def test_embeddings_count_their_prompts(served: Callable[[str], Served]) -> None:
    server = served("tokensPerMinute: 8")
    headers = {"authorization": "Bearer sesame"}
    body = {"model": "echo", "input": [[1, 2, 3], [4, 5]]}
    assert (await server.http.post("/v1/embeddings", json=body, headers=headers)).is_success
    again = await server.http.post("/v1/embeddings", json=body, headers=headers)
    assert again.status_code == 429
    await server.quotas.close()


async def test_requests_at_once_stay_within_the_limit_and_streams_are_not_cut(
    served: Callable[[str], Served],
) -> None:
    usage = (await served("").ask()).json()["usage"]
    bound = usage["prompt_tokens"] + 4
    server = served(f"tokensPerMinute: {3 * bound}")
    answers = await asyncio.gather(*(server.ask(stream=True) for _ in range(8)))
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 5
    for answer in answers:
        assert answer.is_success == answer.text.endswith("data: [DONE]\n\n")
    await server.quotas.close()


async def test_what_is_granted_when_patience_is_just_over_is_given_back(
    monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr("diptych_frontend.quotas.quotas.PATIENCE_S", 0.0)
    own = Books(None)
    quotas = Quotas(lambda: {"ann": Limits(token_budget=100)}, own)
    with pytest.raises(EngineOverloadedError):
        await quotas.reserve("ann", 100)
    await eventually(lambda: quotas._posting is None and not quotas._ended)
    assert not own.ledger.of("ann").held


async def test_a_router_that_shares_no_folder_grants_its_part(tmp_path: Path, clock: Clock) -> None:
    limits = {"alice": Limits(tokens_per_minute=100)}
    alone = Quotas(lambda: limits, Books(None), num_routers=lambda: 2, clock=clock)
    sharing = Quotas(lambda: limits, Books(tmp_path), num_routers=lambda: 2, clock=clock)
    for quotas, limit in ((alone, 50), (sharing, 100)):
        assert (await quotas.reserve("alice", limit + 1)).lacking
        assert not (await quotas.reserve("alice", limit)).lacking
        await quotas.close()


async def test_metrics_tell_limits_and_what_is_left(served: Callable[[str], Served]) -> None:
    server = served("tokensPerMinute: 1000")
    used = (await server.ask()).json()["usage"]["total_tokens"]
    server.quotas.refresh()
    await server.quotas.close()
    labels = {"model_name": "echo", "tenant": "alice", "per": "minute"}
    value = server.metrics.registry.get_sample_value
    assert value("diptych:tenant_tokens_limit", labels) == 1000
    assert value("diptych:tenant_tokens_left", labels) == 1000 - used


async def test_a_disk_that_fails_refuses_keys_with_limits_only(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").mkdir()
    server = Served(tmp_path / "keys", "tokensPerMinute: 1000", clock, tmp_path / "usage")

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(books, "_replace", full)
        refused = await server.ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert (await server.ask(key="open-up")).is_success
    assert (await server.ask()).is_success
    await server.quotas.close()
    counts = server.quotas._books.ledger.counts
    assert counts["bob"].requests == 1, "what could not be recorded is recorded later"
    assert counts["alice"].held == {}
