"""What an operator costs with many services: memory, CPU at rest, requests to the API server.

    KUBECONFIG=... python -m benchmarks.operator_scale --services 100 1000

Starts an operator of its own in a namespace of its own, adds suspended services (all objects, no
pods) up to each number, waits until all have their status, and then watches for a while. The CRD
has to be installed, and no other operator may serve the namespace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

import psutil
from prometheus_client.parser import text_string_to_metric_families

from diptych_operator.api.service import API_VERSION, KIND
from diptych_operator.kube.client import Kube
from diptych_operator.kube.leader import RETRY_S

NAMESPACE = "diptych-scale"
METRICS_PORT = 18990
CREATORS = 16
DEADLINE_S = 1800.0
QUIET_S = 30.0


@dataclass(frozen=True, slots=True)
class Figures:
    services: int
    seconds_to_reconcile: float
    """From the first service added in this round to the status of the last."""
    rss_mib: float
    cpu_percent_at_rest: float
    """CPU time at rest, in percent of one core."""
    requests_per_hour_at_rest: float
    """Without watches: leases and whatever else the operator sends."""
    requests_per_service: float
    """Sent to bring one service from nothing to its status."""


async def measure(numbers: list[int], rest_s: float) -> list[Figures]:
    found: list[Figures] = []
    async with await Kube.connect() as kube, namespace(kube), operator() as process:
        have = 0
        for number in sorted(numbers):
            before = operator_metrics()["diptych_operator_api_requests"]
            started = time.monotonic()
            await add_services(kube, have, number)
            await settled(number)
            seconds = time.monotonic() - started
            sent = operator_metrics()["diptych_operator_api_requests"] - before
            added, have = number - have, number
            await quiet()
            found.append(await at_rest(process, have, rest_s, seconds, sent / added))
            print(json.dumps(asdict(found[-1])), flush=True)
    return found


async def at_rest(
    process: psutil.Process, services: int, rest_s: float, seconds: float, each: float
) -> Figures:
    requests = operator_metrics()["diptych_operator_api_requests"]
    cpu = process.cpu_times()
    await asyncio.sleep(rest_s)
    spent = process.cpu_times()
    per_hour = 3600 / rest_s
    return Figures(
        services=services,
        seconds_to_reconcile=round(seconds, 1),
        rss_mib=round(process.memory_info().rss / 2**20, 1),
        cpu_percent_at_rest=round(
            100 * (spent.user + spent.system - cpu.user - cpu.system) / rest_s, 2
        ),
        requests_per_hour_at_rest=round(
            (operator_metrics()["diptych_operator_api_requests"] - requests) * per_hour
        ),
        requests_per_service=round(each, 1),
    )


async def add_services(kube: Kube, first: int, last: int) -> None:
    limit = asyncio.Semaphore(CREATORS)

    async def add(index: int) -> None:
        async with limit:
            await kube.create(
                {
                    "apiVersion": API_VERSION,
                    "kind": KIND,
                    "metadata": {"name": f"service-{index:05d}", "namespace": NAMESPACE},
                    "spec": {
                        "model": {"uri": "dummy://"}, "prefill": {}, "decode": {}, "suspend": True,
                    },
                }
            )  # fmt: skip

    await asyncio.gather(*(add(index) for index in range(first, last)))


async def settled(services: int) -> None:
    """Wait until the operator has reported on every service and has nothing left to do."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        metrics = operator_metrics()
        if metrics.get('diptych_operator_services{"Available"}', 0) >= services:
            return
        await asyncio.sleep(1)
    raise TimeoutError(f"{services} services were not reconciled in {DEADLINE_S:g} s")


async def quiet() -> None:
    """Wait until requests are those of the Lease only: other controllers may touch new objects."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        before = operator_metrics()["diptych_operator_api_requests"]
        await asyncio.sleep(QUIET_S)
        if operator_metrics()["diptych_operator_api_requests"] - before <= QUIET_S / RETRY_S + 1:
            return
    raise TimeoutError(f"the operator was still busy after {DEADLINE_S:g} s")


def operator_metrics() -> dict[str, float]:
    """Sums over labels, except that services are kept by condition."""
    with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name
            if "condition" in sample.labels:
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
        "--namespaces", NAMESPACE, "--lease-namespace", NAMESPACE, "--log-level", "warning",
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
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if operator_metrics()["diptych_operator_leader"] == 1:
                return
        except OSError:
            pass  # not there yet
        await asyncio.sleep(0.5)
    raise TimeoutError("the operator did not come to lead within 60 s")


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
