"""s3://BUCKET/KEY: objects in S3, or in a store with its API."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Final, cast

import obstore
from obstore.exceptions import (
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from diptych_frontend.model_files.fetch.source import (
    CREDENTIALS,
    URI,
    BadSourceError,
    ChangedError,
    Credentials,
    RemoteFile,
    UnreachableError,
)
from diptych_protocol.model_uri import ModelUri, parts_of

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, RetryConfig, S3Config

CONNECT_TIMEOUT: Final = timedelta(seconds=10)
READ_TIMEOUT: Final = timedelta(seconds=30)
PART_TIMEOUT: Final = timedelta(seconds=300)
AMBIENT: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)
"""Any of these variables shows that the process was given an identity."""
MAX_CAUSE: Final = 120
"""The most characters of a store's own message that are passed on."""


class S3Source:
    """See `Source`: one object, or the objects directly below a prefix."""

    def __init__(self, uri: ModelUri, credentials: Credentials) -> None:
        self._uri = uri
        with self._mapped_errors(uri.path):
            self._store = S3Store(
                uri.host,
                config=_config(credentials),
                client_options=_client_options(credentials),
                # The fetcher repeats what fails, for every source in the same way.
                retry_config=_NO_RETRIES,
            )

    def files(self) -> Sequence[RemoteFile]:
        if self._uri.is_file:
            return [self._file(name) for name in parts_of(self._uri.path)]
        with self._mapped_errors(self._uri.path):
            folder = f"{self._uri.path}/"
            found = obstore.list_with_delimiter(self._store, folder)["objects"]
            return [_remote_file(meta, meta["path"].removeprefix(folder)) for meta in found]

    def _file(self, name: str) -> RemoteFile:
        with self._mapped_errors(name):
            return _remote_file(obstore.head(self._store, name), name)

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        with self._mapped_errors(file.locator):
            got = obstore.get(
                self._store, file.locator, options={"range": (start, end), "if_match": file.version}
            )
            part = bytes(got.bytes())
        if len(part) != end - start:
            raise UnreachableError(f"s3://{self._uri.host} broke off")
        return part

    def close(self) -> None:
        """The store's connections are closed with the object."""

    @contextmanager
    def _mapped_errors(self, name: str) -> Iterator[None]:
        where = f"s3://{self._uri.host}"
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError):
            raise BadSourceError(
                CREDENTIALS, f"{where} refuses access; give keys that may list and read the model"
            ) from None
        except FileNotFoundError:
            raise BadSourceError(
                URI, f"{where} has no {name}; check bucket, key, region and endpoint"
            ) from None
        except PreconditionError:
            raise ChangedError(f"{where} has another version of the file than before") from None
        except BaseError as exc:
            cause = _cause(exc)
            if _NO.search(cause):
                problem = f"{where} cannot be read: {cause}; check bucket, region and endpoint"
                raise BadSourceError(URI, problem) from None
            raise UnreachableError(f"{where} cannot be read: {cause}") from None


_NO = re.compile(r"status code: 4(?!08|29)\d\d")
"""A definite no that the client has no error for, such as a bucket that is not there."""
_NO_RETRIES: RetryConfig = {"max_retries": 0, "retry_timeout": PART_TIMEOUT}


def _config(credentials: Credentials) -> S3Config:
    """What the Secret gives; the rest is the client's to find in its environment.

    Without either, requests are not signed: that opens public buckets, and a pod that was given no
    identity does not take that of its node.
    """
    given = {name: value for name, value in asdict(credentials).items() if value}
    given.pop("token", None)  # is not for stores, which call all the others as we do
    if "access_key_id" not in given and not any(name in os.environ for name in AMBIENT):
        given["skip_signature"] = True
    return cast("S3Config", given)


def _client_options(credentials: Credentials) -> ClientConfig:
    return {
        "connect_timeout": CONNECT_TIMEOUT,
        "read_timeout": READ_TIMEOUT,
        "timeout": PART_TIMEOUT,
        # An endpoint inside a cluster often has no certificate; then the Secret says so.
        "allow_http": credentials.endpoint.startswith("http://"),
    }


def _cause(exc: BaseError) -> str:
    """The reason at the end of the client's long message, which also shows URLs."""
    text, _, _ = " ".join(str(exc).split()).partition(" Debug source")
    return text.rpartition(" - ")[2][:MAX_CAUSE]


def _remote_file(meta: ObjectMeta, name: str) -> RemoteFile:
    if not meta["e_tag"]:
        raise BadSourceError(URI, f"the store gives {name} no entity tag; use another")
    return RemoteFile(name, meta["size"], meta["e_tag"], meta["path"])
