"""How engines that run vLLM are told to hand KV over: by our connector, or by vLLM's own for NIXL.

Our connector is no part of vLLM's image. An init container copies it into a volume, from which
`PYTHONPATH` gives it to vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from diptych_operator.api.names import (
    BIND_HOST_VARIABLE,
    CONNECTOR_CONTAINER,
    CONNECTOR_DIR,
    KEYS_DIR,
    PORT_VARIABLES,
)
from diptych_operator.api.pools import PoolName
from diptych_operator.api.service import InferenceService
from diptych_operator.render.keys import KeySets, hinge_keys_volume
from diptych_operator.render.model import CONFINED, without_devices

KEYS_VARIABLE: Final = "DIPTYCH_KEYS_DIR"
_ROUTES: Final = "--middleware=diptych_vllm.routes.Routes"
"""The route by which leases are given back. vLLM adds it to the middleware of the service's own
arguments."""
_COPY_DIR: Final = "/var/lib/diptych/connector"
"""Where the init container has the volume that is to be filled."""
_NIXL_ROLES: Final[Mapping[PoolName, str]] = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True, slots=True)
class Handoff:
    """What pods of vLLM have for the sake of the hand-off."""

    arguments: Sequence[str] = ()
    """Arguments of `vllm serve`; Kubernetes expands the variables in them."""
    variables: Mapping[str, str] = field(default_factory=dict)
    keys: Sequence[dict[str, Any]] = ()
    """The volume with the service's keys."""
    init_containers: Sequence[dict[str, Any]] = ()
    read_only: Mapping[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    """As `Pods.read_only`."""


def handoff(service: InferenceService, pool: PoolName, revision: str, keys: KeySets) -> Handoff:
    """Pure; empty for a service of one pool."""
    match service.connector:
        case "none":
            return Handoff()
        case "nixl":
            return Handoff(
                [_transfer_config(_nixl(service, pool))],
                # vLLM tells decode engines this address as it is.
                {"VLLM_NIXL_SIDE_CHANNEL_HOST": "$(POD_IP)"},
            )
        case "diptych":
            told = Handoff(
                [_transfer_config(_diptych(service, revision)), _ROUTES],
                {KEYS_VARIABLE: KEYS_DIR},
                [hinge_keys_volume(service, keys.current)],
            )
            return told if _image_has_it(service, pool) else _brought(service, pool, told)


def _nixl(service: InferenceService, pool: PoolName) -> dict[str, Any]:
    return {
        "kv_connector": "NixlConnector",
        "kv_role": _NIXL_ROLES[pool],
        "kv_connector_extra_config": {"kv_lease_duration": int(service.lease_seconds)},
    }


def _diptych(service: InferenceService, revision: str) -> dict[str, Any]:
    return {
        "kv_connector": "DiptychConnector",
        "kv_connector_module_path": "diptych_vllm.connector",
        # What an engine does is decided for each request.
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "listen_host": f"$({BIND_HOST_VARIABLE})",
            "listen_port": _NUMBER,
            "advertise_host": "$(POD_IP)",
            "lease_seconds": service.lease_seconds,
            "keys": f"$({KEYS_VARIABLE})",
            "revision": revision,
        },
    }


_NUMBER: Final = f"$({PORT_VARIABLES['kv']})"


def _transfer_config(config: dict[str, Any]) -> str:
    # A request whose KV did not come fails: computing it anew would hide that nothing is handed
    # over. `kv_buffer_device` is left to vLLM, which takes the device that it runs on.
    whole = config | {"kv_load_failure_policy": "fail"}
    text = json.dumps(whole, separators=(",", ":")).replace(f'"{_NUMBER}"', _NUMBER)
    return f"--kv-transfer-config={text}"


def _image_has_it(service: InferenceService, pool: PoolName) -> bool:
    return service.spec.transfer.connector_image == service.engine_of(pool).image


def _brought(service: InferenceService, pool: PoolName, told: Handoff) -> Handoff:
    """With the connector copied into the pod."""
    copy = {
        "name": CONNECTOR_CONTAINER,
        "image": service.spec.transfer.connector_image,
        "command": ["cp", "--recursive", "--no-target-directory", CONNECTOR_DIR, _COPY_DIR],
        **CONFINED,
        "volumeMounts": [{"name": CONNECTOR_CONTAINER, "mountPath": _COPY_DIR}],
        **without_devices(service.pools[pool].resources),
    }
    return Handoff(
        told.arguments,
        {**told.variables, "PYTHONPATH": CONNECTOR_DIR},
        told.keys,
        [copy],
        {CONNECTOR_CONTAINER: (CONNECTOR_DIR, {"emptyDir": {}})},
    )
