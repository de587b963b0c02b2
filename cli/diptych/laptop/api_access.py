"""Access to the API of a service on this machine: its address, its keys and its certificate.

On loopback the API is open, whatever the file requires in a cluster, because the Secrets that it
names do not exist here. At other addresses it needs keys, from a directory or made for the run, and
TLS if the file asks for it.
"""

from __future__ import annotations

import ipaddress
import secrets
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from diptych.errors import BadInputError
from diptych.known_models import Source
from diptych.laptop.pods import LOOPBACK, reached_at
from diptych.laptop.rundir import RunDirectory
from diptych_frontend.openai.api_keys import ApiKeys
from diptych_frontend.openai.tls import CERTIFICATE_FILE, Certificate
from diptych_operator.api.router import ApiKeys as ApiKeysOfSecret
from diptych_operator.api.router import Batches, Router, Tls
from diptych_operator.api.service import InferenceService
from diptych_protocol import InvalidRequestError
from diptych_protocol.router_settings import HostNames, Origins

KEYS_NAME, TLS_NAME = "laptop-api-keys", "laptop-tls"
"""Folders of the run directory that take the place of Secrets."""
MADE_KEY_NAME = "laptop"
MOST_SHOWN = 200
BATCHES_SIZE = "256Mi"
"""A low limit, because the run directory may be in memory."""


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """The access that the user asked for; it has not been checked yet."""

    port: int
    host: str = LOOPBACK
    api_keys: Path | None = None
    """A directory like a mounted Secret: each file is a key, under its client's name."""
    tls: Path | None = None
    """A directory with `tls.crt` and `tls.key`."""
    hosts: tuple[str, ...] = ()
    """Further host names, beside those that the file allows."""
    origins: tuple[str, ...] = ()
    """Further sites whose pages may use the API, beside those that the file allows."""

    @property
    def on_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def has_keys(self) -> bool:
        return self.api_keys is not None or not self.on_loopback

    @property
    def url(self) -> str:
        """Base URL of the OpenAI API."""
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{reached_at(self.host)}:{self.port}/v1"

    def fit(self, source: Source, service: InferenceService) -> InferenceService:
        """Return the service with this access instead of the access in a cluster.

        Raises `BadInputError` for missing or unusable keys or certificates.
        """
        if service.spec.router.tls is not None and self.tls is None and not self.on_loopback:
            raise BadInputError(
                f"{source}: spec.router.tls: its Secret is a cluster's; give --tls DIR with "
                f"{CERTIFICATE_FILE} and tls.key, or listen on {LOOPBACK}"
            )
        if self.api_keys is not None and not ApiKeys(self.api_keys).names:
            raise BadInputError(
                f"--api-keys: {self.api_keys} holds no key; each is a file, named for its client"
            )
        if self.tls is not None:
            try:
                Certificate(self.tls)
            except InvalidRequestError as exc:
                raise BadInputError(f"--tls: {exc}") from exc
        router = replace(
            service.spec.router,
            api_keys=self._keys_of(service) if self.has_keys else None,
            tls=Tls(TLS_NAME) if self.tls is not None else None,
            ui=True,
            batches=service.spec.router.batches or Batches(size=BATCHES_SIZE),
            allowed_hosts=[*service.spec.router.allowed_hosts, *self.hosts],
            allowed_origins=[*service.spec.router.allowed_origins, *self.origins],
        )
        self._check_names(router)
        return replace(service, spec=replace(service.spec, router=router))

    def _keys_of(self, service: InferenceService) -> ApiKeysOfSecret:
        asked = service.spec.router.api_keys or ApiKeysOfSecret(KEYS_NAME)
        return replace(asked, secret_name=KEYS_NAME)

    @staticmethod
    def _check_names(router: Router) -> None:
        """Raise `BadInputError` for what is no name, or no origin."""
        for option, values, kind, wanted in (
            ("--allow-host", router.allowed_hosts, HostNames, "a lower-case name without a port"),
            ("--allow-origin", router.allowed_origins, Origins, "like https://app.example.com"),
        ):
            try:
                msgspec.convert(values, kind)
            except msgspec.ValidationError as exc:
                given = ", ".join(values)[:MOST_SHOWN]
                raise BadInputError(f"{option} is {wanted}, at most 64 times, not {given}") from exc

    def furnish(self, run_dir: RunDirectory) -> Path | None:
        """Put keys and certificate where the router reads them. Returns the file of a key."""
        if self.tls is not None:
            run_dir.link(f"secrets/{TLS_NAME}", self.tls)
        if self.api_keys is not None:
            run_dir.link(f"secrets/{KEYS_NAME}", self.api_keys)
            return self.api_keys.resolve() / ApiKeys(self.api_keys).names[0]
        if not self.has_keys:
            return None
        relative = f"secrets/{KEYS_NAME}/{MADE_KEY_NAME}"
        run_dir.write(relative, f"sk-{secrets.token_urlsafe(24)}\n".encode())
        return run_dir.path / relative

    @property
    def certificate(self) -> Path | None:
        return None if self.tls is None else self.tls.resolve() / CERTIFICATE_FILE

    def access(self, key: str = "") -> str:
        """Say in one line who may use the API, with the key that was made for the run, if given.

        Names of keys are those at the time of the call.
        """
        tls = "TLS" if self.tls is not None else "no TLS"
        if self.api_keys is not None:
            return f"keys of {', '.join(ApiKeys(self.api_keys).names)}; {tls}"
        if self.has_keys:
            return f"one key, made for this run{key and f': {key}'}; {tls}"
        return f"open on loopback, no keys; {tls}"
