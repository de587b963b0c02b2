"""The chat client against a real, small server."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from PIL import Image
from rich.console import Console
from waits import PATIENCE_S

from diptych.answer_stream import AnswerError, chunks_of, stream_chat
from diptych.api_service import Service, find_service
from diptych.chat.conversation import Conversation
from diptych.chat.loop import printer
from diptych.demo import HandOff, Timing, read_hand_off
from diptych.errors import BadInputError, RunError
from diptych.main import main
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_protocol import KVTransferStats, SchedulerStats


@pytest.fixture
def url(small_server: str) -> str:
    return f"{small_server}/v1"


async def said(conversation: Conversation, text: str) -> str:
    pieces: list[str] = []
    await conversation.say(text, pieces.append)
    return "".join(pieces)


@pytest.mark.parametrize(
    ("data", "text", "tokens"),
    [
        ('{"choices": [{"delta": {"content": "hi"}}]}', "hi", None),
        ('{"choices": [{"delta": {"role": "assistant", "content": null}}]}', "", None),
        ('{"choices": [], "usage": {"completion_tokens": 3}}', "", 3),
        ('{"choices": [{"index": 0, "finish_reason": "stop"}], "usage": null}', "", None),
    ],
)
def test_events_of_a_stream_are_read(data: str, text: str, tokens: int | None) -> None:
    [chunk] = chunks_of(f"id: 1\ndata: {data}\n\ndata: [DONE]\n\n".encode())
    assert chunk.text == text
    assert (chunk.usage.completion_tokens if chunk.usage else None) == tokens


def chunk(text: str, event_id: str) -> str:
    data = json.dumps({"choices": [{"delta": {"content": text}}]})
    return f"id: {event_id}\ndata: {data}\n\n"


BEGUN = f"{chunk('a', '1')}{chunk('b', '2')}id: 3\ndata: {{"
GONE = '{"error": {"message": "too late"}}'


@pytest.mark.parametrize(
    ("later", "outcome"),
    [
        (["502 Bad Gateway", "200 OK"], "abc"),
        (["404 Not Found"], "HTTP 404: too late"),
    ],
)
async def test_a_stream_that_broke_off_goes_on_after_its_last_whole_event(
    later: list[str], outcome: str
) -> None:
    bodies = {
        "502 Bad Gateway": "",
        "404 Not Found": GONE,
        "200 OK": f"{chunk('c', '3')}data: [DONE]",
    }
    answers = [("200 OK", BEGUN), *((status, bodies[status]) for status in later)]
    last_ids: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert "x-diptych-resumable: 1" in head
        last_ids.append(head.partition("last-event-id: ")[2].partition("\r\n")[0])
        status, body = answers.pop(0)
        writer.write(f"HTTP/1.1 {status}\r\nconnection: close\r\n\r\n{body}\n".encode())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        [[_, port]] = [each.getsockname() for each in server.sockets]
        said = ""
        try:
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                async for piece in stream_chat(client, f"http://127.0.0.1:{port}", {}):
                    said += piece.text
        except AnswerError as exc:
            assert said == "ab"
            said = str(exc)
    assert (said, last_ids) == (outcome, ["", *("2" for _ in later)])


@pytest.mark.parametrize("terminal", [True, False])
def test_an_answer_gives_a_terminal_no_orders(terminal: bool) -> None:
    """The clipboard, the title, a line that hides another; a pipe gets the answer as it is."""
    answer = "a\x1b]52;c;cm0=\x07b\x9b2Jc\rd\u202ee\tf\r\ng \u00e9\u4e2d"
    file = io.StringIO()
    printer(Console(file=file, force_terminal=terminal))(answer)
    spelled = "a\\x1b]52;c;cm0=\\x07b\\x9b2Jc\\rd\\u202ee\tf\r\ng \u00e9\u4e2d"
    assert file.getvalue() == (spelled if terminal else answer)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"error": {"message": "engine lost", "code": 500}}', "engine lost"),
        ('{"error": "engine lost"}', "engine lost"),
        ("{nonsense", "no chunk of an answer"),
        ('{"choices": 3}', "no chunk of an answer"),
        ("\xff", "no chunk of an answer"),
    ],
)
async def test_errors_and_nonsense_in_a_stream_are_told(data: str, message: str) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield f"data: {data}\n\ndata: [DONE]\n\n".encode()

    answering = httpx.MockTransport(lambda _: httpx.Response(200, content=body()))
    async with httpx.AsyncClient(transport=answering) as client:
        with pytest.raises(AnswerError, match=message):
            _ = [chunk async for chunk in stream_chat(client, "http://service", {})]


async def test_a_conversation_is_sent_whole_and_can_be_reset(url: str) -> None:
    conversation = Conversation(Service(url, "small", {}), {}, "be brief")
    assert await said(conversation, "count") == "2 messages"
    assert await said(conversation, "count") == "4 messages"
    conversation.reset()
    assert await said(conversation, "count") == "2 messages"


@pytest.mark.parametrize("text", ["refuse", "break"])
async def test_a_turn_that_fails_leaves_no_trace(url: str, text: str) -> None:
    conversation = Conversation(Service(url, "small", {}), {}, None)
    with pytest.raises(AnswerError):
        await said(conversation, text)
    assert await said(conversation, "count") == "1 messages"


def test_the_prompt_reads_lines_until_the_end_of_input(url: str) -> None:
    lines = "count\n\nrefuse\ncount\n/reset\ncount\n"
    result = CliRunner().invoke(main, ["chat", "--url", url], input=lines)
    assert result.exit_code == 1, "a script would miss an answer"
    assert result.stdout == "1 messages\n3 messages\n1 messages\n"
    assert result.stderr.strip() == "error: HTTP 400: too long"


def test_a_pipe_gets_the_answer_and_nothing_else(url: str) -> None:
    chat = [sys.executable, "-m", "diptych.main", "chat", "--url", url]
    done = subprocess.run(chat, input="count\n", capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (0, "1 messages\n", "")


def test_a_pipe_that_nobody_reads_ends_a_chat_without_a_word() -> None:
    event = b'data: {"choices": [{"index": 0, "delta": {"content": "Hello"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    def answer(server: socket.socket) -> None:
        client, _ = server.accept()
        with client:
            client.recv(1 << 16)
            client.sendall(head + b"%x\r\n%b\r\n" % (len(event), event))
            while client.recv(1 << 16):  # until it leaves, in the midst of its answer
                pass

    unread, pipe = os.pipe()
    os.close(unread)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=(server,), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-m", "diptych.main", "chat", "--url", url, "--model", "m"]
        done = subprocess.run(
            command, input=b"hello\n", stdout=pipe, stderr=subprocess.PIPE, timeout=PATIENCE_S
        )
    os.close(pipe)
    assert (done.returncode, done.stderr) == (1, b"")


def test_who_types_into_a_chat_whose_answers_go_elsewhere_is_prompted_beside_them(
    url: str,
) -> None:
    keyboard, own = os.openpty()
    chat = [sys.executable, "-m", "diptych.main", "chat", "--url", url]
    os.write(keyboard, b"count\n\x04")
    done = subprocess.run(chat, stdin=own, capture_output=True, text=True, timeout=PATIENCE_S)
    os.close(keyboard)
    os.close(own)
    assert done.stdout == "1 messages\n"
    assert "you> " in done.stderr
    assert "Ctrl-D ends" in done.stderr


def test_an_image_is_a_part_of_one_message(url: str, tmp_path: Path) -> None:
    Image.new("RGB", (2, 2)).save(tmp_path / "dot.png")
    lines = f"/image {tmp_path / 'dot.png'}\ncount\ncount\n"
    result = CliRunner().invoke(main, ["chat", "--url", url], input=lines)
    assert "1 messages, 1 images" in result.stdout
    assert result.stdout.endswith("3 messages\n")


def test_a_program_may_send_what_looks_like_a_command(url: str) -> None:
    result = CliRunner().invoke(main, ["chat", "--url", url], input="/unknown\n/quit\ncount\n")
    assert "is Paris." in result.stdout
    assert "messages" not in result.stdout


def test_the_model_is_the_first_that_the_service_lists(url: str) -> None:
    found = [find_service(url, None), find_service(url.removesuffix("/v1"), "other")]
    assert [(one.url, one.model) for one in found] == [(url, "small"), (url, "other")]


def test_a_service_out_of_reach_is_told_in_one_line() -> None:
    with pytest.raises(RunError, match="out of reach"):
        find_service("http://127.0.0.1:1", None)


@pytest.mark.parametrize("model", ["m", None])
@pytest.mark.parametrize(
    "url",
    ["no-scheme", "http://", "http://[::1", "ftp://x", "http://h:65536", "http://h\n", "\udcff"],
)
def test_what_can_be_no_address_is_said_so_at_once(url: str, model: str | None) -> None:
    with pytest.raises(BadInputError, match="such as http"):
        find_service(url, model)


def test_without_a_service_chat_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    result = CliRunner().invoke(main, ["chat", "--once", "hi"])
    assert result.exit_code == 1
    assert "start one with `diptych up`, or give --url" in result.stderr


@pytest.mark.parametrize(
    ("timing", "speed"),
    [(Timing(0.1, 1.1, 11), 10.0), (Timing(0.1, 0.1, 1), None), (Timing(0.1, 0.1, 5), None)],
)
def test_the_speed_is_that_of_the_tokens_after_the_first(
    timing: Timing, speed: float | None
) -> None:
    assert timing.tokens_per_s == (pytest.approx(speed) if speed else None)


def test_without_a_hand_off_every_figure_is_zero() -> None:
    assert read_hand_off("") == HandOff(0, 0, 0.0, 0, ())


def test_the_figures_are_read_from_what_servers_export() -> None:
    transfer = KVTransferStats(
        loads_completed=2,
        loads_failed=1,
        blocks_received=3,
        bytes_received=4096,
        seconds_receiving=0.5,
        transport="tcp",
    )
    stats = {"decode-0": SchedulerStats(kv_transfer=transfer)}
    exposition, _ = ServerMetrics("small", lambda: stats).exposition("text/plain")
    assert read_hand_off(exposition.decode()) == HandOff(3, 4096, 0.5, 2, ("tcp",))
