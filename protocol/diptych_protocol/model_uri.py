"""Parses a model's URI, and computes the place of a fetched model in a cache.

The operator writes that place into the engines' configuration, and the fetcher fills it. Both
compute it here, from the service alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Final, Literal, cast
from urllib.parse import urlsplit

from diptych_protocol.errors import InvalidRequestError

Scheme = Literal["hf", "s3", "https", "pvc", "oci", "package", "file", "dummy"]
Reader = Literal["engine", "router"]
"""Who reads the model. An engine reads all of it; a router only its tokenizer and configuration."""

FORMS: Final[dict[str, str]] = {
    "hf": "hf://ORG/REPO or hf://ORG/REPO/FILE.gguf",
    "s3": "s3://BUCKET/FOLDER or s3://BUCKET/FILE.gguf",
    "https": "https://HOST/FILE.gguf",
    "pvc": "pvc://CLAIM/PATH",
    "oci": "oci://REGISTRY/REPO:TAG@sha256:DIGEST, with #/PATH for a path in the image",
    "package": "package://PKG/FILE",
    "file": "file:///PATH",
    "dummy": "dummy://?num_hidden_layers=2",
}
"""Scheme -> the form of such a URI."""

_FIRST_PART = re.compile(r"(.+)-00001-of-(\d{5})\.gguf")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}")
_UNSAFE = re.compile(r"[\x00-\x1f\x7f\\?#]")
_NOT_IN_SLUGS = re.compile(r"[^A-Za-z0-9._]+")
_MAX_SLUG: Final = 80


@dataclass(frozen=True, slots=True)
class ModelUri:
    """A URI in one of the forms above, checked."""

    text: str
    scheme: Scheme
    host: str
    """ORG/REPO, bucket, HOST[:PORT], claim, image with its digest, or package."""
    path: str
    """The path within `host`, without a leading slash; empty for all of it. For
    dummy, the query."""

    @property
    def is_fetched(self) -> bool:
        """Whether it has to be copied into a cache before it can be read."""
        return self.scheme in ("hf", "s3", "https")

    @property
    def is_file(self) -> bool:
        """Whether it is one GGUF file instead of a folder in Hugging Face's layout."""
        return self.path.endswith(".gguf")


def parse_model_uri(uri: str) -> ModelUri:
    """Parse a URI. Raises `InvalidRequestError` that says how it should be written."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in FORMS:
        raise _refuse(f"{uri!r} has no scheme of {', '.join(f'{name}://' for name in FORMS)}")
    host, path = _split(scheme, rest)
    parsed = ModelUri(uri, cast("Scheme", scheme), host, path)
    if scheme != "dummy" and not (_well_formed(parsed) and _safe(path)):
        raise _refuse(f"{uri!r} is not of the form {FORMS[scheme]}")
    return parsed


def parts_of(name: str) -> list[str]:
    """Return the names of the files that a GGUF model is split into, from that of the first; of a
    model in one file, its own name."""
    found = _FIRST_PART.fullmatch(name)
    if found is None:
        return [name]
    stem, count = found[1], int(found[2])
    return [name, *(f"{stem}-{part:05}-of-{count:05}.gguf" for part in range(2, count + 1))]


def is_pinned(uri: ModelUri, revision: str, sha256: str) -> bool:
    """Whether what the URI names can never change: a commit, or a checksum."""
    return bool(sha256) or (uri.scheme == "hf" and _COMMIT.fullmatch(revision) is not None)


def cache_name(uri: ModelUri, revision: str, sha256: str, reader: Reader) -> str:
    """Return the name of a fetched model's directory in a cache: readable, and different for each
    content.

    A model that is not pinned has the directory of its reference (for hf://, of the branch `main`).
    """
    if uri.scheme == "hf":
        revision = revision or "main"
    identity = json.dumps([uri.scheme, uri.host, uri.path, revision, sha256, reader])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    slug = _NOT_IN_SLUGS.sub("-", f"{uri.host}/{uri.path}").strip("-._")[-_MAX_SLUG:]
    return f"{slug.strip('-._')}-{digest}" + ("-router" if reader == "router" else "")


def cached_path(uri: ModelUri, revision: str, sha256: str, reader: Reader) -> str:
    """Return the path that an engine or router opens, relative to the cache: the folder, or the
    file in it."""
    folder = cache_name(uri, revision, sha256, reader)
    return f"{folder}/{uri.path.rsplit('/', 1)[-1]}" if uri.is_file else folder


def _split(scheme: str, rest: str) -> tuple[str, str]:
    if scheme == "dummy":
        return "", rest
    if scheme == "oci":
        image, _, path = rest.partition("#")
        return image, path.strip("/")
    if scheme == "hf":
        org, _, rest = rest.partition("/")
        repo, _, path = rest.partition("/")
        return f"{org}/{repo}", path
    host, _, path = rest.partition("/")
    return host, path if scheme in ("package", "file") else path.rstrip("/")


def _well_formed(uri: ModelUri) -> bool:
    match uri.scheme:
        case "hf":
            return re.fullmatch(r"[\w.-]+/[\w.-]+", uri.host, re.ASCII) is not None and (
                not uri.path or uri.is_file
            )
        case "https":
            # Credentials belong into a Secret, not into a URI that everybody may read.
            return bool(uri.host) and "@" not in uri.host and uri.is_file and _has_port(uri)
        case "oci":
            return _DIGEST.fullmatch(uri.host) is not None
        case "file":
            return uri.host in ("", "localhost") and bool(uri.path)
        case _:
            return re.fullmatch(r"[\w.-]+", uri.host, re.ASCII) is not None and bool(uri.path)


def _has_port(uri: ModelUri) -> bool:
    try:
        return urlsplit(uri.text).port != 0
    except ValueError:
        return False


def _safe(path: str) -> bool:
    """No way out of the folder, and nothing that another parser would take differently."""
    parts = path.split("/") if path else []
    return not _UNSAFE.search(path) and not any(part in ("", ".", "..") for part in parts)


def _refuse(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"model: {problem}", param="model")
