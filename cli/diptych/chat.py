"""`diptych chat`: a conversation with a running service, streamed over its OpenAI API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
from rich.console import Console

from diptych.errors import RunError
from diptych.laptop import rundir
from diptych.laptop.client import options

TIMEOUT = httpx.Timeout(connect=5.0, read=120.0, write=10.0, pool=5.0)
Message = dict[str, str]


class ChatError(Exception):
    """The service answered with an error, or not to the end; `str()` is one line for the user."""


class Piece(msgspec.Struct, frozen=True):
    """One event of a stream: some text, or how many tokens there were."""

    text: str = ""
    completion_tokens: int | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Error(msgspec.Struct):
    message: str = "unknown error"


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


def read_event(data: str) -> Piece:
    """The payload of one server-sent event. Raises `ChatError` for an error, or for nonsense."""
    try:
        chunk = msgspec.json.decode(data, type=_Chunk)
    except msgspec.MsgspecError as exc:
        raise ChatError(f"the service sent something that is no chat chunk: {exc}") from exc
    if chunk.error is not None:
        raise ChatError(chunk.error.message)
    text = "".join(choice.delta.content or "" for choice in chunk.choices[:1])
    return Piece(text, chunk.usage.completion_tokens if chunk.usage else None)


async def stream_chat(
    client: httpx.AsyncClient, url: str, body: dict[str, Any]
) -> AsyncIterator[Piece]:
    """One chat completion, as its pieces arrive. Raises `ChatError`.

    `url` is the API's base and ends in `/v1`; `body` needs `model` and `messages`.
    """
    request = body | {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", f"{url}/chat/completions", json=request) as response:
            if response.status_code != 200:
                raise ChatError(_refusal(response.status_code, await response.aread()))
            async for line in response.aiter_lines():
                field, _, data = line.partition(":")
                if field != "data":
                    continue
                if data.strip() == "[DONE]":
                    return
                yield read_event(data)
    except httpx.HTTPError as exc:
        raise ChatError(f"{url} is out of reach: {exc or type(exc).__name__}") from exc
    raise ChatError("the stream broke off before its end")


def _refusal(status: int, body: bytes) -> str:
    try:
        error = msgspec.json.decode(body, type=_Chunk).error
    except msgspec.MsgspecError:
        error = None
    return f"HTTP {status}: {error.message if error else body[:200].decode(errors='replace')}"


@dataclass(frozen=True, slots=True)
class Service:
    """Whom to talk to."""

    url: str
    """Base URL of the OpenAI API, ending in /v1."""
    model: str
    client: dict[str, Any]
    """Arguments of an httpx client."""


def find_service(url: str | None, model: str | None, api_key: str | None = None) -> Service:
    """Base URL and model name to talk to: as given, else those of the newest running service."""
    if url is None:
        states = [state for state in rundir.running() if state.ready]
        if not states:
            raise RunError("no service runs here; start one with `diptych up FILE`, or give --url")
        found = states[0]
        return Service(found.url, model or found.model, options(found))
    base = url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    client = options(api_key=api_key)
    return Service(base, model or _first_model(base, client), client)


def _first_model(base: str, client: dict[str, Any]) -> str:
    try:
        response = httpx.get(f"{base}/models", timeout=TIMEOUT, **client)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise RunError(f"{base} is out of reach: {exc}") from exc
    except (ValueError, LookupError, TypeError) as exc:
        raise RunError(f"{base}/models does not list a model; give --model") from exc


class Conversation:
    """What was said so far; the service remembers nothing."""

    def __init__(self, service: Service, options: dict[str, Any], system: str | None) -> None:
        self._service = service
        self._body = {"model": service.model, **options}
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def reset(self) -> None:
        self.messages = list(self._opening)

    async def say(self, text: str, show: Callable[[str], None]) -> None:
        """Say something and show the answer as it comes.

        A turn that fails or is cut short leaves no trace in the conversation. Raises `ChatError`.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        answer: list[str] = []
        body = self._body | {"messages": messages}
        async with httpx.AsyncClient(timeout=TIMEOUT, **self._service.client) as client:
            async for piece in stream_chat(client, self._service.url, body):
                answer.append(piece.text)
                show(piece.text)
        self.messages = [*messages, {"role": "assistant", "content": "".join(answer)}]


def converse(conversation: Conversation, console: Console) -> None:
    """Read lines and answer them until the end of input."""
    console.print("Ctrl-D ends, Ctrl-C cuts an answer short, /reset starts afresh.", style="dim")
    while True:
        try:
            line = console.input("[bold]you>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line == "/reset":
            conversation.reset()
        elif line:
            _turn(conversation, line, console)


def _turn(conversation: Conversation, line: str, console: Console) -> None:
    try:
        asyncio.run(conversation.say(line, printer(console)))
    except ChatError as exc:
        console.print(f"error: {exc}", style="red", markup=False)
    except KeyboardInterrupt:
        console.print(" (cut short)", style="dim")
    else:
        console.print()


def printer(console: Console) -> Callable[[str], None]:
    """Prints pieces of text as they are, at once."""

    def show(text: str) -> None:
        console.out(text, end="", highlight=False)
        console.file.flush()

    return show
