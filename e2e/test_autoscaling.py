"""Pools that follow the load, down to nothing, and a request that wakes them."""

from __future__ import annotations

import time

import pytest
from e2e.bench import ENGINE_RESOURCES, Bench
from e2e.kubectl import Object
from e2e.service import ENGINE_ROLES, READY_TIMEOUT_S

PATIENCE_S = 10
"""scaleDownSeconds."""
SCALING_TIMEOUT_S = 120.0
HOLD_S = 120
QUESTION = "In one word: what do bees make?"
LEAST, MOST = 1, 2
DECODE = {"kvUtilization": 1}
"""Percent, the least there is: of 256 MiB in bfloat16 it is 116 tokens. Two requests use more."""


@pytest.fixture(scope="module")
def bench(unapplied: Bench, example: Object) -> Bench:
    """One pod in each pool; decode may grow."""
    bounds = {"minReplicas": LEAST, "maxReplicas": MOST, "scaleDownSeconds": PATIENCE_S}
    unapplied.install(
        example,
        "apply with autoscaling",
        prefill={"autoscaling": bounds, "resources": ENGINE_RESOURCES},
        decode={"autoscaling": {**bounds, **DECODE}, "resources": ENGINE_RESOURCES},
        router={**example["spec"].get("router", {}), "holdSeconds": HOLD_S},
    )
    return unapplied


def test_decode_grows_with_the_load_and_shrinks_without(bench: Bench) -> None:
    """Prefill, which is not short, keeps its one pod."""
    service = bench.service

    def disruption() -> None:
        service.has_ready("decode", MOST, SCALING_TIMEOUT_S)
        service.settled()
        assert len(service.pods("prefill")) == LEAST

    assert bench.disrupt("load adds a decode pod", disruption).failures == {}
    started = time.monotonic()
    service.has_ready("decode", LEAST, PATIENCE_S + SCALING_TIMEOUT_S)
    bench.measured("rest takes it away", started)
    assert service.status()["decode"]["desired"] == LEAST


def test_an_idle_service_sleeps_and_a_request_wakes_it(bench: Bench) -> None:
    service = bench.service
    answer = service.chat(QUESTION)["choices"]
    started = time.monotonic()
    to_zero = {"autoscaling": {"minReplicas": 0}}
    service.patch_spec({"prefill": to_zero, "decode": to_zero})
    said = service.says("Available", "True", "Asleep", PATIENCE_S + SCALING_TIMEOUT_S)
    assert f"held up to {HOLD_S} s" in said
    for role in ENGINE_ROLES:
        service.has_ready(role, 0)
    bench.measured("fall asleep", started)
    assert service.condition("Degraded") == "False"
    assert len(service.ready_pods("router")) == 1

    started = time.monotonic()
    assert service.chat(QUESTION)["choices"] == answer
    bench.measured("wake up and answer", started)
    service.says("Available", "True", "Serving", READY_TIMEOUT_S)
