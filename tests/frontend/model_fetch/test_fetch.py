"""From a URI to files in a cache, against real HTTP servers that may misbehave."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from waits import FOR_EVER_S, PATIENCE_S, Deadline, source_of

from diptych_frontend.model_files.fetch.cache import CacheEntry
from diptych_frontend.model_files.fetch.download import PARTS_AT_A_TIME, with_attempts
from diptych_frontend.model_files.fetch.fetch import fetch_model
from diptych_frontend.model_files.fetch.source import (
    BadSourceError,
    ChangedError,
    Credentials,
    FetchError,
    UnreachableError,
)
from diptych_frontend.model_files.model_source import resolve_model
from diptych_protocol import InvalidRequestError

COMMIT = "c0ffee" + 34 * "0"
PART = 64 << 10
SAFETENSORS = "model-00001-of-00002.safetensors"
Fetch = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def fetch(store: Any, tmp_path: Path) -> Fetch:
    def fetch(uri: str, token: str = "", **options: Any) -> Path:
        keys = {} if uri.startswith("hf://") else {
            "access_key_id": "AKIA", "secret_access_key": "secret", "region": "us-east-1",
        }  # fmt: skip
        credentials = Credentials(endpoint=store.url, token=token, **keys)
        return fetch_model(uri, tmp_path / "cache", credentials=credentials, **options)

    return fetch


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = Deadline(source_of(condition))
    while not condition():
        deadline.check()
        time.sleep(0.005)


@pytest.mark.parametrize("uri", ["hf://org/repo", "s3://bucket/some/folder"])
def test_a_folder_arrives_with_what_an_engine_reads_and_nothing_else(
    store: Any, fetch: Fetch, folder_model: dict[str, bytes], uri: str
) -> None:
    prefix = "some/folder/" if uri.startswith("s3") else ""
    store.files = {prefix + name: data for name, data in folder_model.items()}
    path = fetch(uri)
    wanted = {"config.json", "tokenizer.json", SAFETENSORS, "model-00002-of-00002.safetensors"}
    assert names(path) == wanted
    assert all((path / name).read_bytes() == folder_model[name] for name in wanted)
    before = store.total_served()
    assert fetch(uri) == path
    assert store.served.keys() - {""} == {prefix + name for name in wanted}
    assert sum(store.served[prefix + name] for name in wanted) <= before


def test_a_source_that_is_silent_is_given_up_when_somebody_waits(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnreachableError, match=r"no answer within 0\.2 s"):
            fetch_model(
                "hf://org/repo",
                tmp_path,
                credentials=Credentials(endpoint=endpoint),
                answer_within_s=0.2,
            )


def test_a_router_gets_no_weights(store: Any, fetch: Fetch, folder_model: dict[str, bytes]) -> None:
    store.files = folder_model
    path = fetch("hf://org/repo", reader="router")
    assert names(path) == {"config.json", "tokenizer.json"}
    assert path.name.endswith("-router")
    assert path != fetch("hf://org/repo")


@pytest.mark.parametrize("uri", ["hf://org/repo/q/model.gguf", "s3://bucket/q/model.gguf"])
def test_of_a_gguf_file_a_router_gets_the_header_only(
    store: Any, fetch: Fetch, gguf_bytes: bytes, uri: str
) -> None:
    store.files = {"q/model.gguf": gguf_bytes}
    path = fetch(uri, reader="router")
    assert path.name == "model.gguf"
    assert path.stat().st_size == 4 * PART
    assert resolve_model(path.as_uri()).config.hidden_size == 64
    assert store.served["q/model.gguf"] == 4 * PART
    assert fetch(uri).read_bytes() == gguf_bytes


@pytest.mark.parametrize("scheme", ["hf://org/repo", "s3://bucket"])
def test_all_files_of_a_split_model_arrive_and_a_router_gets_the_first(
    store: Any, fetch: Fetch, gguf_bytes: bytes, scheme: str
) -> None:
    first, second = (f"q/m-0000{part}-of-00002.gguf" for part in (1, 2))
    store.files = {first: gguf_bytes, second: b"more", "q/other.gguf": b"else"}
    path = fetch(f"{scheme}/{first}")
    assert names(path.parent) == {Path(first).name, Path(second).name}
    assert (path.read_bytes(), path.with_name(Path(second).name).read_bytes()) == (
        gguf_bytes,
        b"more",
    )
    router = fetch(f"{scheme}/{first}", reader="router")
    assert names(router.parent) == {Path(first).name}
    with pytest.raises(BadSourceError, match=r"spec\.model\.sha256: .* is one of 2 files"):
        fetch(f"{scheme}/{first}", sha256=64 * "0")


def test_a_missing_part_of_a_split_model_is_named(
    store: Any, fetch: Fetch, gguf_bytes: bytes
) -> None:
    store.files = {"m-00001-of-00002.gguf": gguf_bytes}
    with pytest.raises(BadSourceError, match=r"lacks its part m-00002-of-00002\.gguf"):
        fetch("hf://org/repo/m-00001-of-00002.gguf")
    with pytest.raises(BadSourceError, match=r"has no m-00002-of-00002\.gguf"):
        fetch("s3://bucket/m-00001-of-00002.gguf")


def test_a_pinned_model_is_not_asked_for_again(store: Any, fetch: Fetch, gguf_bytes: bytes) -> None:
    store.files = {"model.gguf": gguf_bytes}
    sha256 = hashlib.sha256(gguf_bytes).hexdigest()
    for uri, pin in (
        ("hf://org/repo/model.gguf", {"revision": COMMIT}),
        ("s3://bucket/model.gguf", {"sha256": sha256}),
    ):
        path = fetch(uri, **pin)
        asked = len(store.requests)
        assert fetch(uri, **pin) == path
        assert len(store.requests) == asked


def test_an_unpinned_model_follows_its_source_and_survives_its_silence(
    store: Any, fetch: Fetch, gguf_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    uri = "hf://org/repo/model.gguf"
    store.files = {"model.gguf": gguf_bytes}
    path = fetch(uri)
    old = path.open("rb")
    store.files = {"model.gguf": gguf_bytes[::-1]}
    store.commit = 40 * "d"
    assert fetch(uri) == path
    assert path.read_bytes() == gguf_bytes[::-1]
    with old:
        assert old.read() == gguf_bytes
    store.failing = [503]
    assert fetch(uri) == path
    assert "using the copy in the cache" in caplog.text
    served = store.total_served()
    store.files = {"model.gguf": gguf_bytes}
    store.commit = COMMIT
    assert fetch(uri).read_bytes() == gguf_bytes
    assert store.served["model.gguf"] <= served, "the earlier version was still there"


@pytest.mark.parametrize("uri", ["hf://org/repo/model.gguf", "s3://bucket/model.gguf"])
def test_a_connection_that_breaks_costs_one_part_at_most(
    store: Any, fetch: Fetch, gguf_bytes: bytes, uri: str
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    store.cut_after = {"model.gguf": 9 * PART + 5000}
    assert fetch(uri).read_bytes() == gguf_bytes
    assert not store.cut_after
    assert len(gguf_bytes) < store.served["model.gguf"] <= len(gguf_bytes) + PART


@pytest.mark.parametrize("uri", ["hf://org/repo/model.gguf", "s3://bucket/model.gguf"])
def test_what_is_on_the_disk_is_not_fetched_again(
    store: Any, fetch: Fetch, gguf_bytes: bytes, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    with monkeypatch.context() as impatient:
        impatient.setattr("diptych_frontend.model_files.fetch.download.ATTEMPTS", 1)
        impatient.setattr(
            "diptych_frontend.model_files.fetch.download.with_attempts.__defaults__", (1,)
        )
        store.cut_after = {"model.gguf": 9 * PART + 5000}
        with pytest.raises(UnreachableError):
            fetch(uri)
    before = store.served["model.gguf"]
    assert fetch(uri).read_bytes() == gguf_bytes
    # At least the parts that were ahead of the broken one had to be written.
    assert store.served["model.gguf"] - before <= len(gguf_bytes) - 3 * PART


def test_a_damaged_download_is_repeated_once_and_then_refused(
    store: Any, fetch: Fetch, gguf_bytes: bytes
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    store.damaged = {"model.gguf": 1}
    assert fetch("hf://org/repo/model.gguf").read_bytes() == gguf_bytes
    store.damaged = {"model.gguf": 1000}
    with pytest.raises(FetchError, match="checksum twice"):
        fetch("hf://org/repo/model.gguf", revision=COMMIT)
    store.damaged = {}
    assert fetch("hf://org/repo/model.gguf", revision=COMMIT).read_bytes() == gguf_bytes


def test_small_files_are_verified_too(
    store: Any, fetch: Fetch, folder_model: dict[str, bytes]
) -> None:
    store.files = folder_model
    store.damaged = {"config.json": 2}
    with pytest.raises(FetchError, match=r"config\.json differs"):
        fetch("hf://org/repo")


def test_the_given_checksum_wins(store: Any, fetch: Fetch, gguf_bytes: bytes) -> None:
    store.files = {"model.gguf": gguf_bytes}
    wrong = 64 * "0"
    with pytest.raises(FetchError, match=r"spec\.model\.sha256 is that of another file"):
        fetch("s3://bucket/model.gguf", sha256=wrong)
    asked = store.served["model.gguf"]
    with pytest.raises(BadSourceError, match=r"spec\.model\.sha256: .* has the checksum"):
        fetch("hf://org/repo/model.gguf", sha256=wrong)
    assert store.served["model.gguf"] == asked, "the hub's own checksum told before any byte"


def test_a_file_that_changes_under_way_is_not_patched_together(
    store: Any, fetch: Fetch, gguf_bytes: bytes
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    store.hold_after = {"model.gguf": 8 * PART}

    def change() -> None:
        wait_until(lambda: store.total_served() > 8 * PART)
        store.files = {"model.gguf": gguf_bytes[::-1]}
        store.released.set()

    changer = threading.Thread(target=change)
    changer.start()
    with pytest.raises(ChangedError, match="another version"):
        fetch("s3://bucket/model.gguf")
    changer.join()
    assert fetch("s3://bucket/model.gguf").read_bytes() == gguf_bytes[::-1]


def test_a_server_without_ranges_serves_small_files_only(
    store: Any, fetch: Fetch, gguf_bytes: bytes
) -> None:
    store.ranges = False
    store.files = {"model.gguf": gguf_bytes[:PART]}
    assert fetch("hf://org/repo/model.gguf").read_bytes() == gguf_bytes[:PART]
    store.files = {"other.gguf": gguf_bytes}
    with pytest.raises(BadSourceError, match=r"spec\.model\.uri: .* sends no parts of files; use"):
        fetch("hf://org/repo/other.gguf")


def test_what_nobody_waits_for_any_more_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diptych_frontend.model_files.fetch.download.FIRST_PAUSE_S", FOR_EVER_S)
    given_up = threading.Event()
    calls = 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        threading.Timer(0.05, given_up.set).start()
        raise UnreachableError("nobody there")

    with pytest.raises(UnreachableError):
        with_attempts(fail, given_up=given_up)
    assert calls == 1


def test_a_busy_hub_is_asked_again(store: Any, fetch: Fetch, gguf_bytes: bytes) -> None:
    store.files = {"model.gguf": gguf_bytes}
    store.failing = [429, 503]
    assert fetch("hf://org/repo/model.gguf").read_bytes() == gguf_bytes


def test_the_token_opens_the_hub_and_goes_nowhere_else(
    store: Any, fetch: Fetch, gguf_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    store.token = "hf_secret"
    caplog.set_level(logging.INFO, "diptych_frontend")
    with pytest.raises(BadSourceError, match=r"spec\.model\.credentials: org/repo is gated"):
        fetch("hf://org/repo/model.gguf", token="hf_wrong")
    fetch("hf://org/repo/model.gguf", token="hf_secret")
    assert not store.leaked
    resolved = sum("/resolve/" in line for line in store.requests)
    parts = sum("/link/" in line for line in store.requests)
    assert parts == -(-len(gguf_bytes) // PART)
    assert resolved <= PARTS_AT_A_TIME, "a link that was resolved is used again"
    assert "secret" not in caplog.text
    assert "hf_secret" not in repr(Credentials(token="hf_secret"))


def test_the_keys_open_the_bucket(
    store: Any, fetch: Fetch, gguf_bytes: bytes, tmp_path: Path
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    refused = r"spec\.model\.credentials: s3://bucket refuses"
    store.access_key = "OTHER"
    with pytest.raises(BadSourceError, match=refused):
        fetch("s3://bucket/model.gguf")
    store.access_key = "AKIA"
    nobody = Credentials(endpoint=store.url)
    with pytest.raises(BadSourceError, match=refused):
        fetch_model("s3://bucket/model.gguf", tmp_path, credentials=nobody)
    assert fetch("s3://bucket/model.gguf").read_bytes() == gguf_bytes
    store.access_key = ""
    path = fetch_model("s3://bucket/model.gguf", tmp_path, credentials=nobody)
    assert path.read_bytes() == gguf_bytes, "a public bucket needs no keys"


@pytest.mark.parametrize(
    ("uri", "options", "says"),
    [
        ("hf://org/other", {}, r"spec\.model\.uri: .* has no org/other"),
        ("hf://org/re--po", {}, r"spec\.model\.uri: org/re--po cannot be the name"),
        ("hf://org/repo", {"revision": "v9"}, r"spec\.model\.revision: org/repo has no 'v9'"),
        ("hf://org/repo", {}, r"holds no \*\.safetensors; it has GGUF files.*repo/FILE: a\.gguf"),
        ("hf://org/repo/b.gguf", {}, r"b\.gguf does not exist; .*: a\.gguf"),
        ("hf://org/repo/a.gguf", {"reader": "router"}, r"a\.gguf is not a usable GGUF file"),
        ("hf://org/repo", {"sha256": 64 * "0"}, r"spec\.model\.sha256: a folder has no checksum"),
        ("s3://bucket/b.gguf", {}, r"s3://bucket has no b\.gguf"),
        ("s3://bucket-that-is-not/none", {}, r"s3://bucket-that-is-not .*404.*; check bucket"),
        ("s3://bucket/none", {}, r"holds no \*\.safetensors"),
        ("s3://bucket/a.gguf", {"revision": "v1"}, r"spec\.model\.revision: s3:// has no"),
        ("file:///a.gguf", {}, "needs no fetching"),
    ],
)
def test_what_cannot_be_had_is_said_in_one_line(
    store: Any, fetch: Fetch, uri: str, options: dict[str, Any], says: str
) -> None:
    store.files = {"a.gguf": b"no model"}
    with pytest.raises(BadSourceError, match=says) as caught:
        fetch(uri, **options)
    assert "\n" not in str(caught.value)


def test_an_endpoint_that_holds_a_password_is_refused() -> None:
    with pytest.raises(BadSourceError, match=r"spec\.model\.credentials: endpoint") as caught:
        Credentials(endpoint="https://me:secret@store.example")
    assert "secret" not in str(caught.value)


def test_a_malformed_uri_is_an_invalid_request(fetch: Fetch) -> None:
    with pytest.raises(InvalidRequestError, match="is not of the form hf://ORG/REPO"):
        fetch("hf://repo")


def test_a_source_that_is_not_there_is_unreachable(store: Any, tmp_path: Path) -> None:
    nowhere = Credentials(
        endpoint="http://127.0.0.1:9", access_key_id="A", secret_access_key="B", region="r"
    )
    for uri in ("hf://org/repo", "s3://bucket/model.gguf", "https://127.0.0.1:9/model.gguf"):
        with pytest.raises(UnreachableError, match="cannot be"):
            fetch_model(uri, tmp_path, credentials=nowhere)


def test_two_at_once_make_one_download(
    store: Any, fetch: Fetch, gguf_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "diptych_frontend")
    store.files = {"model.gguf": gguf_bytes}
    store.hold_after = {"model.gguf": 8 * PART}
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch("hf://org/repo/model.gguf")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: caplog.text.count("another process") == 2)
    store.released.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(found) == 3
    assert found[0].read_bytes() == gguf_bytes
    assert store.served["model.gguf"] == len(gguf_bytes)


def test_a_damaged_copy_is_fetched_anew(store: Any, fetch: Fetch, gguf_bytes: bytes) -> None:
    store.files = {"model.gguf": gguf_bytes}
    path = fetch("hf://org/repo/model.gguf", revision=COMMIT)
    os.truncate(path, 100)
    assert fetch("hf://org/repo/model.gguf", revision=COMMIT).read_bytes() == gguf_bytes


def test_what_was_begun_of_an_older_version_is_removed(
    store: Any, fetch: Fetch, gguf_bytes: bytes, tmp_path: Path
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    own = fetch("hf://org/repo/model.gguf").parent.name
    partial = tmp_path / "cache" / ".partial"
    stale, others = partial / f"{own}-{16 * '0'}", partial / f"{own}-router-{16 * '0'}"
    stale.mkdir()
    others.mkdir()
    store.files = {"model.gguf": gguf_bytes[::-1]}
    store.commit = 40 * "d"
    fetch("hf://org/repo/model.gguf")
    assert (stale.exists(), others.exists()) == (False, True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB. It is mounted where only a process in namespaces of its own sees it, so no
    rights are needed, and nothing of it is left."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = 'mount -t tmpfs -o size=4m none "$0" && echo mounted && exec cat'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        if holder.stdout.readline() != b"mounted\n":
            pytest.skip("needs user namespaces")
        yield Path(f"/proc/{holder.pid}/root{place}")
        holder.stdin.close()


def fill(disk: Path, *, but: int = 0) -> Path:
    """Take all the room of a disk but so many bytes."""
    filler = disk / "filler"
    with contextlib.suppress(OSError):  # others may write meanwhile
        filler.write_bytes(bytes(shutil.disk_usage(disk).free - but))
    return filler


def test_a_disk_without_enough_room_is_told_of_before_anything_is_fetched(
    store: Any, small_disk: Path, gguf_bytes: bytes
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    fill(small_disk, but=len(gguf_bytes) // 2)
    with pytest.raises(
        FetchError, match=r"spec\.model\.cache: .* MiB are still to come and .* free"
    ):
        fetch_model(
            "hf://org/repo/model.gguf", small_disk, credentials=Credentials(endpoint=store.url)
        )
    assert "model.gguf" not in store.served


def test_a_fetch_goes_on_where_a_disk_became_full_in_its_middle(
    store: Any, small_disk: Path, gguf_bytes: bytes
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    store.hold_after = {"model.gguf": 8 * PART}
    fetch = partial(
        fetch_model,
        "hf://org/repo/model.gguf",
        small_disk,
        credentials=Credentials(endpoint=store.url),
    )
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(fetch)
        wait_until(lambda: any(p.stat().st_size for p in small_disk.glob(".partial/*/model.gguf")))
        filler = fill(small_disk)
        store.released.set()
        with pytest.raises(FetchError, match=r"spec\.model\.cache: .* is full; enlarge the volume"):
            fetching.result(PATIENCE_S)
    (begun,) = small_disk.glob(".partial/*/model.gguf")
    kept = begun.stat().st_size
    assert begun.read_bytes() == gguf_bytes[:kept]
    with pytest.raises(FetchError, match="are still to come"):
        fetch()
    filler.unlink()
    wait_until(lambda: not store.sending)
    before = store.served["model.gguf"]
    assert fetch().read_bytes() == gguf_bytes
    assert store.served["model.gguf"] - before == len(gguf_bytes) - kept


@pytest.fixture
def nobody() -> Iterator[int]:
    """Root may write anywhere, so root's tests are somebody else's for a while."""
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    try:
        yield os.geteuid()
    finally:
        os.seteuid(me)


def test_a_cache_that_may_not_be_written_names_the_user(tmp_path: Path, nobody: int) -> None:
    if os.getuid() == nobody:
        tmp_path.chmod(0o500)
    with pytest.raises(FetchError, match=rf"user {nobody} may not write .*; give"):  # noqa: SIM117
        with CacheEntry(tmp_path, "model").locked():
            pass
