"""What an operator costs with many running services: memory, CPU, requests to the API server.

    KUBECONFIG=... python -m benchmarks.operator_scale --services 100 1000

Starts an operator of its own in a namespace of its own, and adds services of 1P1D that scale by
load up to each number. There is no kubelet: this program marks their pods ready, and answers for
all routers on their admin port. Once all services are available it watches for a while, loses a
pod, and lets another operator take over. The CRD has to be installed, no node may take the pods,
and no other operator may serve the namespace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import psutil
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from diptych_operator.api.names import ADMIN_PORT
from diptych_operator.api.service import API_VERSION, KIND
from diptych_operator.key_keeper import RECHECK_S
from diptych_operator.kube.client import ApiError, Kube, object_path
from diptych_operator.kube.leader import LEASE_S, RETRY_S
from diptych_protocol.admin import RouterReport

NAMESPACE = "diptych-scale"
METRICS_PORT = 18990
CREATORS = 16
DEADLINE_S = 2400.0
QUIET_S = 15.0
AVAILABLE = 'diptych_operator_services{"Available"}'
START_S = 2.0
"""How often pods are marked ready."""
LOSSES = 5
"""Pods that are lost, one after the other."""


@dataclass(frozen=True, slots=True)
class Figures:
    services: int
    rss_mib: float
    cores: float
    """CPU time of the operator's process a second, while only the load is watched."""
    requests_a_minute: float
    """Without watches: leases and whatever else the operator sends."""
    ms_a_pass: float
    """CPU time."""
    requests_per_service: float
    """Sent to bring one service from nothing to running."""
    seconds_to_tell: float
    """From the loss of a pod until the status says so, the worst of `LOSSES`."""
    seconds_to_replace: float
    """Until it says that the next pod is ready, which it is `START_S` after that at most."""
    takeover_seconds: float
    """CPU time of another operator until it has looked at all services."""
    takeover_requests: float
    """Sent by it meanwhile, for each service."""
    takeover_changes: int
    """Objects that are not as they were before the takeover."""


async def measure(numbers: list[int], rest_s: float) -> list[Figures]:
    found: list[Figures] = []
    async with await Kube.connect() as kube, namespace(kube), routers() as address:
        starting = asyncio.Lock()
        kubelet = asyncio.create_task(mark_pods_ready(kube, address, starting))
        have = 0
        for number in sorted(numbers):
            async with operator() as process:
                before = requests_sent()
                await add_services(kube, have, number)
                await settled(number)
                each = (requests_sent() - before) / (number - have)
                have = number
                await quiet(have)
                resting = await at_rest(process, rest_s)
                print(f"{have} services at rest: {resting}", flush=True)
                replaced = [await lose_a_pod(kube, starting, index) for index in range(LOSSES)]
                await quiet(have)
            told, ready = (max(seconds) for seconds in zip(*replaced, strict=True))
            taken = await take_over(kube, have)
            found.append(Figures(have, *resting, round(each, 1), told, ready, *taken))
            print(json.dumps(asdict(found[-1])), flush=True)
        kubelet.cancel()
    return found


async def at_rest(process: psutil.Process, rest_s: float) -> tuple[float, float, float, float]:
    """Memory, cores, requests a minute, and milliseconds a pass."""
    before, cpu = operator_metrics(), cpu_seconds(process)
    await asyncio.sleep(rest_s)
    after, spent = operator_metrics(), cpu_seconds(process) - cpu
    passes = after["diptych_operator_reconcile_total"] - before["diptych_operator_reconcile_total"]
    sent = after["diptych_operator_api_requests"] - before["diptych_operator_api_requests"]
    return (
        round(process.memory_info().rss / 2**20),
        round(spent / rest_s, 3),
        round(sent * 60 / rest_s),
        round(1000 * spent / max(1, passes), 2),
    )


async def lose_a_pod(kube: Kube, starting: asyncio.Lock, index: int) -> tuple[float, float]:
    """Delete a decode pod; the seconds until the status says so, and until there is another one.

    No pod starts before the status has told: a busy operator would see the next one at once.
    """
    name = f"service-{index:05d}"
    path = object_path("v1", "Pod", NAMESPACE)
    query = {"labelSelector": f"diptych.dev/service={name},app.kubernetes.io/component=decode"}
    (pod,) = (await kube.request("GET", path, query))["items"]

    async def seconds_until_ready(ready: int) -> float:
        while time.monotonic() < started + DEADLINE_S:
            raw = await kube.get(API_VERSION, KIND, NAMESPACE, name)
            if raw is not None and raw["status"]["decode"].get("ready", 0) == ready:
                return round(time.monotonic() - started, 2)
            await asyncio.sleep(0.02)
        raise TimeoutError(f"the status never told of {ready} ready pods")

    async with starting:
        started = time.monotonic()
        await kube.request(
            "DELETE", f"{path}/{pod['metadata']['name']}", None, {"gracePeriodSeconds": 0}
        )
        told = await seconds_until_ready(0)
    return told, await seconds_until_ready(1)


async def take_over(kube: Kube, services: int) -> tuple[float, float, int]:
    """CPU seconds, requests for each service, and changed objects."""
    before = await versions(kube)
    async with operator() as process:
        await settled(services)
        await quiet(services)
        figures = round(cpu_seconds(process), 1), round(requests_sent() / services, 1)
    after = await versions(kube)
    return *figures, sum(after.get(key) != version for key, version in before.items())


async def versions(kube: Kube) -> dict[tuple[str, str], str]:
    """The resourceVersion of each object that the operator writes."""
    kinds = [(API_VERSION, KIND), ("apps/v1", "Deployment")]
    kinds += [("networking.k8s.io/v1", "NetworkPolicy")]
    kinds += [("v1", kind) for kind in ("ConfigMap", "Service", "ServiceAccount", "Secret")]
    return {
        (kind, raw["metadata"]["name"]): raw["metadata"]["resourceVersion"]
        for version, kind in kinds
        for raw in (await kube.request("GET", object_path(version, kind, NAMESPACE)))["items"]
    }


def cpu_seconds(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def requests_sent() -> float:
    return operator_metrics()["diptych_operator_api_requests"]


async def add_services(kube: Kube, first: int, last: int) -> None:
    pool = {"podTemplate": {"spec": {"schedulerName": "nobody"}}}
    scaled = pool | {"autoscaling": {"minReplicas": 1, "maxReplicas": 4}}
    spec = {
        "model": {"uri": "dummy://"}, "router": pool, "prefill": scaled, "decode": scaled,
        "transfer": {"verify": "Off"},
    }  # fmt: skip

    async def add(index: int) -> None:
        meta = {"name": f"service-{index:05d}", "namespace": NAMESPACE}
        await kube.create({"apiVersion": API_VERSION, "kind": KIND, "metadata": meta, "spec": spec})

    await in_turns(add, range(first, last))


async def mark_pods_ready(kube: Kube, address: str, starting: asyncio.Lock) -> None:
    """Do a kubelet's work, for pods that no scheduler places; none while the lock is held."""
    path = object_path("v1", "Pod", NAMESPACE)

    async def start(raw: dict[str, Any]) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = [
            {"type": kind, "status": "True", "lastTransitionTime": now}
            for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        ]
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        body = {"status": status | {"conditions": ready, "startTime": now}}
        kind = "application/strategic-merge-patch+json"
        try:
            await kube.request(
                "PATCH", f"{path}/{raw['metadata']['name']}/status", None, body, kind
            )
        except ApiError as exc:
            if exc.status != 404:
                raise

    while True:
        async with starting:
            waiting = await kube.request("GET", path, {"fieldSelector": "status.phase=Pending"})
            await in_turns(start, waiting["items"])
        await asyncio.sleep(START_S)


async def in_turns(act: Callable[[Any], Any], things: Any) -> None:
    limit = asyncio.Semaphore(CREATORS)

    async def one(thing: Any) -> None:
        async with limit:
            await act(thing)

    await asyncio.gather(*(one(thing) for thing in things))


@asynccontextmanager
async def routers() -> AsyncIterator[str]:
    """An address where every router of every service answers that it idles."""
    report = msgspec.json.encode(
        RouterReport(
            ready=True, reason="", open_requests=0, held_requests=0, serving_revisions=[],
            engines=[], canaries=[],
        )
    )  # fmt: skip

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=report)

    app = web.Application()
    app.router.add_get("/admin/state", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; endpoints may not be on loopback
        address = str(probe.getsockname()[0])
    try:
        await web.TCPSite(runner, address, ADMIN_PORT).start()
        yield address
    finally:
        await runner.cleanup()


async def settled(services: int) -> None:
    """Wait until the operator finds every service available."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if operator_metrics().get(AVAILABLE, 0) >= services:
            return
        await asyncio.sleep(0.5)
    raise TimeoutError(f"{services} services were not available in {DEADLINE_S:g} s")


async def quiet(services: int) -> None:
    """Wait until requests are those at rest, for the Lease and to look at each Secret again, in
    turn by chance: other controllers may touch new objects."""
    most = QUIET_S / RETRY_S + 1 + 2 * services * QUIET_S / RECHECK_S
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        before = requests_sent()
        await asyncio.sleep(QUIET_S)
        if requests_sent() - before <= most:
            return
    raise TimeoutError(f"the operator was still busy after {DEADLINE_S:g} s")


def operator_metrics() -> dict[str, float]:
    """Sums over labels, except that services are kept by condition that holds."""
    with urllib.request.urlopen(
        f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=DEADLINE_S
    ) as answer:
        text = answer.read().decode()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name
            if "condition" in sample.labels and sample.labels.get("status") == "True":
                name += f'{{"{sample.labels["condition"]}"}}'
            totals[name] = totals.get(name, 0.0) + sample.value
    return totals


@asynccontextmanager
async def namespace(kube: Kube) -> AsyncIterator[None]:
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    await kube.request("POST", "/api/v1/namespaces", None, body)
    try:
        yield
    finally:
        await kube.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}")


@asynccontextmanager
async def operator() -> AsyncIterator[psutil.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "diptych_operator",
        "--namespaces", NAMESPACE, "--release", f"{NAMESPACE}/operator", "--log-level", "warning",
        "--metrics-host", "127.0.0.1", "--metrics-port", str(METRICS_PORT),
        env=os.environ,
    )  # fmt: skip
    try:
        await leading()
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


async def leading() -> None:
    deadline = time.monotonic() + LEASE_S + 60
    while time.monotonic() < deadline:
        try:
            if operator_metrics()["diptych_operator_leader"] == 1:
                return
        except OSError:
            pass  # not there yet
        await asyncio.sleep(0.5)
    raise TimeoutError("the operator did not come to lead")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operator_scale")
    parser.add_argument("--services", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--rest-seconds", type=float, default=120.0)
    args = parser.parse_args()
    found = asyncio.run(measure(args.services, args.rest_seconds))
    rows = [asdict(figures) for figures in found]
    print("| " + " | ".join(name.replace("_", " ") for name in rows[0]) + " |")
    print("|" + "---:|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


if __name__ == "__main__":
    main()
