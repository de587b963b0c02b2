"""Batches as users of the official client see them. Nothing depends on which model answers."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest
from engine_kit.echo_engine import EchoEngine
from waits import PATIENCE_S

from diptych_frontend.batches_api import batch_run, states
from diptych_frontend.batches_api.api_types import WINDOW_S
from diptych_frontend.batches_api.batch_run import PRIORITY, Manners
from diptych_frontend.batches_api.file_store import FileStore
from diptych_frontend.batches_api.journal import Journal
from diptych_protocol import (
    EngineGenerateError,
    EngineOverloadedError,
    QuotaExceededError,
    RequestOutput,
    SamplingParams,
    TenantOverloadedError,
)

ENDED = {"failed", "completed", "expired", "cancelled"}
COMPLETION = {"model": "echo", "max_tokens": 4}


def asked(prompt: str = "abc", **fields: Any) -> dict[str, Any]:
    return {**COMPLETION, "prompt": prompt, **fields}


class HoldingEngine(EchoEngine):
    """Never answers a prompt that begins with `held`."""

    async def _outputs(
        self, prompt: list[int], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        if bytes(prompt).startswith(b"held"):
            await asyncio.Event().wait()
        async for output in super()._outputs(prompt, params):
            yield output


@pytest.fixture
async def engine() -> HoldingEngine:
    return HoldingEngine()


@pytest.fixture
async def server(start: Any, engine: EchoEngine) -> AsyncIterator[Any]:
    async with start(engine) as server:
        yield server


@pytest.fixture
async def ann(server: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with server.client("ann") as client:
        yield client


async def begun(
    client: openai.AsyncOpenAI, content: bytes, endpoint: Any = "/v1/completions", **fields: Any
) -> openai.types.Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )


async def ended(client: openai.AsyncOpenAI, batch: openai.types.Batch) -> openai.types.Batch:
    async with asyncio.timeout(PATIENCE_S):
        while batch.status not in ENDED:
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """The lines of a file by their custom ids."""
    assert file_id is not None
    text = (await client.files.content(file_id)).text
    found = [json.loads(line) for line in text.splitlines()]
    by_id = {line["custom_id"]: line for line in found}
    assert len(by_id) == len(found)
    return by_id


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_batch_has_the_answers_of_its_route(ann: openai.AsyncOpenAI, written: Any) -> None:
    content = written(asked("abc"), asked("xyz"))
    batch = await begun(ann, content, metadata={"night": "first"})
    assert batch.object == "batch"
    assert batch.status == "validating"
    assert batch.metadata == {"night": "first"}
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = await ended(ann, batch)
    assert batch.status == "completed"
    assert batch.error_file_id is None
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (2, 2, 0)
    for stamp in (batch.in_progress_at, batch.finalizing_at, batch.completed_at):
        assert stamp is not None
        assert stamp >= batch.created_at
    found = await results(ann, batch.output_file_id)
    assert found.keys() == {"line-0", "line-1"}
    line = found["line-1"]
    assert line["error"] is None
    response = line["response"]
    assert response["status_code"] == 200
    assert response["request_id"] == f"{batch.id}-2"
    direct = await ann.completions.create(**asked("xyz"))
    assert response["body"]["choices"][0]["text"] == direct.choices[0].text == "xyzx"
    assert direct.usage is not None
    assert response["body"]["usage"]["total_tokens"] == direct.usage.total_tokens
    usage = batch.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (6, 8, 14)
    assert usage.input_tokens_details.cached_tokens == 2
    assert batch.output_file_id is not None
    file = await ann.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]},
         "chat.completion"),
        ("/v1/embeddings", {"input": "hi"}, "list"),
        ("/v1/responses", {"input": "hi"}, "response"),
    ],
)  # fmt: skip
async def test_each_endpoint_is_served(
    ann: openai.AsyncOpenAI, written: Any, endpoint: str, body: dict[str, Any], kind: str
) -> None:
    batch = await begun(ann, written({"model": "echo", **body}, url=endpoint), endpoint)
    batch = await ended(ann, batch)
    [line] = (await results(ann, batch.output_file_id)).values()
    assert line["response"]["body"]["object"] == kind


async def test_a_request_that_its_route_refuses_is_in_the_error_file(
    ann: openai.AsyncOpenAI, written: Any
) -> None:
    batch = await begun(ann, written(asked(), asked(temperature="hot"), asked(model="other")))
    batch = await ended(ann, batch)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (3, 1, 2)
    assert (await results(ann, batch.output_file_id)).keys() == {"line-0"}
    errors = await results(ann, batch.error_file_id)
    assert errors["line-1"]["response"]["status_code"] == 400
    assert errors["line-1"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors["line-2"]["response"]["status_code"] == 404


async def test_a_file_that_is_wrong_fails_the_batch_before_anything_is_asked(
    ann: openai.AsyncOpenAI, engine: EchoEngine, written: Any
) -> None:
    one = written(asked())
    poisoned = one.replace(b'"abc"', b'"abc", "stream": 1e99999')
    batch = await ended(ann, await begun(ann, one + b"nonsense\n" + one + poisoned))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    found = [(error.code, error.line, error.param) for error in batch.errors.data]
    assert found == [
        ("invalid_json_line", 2, None),
        ("duplicate_custom_id", 3, "custom_id"),
        ("invalid_stream", 4, "body.stream"),
    ]
    assert batch.output_file_id is None
    assert engine.seen == []


async def test_a_file_that_a_defect_keeps_from_being_checked_fails_its_batch(
    ann: openai.AsyncOpenAI, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defective(*args: Any) -> None:
        raise IndexError("planted")

    monkeypatch.setattr(batch_run, "check", defective)
    batch = await ended(ann, await begun(ann, written(asked())))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or ()] == ["internal_error"]


async def test_a_cancelled_batch_has_what_is_done(
    ann: openai.AsyncOpenAI, engine: HoldingEngine, written: Any
) -> None:
    batch = await begun(ann, written(asked(), *[asked("held")] * 5))
    await until(lambda: len(engine.running) == 5)
    batch = await ann.batches.cancel(batch.id)
    assert batch.status == "cancelling"
    assert batch.cancelling_at is not None
    batch = await ended(ann, batch)
    assert batch.status == "cancelled"
    assert batch.cancelled_at is not None
    assert engine.running == set()
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (6, 1, 0)
    assert (await results(ann, batch.output_file_id)).keys() == {"line-0"}
    with pytest.raises(openai.ConflictError):
        await ann.batches.cancel(batch.id)


async def test_a_batch_whose_window_passes_has_what_is_done_and_names_the_rest(
    ann: openai.AsyncOpenAI, engine: HoldingEngine, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_end, later_s = states.next_end, 0
    monkeypatch.setattr(states, "next_end", lambda record, now: next_end(record, now + later_s))
    batch = await begun(ann, written(asked(), asked("held")))
    async with asyncio.timeout(PATIENCE_S):
        while batch.request_counts is None or not batch.request_counts.completed:
            await asyncio.sleep(0.02)
            batch = await ann.batches.retrieve(batch.id)
    later_s = WINDOW_S
    batch = await ended(ann, batch)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    assert engine.running == set()
    assert (await results(ann, batch.output_file_id)).keys() == {"line-0"}
    [line] = (await results(ann, batch.error_file_id)).values()
    assert (line["custom_id"], line["response"]) == ("line-1", None)
    assert line["error"]["code"] == "batch_expired"
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (2, 1, 1)


@pytest.mark.parametrize("refusal", [EngineOverloadedError("full"), TenantOverloadedError("full")])
async def test_a_busy_server_is_asked_again(
    server: Any, ann: openai.AsyncOpenAI, engine: EchoEngine, written: Any, refusal: Exception
) -> None:
    engine.refusal = refusal
    batch = await begun(ann, written(asked()))
    await until(lambda: len(engine.seen) > 2)
    assert (await ann.batches.retrieve(batch.id)).status == "in_progress"
    engine.refusal = None
    batch = await ended(ann, batch)
    assert batch.error_file_id is None
    assert server.metric("batch_retries_total") >= 2


@pytest.mark.parametrize("retry_after_s", [0, 3600])
async def test_who_has_used_all_tokens_leaves_the_places_to_others(
    start: Any, engine: EchoEngine, written: Any, retry_after_s: int, monkeypatch: Any
) -> None:
    used = QuotaExceededError("used", retry_after_s=retry_after_s, code="insufficient_quota")
    refused = 0

    def check(*args: Any, tenant: str = "", **kwargs: Any) -> None:
        nonlocal refused
        if tenant == "ann":
            refused += 1
            raise used

    async with (
        start(engine, concurrency=1) as server,
        server.client("ann") as ann,
        server.client("bob") as bob,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(engine, "check_admission", check)
            of_ann = await begun(ann, written(asked(), asked()))
            await until(lambda: refused > 1)
            of_bob = await begun(bob, written(asked()))
            assert (await ended(bob, of_bob)).status == "completed"
            assert (await ann.batches.retrieve(of_ann.id)).status == "in_progress"
        assert len(await results(ann, (await ended(ann, of_ann)).output_file_id)) == 2


async def test_a_request_that_engines_cannot_do_is_given_up(
    ann: openai.AsyncOpenAI, engine: EchoEngine, written: Any
) -> None:
    engine.failure = EngineGenerateError("out of luck")
    batch = await ended(ann, await begun(ann, written(asked())))
    [line] = (await results(ann, batch.error_file_id)).values()
    assert line["response"]["status_code"] == 500
    assert line["response"]["body"]["error"]["message"] == "out of luck"
    assert len(engine.seen) == 3


async def test_requests_of_batches_are_few_at_a_time(
    start: Any, engine: EchoEngine, written: Any
) -> None:
    engine.gate.clear()
    async with start(engine, concurrency=3) as server, server.client("ann") as ann:
        batch = await begun(ann, written(*[asked()] * 9))
        await until(lambda: len(engine.running) == 3)
        await asyncio.sleep(0.1)
        assert len(engine.running) == 3
        engine.gate.set()
        assert (await ended(ann, batch)).status == "completed"


async def test_requests_of_long_lines_are_fewer_at_a_time(
    start: Any, engine: EchoEngine, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "OPEN_BYTES", 4500)
    engine.gate.clear()
    long = asked(user="x" * 2000)
    async with start(engine, concurrency=16) as server, server.client("ann") as ann:
        batch = await begun(ann, written(*[long] * 4))
        await until(lambda: len(engine.running) == 2)
        await asyncio.sleep(0.1)
        assert len(engine.running) == 2
        monkeypatch.setattr(batch_run, "OPEN_BYTES", 1)
        engine.gate.set()
        assert (await ended(ann, batch)).status == "completed"


async def test_batches_give_way_while_others_wait_but_never_stand_still(
    start: Any, engine: EchoEngine, written: Any
) -> None:
    busy = True
    manners = Manners(lambda: busy, has_priorities=lambda: True)
    engine.gate.clear()
    async with start(engine, manners) as server, server.client("ann") as ann:
        batch = await begun(ann, written(*[asked()] * 4, asked(priority=PRIORITY + 1)))
        await until(lambda: len(engine.running) == 1)
        await asyncio.sleep(0.1)
        assert len(engine.running) == 1
        busy = False
        await until(lambda: len(engine.running) == 5)
        engine.gate.set()
        await ended(ann, batch)
    assert [seen[2] for seen in engine.seen] == [*[PRIORITY] * 4, PRIORITY + 1]


async def test_where_engines_know_no_priorities_none_is_sent(
    ann: openai.AsyncOpenAI, engine: EchoEngine, written: Any
) -> None:
    await ended(ann, await begun(ann, written(asked())))
    assert [seen[2] for seen in engine.seen] == [0]


async def test_clients_do_not_wait_for_each_others_batches(
    server: Any, ann: openai.AsyncOpenAI, engine: EchoEngine, written: Any
) -> None:
    engine.gate.clear()
    first = await begun(ann, written(*[asked("slow")] * 2))
    second = await begun(ann, written(asked("next")))
    await until(lambda: len(engine.running) == 2)
    async with server.client("bob") as bob:
        other = await begun(bob, written(asked("other")))
        await until(lambda: len(engine.running) == 3)
        assert (await ann.batches.retrieve(second.id)).status == "validating"
        engine.gate.set()
        assert (await ended(bob, other)).status == "completed"
    for batch in (first, second):
        assert (await ended(ann, batch)).status == "completed"


async def test_another_client_knows_nothing_of_a_batch(
    server: Any, ann: openai.AsyncOpenAI, engine: EchoEngine, written: Any
) -> None:
    batch = await ended(ann, await begun(ann, written(asked())))
    async with server.client("bob") as bob:
        with pytest.raises(openai.NotFoundError):
            await bob.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            await bob.batches.cancel(batch.id)
        assert (await bob.batches.list()).data == []
        with pytest.raises(openai.BadRequestError, match="no such file"):
            await bob.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/completions",
                completion_window="24h",
            )
    assert engine.running == set()


async def test_a_batch_without_its_clients_key_waits(
    start: Any, engine: EchoEngine, written: Any
) -> None:
    good = {"ann"}
    engine.gate.clear()
    manners = Manners(is_client=lambda name: name in good)
    async with start(engine, manners) as server, server.client("bob") as bob:
        batch = await begun(bob, written(asked()))
        await asyncio.sleep(0.2)
        assert engine.seen == []
        good.add("bob")
        await until(lambda: engine.running)
        good.clear()
        await until(lambda: not engine.running)
        engine.gate.set()
        good.add("bob")
        assert (await ended(bob, batch)).status == "completed"


async def test_batches_are_listed_in_pages(ann: openai.AsyncOpenAI, written: Any) -> None:
    made = [await begun(ann, written(asked())) for _ in range(3)]
    newest_first = [batch.id for batch in reversed(made)]
    page = await ann.batches.list(limit=2)
    assert [batch.id for batch in page.data] == newest_first[:2]
    assert page.has_more
    assert [batch.id async for batch in ann.batches.list(limit=2)] == newest_first
    with pytest.raises(openai.BadRequestError, match="limit"):
        await ann.batches.list(limit=0)
    for batch in made:
        await ended(ann, batch)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k": "x" * 513}}, "metadata"),
        ({"input_file_id": "file-../../keys/ann"}, "input_file_id"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
    ],
)
async def test_a_wrong_field_is_named(
    ann: openai.AsyncOpenAI, written: Any, fields: dict[str, Any], named: str
) -> None:
    file = await ann.files.create(file=("in.jsonl", written(asked())), purpose="batch")
    usual: dict[str, Any] = {
        "input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"
    }  # fmt: skip
    with pytest.raises(openai.BadRequestError) as caught:
        await ann.batches.create(**{**usual, **fields})
    assert caught.value.param == named


async def test_a_batch_survives_a_disk_that_is_full_for_a_while(
    server: Any, ann: openai.AsyncOpenAI, engine: HoldingEngine, written: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    failures: list[bytes] = []
    real = Journal.append

    def append(self: Journal, sign: bytes, result: bytes) -> None:
        if len(failures) < 3:
            failures.append(sign)
            raise OSError(errno.ENOSPC, "no space left")
        real(self, sign, result)

    monkeypatch.setattr(Journal, "append", append)
    batch = await ended(ann, await begun(ann, written(*[asked()] * 4)))
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert len(await results(ann, batch.output_file_id)) == 4
    assert len(failures) == 3


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """`small_files(size)`: the system takes no more of any file, and of the write that reaches the
    size only a part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def test_a_disk_that_is_full_in_the_middle_of_an_answer_costs_none_and_doubles_none(
    ann: openai.AsyncOpenAI,
    engine: HoldingEngine,
    written: Any,
    small_files: Callable[[int], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    content = written(*[asked()] * 20)
    small_files(len(content) + 1000)  # the answers are longer than the questions
    batch = await begun(ann, content)
    await until(lambda: caplog.text.count("File too large") >= 2)
    halfway = await ann.batches.retrieve(batch.id)
    assert halfway.status == "in_progress"
    small_files(resource.RLIM_INFINITY)
    batch = await ended(ann, batch)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert len(await results(ann, batch.output_file_id)) == 20


async def test_a_batch_waits_while_its_client_has_no_room(
    start: Any, engine: HoldingEngine, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "TICKS_A_ROOM", 1)
    looks = 0
    room = 1 << 30

    def has_room(store: FileStore, client: str) -> int:
        nonlocal looks
        looks += room == 0
        return room

    monkeypatch.setattr(FileStore, "room", has_room)
    engine.gate.clear()
    async with start(engine, concurrency=1) as server, server.client("ann") as ann:
        batch = await begun(ann, written(*[asked()] * 3))
        await until(lambda: engine.running)
        room = 0
        await until(lambda: looks > 1)
        engine.gate.set()
        await asyncio.sleep(0.2)
        assert len(engine.seen) == 1
        room = 1 << 30
        assert (await ended(ann, batch)).status == "completed"


async def test_a_process_that_leaves_aborts_its_requests_and_the_next_one_asks_them_again(
    start: Any, engine: HoldingEngine, written: Any
) -> None:
    async with start(engine) as first, first.client("ann") as ann:
        batch = await begun(ann, written(asked(), asked("held")))
        await until(lambda: first.metric("batch_requests_total", outcome="completed") == 1)
        await until(lambda: engine.running)
        await first.service.close()
        assert engine.running == set()
        assert (await ann.batches.retrieve(batch.id)).status == "in_progress"
    sound = EchoEngine()
    async with start(sound) as second, second.client("ann") as ann:
        batch = await ended(ann, batch)
        assert len(await results(ann, batch.output_file_id)) == 2
    assert [seen[0] for seen in sound.seen] == [f"{batch.id}-2"]


async def test_what_batches_did_is_counted(
    server: Any, ann: openai.AsyncOpenAI, written: Any
) -> None:
    await ended(ann, await begun(ann, written(asked(), asked(model="other"))))
    await until(lambda: server.metric("batches_running") == 0)
    assert server.metric("batch_requests_total", outcome="completed") == 1
    assert server.metric("batch_requests_total", outcome="failed") == 1
    assert server.metric("batches_total", status="completed") == 1
    route = {"route": "/v1/completions", "status": "200"}
    assert server.metric("http_requests_total", **route) == 1
