"""A cache that others write to: a copy serves only as the checksum or the hub describes it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diptych_frontend.model_files.fetch.fetch import fetch_model
from diptych_frontend.model_files.fetch.source import Credentials, UnreachableError

COMMIT = "c0ffee" + 34 * "0"
WEIGHTS = "model-00001-of-00002.safetensors"
FOLDER, FILE = "hf://org/repo", "hf://org/repo/model.gguf"
Fetch = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def fetch(store: Any, tmp_path: Path) -> Fetch:
    def fetch(uri: str, **options: Any) -> Path:
        credentials = Credentials(endpoint=store.url)
        return fetch_model(uri, tmp_path / "cache", credentials=credentials, **options)

    return fetch


def other_bytes(file: Path, _: Path) -> None:
    """Sizes and the record agree, because the length is the same."""
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])


def symbolic_link(file: Path, elsewhere: Path) -> None:
    """Its content is right, until whoever made the link changes it."""
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)


def hard_link(file: Path, elsewhere: Path) -> None:
    os.link(file, elsewhere)


def folder_elsewhere(file: Path, elsewhere: Path) -> None:
    """Where readers look there is a link to a folder outside."""
    place = next(path for path in file.parents[2].iterdir() if path.is_symlink())
    shutil.copytree(file.parent, elsewhere)
    place.unlink()
    place.symlink_to(elsewhere)


def further_file(file: Path, _: Path) -> None:
    """A folder's reader takes every file of weights, and a chat template if there is one."""
    (file.parent / "chat_template.jinja").write_text("forged")


FORGERIES = [other_bytes, symbolic_link, hard_link, folder_elsewhere, further_file]
forgeries = pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)


@forgeries
def test_a_forged_copy_of_a_pinned_commit_is_fetched_anew(
    store: Any, fetch: Fetch, folder_model: dict[str, bytes], tmp_path: Path, forge: Any
) -> None:
    store.files = folder_model
    path = fetch(FOLDER, revision=COMMIT, shared=True)
    names = {file.name for file in path.iterdir()}
    forge(path.resolve() / WEIGHTS, tmp_path / "elsewhere")
    assert fetch(FOLDER, revision=COMMIT, shared=True) == path
    found = path / WEIGHTS
    assert found.read_bytes() == folder_model[WEIGHTS]
    assert not found.is_symlink()
    assert found.stat().st_nlink == 1
    assert path.resolve().is_relative_to(tmp_path / "cache")
    assert {file.name for file in path.iterdir()} == names


@pytest.mark.one_in(2, "forge", "shared")
@forgeries
@pytest.mark.parametrize("shared", [True, False])
def test_a_forged_copy_of_a_file_with_a_checksum_is_fetched_anew(
    store: Any, fetch: Fetch, gguf_bytes: bytes, tmp_path: Path, forge: Any, shared: bool
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    pin = {"sha256": hashlib.sha256(gguf_bytes).hexdigest(), "shared": shared}
    path = fetch(FILE, **pin)
    forge(path.resolve(), tmp_path / "elsewhere")
    assert fetch(FILE, **pin) == path
    assert path.read_bytes() == gguf_bytes
    assert path.stat().st_nlink == 1
    assert {file.name for file in path.parent.iterdir()} == {"model.gguf", ".diptych.json"}


def test_a_sound_copy_is_read_and_not_fetched_again(
    store: Any, fetch: Fetch, folder_model: dict[str, bytes], gguf_bytes: bytes
) -> None:
    store.files = {**folder_model, "model.gguf": gguf_bytes}
    sha256 = hashlib.sha256(gguf_bytes).hexdigest()
    for uri, pin in ((FOLDER, {"revision": COMMIT}), (FILE, {"sha256": sha256})):
        fetch(uri, shared=True, **pin)
        served = sum(store.served[name] for name in store.files if name in store.served)
        fetch(uri, shared=True, **pin)
        again = sum(store.served[name] for name in store.files if name in store.served)
        assert again == served


def test_without_the_hub_nobody_vouches_for_a_shared_copy_but_a_checksum(
    store: Any, fetch: Fetch, gguf_bytes: bytes
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    sha256 = hashlib.sha256(gguf_bytes).hexdigest()
    fetch(FILE, revision=COMMIT, shared=True)
    path = fetch(FILE, sha256=sha256, shared=True)
    store.failing = [503] * 100
    with pytest.raises(UnreachableError):
        fetch(FILE, revision=COMMIT, shared=True)
    assert fetch(FILE, sha256=sha256, shared=True) == path


def test_what_another_began_does_not_lead_the_fetch_elsewhere(
    store: Any, fetch: Fetch, gguf_bytes: bytes, tmp_path: Path
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    path = fetch(FILE, revision=COMMIT, shared=True)
    partial = tmp_path / "cache" / ".partial" / path.parent.resolve().name
    shutil.rmtree(path.parent.resolve())
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    partial.mkdir()
    (partial / "model.gguf").symlink_to(victim)
    assert fetch(FILE, revision=COMMIT, shared=True).read_bytes() == gguf_bytes
    assert victim.read_bytes() == b"mine"


# --- nobody else vouches for the content -------------------------------------------------------


@pytest.mark.parametrize("options", [{"recorded": True}, {"shared": True}], ids=str)
def test_a_damaged_copy_of_a_bucket_or_a_web_server_is_fetched_anew(
    store: Any, fetch: Fetch, gguf_bytes: bytes, tmp_path: Path, options: dict[str, bool]
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    path = fetch("s3://bucket/model.gguf", **options)
    other_bytes(path.resolve(), tmp_path)
    assert fetch("s3://bucket/model.gguf", **options).read_bytes() == gguf_bytes


@pytest.mark.parametrize("reader", ["engine", "router"])
def test_a_damaged_copy_of_a_pinned_commit_is_fetched_anew_and_a_sound_one_needs_no_hub(
    store: Any, fetch: Fetch, gguf_bytes: bytes, tmp_path: Path, reader: str
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    options = {"revision": COMMIT, "recorded": True, "reader": reader}
    path = fetch(FILE, **options)
    whole = path.read_bytes()
    asked = len(store.requests)
    assert fetch(FILE, **options) == path
    assert len(store.requests) == asked, "the record vouches for it"
    other_bytes(path.resolve(), tmp_path)
    assert fetch(FILE, **options).read_bytes() == whole


def test_a_damaged_copy_that_cannot_be_fetched_anew_does_not_serve(
    store: Any, fetch: Fetch, folder_model: dict[str, bytes], tmp_path: Path
) -> None:
    store.files = folder_model
    path = fetch(FOLDER, recorded=True)
    other_bytes(path.resolve() / WEIGHTS, tmp_path)
    store.failing = [503] * 100
    with pytest.raises(UnreachableError):
        fetch(FOLDER, recorded=True)


def test_a_copy_of_an_earlier_version_has_no_digests_and_serves(
    store: Any, fetch: Fetch, gguf_bytes: bytes
) -> None:
    store.files = {"model.gguf": gguf_bytes}
    path = fetch(FILE, revision=COMMIT)
    record = path.parent / ".diptych.json"
    old = json.loads(record.read_bytes())
    del old["digests"]
    record.write_text(json.dumps(old))
    asked = len(store.requests)
    assert fetch(FILE, revision=COMMIT, recorded=True) == path
    assert len(store.requests) == asked
