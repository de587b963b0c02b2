"""What users notice while pods are killed, pools scaled, revisions rolled and keys changed.

Each test lets traffic flow, disrupts, waits until the service is whole again, and counts. Where the
design promises it, no request may fail or come back with another text; nothing is sent twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from e2e.bench import AFTER, POOL, Bench
from e2e.kubectl import Kubectl, Object, wait_for
from e2e.service import READY_TIMEOUT_S

CONCURRENCY = 3
DRAIN_TIMEOUT_S, HALF_WAY_S = 60.0, 20.0
"""How long a node is drained where there are others, and where the pods have no other."""
TWO = {**POOL, "replicas": 2}


@contextmanager
def cordoned(kubectl: Kubectl, node: str) -> Iterator[None]:
    """Whatever happens inside, the node takes pods again afterwards."""
    try:
        yield
    finally:
        kubectl.run("uncordon", node)


@pytest.fixture(scope="module")
def bench(unapplied: Bench, example: Object) -> Bench:
    """The example with two pods of everything."""
    bench = replace(unapplied, concurrency=CONCURRENCY)
    router = {**example["spec"].get("router", {}), "replicas": 2}
    bench.install(example, "apply two of each", prefill=TWO, decode=TWO, router=router)
    return bench


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
    def disruption() -> None:
        before = bench.service.engines()
        bench.service.annotate("diptych.dev/rotate-secrets", str(time.time_ns()))
        wait_for(
            "no engine with the old keys",
            lambda: not before & bench.service.engines(),
            2 * READY_TIMEOUT_S,
        )
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
    seconds = DRAIN_TIMEOUT_S if len(bench.kubectl.list("nodes")) > 1 else HALF_WAY_S
    emptied: list[bool] = []

    def disruption() -> None:
        with cordoned(bench.kubectl, node):
            labels = "app.kubernetes.io/name in (diptych, diptych-operator)"
            emptied.append(bench.kubectl.drain(node, labels, seconds))
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
    bench.measured("delete two of each", started)
