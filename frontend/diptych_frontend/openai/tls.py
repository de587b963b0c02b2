"""TLS with certificates of mounted Secrets of type kubernetes.io/tls: that of the public port, and
those of services that are asked."""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from diptych_frontend.openai.mounted import Mark, mark, read
from diptych_protocol import InvalidRequestError

log = logging.getLogger(__name__)

CERTIFICATE_FILE, KEY_FILE = "tls.crt", "tls.key"
CERTIFICATE_END = "-----END CERTIFICATE-----"
MOST_BYTES = 1 << 20
"""A Secret holds no more."""
FORMER_S: Final = 24 * 3600.0
"""How long a service may go on with its former certificate: whoever else has the key of that one
could show it for ever."""


class Certificate:
    """A server's certificate and key. New connections use the pair that was read last."""

    def __init__(self, directory: Path) -> None:
        """Raises `InvalidRequestError` without a matching pair of certificate and key."""
        self._directory = directory
        self._mark: Mark | None = None
        self.complaint = ""
        """Why the pair that is there now is not the one in use; empty if it is."""
        self._ends: datetime | None = None
        self._told = ""
        """Which end of a certificate the log has told of."""
        self.context = _new_context()
        try:
            self._load()
        except (OSError, ValueError) as exc:
            raise InvalidRequestError(
                f"{directory} must hold {CERTIFICATE_FILE} and {KEY_FILE}, a PEM certificate "
                f"(with its chain) and its key without a password: {exc}",
                param="tls",
            ) from exc

    @property
    def expired(self) -> str:
        """When the one in use ended, an RFC 3339 time; empty if it has not."""
        if self._ends is None or self._ends > datetime.now(UTC):
            return ""
        return f"{self._ends:%Y-%m-%dT%H:%M:%SZ}"

    def refresh(self) -> bool:
        """Read the pair if it has changed; True if there is a new one.

        A pair that does not match changes nothing, and is logged once, as is the end of one.
        """
        if (ended := self.expired) and ended != self._told:
            log.error("%s: the certificate ended at %s; renew it", self._directory, ended)
        self._told = ended
        try:
            if self._look() == self._mark:
                self.complaint = ""
                return False
            self._load()
        except (OSError, ValueError) as exc:
            if str(exc) != self.complaint:
                log.error("%s: %s; the former certificate stays", self._directory, exc)
            self.complaint = str(exc)
            return False
        self.complaint = ""
        log.info("%s: a new certificate", self._directory)
        return True

    def _look(self) -> Mark:
        return mark(self._directory, (CERTIFICATE_FILE, KEY_FILE))

    def _load(self) -> None:
        seen = self._look()
        # Where the links lead now, so that both files are of one version of the Secret.
        place = os.path.dirname(os.path.realpath(self._directory / CERTIFICATE_FILE))
        pair = os.path.join(place, CERTIFICATE_FILE), os.path.join(place, KEY_FILE)
        # Tried first: a context that is given a key of another certificate is left without any.
        _new_context().load_cert_chain(*pair, password=_no_password)
        self.context.load_cert_chain(*pair, password=_no_password)
        self._mark = seen  # not before: what has failed is tried again at the next look
        with suppress(OSError, ValueError):
            self._ends = None  # until it is told
            self._ends = _last_moment(self.context, Path(pair[0]))


class KnownCertificate:
    """The certificate of a service that is asked. Whoever shows another one is not that service,
    whoever signed it; so it need not have the name by which the service is called."""

    def __init__(self, files: Iterable[Path]) -> None:
        """files: with one certificate each, of which the service shows any."""
        self._marks: dict[Path, Mark] = dict.fromkeys(files, ())
        self._read: dict[Path, ssl.SSLContext] = {}
        self._changed_at = 0.0
        """When one was read last, by the monotonic clock."""
        self.shown: ssl.SSLContext | None = None
        """The one that trusts what the service has shown last. That may be its former certificate:
        it goes on with it where the new one is not its key's."""
        self.refresh()

    @property
    def contexts(self) -> tuple[ssl.SSLContext, ...]:
        """For new connections, the first to be tried first; they trust nobody before a file is
        there."""
        trusted = dict.fromkeys([*filter(None, [self.shown]), *self._read.values()])
        return tuple(trusted) or (_NOBODY,)

    def recognise(self, context: ssl.SSLContext) -> None:
        """Take note of what the service has shown. A former certificate is over then."""
        if context in self.contexts:
            self.shown = context

    def refresh(self) -> bool:
        """Read the files that have changed; True if there is a new certificate. What cannot be read
        changes nothing, and is logged."""
        news = [self._look(file) for file in self._marks]
        now = time.monotonic()
        if any(news):
            self._changed_at = now
        elif self.shown not in self._read.values() and now - self._changed_at > FORMER_S:
            self.shown = None
        return any(news)

    def _look(self, file: Path) -> bool:
        seen = mark(file.parent, [file.name])
        if seen == self._marks[file]:
            return False
        self._marks[file] = seen
        try:
            self._read[file] = _trusting(file)
        except (OSError, ValueError) as exc:
            log.error("%s: %s; the former certificate is expected", file, exc)
            return False
        return True


_NOBODY: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts no certificate."""
_NO_CHECK_TIME: Final = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME. Whoever mounts a certificate says that it is the service's:
past its last day requests through a route would only fail."""


def _trusting(file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    # Only the first one, the service's own: whoever had signed it could sign others.
    own, end, _ = read(file, MOST_BYTES).decode().partition(CERTIFICATE_END)
    context.load_verify_locations(cadata=own + end)
    return context


def _last_moment(server: ssl.SSLContext, file: Path) -> datetime:
    """Until when its certificate is good, as a client sees it that trusts it."""
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = _trusting(file).wrap_bio(ours, theirs)
    for end in (client, server.wrap_bio(theirs, ours, server_side=True), client):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    shown = client.getpeercert() or {}
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown["notAfter"])), UTC)


def _new_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_password() -> str:
    """Instead of asking at the terminal."""
    raise ValueError("the key is protected by a password")
