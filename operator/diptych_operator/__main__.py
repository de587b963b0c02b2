"""The operator: `python -m diptych_operator [--namespaces a,b]`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from typing import Any

import kopf
import msgspec
from pythonjsonlogger.json import JsonFormatter

from diptych_operator.api.images import Images
from diptych_operator.api.limits import Allowed
from diptych_operator.api.scaler import SCALER_KIND
from diptych_operator.api.service import API_VERSION
from diptych_operator.kube.client import Kube
from diptych_operator.kube.cluster import Cluster, read_cluster
from diptych_operator.kube.leader import Candidate, lead
from diptych_operator.kube.watch import Indexed, registry, settings
from diptych_operator.kube.work_queue import WorkQueue
from diptych_operator.metrics import OperatorMetrics
from diptych_operator.probes import serve_probes
from diptych_operator.reconcile import Reconciler
from diptych_operator.routers import Routers
from diptych_protocol import DiptychError

log = logging.getLogger("diptych_operator")

CONCURRENT_PASSES = 64
"""A pass mostly waits; a router that is out of reach holds one up for seconds."""
BATCH_S = 0.2
"""Events of one service that arrive within this time are one pass."""


async def run(args: argparse.Namespace) -> None:
    """Stand for election, lead, and return on SIGTERM. Raises `DiptychError`."""
    metrics = OperatorMetrics()
    stop = asyncio.Event()
    _stop_on_signals(stop)
    async with await Kube.connect() as kube:
        versions = await kube.group_versions()
        if API_VERSION not in versions:
            raise DiptychError(f"the cluster does not serve {API_VERSION}: apply the CRD first")
        cluster = read_cluster(
            *await kube.version(),
            versions,
            args.lease_namespace,
            has_pool_scalers=await kube.can_list(API_VERSION, SCALER_KIND, args.namespaces),
        )
        metrics.watch_gauge("api_requests", "Requests to the API server.", lambda: kube.requests)
        async with serve_probes(args.metrics_host, args.metrics_port, metrics):
            candidate = Candidate(args.identity, args.lease_namespace, args.lease_name)
            await lead(kube, candidate, lambda: operate(kube, cluster, metrics, args, stop), stop)
    log.info("stopped")


async def operate(
    kube: Kube,
    cluster: Cluster,
    metrics: OperatorMetrics,
    args: argparse.Namespace,
    stop: asyncio.Event,
) -> None:
    """What the leader does, until told to stop. Whatever ends it ends the process."""
    log.info("leading as %s on %s", args.identity, cluster)
    indexed = Indexed()
    async with Routers() as routers:
        images = Images(
            args.engine_image,
            args.router_image,
            args.vllm_connector_image,
            cluster_chooses_user=args.cluster_chooses_user,
        )
        reconciler = Reconciler(kube, indexed, cluster, routers, metrics, images, args.limits)
        queue = WorkQueue(reconciler.reconcile, concurrency=CONCURRENT_PASSES, batch_s=BATCH_S)
        metrics.watch_gauge("queue_length", "Services that wait for a worker.", queue.backlog)
        handlers = registry(cluster, indexed, queue.add)
        tasks: tuple[asyncio.Task[Any], ...] = (
            asyncio.create_task(queue.run(), name="work queue"),
            asyncio.create_task(watch(handlers, settings(cluster), args, stop), name="watches"),
            asyncio.create_task(stop.wait(), name="stop"),
        )
        metrics.leader.set(1)
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            metrics.leader.set(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()


async def watch(
    handlers: kopf.OperatorRegistry,
    chosen: kopf.OperatorSettings,
    args: argparse.Namespace,
    stop: asyncio.Event,
) -> None:
    """Have kopf watch, until cancelled."""
    ours = asyncio.all_tasks()
    watches = await kopf.spawn_tasks(
        registry=handlers,
        settings=chosen,
        standalone=True,
        # kopf would look for the user's name, which a container may not have.
        identity=args.identity,
        clusterwide=not args.namespaces,
        namespaces=args.namespaces,
    )
    _stop_on_signals(stop)  # kopf has just taken them for itself
    await kopf.run_tasks(watches, ignored=ours)


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def set_up_logging(level: str) -> None:
    """JSON lines on stderr, ours and those of the libraries."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter(
            "{asctime}{levelname}{name}{message}",
            style="{",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger"},
        )
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # kopf tells of every object that it sees.
    logging.getLogger("kopf").setLevel(logging.WARNING)


def main() -> None:
    # Until the loop has its own handlers: process 1 of a container ignores what has none.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(prog="python -m diptych_operator", description=__doc__)
    parser.add_argument(
        "--namespaces",
        type=lambda text: [name for name in text.split(",") if name],
        default=[],
        help="namespaces to serve, with commas; left out, the whole cluster",
    )
    parser.add_argument(
        "--lease-namespace",
        default=os.environ.get("POD_NAMESPACE", "default"),
        help="where the Lease is by which one of several operators leads",
    )
    parser.add_argument("--lease-name", default="diptych-operator")
    parser.add_argument(
        "--identity",
        default=os.environ.get("POD_NAME") or f"{socket.gethostname()}-{secrets.token_hex(4)}",
        help="unique name of this operator in the election; two of one name would both lead",
    )
    parser.add_argument("--metrics-host", default="0.0.0.0", help="address of the port below")
    parser.add_argument(
        "--metrics-port", type=int, default=8080, help="port of /metrics, /healthz and /readyz"
    )
    for component, field, default in (
        ("engine", "engine.image", Images().engine),
        ("router", "router.image", Images().router),
        ("vllm-connector", "transfer.connectorImage", Images().vllm_connector),
    ):
        parser.add_argument(
            f"--{component}-image",
            default=default,
            help=f"image of services that leave spec.{field} out; %(default)s",
        )
    parser.add_argument(
        "--limits",
        type=lambda text: msgspec.json.decode(text, type=Allowed),
        metavar="JSON",
        help="what services may ask for, as the chart's limits.allow; left out, anything",
    )
    parser.add_argument(
        "--cluster-chooses-user",
        action="store_true",
        help="pods name no user and no group, as OpenShift's constraints want it",
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    args = parser.parse_args()
    set_up_logging(args.log_level)
    try:
        asyncio.run(run(args))
    except (DiptychError, OSError, ValueError) as exc:
        log.error("%s", exc)
        sys.exit(1)


if __name__ == "__main__":
    main()
