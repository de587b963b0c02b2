"""The connector's settings from vLLM's `kv_connector_extra_config`, and what they require of the
rest of vLLM's configuration. It only reads the keys."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from diptych_frontend.core_client.curve import read_keys
from diptych_kv_transfer.connector import key_of
from diptych_kv_transfer.signing.keys import HingeKey
from diptych_protocol import InvalidRequestError, KVTransferConfig

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
        try:
            return msgspec.convert(raw, cls)
        except msgspec.ValidationError as exc:
            raise InvalidRequestError(f"{PARAM}: {exc}", param=PARAM) from exc

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
