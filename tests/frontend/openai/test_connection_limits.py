"""What strangers may do to a server before anybody knows who they are, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from waits import FOR_EVER_S, PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai import connection_limits, server
from diptych_frontend.openai.connection_limits import (
    MAX_PIPELINED,
    Connections,
    raise_descriptor_limit,
)

REQUEST = b"GET /version HTTP/1.1\r\nHost: x\r\n"


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = httpx.URL(url)
    return await asyncio.open_connection(address.host, address.port)


def told_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What was logged, but for a loop's stalls on a busy machine."""
    return [record for record in caplog.records if record.name != "diptych.loop"]


async def answer_to(url: str, *pieces: bytes) -> bytes:
    """All that the server says until it closes."""
    reader, writer = await connect(url)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(
            [REQUEST, b"".join(b"X-%d: y\r\n" % i for i in range(200)), b"\r\n"], id="many"
        ),
        pytest.param([REQUEST, b"X: " + b"y" * (80 << 10) + b"\r\n\r\n"], id="long"),
        pytest.param([REQUEST, b"X: y", *[b"y" * (16 << 10)] * 6], id="one without an end"),
        pytest.param([b"GET /", *[b"y" * (16 << 10)] * 6], id="a line without an end"),
        pytest.param([b"GET /" + b"y" * (64 << 10) + b" HTTP/1.1\r\n\r\n"], id="a long line"),
    ],
)
async def test_headers_are_bounded_in_number_and_size(
    engine: Any, serve: Any, pieces: list[bytes]
) -> None:
    async with serve(build_app(engine)) as url:
        answer = await answer_to(url, *pieces)
        # A client that is still sending may lose the answer to the reset of its connection.
        assert not answer or answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (b"HTTP/1.1\r\n", b"400"),
        (b"HTTP/1.0\r\n", b"200"),
        (b"HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n", b"501"),
        (b"HTTP/1.1\r\nHost: x\r\ntransfer-ENCODING: Chunked\r\n", b"200"),
    ],
    ids=["no host", "no host in HTTP/1.0", "compressed", "chunked"],
)
async def test_requests_that_others_may_read_otherwise_are_refused(
    engine: Any, serve: Any, head: bytes, told: bytes
) -> None:
    async with serve(build_app(engine)) as url:
        request = b"GET /version " + head + b"Connection: close\r\n\r\n0\r\n\r\n"
        assert (await answer_to(url, request)).split(b" ")[1] == told


async def test_headers_within_the_bounds_are_served(engine: Any, serve: Any) -> None:
    async with serve(build_app(engine)) as url, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        headers = {f"x-{i}": "y" * 400 for i in range(100)}
        for _ in range(3):
            assert (await client.get(f"{url}/version", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("sent", "told"),
    [(b"", b""), (b"\r\n", b""), (b"GET /ver", b"HTTP/1.1 408 "), (REQUEST, b"HTTP/1.1 408 ")],
    ids=["nothing", "a line break", "half a line", "half of the headers"],
)
async def test_headers_that_do_not_come_are_not_waited_for(
    engine: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, sent: bytes, told: bytes
) -> None:
    monkeypatch.setattr(connection_limits, "HEAD_TIMEOUT_S", 0.2)
    async with serve(build_app(engine)) as url:
        answer = await answer_to(url, sent)
        assert answer.startswith(told)
        assert told or not answer


async def test_a_second_request_has_to_come_in_time_as_well(
    engine: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "HEAD_TIMEOUT_S", 0.2)
    async with serve(build_app(engine)) as url:
        reader, writer = await connect(url)
        writer.write(REQUEST + b"\r\n")
        assert b"200 OK" in await reader.readuntil(b"\r\n")
        await asyncio.sleep(1.5)  # longer than a sweep and the deadline: an idle connection stays
        writer.write(REQUEST)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert b"HTTP/1.1 408 " in answer
        writer.close()


async def test_a_long_answer_outlasts_the_deadline_of_headers(
    engine: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "HEAD_TIMEOUT_S", 0.2)
    engine.gate.clear()
    async with serve(build_app(engine)) as url, httpx.AsyncClient(timeout=PATIENCE_S) as client:
        body = {"model": "echo", "prompt": "abc", "max_tokens": 2}
        asking = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
        await asyncio.sleep(1.5)  # longer than a sweep and the deadline
        engine.gate.set()
        assert (await asking).status_code == 200


@pytest.mark.parametrize("answers", [1, 2])
async def test_who_knows_no_chunks_gets_an_answer_that_ends_with_the_connection(
    engine: Any, serve: Any, answers: int
) -> None:
    """HTTP/1.0, as of ApacheBench and of proxies by their defaults."""
    body = b'{"model": "echo", "stream": true, "prompt": "abc", "max_tokens": 3, "n": %d}' % answers
    head = b"POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\n"
    sent = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with serve(build_app(engine)) as url:
        old = await answer_to(url, head + sent)
        head, _, events = old.partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        assert all(line.startswith(b"data: ") for line in events.split(b"\n\n") if line), events
        assert events.endswith(b"data: [DONE]\n\n")
        whole = await answer_to(url, b"GET /v1/models HTTP/1.0\r\n\r\n")
        head, _, models = whole.partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(models) in head
        assert (await answer_to(url, b"HEAD /v1/models HTTP/1.0\r\n\r\n")).endswith(b"\r\n\r\n")


async def test_requests_sent_ahead_are_bounded(engine: Any, serve: Any, eventually: Any) -> None:
    engine.gate.clear()
    body = b'{"model": "echo", "prompt": "a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with serve(build_app(engine)) as url:
        asking = asyncio.create_task(answer_to(url, whole * 100))
        await eventually(lambda: len(engine.seen) == 1)
        engine.gate.set()
        answer = await asking
        assert answer.count(b"HTTP/1.1 200") == len(engine.seen) == 1 + MAX_PIPELINED, answer
        assert b"sent ahead" in answer[answer.rindex(b"HTTP/1.1 400") :]


@pytest.mark.parametrize(
    "nonsense",
    [b"get /health HTTP/1.1\r\n\r\n", REQUEST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"],
    ids=["no request", "no body"],
)
async def test_requests_before_nonsense_are_answered_first(
    engine: Any, serve: Any, eventually: Any, nonsense: bytes
) -> None:
    engine.gate.clear()
    body = b'{"model": "echo", "prompt": "a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with serve(build_app(engine)) as url:
        asking = asyncio.create_task(answer_to(url, whole * 2 + nonsense, whole))
        await eventually(lambda: len(engine.seen) == 1)
        engine.gate.set()
        answer = await asking
    assert [each[:3] for each in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"400"]


async def test_a_body_that_breaks_off_in_nonsense_is_told_so(engine: Any, serve: Any) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with serve(build_app(engine)) as url:
        answer = await answer_to(url, head + b'3\r\n{"m\r\n', b"zz\r\n")
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert b"this is not HTTP" in answer
    assert answer.count(b"HTTP/1.1") == 1


H2C = b"Upgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\nConnection: Upgrade, HTTP2-Settings"
"""So Java's HttpClient begins each connection."""
WEBSOCKET = b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13"


@pytest.mark.parametrize("wish", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize("size", [1, 7, 100_000], ids=["bytes", "pieces", "at once"])
async def test_a_request_that_would_rather_speak_another_protocol_is_answered(
    engine: Any, serve: Any, caplog: pytest.LogCaptureFixture, wish: bytes, size: int
) -> None:
    body = b'{"model": "echo", "prompt": "a b", "max_tokens": 1}'
    chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    counted = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    last = REQUEST + b"Connection: Close, Upgrade\r\nUpgrade: h2c\r\n\r\n"
    sent = b"".join(head + wish + b"\r\n" + each for each in (chunked, counted)) + last
    async with serve(build_app(engine)) as url:
        pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
        answer = await answer_to(url, *pieces)
    assert answer.count(b"HTTP/1.1 200 OK") == 3, answer
    assert answer.count(b'"object":"text_completion"') == 2
    assert answer.count(b"connection: close") == 1
    assert not told_in(caplog), "strangers fill no log"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"405"),
        (b"\x16\x03\x01\x02\x00\x01\x00", b"400"),
        (REQUEST + b"X : y\r\n\r\n", b"400"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"400"),
    ],
    ids=["a tunnel", "TLS", "a space in a name", "HTTP/2"],
)
async def test_what_is_no_request_is_refused_and_fills_no_log(
    engine: Any, serve: Any, caplog: pytest.LogCaptureFixture, sent: bytes, status: bytes
) -> None:
    async with serve(build_app(engine)) as url:
        answer = await answer_to(url, sent)
    assert answer.startswith(b"HTTP/1.1 " + status), answer
    assert not told_in(caplog)


async def test_a_reader_that_stopped_leaves_no_socket_behind(
    engine: Any, serve: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "WRITE_TIMEOUT_S", 0.5)
    made: list[Connections] = []
    of_this_process = Connections.of_this_process

    def remembered() -> Connections:
        made.append(of_this_process())
        return made[-1]

    monkeypatch.setattr(Connections, "of_this_process", remembered)
    async with serve(build_app(engine)) as url:
        address = httpx.URL(url)
        transport, _ = await asyncio.get_running_loop().create_connection(
            asyncio.Protocol,
            address.host,
            address.port,  # type: ignore[arg-type]
        )
        transport.pause_reading()
        body = b'{"model":"echo","prompt":"a","max_tokens":1000000000,"stream":true,"n":100}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        transport.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await eventually(lambda: len(made[0]) == 1)
        await eventually(lambda: len(made[0]) == 0)
        await eventually(lambda: bool(engine.left_early))
        transport.abort()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such thing")
async def test_nor_what_the_system_has_taken_to_send(
    engine: Any, serve: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that fit into its buffers are written as far as the server can see."""
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 1.0)
    metrics = ServerMetrics(engine.model_name, engine.stats_by_engine)
    async with serve(build_app(engine, metrics=metrics)) as url:
        address = httpx.URL(url)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((address.host, address.port))
            last = REQUEST.replace(b"/version", b"/metrics") + b"Connection: close\r\n\r\n"
            client.sendall((REQUEST.replace(b"/version", b"/metrics") + b"\r\n") * 7 + last)
            ours = client.getsockname()[1]

            def kept() -> bool:
                sockets = psutil.net_connections("tcp")
                return any(
                    x.laddr and x.laddr.port == address.port and x.raddr and x.raddr.port == ours
                    for x in sockets
                )

            assert kept()
            await eventually(lambda: not kept())


class Connection:
    """What `Connections` looks at."""

    def __init__(self, is_idle: bool) -> None:
        self.is_idle = is_idle
        self.closed = False
        self.transport = self

    def abort(self) -> None:
        self.closed = True


def test_idle_connections_make_room_for_new_ones() -> None:
    connections: Any = Connections(32)
    idle = [Connection(is_idle=True) for _ in range(10)]
    busy = [Connection(is_idle=False) for _ in range(6)]
    for connection in (*busy, *idle):
        assert connections.enter("greedy", connection)
    newcomer = Connection(is_idle=False)
    assert connections.enter("greedy", newcomer), "two idle ones give way to it"
    assert [each.closed for each in idle] == [True] * 2 + [False] * 8
    assert not any(each.closed for each in (*busy, newcomer))
    others = [(f"address {i}", Connection(is_idle=False)) for i in range(17)]
    assert all(connections.enter(*other) for other in others)
    assert len(connections) == 32
    assert connections.enter("one more", Connection(is_idle=False))
    assert sum(each.closed for each in idle) == 4, "the address with most makes room for others"


def test_busy_connections_give_way_to_nobody() -> None:
    connections: Any = Connections(8)
    assert all(connections.enter("greedy", Connection(is_idle=False)) for _ in range(4))
    assert not connections.enter("greedy", Connection(is_idle=True)), "one address has half at most"
    assert all(connections.enter(str(number), Connection(is_idle=False)) for number in range(4))
    assert not connections.enter("one more", Connection(is_idle=True))
    assert len(connections) == 8


async def test_one_too_many_is_told_to_come_again(
    engine: Any, serve: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_CONNECTIONS", 4)
    engine.gate.clear()
    async with serve(build_app(engine)) as url, httpx.AsyncClient(timeout=FOR_EVER_S) as client:
        body = {"model": "echo", "prompt": "abc", "max_tokens": 2}
        asking = [
            asyncio.create_task(client.post(f"{url}/v1/completions", json=body)) for _ in range(2)
        ]
        await eventually(lambda: len(engine.running) == 2)
        answer = await answer_to(url)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: " in answer
        engine.gate.set()
        assert [(await each).status_code for each in asking] == [200, 200]


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_descriptors")
def test_the_server_takes_the_descriptors_that_it_may_have() -> None:
    most = raise_descriptor_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most
    assert most == min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 65536)
