"""Admits holders of an API key. Each key has a name for metrics and logs.

The keys are the files of a mounted Secret: a file's name is the client's name, its first line the
key, the others the key's limits, if it has any.
Several keys are valid at once, so a client can change its key without a gap: add the new one, let
the client change over, remove the old one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Awaitable, Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from diptych_frontend.openai.exchange import exchange_of, header
from diptych_frontend.openai.mounted import Mark, TooManyFilesError, mark, names_in, read
from diptych_frontend.quotas.ledger import NO_LIMITS, Limits, read_limits
from diptych_protocol import InvalidRequestError

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset(
    {"/health", "/live", "/ping", "/metrics", "/version", "/openapi.json", "/docs"}
)
"""Paths without a key, because probes, scrapers and browsers send none."""
MAX_KEYS = 256
MAX_KEY_BYTES = 4096
SIGNING_KEY = ".usage-signing-key"
"""A file among the keys that is none, because its name begins with a dot."""
_NAME = re.compile(r"[-._A-Za-z0-9]{1,253}")
_KEY = re.compile(rb"[\x21-\x7e]{1,4096}")
"""What an Authorization header carries as it is."""


class ApiKeys:
    """The keys of a directory, as they were at the last refresh."""

    def __init__(self, directory: Path) -> None:
        """Read the keys. A directory without a usable key admits nobody, as the log says."""
        self._directory = directory
        self._mark: Mark | None = None
        self._complaint = ""
        self._pepper = secrets.token_bytes(32)
        self._names: dict[bytes, str] = {}
        """By the digest of the key."""
        self._limits: dict[str, Limits] = {}
        """By name."""
        self.left_out: list[str] = []
        """What is wrong with entries that are no keys, for people."""
        self.refresh()

    @property
    def names(self) -> list[str]:
        """The names of the keys that are valid now."""
        return sorted(self._names.values())

    def limits(self) -> Mapping[str, Limits]:
        """Return how many tokens may be used, by the names of the keys that have limits."""
        return self._limits

    def signing_key(self) -> bytes:
        """Return the key that signs what keys have used, or nothing if there is none."""
        with contextlib.suppress(OSError):
            return read(self._directory / SIGNING_KEY, MAX_KEY_BYTES).strip()
        return b""

    def refresh(self) -> bool:
        """Read the keys if they have changed; True if so. Errors are logged."""
        try:
            files = names_in(self._directory, MAX_KEYS)
        except (FileNotFoundError, NotADirectoryError, TooManyFilesError) as exc:
            self._complain(f"cannot read the API keys: {exc}; nobody is let in")
            changed, self._mark, self._names = self._mark is not None, None, {}
            self.left_out = [str(exc)]
            return changed
        except OSError as exc:  # of this process: its descriptors, for example, have run out
            self._complain(f"cannot look at the API keys: {exc}; they stay what they were")
            return False
        seen = mark(self._directory, files)
        if seen == self._mark:
            return False
        former, limits = self._names, self._limits
        self._names, self._limits, unread = self._read([name for name, *_ in seen])
        if unread:  # look again: nothing else would say that they have changed
            self._mark = None
            self._names |= {digest: name for digest, name in former.items() if name in unread}
            self._limits |= {name: limits[name] for name in unread if name in limits}
            self._complain(
                f"cannot read the API keys {', '.join(unread)}; they stay what they were"
            )
            return self._names != former
        self._mark = seen
        if self._names:
            self._complaint = ""
            log.info("API keys of %s", ", ".join(self.names))
        else:
            self._complain(f"{self._directory} holds no API key; nobody is let in")
        return True

    def name_of(self, key: bytes) -> str | None:
        """Return the name of a key, or None. The time that it takes does not depend on the key."""
        offered = self._digest(key)
        found = None
        for digest, name in self._names.items():
            if hmac.compare_digest(digest, offered):
                found = name
        return found

    def _read(self, files: list[str]) -> tuple[dict[bytes, str], dict[str, Limits], list[str]]:
        """The names by digest, limits, and the files that cannot be read now, but may be later."""
        names: dict[bytes, str] = {}
        limits: dict[str, Limits] = {}
        unread: list[str] = []
        self.left_out = wrong = []
        for name in files:
            try:
                content = read(self._directory / name, MAX_KEY_BYTES).strip()
                key, _, lines = content.partition(b"\n")
                key, own = key.strip(), read_limits(lines.strip())
            except InvalidRequestError as exc:
                wrong.append(f"the API key {name[:253]!r} is left out: its limits: {exc}")
                continue
            except OSError as exc:
                if exc.errno is None:  # it is no key
                    wrong.append(f"an API key is left out: {exc}")
                else:
                    unread.append(name)
                continue
            if not _NAME.fullmatch(name) or not _KEY.fullmatch(key):
                wrong.append(
                    f"the API key {name[:253]!r} is left out: its name must be letters, digits, "
                    "'-', '_' and '.', the key's line visible ASCII characters"
                )
                continue
            first = names.setdefault(self._digest(key), name)
            if first != name:
                wrong.append(f"the API keys {first} and {name} are equal; it counts as {first}")
            if own != NO_LIMITS:
                limits[first] = own.and_of(limits.get(first, NO_LIMITS))
        for words in wrong:
            log.warning("%s", words)
        return names, limits, unread

    def _digest(self, key: bytes) -> bytes:
        """Equal lengths to compare, and nothing to be learnt from how a comparison went."""
        return hashlib.blake2b(key, key=self._pepper, digest_size=32).digest()

    def _complain(self, text: str) -> None:
        """Once, until there is something else to say."""
        if text != self._complaint:
            log.error("%s", text)
        self._complaint = text


class KeyGate:
    """Refuses requests without a key, except to the open paths of probes and scrapers."""

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # No coroutine of its own, which would be one more to wake for each token of an answer.
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            name = self._keys.name_of(_offered(scope))
            if name is None:
                raise InvalidRequestError(
                    "wrong or missing API key; send it as 'Authorization: Bearer KEY' or "
                    "'X-Api-Key: KEY'",
                    status=401,
                    code="invalid_api_key",
                )
            exchange_of(scope).tenant = name
        return self._app(scope, receive, send)


def _offered(scope: Scope) -> bytes:
    """The key in the request's Authorization header, else that in X-Api-Key, where Anthropic's
    clients have it; empty without one."""
    scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
    if scheme.lower() != "bearer":
        key = header(scope, b"x-api-key") or ""
    return key.strip().encode("latin-1")
