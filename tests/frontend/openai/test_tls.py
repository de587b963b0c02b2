"""HTTPS with a certificate that is exchanged under the running server."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.openai.server import Site, listen, serve_sites
from diptych_frontend.openai.tls import Certificate
from diptych_protocol import InvalidRequestError

CERTIFICATES = Path(__file__).parents[2] / "support" / "certificates"


def put(name: str, folder: Path, *files: str) -> None:
    for file in files or ("tls.crt", "tls.key"):
        shutil.copy(CERTIFICATES / name / file, folder / file)


def trusting(name: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(CERTIFICATES / name / "tls.crt"))


async def status(url: str, trusted: str) -> int:
    """The status that a new connection gets; -1 if the certificate is another."""
    try:
        async with httpx.AsyncClient(verify=trusting(trusted), timeout=PATIENCE_S) as http:
            return (await http.get(f"{url}/v1/models")).status_code
    except httpx.ConnectError:
        return -1


async def test_a_new_certificate_serves_new_connections(engine: Any, tmp_path: Path) -> None:
    put("first", tmp_path)
    certificate = Certificate(tmp_path)
    listener = listen("127.0.0.1", 0)
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    serving = asyncio.create_task(
        serve_sites(Site(build_app(engine), listener, certificate.context))
    )
    try:
        async with httpx.AsyncClient(verify=trusting("first"), timeout=PATIENCE_S) as kept:
            assert (await kept.get(f"{url}/v1/models")).status_code == 200
            assert await status(url, "second") == -1
            put("second", tmp_path)
            assert certificate.refresh()
            assert not certificate.refresh()
            assert await status(url, "second") == 200
            assert await status(url, "first") == -1
            assert (await kept.get(f"{url}/v1/models")).status_code == 200, "it goes on"
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            async with httpx.AsyncClient(timeout=PATIENCE_S) as plain:
                await plain.get(url.replace("https", "http"))
    finally:
        serving.cancel()
        await asyncio.wait((serving,))


def test_a_certificate_that_has_ended_serves_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put("first", tmp_path)
    certificate, told = Certificate(tmp_path), list[str]()
    for name in ("first", "expired", "expired", "second"):
        put(name, tmp_path)
        for _ in range(2):  # it may end long after it was read
            certificate.refresh()
        told.append(certificate.expired)
    assert told == ["", *["2020-02-01T00:00:00Z"] * 2, ""]
    (logged,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert "the certificate ended at 2020-02-01T00:00:00Z; renew it" in logged


async def test_a_pair_that_does_not_fit_changes_nothing(
    engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put("first", tmp_path)
    certificate = Certificate(tmp_path)
    listener = listen("127.0.0.1", 0)
    url = f"https://127.0.0.1:{listener.getsockname()[1]}"
    serving = asyncio.create_task(
        serve_sites(Site(build_app(engine), listener, certificate.context))
    )
    try:
        put("second", tmp_path, "tls.crt")  # and the key of the first
        for _ in range(3):
            assert not certificate.refresh()
        assert [record.levelno for record in caplog.records] == [logging.ERROR]
        assert await status(url, "first") == 200
        put("second", tmp_path, "tls.key")
        assert certificate.refresh()
        assert await status(url, "second") == 200
        shutil.rmtree(tmp_path)
        assert not certificate.refresh()
        assert await status(url, "second") == 200
    finally:
        serving.cancel()
        await asyncio.wait((serving,))


def test_a_pair_that_cannot_be_read_now_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("first", tmp_path)
    certificate = Certificate(tmp_path)
    put("second", tmp_path)

    def fails(*_: object, **__: object) -> None:
        raise OSError("no descriptors")

    with monkeypatch.context() as patched:
        patched.setattr(ssl.SSLContext, "load_cert_chain", fails)
        assert not certificate.refresh()
    assert certificate.refresh()
    assert not certificate.refresh()


@pytest.mark.parametrize(
    "files",
    [{}, {"tls.crt": b"x", "tls.key": b"y"}, {"tls.crt": b""}],
)
def test_without_a_pair_the_server_does_not_start(tmp_path: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequestError, match=r"tls\.crt and tls\.key"):
        Certificate(tmp_path)


def test_what_is_older_than_tls_1_2_is_not_spoken(tmp_path: Path) -> None:
    put("first", tmp_path)
    assert Certificate(tmp_path).context.minimum_version == ssl.TLSVersion.TLSv1_2
