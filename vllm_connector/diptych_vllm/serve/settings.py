"""Reads where the server listens, and its identity, from the environment variables of an engine's
pod. Its only I/O is to read the keys."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path

import msgspec

from diptych_frontend.core_client.curve import read_keys
from diptych_protocol import CurveKeys, InvalidRequestError
from diptych_protocol.kv_transfer_params import is_ip_literal

HOST, PORT, KEYS = "DIPTYCH_BIND_HOST", "DIPTYCH_CORE_PORT", "DIPTYCH_KEYS_DIR"
REVISION, NAME, NODE, ZONE = "DIPTYCH_REVISION", "POD_NAME", "NODE_NAME", "NODE_ZONE"
MAX_TCP_PORT = 65535


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
        if not number.isdecimal() or not 0 < int(number) <= MAX_TCP_PORT:
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
