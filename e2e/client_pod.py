"""Runs in a pod beside the service: constant traffic, and single requests. Standard library only.

Traffic is greedy chat, streamed, every request on a connection of its own and never repeated, so
that each failure counts. What each prompt's answer must be is learnt before the traffic starts,
from the undisturbed service; an answer that differs by one character is a failure. One JSON object
a line goes to standard output; the end of standard input ends the traffic.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import secrets
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

READ_TIMEOUT_S = 120.0
"""Longest silence in a stream."""
SUBJECTS = ("the sea", "old bridges", "winter bread", "the night train")
PROMPTS = [
    f"Write about {subject} for a reader who has never heard of it. Say what it looks like, "
    "what people do there, and why somebody would remember it for many years."
    for subject in SUBJECTS
]


class Failed(Exception):
    """The request failed as a user would see it; the message says how."""


def streamed(url: str, body: bytes) -> Iterator[str]:
    """The data of each server-sent event, up to `[DONE]`. Raises `Failed` or OSError."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=READ_TIMEOUT_S)
    try:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", parts.path + "/chat/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise Failed(f"HTTP {response.status}: {response.read(300).decode(errors='replace')}")
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip().decode()
            if data == "[DONE]":
                return
            yield data
        raise Failed("the stream broke off")
    except http.client.HTTPException as exc:
        raise Failed(f"{type(exc).__name__}: {exc}") from exc
    finally:
        connection.close()


class Traffic:
    """Workers that chat until told to stop, and what they found."""

    def __init__(self, url: str, model: str, max_tokens: int) -> None:
        self._url = url
        self._common = {
            "model": model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
        }
        self._right: dict[str, str] = {}
        self._stop = threading.Event()
        self._printing = threading.Lock()

    def run(self, concurrency: int) -> None:
        with ThreadPoolExecutor(concurrency) as pool:
            answers = pool.map(lambda prompt: self._ask(prompt, {}), PROMPTS)
            self._right = dict(zip(PROMPTS, answers, strict=True))
        self._print({"event": "started", "unix_time": time.time()})
        workers = [
            threading.Thread(target=self._work, args=(n,), name=f"worker{n}", daemon=True)
            for n in range(concurrency)
        ]
        for worker in workers:
            worker.start()
        sys.stdin.read()
        self._stop.set()
        for worker in workers:
            worker.join(2 * READ_TIMEOUT_S)
        stuck = [worker.name for worker in workers if worker.is_alive()]
        self._print({"event": "stopped", "unix_time": time.time(), "stuck": stuck})

    def _work(self, number: int) -> None:
        for prompt in itertools.islice(itertools.cycle(PROMPTS), number, None):
            if self._stop.is_set():
                return
            self._print(self._request(prompt))

    def _request(self, prompt: str) -> dict[str, Any]:
        record: dict[str, Any] = {"event": "request", "unix_time": time.time(), "error": ""}
        started = time.monotonic()
        try:
            answer = self._ask(prompt, record)
            if answer != self._right[prompt]:
                raise Failed(f"wrong text: {answer!r} instead of {self._right[prompt]!r}")
        except (Failed, OSError, ValueError, LookupError) as exc:
            record["error"] = (
                str(exc) if isinstance(exc, Failed) else f"{type(exc).__name__}: {exc}"
            )
        record["seconds"] = round(time.monotonic() - started, 4)
        return record

    def _ask(self, prompt: str, record: dict[str, Any]) -> str:
        """The answer's text; notes the time to the first token and the longest pause."""
        # A salt of its own keeps a request from finding its blocks in a cache: all have to travel.
        own = {
            "messages": [{"role": "user", "content": prompt}],
            "cache_salt": secrets.token_hex(8),
        }
        body = {**self._common, **own}
        before = started = time.monotonic()
        pieces: list[str] = []
        finished = ""
        for data in streamed(self._url, json.dumps(body).encode()):
            event = json.loads(data)
            if "error" in event:
                raise Failed(f"error in the stream: {event['error']}")
            choice = event["choices"][0]
            now = time.monotonic()
            if piece := choice["delta"].get("content"):
                if not pieces:
                    record["ttft"] = round(now - started, 4)
                else:
                    record["pause"] = max(record.get("pause", 0.0), round(now - before, 4))
                pieces.append(piece)
                before = now
            finished = choice.get("finish_reason") or finished
        if finished not in ("stop", "length"):
            raise Failed(f"the answer ended with {finished!r}")
        return "".join(pieces)

    def _print(self, record: dict[str, Any]) -> None:
        with self._printing:
            print(json.dumps(record), flush=True)


def fetch(url: str, body: str | None, key: str) -> str:
    """One GET, or one POST of JSON, with an API key if there is one. Raises OSError."""
    data = body.encode() if body is not None else None
    own = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **own})
    with urllib.request.urlopen(request, timeout=READ_TIMEOUT_S) as response:
        text: bytes = response.read()
    return text.decode()


def upload(url: str, purpose: str, content: str) -> str:
    """One POST of a file as a form, as `POST /v1/files` takes it. Raises OSError."""
    boundary = secrets.token_hex(16)
    part = f"--{boundary}\r\nContent-Disposition: form-data; name="
    body = (
        f'{part}"purpose"\r\n\r\n{purpose}\r\n'
        f'{part}"file"; filename="requests.jsonl"\r\n\r\n{content}\r\n--{boundary}--\r\n'
    )
    kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    request = urllib.request.Request(url, body.encode(), kind)
    with urllib.request.urlopen(request, timeout=READ_TIMEOUT_S) as response:
        text: bytes = response.read()
    return text.decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    traffic = verbs.add_parser("traffic")
    traffic.add_argument("url")
    traffic.add_argument("--model", required=True)
    traffic.add_argument("--concurrency", type=int, required=True)
    traffic.add_argument("--max-tokens", type=int, required=True)
    single = verbs.add_parser("fetch")
    single.add_argument("url")
    single.add_argument("--body")
    single.add_argument("--key", default="")
    file = verbs.add_parser("upload")
    file.add_argument("url")
    file.add_argument("--purpose", required=True)
    file.add_argument("--content", required=True)
    arguments = parser.parse_args()
    if arguments.verb == "fetch":
        print(fetch(arguments.url, arguments.body, arguments.key))
    elif arguments.verb == "upload":
        print(upload(arguments.url, arguments.purpose, arguments.content))
    else:
        run = Traffic(arguments.url, arguments.model, arguments.max_tokens)
        run.run(arguments.concurrency)


if __name__ == "__main__":
    main()
