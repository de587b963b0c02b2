"""The operator: `python -m diptych_operator [--namespaces a,b]`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import kopf
from pythonjsonlogger.json import JsonFormatter

from diptych_operator.api.base import ServiceKey
from diptych_operator.api.names import ROUTE_SUFFIX
from diptych_operator.api.route import ROUTE_KIND
from diptych_operator.api.scaler import SCALER_KIND
from diptych_operator.api.service import API_VERSION, KIND
from diptych_operator.arguments import images, parser
from diptych_operator.kube.client import ApiError, Kube
from diptych_operator.kube.cluster import (
    HTTP_ROUTE_API,
    HTTP_ROUTE_KIND,
    POOL_API,
    POOL_KIND,
    SET_API,
    SET_KIND,
    Cluster,
    read_cluster,
)
from diptych_operator.kube.indexed import Indexed
from diptych_operator.kube.leader import Candidate, lead, leases_of
from diptych_operator.kube.liveness import WatchLiveness
from diptych_operator.kube.rivals import Rivals
from diptych_operator.kube.watch import registry, settings, watched_paths
from diptych_operator.kube.work_queue import WorkQueue
from diptych_operator.metrics import OperatorMetrics, serve_probes
from diptych_operator.reconcile import Reconciler
from diptych_operator.routers import Routers
from diptych_operator.routes import Routes
from diptych_operator.upgrades import Upgrades
from diptych_protocol import DiptychError
from diptych_protocol.threads import resolve_struct_types

log = logging.getLogger("diptych_operator")

CONCURRENT_PASSES = 64
"""Most of a pass is waiting: a router that is out of reach delays it by seconds."""
END_S = 5.0
"""How long the process waits at the end for the leader's tasks before it leaves them behind."""
LOOK_S = 5.0
"""How often the operator checks that the CRD exists and that the watches still get answers."""
FURTHER = (
    (API_VERSION, SCALER_KIND), (API_VERSION, ROUTE_KIND), (SET_API, SET_KIND),
    (POOL_API, POOL_KIND), (HTTP_ROUTE_API, HTTP_ROUTE_KIND),
)  # fmt: skip
"""Kinds that it watches where the cluster has them."""
FURTHER_S = 300.0
"""How often it looks whether one that was missing is there: messages say five minutes."""
BATCH_S = 0.2
"""Events of one service that arrive within this time cause one pass."""


async def run(args: argparse.Namespace) -> None:
    """Stand for election, lead, and return on SIGTERM. Raises `DiptychError`."""
    metrics = OperatorMetrics()
    stop = asyncio.Event()
    _stop_on_signals(stop)
    async with await Kube.connect() as kube:
        metrics.watch_gauge("api_requests", "Requests to the API server.", lambda: kube.requests)
        leader = Leader(kube, metrics, args, stop)
        probes = serve_probes(
            args.metrics_host, args.metrics_port, metrics, leader.faults, leader.unready
        )
        async with probes:
            candidate = Candidate(args.identity, args.release, leases_of(args.namespaces))
            await lead(kube, candidate, leader.operate, stop, leader.hindered)
    log.info("stopped")


class Leader:
    """What an operator does while it leads, and what its probes report."""

    def __init__(
        self, kube: Kube, metrics: OperatorMetrics, args: argparse.Namespace, stop: asyncio.Event
    ) -> None:
        self._kube, self._metrics, self._args, self._stop = kube, metrics, args, stop
        self._alive = WatchLiveness()
        self._further: set[str] = set()
        """Those of `FURTHER` that are watched."""
        self._queue: WorkQueue[ServiceKey] | None = None
        metrics.watch_gauge(
            "queue_length",
            "Services that wait for a worker.",
            lambda: self._queue.backlog() if self._queue else 0,
        )

    def hindered(self, words: str) -> None:
        self._alive.hindrance = words

    def faults(self) -> list[str]:
        return self._alive.faults(time.monotonic(), self._standstill_s())

    def unready(self) -> list[str]:
        return self._alive.unready(time.monotonic(), self._standstill_s())

    def _standstill_s(self) -> float:
        return self._queue.standstill_s() if self._queue else 0.0

    async def operate(self, namespaces: Sequence[str]) -> None:
        """Serve these namespaces, or all if none are given, until `stop` is set; the process ends
        with it. Raises `DiptychError`."""
        self._args.namespaces = list(namespaces)
        if (cluster := await self._cluster_with_crd()) is None:
            return
        log.info("leading as %s on %s", self._args.identity, cluster)
        watched = watched_paths(cluster, self._args.namespaces)
        indexed = Indexed(watched)
        async with Routers(self._has_request) as routers:
            args = self._args
            rivals = Rivals(self._kube, serves_cluster=not self._args.namespaces)
            reconciler = Reconciler(
                self._kube, indexed, cluster, routers, self._metrics, images(args), rivals,
                args.limits, upgrades=Upgrades(args.max_concurrent_rollouts, args.rollout_windows),
            )  # fmt: skip
            routes = Routes(self._kube, indexed, cluster, images(args), rivals, args.limits)

            async def reconcile(key: ServiceKey) -> float | None:
                owner = routes if key[1].endswith(ROUTE_SUFFIX) else reconciler
                return await owner.reconcile(key)

            queue = self._queue = WorkQueue(
                reconcile, concurrency=CONCURRENT_PASSES, batch_s=BATCH_S
            )

            async def work() -> None:
                await indexed.is_whole.wait()
                await queue.run()

            self._alive.expect(watched, time.monotonic())
            handlers = registry(cluster, self._args.namespaces, indexed, queue.add, self._answered)
            tasks: tuple[asyncio.Task[Any], ...] = (
                asyncio.create_task(work(), name="work queue"),
                asyncio.create_task(self._end_when_deaf(), name="liveness"),
                asyncio.create_task(self._end_when_more_is_served(), name="further kinds"),
                asyncio.create_task(
                    watch(handlers, settings(cluster), self._args, self._stop), name="watches"
                ),
                asyncio.create_task(self._stop.wait(), name="stop"),
            )
            self._metrics.leader.set(1)
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._metrics.leader.set(0)
                for task in tasks:
                    task.cancel()
                # kopf logs in for ever if it is ended by a kind that is no longer there.
                await asyncio.wait(tasks, timeout=END_S)
            for task in done:
                task.result()

    async def _cluster_with_crd(self) -> Cluster | None:
        """What the cluster can do, once it serves our CRD; None if told to stop before."""
        while not await self._kube.can_list(API_VERSION, KIND, self._args.namespaces):
            words = f"the cluster does not serve {API_VERSION}, or not to us: apply the CRD, or "
            words += "give the operator the rights of the chart's roles"
            if words != self._alive.hindrance:
                log.warning("%s", words)
            self._alive.hindrance = words
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), LOOK_S)
                return None
        self._alive.hindrance = ""
        self._further = {kind for api, kind in FURTHER if await self._watchable(api, kind)}
        return read_cluster(
            *await self._kube.version(),
            await self._kube.group_versions(),
            self._args.release.partition("/")[0],
            has_pool_scalers=SCALER_KIND in self._further,
            has_gateways={POOL_KIND, HTTP_ROUTE_KIND} <= self._further,
            has_routes=ROUTE_KIND in self._further,
            has_sets=SET_KIND in self._further,
        )

    async def _watchable(self, api: str, kind: str) -> bool:
        return await self._kube.can_list(api, kind, self._args.namespaces)

    async def _end_when_more_is_served(self) -> None:
        """Raises `DiptychError` once a kind can be watched that could not: the next life of the
        process watches it."""
        while True:
            await asyncio.sleep(FURTHER_S)
            found = set[str]()
            with contextlib.suppress(ApiError):
                for api, kind in FURTHER:
                    if kind not in self._further and await self._watchable(api, kind):
                        found.add(kind)
            if found:
                raise DiptychError(f"{' and '.join(sorted(found))} can be watched: begin anew")

    def _has_request(self, key: ServiceKey) -> None:
        if self._queue is not None:
            self._queue.add(key)

    def _answered(self, path: str, status: int) -> None:
        self._alive.answered(path, status, time.monotonic())

    async def _end_when_deaf(self) -> None:
        """Raises `DiptychError` once another life of the process may mend what is wrong."""
        while not (faults := self.faults()):
            await asyncio.sleep(LOOK_S)
        raise DiptychError(f"it does not serve: {'; '.join(faults)}")


async def watch(
    handlers: kopf.OperatorRegistry,
    chosen: kopf.OperatorSettings,
    args: argparse.Namespace,
    stop: asyncio.Event,
) -> None:
    """Run kopf's watches until cancelled."""
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
    """Write our log lines and those of the libraries to stderr as JSON."""
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
    resolve_struct_types()
    args = parser().parse_args()
    set_up_logging(args.log_level)
    status = 0
    try:
        asyncio.new_event_loop().run_until_complete(run(args))
    except (DiptychError, OSError, ValueError) as exc:
        log.error("%s", exc)
        status = 1
    logging.shutdown()
    os._exit(status)  # what was left behind is not waited for; see END_S


if __name__ == "__main__":
    main()
