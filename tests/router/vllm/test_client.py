"""The router's line to a vLLM server: what it sends, hands on, notices and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio
from free_ports import free_port
from vllm_kit.fake_server import DONE, METRICS, Exchange, FakeVllm, data, event, serving
from vllm_kit.sent import request
from waits import PATIENCE_S

from diptych_frontend.core_client.client import NotConnectedError
from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineDeadError,
    FinishReason,
    RouterConfig,
    SchedulerStats,
    StructuredOutputsParams,
    UtilityError,
)
from diptych_protocol.config import Connector
from diptych_protocol.wire import FOLLOW_HEARTBEAT, ErrorKind
from diptych_router.engines.vllm.client import VllmClient
from diptych_router.engines.vllm.description import UnfitServerError
from diptych_router.engines.vllm.service import VllmService


@dataclass
class Line:
    """A client, and what it has said."""

    client: VllmClient = field(init=False)
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    reports: list[SchedulerStats] = field(default_factory=list)
    losses: list[EngineDeadError] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def take(self, message: EngineCoreOutputs) -> None:
        self.outputs += message.outputs
        if message.heartbeat is not None and message.scheduler_stats is not None:
            self.reports.append(message.scheduler_stats)

    @property
    def ends(self) -> list[EngineCoreOutput]:
        return [output for output in self.outputs if output.finished]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeVllm]:
    async with serving(free_port()) as started:
        yield started


@pytest_asyncio.fixture
async def line(server: FakeVllm) -> AsyncIterator[Line]:
    """A client that has been described to."""
    made = Line()
    made.client = VllmClient(
        f"tcp://{server.address}",
        VllmService.of(RouterConfig(model="m", served_name="tiny"), 64),
        on_outputs=made.take,
        on_lost=made.losses.append,
        on_doubt=made.doubts.append,
    )
    await made.client.describe(PATIENCE_S)
    yield made
    made.client.close()


async def test_tokens_come_as_they_are_generated(
    server: FakeVllm, line: Line, eventually: Any
) -> None:
    rest = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.write(event(5))
        await rest.wait()
        await exchange.write(event(6, 7, finish="stop", stop_reason=7), DONE)

    server.script = script
    line.client.add(request(max_tokens=8))
    await eventually(lambda: line.outputs)
    assert not line.ends
    rest.set()
    await eventually(lambda: line.ends)
    assert [output.new_token_ids for output in line.outputs] == [[5], [6, 7]]
    [end] = line.ends
    assert (end.request_id, end.finish_reason, end.stop_reason) == ("r/1", FinishReason.STOP, 7)


async def test_connections_of_whole_answers_are_used_again(
    server: FakeVllm, line: Line, eventually: Any
) -> None:
    for number in range(3):
        line.client.add(request(max_tokens=8))
        await eventually(lambda number=number: len(line.ends) > number)
        await eventually(lambda: not line.client._tasks)
    peers = {exchange._request._transport_peername for exchange in server.exchanges}
    assert len(peers) == 1


@pytest.mark.parametrize("begun", [False, True])
async def test_an_abort_closes_the_connection(
    server: FakeVllm, line: Line, eventually: Any, begun: bool
) -> None:
    async def script(exchange: Exchange) -> None:
        if begun:
            await exchange.write(event(5))
        await exchange.hang()

    server.script = script
    line.client.add(request())
    await eventually(lambda: line.outputs if begun else server.exchanges)
    line.client.abort(["r/1"])
    await eventually(lambda: server.exchanges[0].gone.is_set())
    assert not line.ends, "whoever aborts hears no more of it"
    assert line.losses == []


async def test_an_abort_that_an_output_leads_to_closes_the_connection(
    server: FakeVllm, line: Line, eventually: Any
) -> None:
    """As a stop string does it: within the delivery of the token that completes it."""

    async def script(exchange: Exchange) -> None:
        await exchange.write(event(5))
        await exchange.hang()

    server.script = script
    take = line.client._on_outputs

    def end_it(message: EngineCoreOutputs) -> None:
        take(message)
        line.client.abort(["r/1"])

    line.client._on_outputs = end_it
    line.client.add(request())
    await eventually(lambda: server.exchanges and server.exchanges[0].gone.is_set())
    assert not line.ends


async def test_closing_ends_all_that_is_open(server: FakeVllm, line: Line, eventually: Any) -> None:
    server.script = Exchange.hang
    line.client.add(request())
    await eventually(lambda: server.exchanges)
    line.client.close()
    await eventually(lambda: server.exchanges[0].gone.is_set())


async def test_a_server_that_ends_is_lost_with_its_requests(
    server: FakeVllm, line: Line, eventually: Any
) -> None:
    server.script = Exchange.hang
    line.client.add(request())
    await eventually(lambda: server.exchanges)
    await server.stop()
    await eventually(lambda: line.losses)
    assert not line.ends, "who loses the engine sees to its requests"
    with pytest.raises(NotConnectedError):
        line.client.add(request())


async def test_a_broken_stream_of_a_server_that_lives_is_given_up(
    server: FakeVllm, line: Line, eventually: Any
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(event(5))
        exchange.cut()

    server.script = script
    line.client.add(request())
    await eventually(lambda: line.ends)
    assert [end.finish_reason for end in line.ends] == [FinishReason.ABORT]
    assert line.losses == []


async def test_a_stream_without_an_end_is_given_up(
    server: FakeVllm, line: Line, eventually: Any
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(event(5), DONE)

    server.script = script
    line.client.add(request())
    await eventually(lambda: line.ends)
    assert [end.finish_reason for end in line.ends] == [FinishReason.ABORT]


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (b"<html>\n", ErrorKind.FAULT, "no line of data"),
        (b'data: {"error": {"message": "\xff"}}\n\n', ErrorKind.FAULT, "cannot be read"),
        (b"data: " + b"[" * 100_000 + b"\n\n", ErrorKind.FAULT, "cannot be read"),
        (event(99), ErrorKind.FAULT, "outside the vocabulary"),
        (event(*range(20)), ErrorKind.FAULT, "more tokens than were asked for"),
        (data({"error": {"message": "bad regex", "code": 400}}), ErrorKind.REFUSED, "bad regex"),
        (data({"error": {"message": "boom", "code": 500}}), ErrorKind.FAULT, "boom"),
    ],
)
async def test_a_stream_that_goes_wrong_ends_its_request(
    server: FakeVllm, line: Line, eventually: Any, said: bytes, kind: ErrorKind, words: str
) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(said)
        await exchange.hang()

    server.script = script
    line.client.add(request(max_tokens=8))
    await eventually(lambda: line.ends)
    [end] = line.ends
    assert (end.finish_reason, end.error_kind) == (FinishReason.ERROR, kind)
    assert words in str(end.error)
    await eventually(lambda: server.exchanges[0].gone.is_set())


async def test_an_answer_with_a_form_is_not_begun_anew_in_its_middle(
    server: FakeVllm, line: Line, eventually: Any
) -> None:
    line.client.add(request(5, structured_outputs=StructuredOutputsParams(regex="a+")))
    await eventually(lambda: line.ends)
    [end] = line.ends
    assert end.error_param == "structured_outputs"
    assert "send the request again" in str(end.error)
    assert server.exchanges == []


async def test_statistics_have_what_the_server_does_not_tell(
    server: FakeVllm, line: Line, eventually: Any
) -> None:
    server.script = Exchange.hang
    assert (await line.client.fetch_stats(PATIENCE_S)).queued_prompt_tokens == 0
    line.client.add(request(prompt=8))
    await eventually(lambda: server.exchanges)
    stats = await line.client.fetch_stats(PATIENCE_S)
    assert (stats.num_running, stats.queued_prompt_tokens) == (2, 8)
    assert stats.seconds_stepping > 0
    line.client.abort(["r/1"])
    assert (await line.client.fetch_stats(PATIENCE_S)).queued_prompt_tokens == 0


async def test_heartbeats_bring_the_statistics_while_the_server_is_well(
    server: FakeVllm, line: Line, eventually: Any
) -> None:
    line.client.tell(FOLLOW_HEARTBEAT)
    await eventually(lambda: line.reports)
    server.health = 503
    server.metrics = METRICS.replace("} 17.0", "} 18.0")
    asked = server.times_asked["/health"]
    await eventually(lambda: server.times_asked["/health"] > asked + 1)
    assert line.reports[-1].steps == 17, "one that says that it is ill has no heartbeat"
    server.health = 200
    await eventually(lambda: line.reports[-1].steps == 18)
    await server.stop()
    await eventually(lambda: line.losses)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"generate_status": 403}, "--enable-scale-out"),
        ({"models": {"data": []}}, "--served-model-name"),
    ],
)
async def test_a_server_that_cannot_serve_is_not_described(
    server: FakeVllm,
    line: Line,
    change: dict[str, Any],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    vars(server).update(change)
    for _ in range(2):
        with pytest.raises(UnfitServerError, match=words):
            await line.client.describe(PATIENCE_S)
    assert caplog.text.count(words) == 1, "said once"


@pytest.mark.parametrize("change", [{"health": 503}, {"metrics": "x" * (9 << 20)}])
async def test_a_server_that_is_ill_is_not_described(
    server: FakeVllm, line: Line, change: dict[str, Any]
) -> None:
    vars(server).update(change)
    with pytest.raises(UtilityError):
        await line.client.describe(PATIENCE_S)


@pytest.mark.parametrize(("connector", "salted"), [("nixl", True), ("diptych", False)])
async def test_who_answers_after_a_loss_uses_nothing_that_it_remembered(
    server: FakeVllm, eventually: Any, connector: Connector, salted: bool
) -> None:
    """It may have gone on with a read of blocks that were somebody else's by then."""
    made = Line()
    config = RouterConfig(model="m", served_name="tiny", connector=connector)
    made.client = VllmClient(
        server.address,
        VllmService.of(config, 64),
        on_outputs=made.take,
        on_lost=made.losses.append,
        on_doubt=made.doubts.append,
    )
    for _ in range(2):
        await made.client.describe(PATIENCE_S)
        made.client.add(request())
        await eventually(lambda: made.ends)
        made.outputs.clear()
        made.client.lost(EngineDeadError("it stood still"))
    first, second = (exchange.body["cache_salt"] for exchange in server.exchanges)
    assert first == "s"
    assert (second != "s") is salted
    made.client.close()


async def test_control_calls_are_refused_by_name(line: Line) -> None:
    with pytest.raises(UtilityError, match="hand_off: engines of the runtime vllm"):
        await line.client.call("hand_off", "r/1")
