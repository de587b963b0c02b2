"""One HTTP server that is a Hugging Face hub, a file server behind it, and an S3 store.

It serves bytes from memory with ranges, counts them, and can be told to misbehave.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import gguf
import pytest

COMMIT = "c0ffee" + 34 * "0"
PART = 64 << 10


@dataclass
class Store:
    """What the server holds, and how it behaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    """The hub's one repository and the bucket both hold these."""
    commit: str = COMMIT
    served: dict[str, int] = field(default_factory=dict)
    """Bytes of each file that were sent."""
    sending: int = 0
    """Answers under way."""
    requests: list[str] = field(default_factory=list)
    cut_after: dict[str, int] = field(default_factory=dict)
    """Break the connection once so many bytes of a file have been sent in all."""
    hold_after: dict[str, int] = field(default_factory=dict)
    """Stop sending for as long as `released` is not set."""
    released: threading.Event = field(default_factory=threading.Event)
    damaged: dict[str, int] = field(default_factory=dict)
    """So many answers with this file have a wrong byte."""
    failing: list[int] = field(default_factory=list)
    """Statuses of the next answers."""
    token: str = ""
    """The hub wants it, if set."""
    access_key: str = ""
    leaked: list[str] = field(default_factory=list)
    """Credentials that came to the file server, which must see none."""
    ranges: bool = True
    url: str = ""
    handler: Any = None
    """What a server needs to serve all this."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def link_url(self) -> str:
        return self.url.replace("127.0.0.1", "localhost")

    def total_served(self) -> int:
        with self.lock:
            return sum(self.served.values())


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, store: Store, *args: Any) -> None:
        self.store = store
        super().__init__(*args)

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        with self.store.lock:
            self.store.requests.append(f"{self.command} {parts.path}")
            status = self.store.failing.pop(0) if self.store.failing else 0
        if status:
            self._answer(status, b"", {})
        elif parts.path.startswith("/api/models/"):
            self._listing(parts.path)
        elif (match := re.fullmatch(r"/org/repo/resolve/(\w+)/(.+)", parts.path)) is not None:
            self._resolve(match[1], unquote(match[2]))
        elif parts.path.startswith("/link/"):
            if authorization := self.headers.get("authorization"):
                self.store.leaked.append(authorization)
            self._file(unquote(parts.path.removeprefix("/link/")))
        elif parts.path.startswith("/bucket"):
            self._bucket(unquote(parts.path.removeprefix("/bucket").strip("/")), parts.query)
        elif parts.path.startswith("/web/"):
            self._file(unquote(parts.path.removeprefix("/web/")))
        else:
            self._answer(404, b"", {"x-error-code": "RepoNotFound"})

    def _allowed(self) -> bool:
        token = self.store.token
        return not token or self.headers.get("authorization") == f"Bearer {token}"

    def _listing(self, path: str) -> None:
        if not path.startswith("/api/models/org/repo/"):
            self._answer(404, b"", {"x-error-code": "RepoNotFound"})
        elif not self._allowed():
            self._answer(403, b"", {"x-error-code": "GatedRepo"})
        elif path.rsplit("/", 1)[-1] not in ("main", self.store.commit):
            self._answer(404, b"", {"x-error-code": "RevisionNotFound"})
        else:
            siblings = [described(name, data) for name, data in self.store.files.items()]
            answer = {"id": "org/repo", "sha": self.store.commit, "siblings": siblings}
            self._answer(200, json.dumps(answer).encode(), {"content-type": "application/json"})

    def _resolve(self, commit: str, name: str) -> None:
        if not self._allowed() or commit != self.store.commit:
            self._answer(403, b"", {})
        elif name.endswith(".json"):
            self._file(name)
        else:
            link = f"{self.store.link_url}/link/{name}?signature=secret"
            self._answer(302, b"", {"location": link})

    def _bucket(self, key: str, query: str) -> None:
        signed = self.headers.get("authorization", "")
        if self.path.startswith("/bucket-that-is-not"):
            self._answer(404, b"<Error><Code>NoSuchBucket</Code></Error>", {})
        elif self.store.access_key and f"Credential={self.store.access_key}/" not in signed:
            self._answer(403, b"<Error><Code>AccessDenied</Code></Error>", {})
        elif key:
            self._file(key)
        else:
            prefix = parse_qs(query).get("prefix", [""])[0]
            rows = "".join(
                f"<Contents><Key>{name}</Key><Size>{len(data)}</Size><ETag>{etag(data)}</ETag>"
                "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
                for name, data in self.store.files.items()
                if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
            )
            body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
            self._answer(200, body.encode(), {"content-type": "application/xml"})

    def _file(self, name: str) -> None:
        data = self.store.files.get(name)
        if data is None:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", {})
            return
        tag = etag(data)
        if self.headers.get("if-match", tag) != tag:
            self._answer(412, b"", {})
            return
        headers = {"etag": tag, "last-modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        if wanted is None or not self.store.ranges:
            self._answer(200, self._damage(name, data), headers, name)
            return
        begin, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        headers["content-range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        self._answer(206, self._damage(name, data[begin:end]), headers, name)

    def _damage(self, name: str, data: bytes) -> bytes:
        with self.store.lock:
            if not self.store.damaged.get(name) or self.command == "HEAD":
                return data
            self.store.damaged[name] -= 1
        return bytes([data[0] ^ 1]) + data[1:]

    def _answer(self, status: int, body: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(status)
        for key, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with self.store.lock:
            self.store.sending += 1
        try:
            self._send(body, name)
        finally:
            with self.store.lock:
                self.store.sending -= 1

    def _send(self, body: bytes, name: str) -> None:
        for at in range(0, len(body), 16384):
            chunk = body[at : at + 16384]
            with self.store.lock:
                self.store.served[name] = served = self.store.served.get(name, 0) + len(chunk)
                cut = served > self.store.cut_after.get(name, served)
                if cut:
                    del self.store.cut_after[name]
                hold = served > self.store.hold_after.get(name, served)
            if hold:
                self.store.released.wait(30)
            if cut:
                self.close_connection = True
                return
            try:
                self.wfile.write(chunk)
            except ConnectionError:
                self.close_connection = True
                return


# To sum up a large file, for each of its parts, takes longer than to send it.
@lru_cache(4)
def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


@lru_cache(4)
def described(name: str, data: bytes) -> dict[str, Any]:
    """A file as the hub's API describes it: large ones by SHA-256, others by git's blob id."""
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    row: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob}
    if not name.endswith(".json"):
        sha256 = hashlib.sha256(data).hexdigest()
        row["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 134}
    return row


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A running server; the hub's client is directed to it by the credentials' `endpoint`."""
    for name in [key for key in os.environ if key.startswith(("HF_", "AWS_"))]:
        monkeypatch.delenv(name)
    store = Store()
    store.handler = partial(Handler, store)
    server = ThreadingHTTPServer(("127.0.0.1", 0), store.handler)
    server.daemon_threads = True
    store.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=partial(server.serve_forever, 0.02))
    thread.start()
    try:
        yield store
    finally:
        store.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts and short pauses."""
    monkeypatch.setattr("diptych_frontend.model_files.fetch.download.PART_BYTES", PART)
    monkeypatch.setattr("diptych_frontend.model_files.fetch.download.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("diptych_frontend.model_files.fetch.download.LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr("diptych_frontend.model_files.fetch.cache.LOCK_POLL_S", 0.01)


@pytest.fixture
def folder_model() -> dict[str, bytes]:
    """A repository in Hugging Face's layout, with much that nobody needs."""
    chance = random.Random(0)
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b'{"version": "1.0"}',
        "model-00001-of-00002.safetensors": chance.randbytes(5 * PART + 17),
        "model-00002-of-00002.safetensors": chance.randbytes(PART),
        "consolidated.safetensors": b"again",
        "README.md": b"# words",
        "pytorch_model.bin": b"pickle",
        "onnx/model.safetensors": b"elsewhere",
    }


@pytest.fixture
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF file whose header takes more than one part, followed by many more of weights."""
    path: Path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{key}", 64)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i:06}" for i in range(8000)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    header = path.read_bytes()
    assert 2 * PART < len(header) < 4 * PART
    return header + random.Random(1).randbytes(20 * PART)
