"""The connector's settings from vLLM's `kv_connector_extra_config`, and what they require of the
rest of vLLM's configuration; and where the server listens, and its identity, from the environment
variables of an engine's pod. The only I/O is to read the keys."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from diptych_frontend.core_client.curve import read_keys
from diptych_kv_transfer.connector import key_of
from diptych_kv_transfer.signing.references import HingeKey
from diptych_protocol import CurveKeys, InvalidRequestError, KVTransferConfig
from diptych_protocol.errors import converted
from diptych_protocol.kv_transfer_params import is_ip_literal

PARAM = "kv_connector_extra_config"
MAX_PORT = 65535


class ConnectorSettings(
    KVTransferConfig, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The settings of our own engine's hinge, and those that an engine gets from elsewhere."""

    keys: Annotated[
        str,
        Meta(
            description="Folder with the service's CURVE keys, by which its engines know each "
            "other. Without it the hinge listens on loopback only."
        ),
    ] = ""
    revision: Annotated[
        str,
        Meta(
            max_length=256,
            description="The revision of the service. Engines of different revisions exchange no "
            "KV.",
        ),
    ] = ""

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> ConnectorSettings:
        """Validate the settings. Raises `InvalidRequestError` naming the field."""
        return converted(raw, cls, PARAM, PARAM)

    def require_ports(self, num_ranks: int) -> None:
        """Raise `InvalidRequestError` unless each of this many ranks has a port of its own, which
        other engines can derive from the first one's."""
        if num_ranks > 1 and not 0 < self.listen_port <= MAX_PORT + 1 - num_ranks:
            raise InvalidRequestError(
                f"{PARAM}: listen_port is {self.listen_port}, and each of {num_ranks} ranks needs "
                f"a port: set one from which on {num_ranks} are free",
                param=PARAM,
            )

    def key(self) -> HingeKey:
        """Return the key that the engine and all its peers have.

        `listen_host` is an address. Raises `InvalidRequestError` for keys that cannot be read, and
        without keys unless that address is on loopback.
        """
        return key_of(self, read_keys(Path(self.keys)) if self.keys else None)

    def of_rank(self, rank: int) -> ConnectorSettings:
        """Return the settings of one rank's hinge."""
        port = self.listen_port + rank if self.listen_port else 0
        return msgspec.structs.replace(self, listen_port=port)


def require_tested(facts: Iterable[tuple[str, object, object]]) -> None:
    """Refuse a configuration of vLLM with which the connector was not tested.

    facts: for each option its name, its value, and the only value that was tested. Raises
    `InvalidRequestError`, which names all that differ.
    """
    wrong = [
        f"{name} is {value!r}, and only {tested!r} was tested"
        for name, value, tested in facts
        if value != tested
    ]
    if wrong:
        raise InvalidRequestError(f"the Diptych connector: {'; '.join(wrong)}", param=PARAM)


HOST, PORT, KEYS = "DIPTYCH_BIND_HOST", "DIPTYCH_CORE_PORT", "DIPTYCH_KEYS_DIR"
REVISION, NAME, NODE, ZONE = "DIPTYCH_REVISION", "POD_NAME", "NODE_NAME", "NODE_ZONE"


class ServedPort(msgspec.Struct, frozen=True):
    """The settings of the engine's own port."""

    host: str
    port: int
    keys: CurveKeys | None
    """None: the port is on loopback and admits everybody."""
    revision: str = ""
    engine_id: str = ""
    """Empty: the engine's name consists of its host's name and its port."""
    node: str = ""
    zone: str = ""

    @property
    def endpoint(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ServedPort:
        """Read the variables. Raises `InvalidRequestError`, which names the variable."""
        number = environment.get(PORT, "")
        if not number.isdecimal() or not 0 < int(number) <= MAX_PORT:
            raise InvalidRequestError(
                f"{PORT} is {number!r}: set it to the TCP port for routers", param=PORT
            )
        host = environment.get(HOST) or "127.0.0.1"
        if not is_ip_literal(host):
            raise InvalidRequestError(f"{HOST} is {host!r}: set it to an IP address", param=HOST)
        folder = environment.get(KEYS)
        if not folder and not ipaddress.ip_address(host).is_loopback:
            raise InvalidRequestError(
                f"{KEYS} is not set, and {HOST} is {host}: name the folder with the service's keys,"
                " or listen on loopback",
                param=KEYS,
            )
        return cls(
            host,
            int(number),
            read_keys(Path(folder)) if folder else None,
            environment.get(REVISION, ""),
            environment.get(NAME, ""),
            environment.get(NODE, ""),
            environment.get(ZONE, ""),
        )
