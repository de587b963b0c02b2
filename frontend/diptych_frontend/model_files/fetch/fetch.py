"""From a URI to files in a cache: once, whoever else may be at it."""

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
    URI,
    BadSourceError,
    UnreachableError,
)
from diptych_frontend.model_files.fetch.open_source import open_source
from diptych_frontend.model_files.fetch.progress import Meter, Report, log_progress
from diptych_frontend.model_files.fetch.selection import content_id, select_files
from diptych_frontend.model_files.fetch.source import RemoteFile, Source
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
    credentials: Credentials | None = None,
    report: Report = log_progress,
) -> Path:
    """Have the model in `cache`, and return what `resolve_model` opens: its folder or GGUF file.

    A model that cannot change and is there already is not asked for again. One that can is fetched
    anew when its source says that it has; while the source cannot be reached, the copy serves.

    Raises:
        InvalidRequestError: the URI is malformed.
        FetchError: see `errors`.
    """
    parsed = parse_model_uri(uri)
    if not parsed.is_fetched:
        raise BadSourceError(URI, f"{uri} needs no fetching; it is read in place")
    if revision and parsed.scheme != "hf":
        raise BadSourceError(REVISION, f"{parsed.scheme}:// has no revisions; remove it")
    entry = CacheEntry(cache, cache_name(parsed, revision, sha256, reader))
    found = entry.published()
    if found is None or not is_pinned(parsed, revision, sha256):
        with closing(open_source(parsed, revision, credentials or Credentials())) as source:
            files = _wanted(source, parsed, reader, sha256, found)
            if files is not None:
                _bring(entry, source, parsed, files, reader, report)
    return cache / cached_path(parsed, revision, sha256, reader)


def is_cached(uri: str, cache: Path, *, revision: str = "", sha256: str = "") -> bool:
    """Whether `cache` has all of an engine's files of a model; its source is not asked."""
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
) -> None:
    content = content_id(files)
    header_only = uri.is_file and reader == "router"
    with entry.locked():
        found = entry.published()
        if found is not None and found.content == content:
            return
        if entry.restore(content):
            return
        folder = entry.partial(content)
        total = sum(min(file.size, PART_BYTES) if header_only else file.size for file in files)
        done = sum(path.stat().st_size for path in folder.iterdir())
        entry.check_space(total - done)
        meter = Meter(uri.text, total, done, report)
        fetch = download_header if header_only else download
        with meter.running(entry.beat):
            for file in files:
                fetch(source, file, folder / file.name, meter.advance)
            entry.publish(folder, uri.text, content)
