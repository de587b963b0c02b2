"""Selects the files of a source that a reader needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

from diptych_frontend.model_files.fetch.errors import SHA256, URI, BadSourceError
from diptych_frontend.model_files.fetch.source import Checksum, RemoteFile
from diptych_protocol.model_uri import ModelUri, Reader

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


def select_files(
    uri: ModelUri, files: Sequence[RemoteFile], reader: Reader, sha256: str
) -> list[RemoteFile]:
    """Return the files to fetch, with their names in the model's folder.

    Raises `BadSourceError` if there is no model among them, or not the one with this checksum.
    """
    if uri.is_file:
        return [_single_file(uri, files, sha256)]
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


def _single_file(uri: ModelUri, files: Sequence[RemoteFile], sha256: str) -> RemoteFile:
    found = next((file for file in files if file.name == uri.path), None)
    if found is None:
        raise BadSourceError(URI, f"{uri.text} does not exist{_gguf_hint(uri, files)}")
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
