"""Fetches a model from a URI into a cache, once, even if several processes try."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

from diptych_frontend.model_files.fetch.cache import CacheEntry, Record
from diptych_frontend.model_files.fetch.credentials import Credentials
from diptych_frontend.model_files.fetch.download import (
    PART_BYTES,
    download,
    download_header,
    with_attempts,
)
from diptych_frontend.model_files.fetch.errors import (
    REVISION,
    SHA256,
    URI,
    BadSourceError,
    UnreachableError,
)
from diptych_frontend.model_files.fetch.open_source import open_source
from diptych_frontend.model_files.fetch.progress import Meter, Report, log_progress
from diptych_frontend.model_files.fetch.selection import content_id, select_files
from diptych_frontend.model_files.fetch.source import Checksum, RemoteFile, Source
from diptych_protocol.model_uri import (
    ModelUri,
    Reader,
    cache_name,
    cached_path,
    is_pinned,
    parse_model_uri,
)

logger = logging.getLogger(__name__)


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
) -> Path:
    """Fetch the model into `cache`, and return what `resolve_model` opens: its folder or GGUF file.

    If a model that cannot change is there already, the source is not asked. A model that can change
    is fetched again when its source reports another version; if the source is unreachable, the copy
    is used.

    With `sha256` the copy is read, and fetched again if it differs. In a `shared` cache, which
    others write to, a copy is used only if it matches the source's listing: without an answer of
    the source there is no model. Where the source lists no checksums, those of what was fetched are
    used. With `recorded` they are also compared where nobody else vouches for a copy.

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
            copy = _with_checksum(path.name, found, sha256)
            if entry.holds(found.content, [copy]):
                return path
            logger.warning("%s in the cache is not the file of %s", path.name, SHA256)
            found = None
        elif not shared:
            return path
    with closing(open_source(parsed, revision, credentials or Credentials())) as source:
        files = _wanted(source, parsed, reader, sha256, None if shared else found)
        if files is not None and not (verified and entry.holds(content_id(files), files)):
            _bring(entry, source, parsed, files, reader, report, verified=verified)
    return path


def _with_checksum(name: str, found: Record, sha256: str) -> RemoteFile:
    """The one file of a model in the cache, as the service's checksum vouches for it."""
    return RemoteFile(name, found.files.get(name, 0), "", "", Checksum("sha256", sha256))


def is_cached(uri: str, cache: Path, *, revision: str = "", sha256: str = "") -> bool:
    """Whether `cache` has all files of a model that an engine needs. The source is not asked."""
    name = cache_name(parse_model_uri(uri), revision, sha256, "engine")
    return CacheEntry(cache, name).published() is not None


def _wanted(
    source: Source, uri: ModelUri, reader: Reader, sha256: str, found: Record | None
) -> list[RemoteFile] | None:
    """The files that must be fetched; None if what was found may serve."""
    try:
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
