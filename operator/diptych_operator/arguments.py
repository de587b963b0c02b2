"""The operator's arguments, which `kubectl diptych plan` reads too."""

from __future__ import annotations

import argparse
import os
import secrets
import socket

import msgspec

from diptych_operator.api.images import Images, PodDefaults
from diptych_operator.api.limits import Allowed
from diptych_operator.upgrades import EXAMPLE, MOST_UPGRADES, RolloutWindow

DESCRIPTION = "The operator: `python -m diptych_operator [--namespaces a,b]`."


def images(args: argparse.Namespace) -> Images:
    """What services have that name none."""
    return Images(
        args.engine_image,
        args.router_image,
        args.vllm_connector_image,
        cluster_chooses_user=args.cluster_chooses_user,
        pods=args.pod_defaults,
    )


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m diptych_operator", description=DESCRIPTION)
    found.add_argument(
        "--namespaces",
        type=lambda text: [name for name in text.split(",") if name],
        default=[],
        help="namespaces to serve, with commas; left out, the whole cluster",
    )
    found.add_argument(
        "--release",
        default=f"{os.environ.get('POD_NAMESPACE', 'default')}/diptych-operator",
        help="namespace and name of this installation, which its replicas have in common",
    )
    found.add_argument(
        "--identity",
        default=os.environ.get("POD_NAME") or f"{socket.gethostname()}-{secrets.token_hex(4)}",
        help="unique name of this operator in the election; two of one name would both lead",
    )
    found.add_argument("--metrics-host", default="0.0.0.0", help="address of the port below")
    found.add_argument(
        "--metrics-port", type=int, default=8080, help="port of /metrics, /healthz and /readyz"
    )
    for component, field, default in (
        ("engine", "engine.image", Images().engine),
        ("router", "router.image", Images().router),
        ("vllm-connector", "transfer.connectorImage", Images().vllm_connector),
    ):
        found.add_argument(
            f"--{component}-image",
            default=default,
            help=f"image of services that leave spec.{field} out; %(default)s",
        )
    found.add_argument(
        "--limits",
        type=lambda text: msgspec.json.decode(text, type=Allowed),
        metavar="JSON",
        help="what services may ask for, as the chart's limits.allow; left out, anything",
    )
    found.add_argument(
        "--pod-defaults",
        type=lambda text: msgspec.json.decode(text, type=PodDefaults),
        default=PodDefaults(),
        metavar="JSON",
        help="what pods of services have that name none, as the chart's podDefaults",
    )
    found.add_argument(
        "--max-concurrent-rollouts",
        type=int,
        default=MOST_UPGRADES,
        help="services that may roll at once because this operator renders them otherwise than the "
        "last one; 0 lets all wait",
    )
    found.add_argument(
        "--rollout-window",
        type=RolloutWindow.read,
        action="append",
        default=[],
        metavar=repr(EXAMPLE),
        dest="rollout_windows",
        help="when such rollouts may begin; may be repeated; left out, always",
    )
    found.add_argument(
        "--cluster-chooses-user",
        action="store_true",
        help="pods name no user and no group, as OpenShift's constraints want it",
    )
    found.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return found
