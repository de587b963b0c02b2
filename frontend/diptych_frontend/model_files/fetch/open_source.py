"""Chooses the client of a source by the URI's scheme."""

from __future__ import annotations

from diptych_frontend.model_files.fetch.credentials import Credentials
from diptych_frontend.model_files.fetch.errors import URI, BadSourceError, FetchError
from diptych_frontend.model_files.fetch.source import Source
from diptych_protocol.model_uri import ModelUri


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
                from diptych_frontend.model_files.fetch.web import WebSource

                return WebSource(uri, credentials)
            case _:
                raise BadSourceError(URI, f"{uri.text} needs no fetching; it is read in place")
    except ModuleNotFoundError as exc:
        raise FetchError(
            f"{uri.scheme}:// needs the package {exc.name!r}; install diptych[fetch] in this image"
        ) from exc
