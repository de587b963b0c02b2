"""`python -m diptych_frontend.model_files.fetch`.

As a container runs it: signals, exit codes, output.
"""

from __future__ import annotations

import base64
import os
import random
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from waits import PATIENCE_S, Deadline, source_of

PART = 16 << 20


def start(store: Any, folder: Path, uri: str, *arguments: str) -> subprocess.Popen[str]:
    keys = folder / "credentials"
    keys.mkdir(exist_ok=True)
    (keys / "endpoint").write_text(f"{store.url}\n")
    (keys / "token").write_text("hf_secret\n")
    command = [
        *(sys.executable, "-m", "diptych_frontend.model_files.fetch", "--uri", uri),
        *("--cache", str(folder / "cache"), "--credentials", str(keys)),
        *arguments,
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = Deadline(source_of(condition))
    while not condition():
        deadline.check()
        time.sleep(0.01)


@pytest.fixture
def large(store: Any) -> bytes:
    """Eight parts; the server stops when the first of them must be on the disk."""
    chance = random.Random(2)
    data = b"".join(chance.randbytes(1 << 16) * (PART >> 16) for _ in range(8))
    store.files = {"model.gguf": data}
    store.token = "hf_secret"
    store.hold_after = {"model.gguf": 6 * PART + (1 << 20)}
    return data


@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_process_that_was_killed_is_continued(
    store: Any, large: bytes, tmp_path: Path, signum: signal.Signals
) -> None:
    uri = "hf://org/repo/model.gguf"
    first = start(store, tmp_path, uri)
    wait_until(lambda: store.total_served() > store.hold_after["model.gguf"])
    first.send_signal(signum)
    code, _, err = finish(first)
    assert code == (-9 if signum == signal.SIGKILL else 143)
    assert "Traceback" not in err
    (begun,) = (tmp_path / "cache" / ".partial").rglob("model.gguf")
    kept = begun.stat().st_size
    assert PART <= kept < len(large)

    store.released.set()
    wait_until(lambda: not store.sending)
    before = store.served["model.gguf"]
    code, out, err = finish(start(store, tmp_path, uri))
    assert code == 0, err
    path = Path(out.strip().removeprefix("file://"))
    assert path.read_bytes() == large
    # An answer to the killed process may have begun after all.
    assert store.served["model.gguf"] - before <= len(large) - kept + (1 << 20)
    assert "hf_secret" not in err
    assert "signature" not in err


def test_processes_that_share_a_cache_make_one_download(
    store: Any, large: bytes, tmp_path: Path
) -> None:
    processes = [start(store, tmp_path, "hf://org/repo/model.gguf") for _ in range(2)]
    wait_until(lambda: store.total_served() > store.hold_after["model.gguf"])
    store.released.set()
    results = [finish(process) for process in processes]
    assert [code for code, _, _ in results] == [0, 0]
    assert len({out for _, out, _ in results}) == 1
    assert store.served["model.gguf"] == len(large)


def test_a_module_runs_then_with_the_path_of_the_model(
    store: Any, tmp_path: Path, gguf_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    monkeypatch.setenv("DIPTYCH_AFTER_FETCH", "base64 -e")
    code, out, err = finish(start(store, tmp_path, "hf://org/repo/model.gguf"))
    assert code == 0, err
    uri, _, then = out.partition("\n")
    assert uri.startswith("file:///")
    assert base64.b64decode(then) == gguf_bytes


def test_what_is_wrong_is_told_by_the_field_that_names_the_model(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIPTYCH_MODEL_FIELD", "spec.other")
    code, _, err = finish(start(store, tmp_path, "dummy://"))
    assert code == 2
    assert "error: spec.other: dummy:// needs no fetching" in err


@pytest.mark.parametrize(
    ("uri", "arguments", "code", "says"),
    [
        ("hf://repo", (), 2, "is not of the form hf://ORG/REPO"),
        ("dummy://", (), 2, "spec.model.uri: dummy:// needs no fetching"),
        ("hf://org/repo/b.gguf", (), 2, "spec.model.uri: hf://org/repo/b.gguf does not exist"),
        ("hf://org/repo/a.gguf", ("--cache", "/dev/null"), 1, "spec.model.cache: /dev/null"),
        ("hf://org/repo/a.gguf", ("--credentials", "/proc"), 2, "none of the keys token,"),
    ],
)
def test_what_goes_wrong_is_one_line_and_an_exit_code(
    store: Any, tmp_path: Path, uri: str, arguments: tuple[str, ...], code: int, says: str
) -> None:
    store.files = {"a.gguf": b"GGUF"}
    ended, out, err = finish(start(store, tmp_path, uri, *arguments))
    assert ended == code, err
    last = err.strip().splitlines()[-1]
    assert last.startswith("diptych model-fetch: error: ")
    assert says in last
    assert (out, "Traceback" in err) == ("", False)


@pytest.fixture
def certified(store: Any, tmp_path: Path) -> Iterator[Path]:
    """The same server once more, with TLS; yields the certificate to trust."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True, timeout=PATIENCE_S,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), store.handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=partial(server.serve_forever, 0.02))
    thread.start()
    store.url = f"https://127.0.0.1:{server.server_address[1]}"
    try:
        yield certificate
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_file_of_a_web_server(
    store: Any, certified: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(3).randbytes(2 * PART + 5)
    store.files = {"m/model.gguf": data}
    uri = f"{store.url}/web/m/model.gguf"
    monkeypatch.setenv("SSL_CERT_FILE", str(certified))
    code, _, err = finish(start(store, tmp_path, f"{store.url}/web/none.gguf"))
    assert code == 2
    assert "has no such file (404)" in err
    code, out, err = finish(start(store, tmp_path, uri))
    assert code == 0, err
    assert Path(out.strip().removeprefix("file://")).read_bytes() == data
