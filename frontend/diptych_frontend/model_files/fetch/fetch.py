"""Fetches a model from a URI into a cache, once, even if several processes try."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from diptych_frontend.installation import this_installation
from diptych_frontend.model_files.fetch.cache import CacheEntry, Record, gib
from diptych_frontend.model_files.fetch.download import (
    PART_BYTES,
    download,
    download_header,
    with_attempts,
    with_deadline,
)
from diptych_frontend.model_files.fetch.source import (
    REVISION,
    SHA256,
    URI,
    BadSourceError,
    Checksum,
    Credentials,
    FetchError,
    RemoteFile,
    Source,
    UnreachableError,
)
from diptych_protocol.model_uri import (
    ModelUri,
    Reader,
    cache_name,
    cached_path,
    is_pinned,
    parse_model_uri,
    parts_of,
)

logger = logging.getLogger(__name__)
PERIOD_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a download at one moment."""

    uri: str
    done_bytes: int
    """Bytes on the disk, including those that an earlier process fetched."""
    total_bytes: int
    bytes_per_s: float
    """Average since this process began."""

    def __str__(self) -> str:
        percent = min(100, 100 * self.done_bytes // max(1, self.total_bytes))
        return (
            f"{self.uri}: {percent}% of {gib(self.total_bytes)}, {self.bytes_per_s / 1e6:.1f} MB/s"
        )


Report = Callable[[Progress], None]


def log_progress(progress: Progress) -> None:
    """Log the progress, in a program without a terminal."""
    logger.info("%s", progress)


class Meter:
    """Counts bytes, and reports from a thread of its own, because hashing takes long too."""

    def __init__(self, uri: str, total: int, done: int, report: Report) -> None:
        self._uri = uri
        self._total = total
        self._before = self._done = done
        self._began = time.monotonic()
        self._report = report

    def advance(self, nbytes: int) -> None:
        """Count `nbytes` more on the disk; fewer, if negative."""
        self._done += nbytes

    def report(self) -> None:
        """Report the progress."""
        elapsed_s = max(time.monotonic() - self._began, 1e-3)
        speed = max(0, self._done - self._before) / elapsed_s
        self._report(Progress(self._uri, self._done, self._total, speed))

    @contextmanager
    def running(self, beat: Callable[[], None]) -> Iterator[None]:
        """Report and `beat` every few seconds, and once more at the end."""
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(PERIOD_S):
                beat()
                self.report()

        thread = threading.Thread(target=run, name="progress", daemon=True)
        thread.start()
        try:
            yield
            self.report()
        finally:
            stop.set()
            thread.join()


SMALL_FILES: Final = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""The files of a folder, besides weights, that are ever read."""
WEIGHTS: Final = ".safetensors"
OTHER_LAYOUT: Final = "consolidated"
"""The same weights in a second layout, under their publisher's own names."""


def open_source(uri: ModelUri, revision: str, credentials: Credentials) -> Source:
    """Return the client of a scheme. Each imports libraries that nothing else needs."""
    try:
        match uri.scheme:
            case "hf":
                from diptych_frontend.model_files.fetch.hub import HubSource

                return HubSource(uri, revision, credentials)
            case "s3":
                from diptych_frontend.model_files.fetch.s3 import S3Source

                return S3Source(uri, credentials)
            case "https":
                from diptych_frontend.model_files.fetch.http_ranges import WebSource

                return WebSource(uri, credentials)
            case _:
                raise BadSourceError(URI, f"{uri.text} needs no fetching; it is read in place")
    except ModuleNotFoundError as exc:
        raise FetchError(
            f"{uri.scheme}:// needs the package {exc.name!r}: "
            f"{this_installation().add_extras('fetch')}"
        ) from exc


def select_files(
    uri: ModelUri, files: Sequence[RemoteFile], reader: Reader, sha256: str
) -> list[RemoteFile]:
    """Return the files to fetch, with their names in the model's folder.

    Raises `BadSourceError` if there is no model among them, or not the one with this checksum.
    """
    if uri.is_file:
        return _gguf_files(uri, files, reader, sha256)
    if sha256:
        raise BadSourceError(SHA256, "a folder has no checksum; remove it, or name one file")
    weights = [file for file in files if _is_weights(file.name)]
    if not weights:
        raise BadSourceError(URI, f"{uri.text} holds no *{WEIGHTS}{_gguf_hint(uri, files)}")
    small = [file for file in files if file.name in SMALL_FILES]
    if not any(file.name == "config.json" for file in small):
        raise BadSourceError(URI, f"{uri.text} holds no config.json; it is no model's folder")
    chosen = small if reader == "router" else small + weights
    return sorted(chosen, key=lambda file: file.name)


def content_id(files: Iterable[RemoteFile]) -> str:
    """Return sixteen hexadecimal digits that change when any file of the selection does."""
    identity = json.dumps([[file.name, file.size, file.version] for file in files])
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _gguf_files(
    uri: ModelUri, files: Sequence[RemoteFile], reader: Reader, sha256: str
) -> list[RemoteFile]:
    """The GGUF file, or all those that the model is split into; a router reads only the first."""
    listed = {file.name: file for file in files}
    if uri.path not in listed:
        raise BadSourceError(URI, f"{uri.text} does not exist{_gguf_hint(uri, files)}")
    parts = parts_of(uri.path)
    if sha256 and len(parts) > 1:
        raise BadSourceError(
            SHA256, f"{uri.text} is one of {len(parts)} files; remove it, and pin a commit"
        )
    missing = [part for part in parts if part not in listed]
    if missing:
        raise BadSourceError(URI, f"{uri.text} lacks its part {missing[0]}; name a complete model")
    wanted = parts[:1] if reader == "router" else parts
    return [_in_folder(uri, listed[part], sha256) for part in wanted]


def _in_folder(uri: ModelUri, found: RemoteFile, sha256: str) -> RemoteFile:
    """A file by its name in the model's folder, with the service's checksum if there is one."""
    named = replace(found, name=PurePosixPath(found.name).name)
    if not sha256:
        return named
    known = found.checksum
    if known is not None and known.algorithm == "sha256" and known.digest != sha256:
        raise BadSourceError(
            SHA256, f"{uri.text} has the checksum {known.digest}; correct it, or the revision"
        )
    return replace(named, checksum=Checksum("sha256", sha256))


def _is_weights(name: str) -> bool:
    return name.endswith(WEIGHTS) and "/" not in name and not name.startswith(OTHER_LAYOUT)


def _gguf_hint(uri: ModelUri, files: Sequence[RemoteFile]) -> str:
    names = sorted(file.name for file in files if file.name.endswith(".gguf"))
    if not names:
        return "; name a model in Hugging Face's layout, or a GGUF file"
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    root = f"{uri.scheme}://{uri.host}/" + ("" if uri.is_file else uri.path)
    return f"; it has GGUF files, so name one as {root.rstrip('/')}/FILE: {shown}"


def fetch_model(
    uri: str,
    cache: Path,
    *,
    revision: str = "",
    sha256: str = "",
    reader: Reader = "engine",
    shared: bool = False,
    recorded: bool = False,
    credentials: Credentials | None = None,
    report: Report = log_progress,
    answer_within_s: float | None = None,
) -> Path:
    """Fetch the model into `cache`, and return what `resolve_model` opens: its folder or GGUF file.

    If a model that cannot change is there already, the source is not asked. A model that can change
    is fetched again when its source reports another version, unless that is unreachable.

    With `sha256` the copy is read, and fetched again if it differs. In a `shared` cache, which
    others write to, a copy is used only if it matches the source's listing: without an answer of
    the source there is no model. Where the source lists no checksums, those of what was fetched are
    used. With `recorded` they are also compared where nobody else vouches for a copy.

    answer_within_s: give up a source that does not say in this time which files it has, because
    somebody waits. None asks it again and again.

    Raises:
        InvalidRequestError: the URI is malformed.
        FetchError: see `errors`.
    """
    parsed = parse_model_uri(uri)
    if not parsed.is_fetched:
        raise BadSourceError(URI, f"{uri} needs no fetching; it is read in place")
    if revision and parsed.scheme != "hf":
        raise BadSourceError(REVISION, f"{parsed.scheme}:// has no revisions; remove it")
    # What a router has of a file no checksum of others covers.
    verified = reader == "engine" and (shared or bool(sha256))
    name = cache_name(parsed, revision, sha256, reader)
    entry = CacheEntry(cache, name, recorded=recorded and not verified)
    path = cache / cached_path(parsed, revision, sha256, reader)
    found = entry.published()
    if found is not None and is_pinned(parsed, revision, sha256):
        if sha256 and verified:
            size = found.files.get(path.name, 0)
            copy = RemoteFile(path.name, size, "", "", Checksum("sha256", sha256))
            if entry.holds(found.content, [copy]):
                return path
            logger.warning("%s in the cache is not the file of %s", path.name, SHA256)
            found = None
        elif not shared:
            return path
    with closing(open_source(parsed, revision, credentials or Credentials())) as source:
        files = _wanted(source, parsed, reader, sha256, None if shared else found, answer_within_s)
        if files is not None and not (verified and entry.holds(content_id(files), files)):
            _bring(entry, source, parsed, files, reader, report, verified=verified)
    return path


def is_cached(uri: str, cache: Path, *, revision: str = "", sha256: str = "") -> bool:
    """Whether `cache` has all files of a model that an engine needs. The source is not asked."""
    name = cache_name(parse_model_uri(uri), revision, sha256, "engine")
    return CacheEntry(cache, name).published() is not None


def _wanted(
    source: Source,
    uri: ModelUri,
    reader: Reader,
    sha256: str,
    found: Record | None,
    answer_within_s: float | None,
) -> list[RemoteFile] | None:
    """The files that must be fetched; None if what was found may serve."""
    try:
        if answer_within_s is not None:
            listed = with_deadline(source.files, answer_within_s)
        else:
            # Behind a copy that can serve, nobody should wait for a source that does not answer.
            listed = with_attempts(source.files) if found is None else source.files()
    except UnreachableError as exc:
        if found is None:
            raise
        logger.warning("%s; using the copy in the cache", exc)
        return None
    files = select_files(uri, listed, reader, sha256)
    return None if found is not None and found.content == content_id(files) else files


def _bring(
    entry: CacheEntry,
    source: Source,
    uri: ModelUri,
    files: list[RemoteFile],
    reader: Reader,
    report: Report,
    *,
    verified: bool,
) -> None:
    content = content_id(files)
    header_only = uri.is_file and reader == "router"
    total = sum(min(file.size, PART_BYTES) if header_only else file.size for file in files)
    with entry.locked():
        # Somebody else may have brought it. To read it takes long, so the lock's holder beats.
        with Meter(uri.text, total, total, lambda _: None).running(entry.beat):
            found = entry.published()
            same = found is not None and found.content == content
            if same and (not verified or entry.holds(content, files)):
                return
            if entry.restore(content, files if verified else None):
                return
        folder = entry.partial(content)
        done = sum(path.stat().st_size for path in folder.iterdir())
        entry.check_space(total - done)
        meter = Meter(uri.text, total, done, report)
        fetch = download_header if header_only else download
        with meter.running(entry.beat):
            digests = {
                file.name: fetch(source, file, folder / file.name, meter.advance) for file in files
            }
            entry.publish(folder, uri.text, content, digests)
