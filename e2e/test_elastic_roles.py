"""Engines that take the other pool's role as the load needs it, and what users notice of it."""

from __future__ import annotations

import pytest
from e2e.bench import POOL, Bench
from e2e.kubectl import Object, wait_for

TURN_TIMEOUT_S = 120.0
TURNED = "took the other pool's role"


@pytest.fixture(scope="module")
def bench(unapplied: Bench, example: Object) -> Bench:
    """A first token sooner than any engine has it, and later tokens that any engine has in time.
    Nobody is refused for them: the policy foresees nothing."""
    router = {"policy": "leastLoaded", "disaggregate": "always", "elasticRoles": 1}
    unapplied.install(
        example,
        "apply with elastic roles",
        prefill=POOL,
        decode={**POOL, "replicas": 2},
        router={**example["spec"].get("router", {}), **router},
        slo={"ttftMs": 1, "interTokenMs": 60_000},
    )
    return unapplied


@pytest.mark.slow
def test_a_decode_engine_computes_prompts_when_these_are_late(bench: Bench) -> None:
    service = bench.service

    def disruption() -> None:
        wait_for(
            "a decode engine takes the other role",
            lambda: TURNED in service.says("DecodeReady", "True", "PodsReady", TURN_TIMEOUT_S),
            TURN_TIMEOUT_S,
        )
        service.settled()

    assert bench.disrupt("a decode engine turns to prefill", disruption).failures == {}
    assert len(service.ready_pods("decode")) == 2
    assert service.condition("KVTransferVerified") == "True"
