"""What users notice while pods are killed, pools scaled, revisions rolled and keys changed.

Each test lets traffic flow, disrupts, waits until the service is whole again, and counts. Where the
design promises it, no request may fail or come back with another text; nothing is sent twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest
from e2e.chart import Chart
from e2e.figures import ARTIFACTS, Figures
from e2e.kubectl import Kubectl, KubectlError, Object, wait_for
from e2e.service import READY_TIMEOUT_S, Service
from e2e.traffic import Client, Report

CONCURRENCY = 3
MAX_TOKENS = 24
BEFORE, AFTER = 4, 8
"""Requests that must have ended before a disruption, and after it."""
PACE_TIMEOUT_S = 180.0
DRAIN_TIMEOUT_S = 60.0
ENGINE_RESOURCES = {"limits": {"cpu": "1"}, "requests": {"cpu": "100m", "memory": "512Mi"}}
"""One thread for each engine, and small enough that a laptop's node holds six."""


@dataclass
class Bench:
    """The service under test and all that disturbs it."""

    service: Service
    client: Client
    chart: Chart
    kubectl: Kubectl
    figures: Figures

    def disrupt(self, row: str, disruption: Callable[[], None]) -> Report:
        """Count what becomes of the traffic; the disruption returns once the service is whole."""
        traffic = self.client.traffic(
            self.service.url,
            self.service.name,
            concurrency=CONCURRENCY,
            max_tokens=MAX_TOKENS,
            record=ARTIFACTS / f"{row.replace(' ', '-')}.jsonl",
        )
        with traffic:
            traffic.wait_served(BEFORE, PACE_TIMEOUT_S)
            started = time.monotonic()
            disruption()
            seconds = round(time.monotonic() - started, 1)
            traffic.wait_served(AFTER, PACE_TIMEOUT_S)
        self.figures.add(row, {"seconds": seconds, **traffic.report.figures()})
        return traffic.report

    def replaced(self, role: str, name: str) -> None:
        """Wait until the pod is gone or dying, and its pool has its two ready pods again."""
        wait_for(
            f"{name} has a successor",
            lambda: name not in [pod["metadata"]["name"] for pod in self.service.pods(role)],
            60,
        )
        self.service.has_ready(role, 2)

    def kill(self, role: str) -> None:
        """End a pod without a word: every process that a signal can reach, then the pod."""
        name = self.service.ready_pods(role)[0]
        with suppress(KubectlError):  # the shell that kills is killed too
            self.kubectl.exec(name, "sh", "-c", "kill -9 -1")
        self.kubectl.delete("pod", name, grace_s=0)
        self.replaced(role, name)

    def dismiss(self, role: str) -> None:
        """Delete a pod as Kubernetes does it in a scale-down or an eviction."""
        name = self.service.ready_pods(role)[0]
        self.kubectl.delete("pod", name)
        self.replaced(role, name)


@contextmanager
def cordoned(kubectl: Kubectl, node: str) -> Iterator[None]:
    """Whatever happens inside, the node takes pods again afterwards."""
    try:
        yield
    finally:
        kubectl.run("uncordon", node)


@pytest.fixture(scope="module")
def bench(
    smollm2: Service,
    client: Client,
    chart: Chart,
    kubectl: Kubectl,
    figures: Figures,
    example: Object,
) -> Bench:
    """The example with two pods of everything."""
    spec = example["spec"]
    pool = {"replicas": 2, "resources": ENGINE_RESOURCES}
    started = time.monotonic()
    smollm2.apply(
        {
            **example,
            "spec": {
                **spec,
                "engine": {**spec.get("engine", {}), "kvCacheMemory": "256Mi"},
                "prefill": pool,
                "decode": pool,
                "router": {**spec.get("router", {}), "replicas": 2},
            },
        }
    )
    smollm2.settled()
    figures.add("apply two of each", {"seconds": round(time.monotonic() - started, 1)})
    return Bench(smollm2, client, chart, kubectl, figures)


def test_undisturbed(bench: Bench) -> None:
    assert bench.disrupt("nothing", lambda: None).failures == {}


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_a_pod_is_deleted(bench: Bench, role: str) -> None:
    report = bench.disrupt(f"delete a {role} pod", lambda: bench.dismiss(role))
    assert report.failures == {}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_is_killed(bench: Bench, role: str) -> None:
    report = bench.disrupt(f"kill a {role} pod", lambda: bench.kill(role))
    assert report.failures == {}


def test_a_router_is_killed(bench: Bench) -> None:
    """Streams die with their router: what runs through it is lost, the rest is not."""
    report = bench.disrupt("kill a router pod", lambda: bench.kill("router"))
    assert len(report.failed) <= CONCURRENCY + AFTER


def test_the_operators_are_killed(bench: Bench) -> None:
    def disruption() -> None:
        names = [pod["metadata"]["name"] for pod in bench.chart.pods()]
        bench.kubectl.delete("pod", *names, grace_s=0)
        bench.chart.ready(READY_TIMEOUT_S)

    assert bench.disrupt("kill the operators", disruption).failures == {}


def test_both_pools_scale_up_and_down(bench: Bench) -> None:
    def disruption() -> None:
        for replicas in (3, 2):
            sizes = {"prefill": {"replicas": replicas}, "decode": {"replicas": replicas}}
            bench.service.patch_spec(sizes)
            for role in sizes:
                bench.service.has_ready(role, replicas)
        bench.service.settled()

    assert bench.disrupt("scale up and down", disruption).failures == {}


def test_a_new_revision_and_back(bench: Bench) -> None:
    first = bench.service.revision()
    served: list[str] = []

    def disruption() -> None:
        for max_num_seqs in (48, None):
            bench.service.patch_spec({"engine": {"maxNumSeqs": max_num_seqs}})
            bench.service.settled(2 * READY_TIMEOUT_S)
            served.append(bench.service.revision())

    assert bench.disrupt("roll out and back", disruption).failures == {}
    assert served[0] != first
    assert served[1] == first


def test_the_keys_are_rotated(bench: Bench) -> None:
    def engines() -> set[str]:
        pods = bench.service.pods("prefill") + bench.service.pods("decode")
        return {pod["metadata"]["uid"] for pod in pods}

    def disruption() -> None:
        before = engines()
        bench.service.annotate("diptych.dev/rotate-secrets", str(time.time_ns()))
        wait_for("no engine with the old keys", lambda: not before & engines(), 2 * READY_TIMEOUT_S)
        bench.service.settled()

    assert bench.disrupt("rotate the keys", disruption).failures == {}


def test_the_chart_is_upgraded(bench: Bench) -> None:
    def disruption() -> None:
        bench.chart.install(podAnnotations__upgraded="yes")
        bench.service.settled()

    assert bench.disrupt("upgrade the chart", disruption).failures == {}


def test_a_node_is_drained(bench: Bench) -> None:
    """Where there is one node only, PodDisruptionBudgets stop the drain half-way; that is fine."""
    node = bench.service.pods("decode")[0]["spec"]["nodeName"]
    emptied: list[bool] = []

    def disruption() -> None:
        with cordoned(bench.kubectl, node):
            labels = "app.kubernetes.io/name in (diptych, diptych-operator)"
            emptied.append(bench.kubectl.drain(node, labels, DRAIN_TIMEOUT_S))
        for role in ("prefill", "decode", "router"):
            bench.service.has_ready(role, 2)
        bench.service.settled()

    bench.disrupt("drain the node", disruption)
    bench.figures.add("drain the node", {"emptied": "yes" if emptied == [True] else "no"})
    assert bench.service.chat("Are you back?")["choices"]


def test_the_service_is_deleted(bench: Bench) -> None:
    started = time.monotonic()
    bench.service.delete()
    bench.service.gone()
    bench.figures.add("delete two of each", {"seconds": round(time.monotonic() - started, 1)})
