"""What a gateway is answered, by the endpoint-picker protocol of the Gateway API's inference
extension (proposal 004 there), message by message and over gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from cases import each
from engine_kit.fake_core import FakeCore
from free_ports import free_port
from gateway_kit import (
    BUFFERED,
    DUPLEX,
    SERVICE,
    STREAMED,
    asked,
    destinations,
    exchange,
    headers,
    health,
    picker,
    said,
)
from service_kit import make_router

from diptych_frontend.app import MAX_BODY_BYTES
from diptych_router.program import picker_process
from diptych_router.program.endpoint_picker import OVERWRITE_IF_EXISTS_OR_ADD, PickerStream, pick
from diptych_router.program.picker_process import RouterState, picking
from diptych_router.requests import pool_client

OWN, OTHER, THIRD = "10.0.0.1:8000", "10.0.0.2:8000", "[fd00::3]:8000"
READY, LEAVING = RouterState(), RouterState(leaving=True)
UNABLE, FULL = RouterState("no engine yet"), RouterState("too many", full=True)


@each(
    ("standing", "allowed", "wanted"),
    [
        (READY, None, OWN),
        (READY, [OTHER, OWN, THIRD], OWN),
        (READY, [OTHER], OTHER),
        (READY, [], ""),
        (LEAVING, None, OWN),
        (LEAVING, [OWN], OWN),
        (LEAVING, [OWN, OTHER], OTHER),
        (UNABLE, None, ""),
        (UNABLE, [OWN], ""),
        (UNABLE, [OWN, OTHER], OTHER),
        (FULL, [OWN, OTHER], OTHER),
    ],
)
def test_the_router_itself_is_picked_if_it_may_be_and_can_take_a_request(
    standing: RouterState, allowed: Sequence[str] | None, wanted: str
) -> None:
    assert pick(OWN, standing, allowed, 0) == wanted


def test_others_take_turns() -> None:
    assert [pick(OWN, READY, [OTHER, THIRD], turn) for turn in range(3)] == [OTHER, THIRD, OTHER]


def test_header_and_metadata_name_one_endpoint_whatever_the_client_sent() -> None:
    answer = PickerStream(OWN, READY, 0).answer(headers([OWN, OTHER]))
    assert destinations(answer) == (OWN, OWN)
    [option] = answer.request_headers.response.header_mutation.set_headers
    assert option.append_action == OVERWRITE_IF_EXISTS_OR_ADD


@pytest.mark.parametrize(
    ("standing", "subset", "status"),
    [(READY, [], 503), (UNABLE, None, 503), (FULL, None, 429), (FULL, [OWN], 429), (FULL, [], 503)],
)
def test_a_request_that_can_go_nowhere_is_answered_at_once(
    standing: RouterState, subset: Sequence[str] | None, status: int
) -> None:
    answer = PickerStream(OWN, standing, 0).answer(headers(subset)).immediate_response
    assert answer.status.code == status
    told = {option.header.key: option.header.raw_value for option in answer.headers.set_headers}
    assert told == {"retry-after": b"1", "content-type": b"application/json"}
    assert json.loads(answer.body)["error"]["code"] == "overloaded"


@each("mode", [None, DUPLEX, BUFFERED, STREAMED])
@each("which", ["request", "response"])
def test_bodies_and_trailers_pass_as_the_gateway_sends_them(which: str, mode: str | None) -> None:
    talk = PickerStream(OWN, READY, 0)
    talk.answer(headers(mode=mode))
    if which == "response":
        served = asked(response_headers={})
        told = served.metadata_context.filter_metadata.add(key="envoy.lb")
        told.value.update({"x-gateway-destination-endpoint-served": OTHER})
        assert talk.answer(served).WhichOneof("response") == "response_headers"
    for text, ends in ((b"ab", False), (b"c", True)):
        chunk = {"body": text, "end_of_stream": ends}
        answer = talk.answer(asked(**{f"{which}_body": chunk}))
        assert answer.WhichOneof("response") == f"{which}_body"
        mutation = getattr(answer, f"{which}_body").response.body_mutation
        if mode in (None, DUPLEX):
            sent = mutation.streamed_response
            assert (sent.body, sent.end_of_stream) == (text, ends)
        else:
            assert mutation.WhichOneof("mutation") is None
    answer = talk.answer(asked(**{f"{which}_trailers": {}}))
    assert answer.WhichOneof("response") == f"{which}_trailers"


def test_a_gateway_that_only_observes_is_not_answered() -> None:
    first = headers()
    first.observability_mode = True
    assert PickerStream(OWN, READY, 0).answer(first) is None


async def test_over_grpc_a_router_is_picked_once_it_can_serve_and_until_it_leaves(
    smollm2: str, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    port, engines = free_port(), [f"127.0.0.1:{free_port()}" for _ in range(2)]
    client = make_router(smollm2, engines[0], engines[1], None, verify="Off")
    client.start()
    async with picking(client, OWN, "127.0.0.1", port), picker(port) as channel:

        async def state() -> tuple[str, ...]:
            asked_for = ("liveness", "readiness", SERVICE)
            return tuple([await health(channel, service) for service in asked_for])

        assert await state() == ("SERVING", "NOT_SERVING", "NOT_SERVING")
        [answer] = await exchange(channel, headers())
        assert answer.immediate_response.status.code == 503
        cores = [FakeCore(f"tcp://{address}") for address in engines]
        try:

            async def is_ready() -> bool:
                return await state() == ("SERVING",) * 3

            await eventually(is_ready)
            first, body = headers(mode=DUPLEX), asked(request_body={"body": b"x" * MAX_BODY_BYTES})
            answers = await exchange(channel, first, body)
            assert destinations(answers[0]) == (OWN, OWN)
            sent = answers[1].request_body.response.body_mutation.streamed_response
            assert len(sent.body) == MAX_BODY_BYTES
            client.leaving = True

            async def leaves() -> bool:
                return await state() == ("SERVING", "NOT_SERVING", "NOT_SERVING")

            await eventually(leaves)
            [answer] = await exchange(channel, headers())
            assert destinations(answer) == (OWN, OWN)
            monkeypatch.setattr(pool_client, "MAX_OPEN_REQUESTS", 0)

            async def is_full() -> bool:
                [answer] = await exchange(channel, headers())
                return bool(answer.immediate_response.status.code == 429)

            await eventually(is_full)
        finally:
            client.shutdown()
            await asyncio.gather(*(core.close() for core in cores))


async def test_a_picker_that_strangers_fill_is_replaced(
    smollm2: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    eventually: Any,
) -> None:
    monkeypatch.setattr(picker_process, "MAX_BYTES", 256 << 20)
    port, engines = free_port(), [f"127.0.0.1:{free_port()}" for _ in range(2)]
    client = make_router(smollm2, engines[0], engines[1], None, verify="Off")
    first, body = headers(mode=DUPLEX), asked(request_body={"body": b"x" * MAX_BODY_BYTES})
    async with picking(client, OWN, "127.0.0.1", port):
        async with picker(port) as channel:
            calls = [said(channel, first, body) for _ in range(64)]
            full = "the endpoint picker has more than 256 MB"
            await eventually(lambda: full in caplog.messages)
            # What it never read, gRPC says again to the next picker, which nobody shall fill.
            assert [call.cancel() for call in calls]

        async def answers() -> bool:
            try:
                async with picker(port) as channel:
                    return len(await exchange(channel, headers())) == 1
            except (OSError, grpc.RpcError):  # the full one is still ending
                return False

        await eventually(answers)
    client.shutdown()
