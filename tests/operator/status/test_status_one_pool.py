"""The status of a service with one pool, and of one that changes to it or from it."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_kit.crds import inference_service, vllm_spec

from diptych_operator.api.images import Images
from diptych_operator.api.parse import parse_object
from diptych_operator.api.pools import Counts
from diptych_operator.api.service import InferenceService
from diptych_operator.api.status import Status
from diptych_operator.executor import open_work
from diptych_operator.plan import Phase, Step
from diptych_operator.revision import revision
from diptych_operator.status.observed import DeploymentView, Observed, PodView
from diptych_operator.status.status import build_status
from diptych_protocol.admin import EngineReport, RouterReport

OLD = "aaaaaaaa"


def parsed(spec: dict[str, Any]) -> InferenceService:
    return parse_object(inference_service(spec), Images())


VLLM = parsed(vllm_spec(decode={"replicas": 1}))
OURS = parsed({})


def pods(revision: str, *roles: str, ready: bool = True) -> list[PodView]:
    return [
        PodView(f"{role}-{revision}", role, "" if role == "router" else revision, "Running",
                ready=ready, terminating=False)
        for role in roles
    ]  # fmt: skip


def deployments(revision: str, *roles: str) -> list[DeploymentView]:
    return [DeploymentView(f"{role}-{revision}", role, revision, 1, 1, 1, True) for role in roles]


def report(revision: str) -> RouterReport:
    engine = EngineReport(
        engine_id="10.0.0.7:8000", role="decode", revision=revision, usable=True, listed=True,
        draining=False, verified=False, open_tokens=0, num_running=0, num_waiting=0,
        queued_prompt_tokens=0, kv_usage=0.0, leases_held=0, blocks_held=0, loads_failed=0,
        leases_expired=0, stale_reads_refused=0,
    )  # fmt: skip
    return RouterReport(
        ready=True, reason="", open_requests=0, held_requests=0, serving_revisions=[],
        engines=[engine], canaries=[],
    )  # fmt: skip


def status_of(
    service: InferenceService,
    shown: list[PodView],
    kinds: list[DeploymentView],
    desired: Counts,
    phase: Phase = Phase.Idle,
) -> Status:
    target = revision(service)
    observed = Observed(tuple(kinds), tuple(shown), (report(target),))
    return build_status(
        service, observed, Step({target: desired}, (), phase, "", ()), Status(),
        target=target, desired=desired, now="2026-11-24T12:00:00Z",
    )  # fmt: skip


def says(status: Status) -> dict[str, tuple[str, str]]:
    return {each.type: (each.status, each.reason) for each in status.conditions}


def test_one_pool_is_enough_and_no_canary_is_waited_for() -> None:
    name = revision(VLLM)
    shown = [*pods(name, "decode"), *pods("", "router")]
    status = status_of(VLLM, shown, deployments(name, "decode"), Counts(0, 1))
    assert says(status) == {
        "Available": ("True", "Serving"),
        "Progressing": ("False", "Idle"),
        "PrefillReady": ("True", "OnePool"),
        "DecodeReady": ("True", "PodsReady"),
        "RouterReady": ("True", "PodsReady"),
        "KVTransferVerified": ("Unknown", "OnePool"),
        "Degraded": ("False", "AsExpected"),
        "Ready": ("True", "Serving"),
        "Reconciling": ("False", "Idle"),
        "Stalled": ("False", "Idle"),
    }
    assert status.current_revision == name
    assert (status.prefill.summary, status.decode.summary) == ("0/0", "1/1")
    available = next(each for each in status.conditions if each.type == "Available")
    assert available.message == f"A router and the pool of revision {name} are ready."


def test_a_pool_that_starts_is_named_and_no_other() -> None:
    name = revision(VLLM)
    shown = [*pods(name, "decode", ready=False), *pods("", "router")]
    found = status_of(VLLM, shown, deployments(name, "decode"), Counts(0, 1), Phase.Progressing)
    assert says(found)["Available"] == ("False", "DecodeNotReady")
    assert found.current_revision == ""


@pytest.mark.parametrize(
    ("service", "old_roles"),
    [(VLLM, ("prefill", "decode")), (OURS, ("decode",))],
    ids=["to one pool", "from one pool"],
)
def test_an_old_revision_of_the_other_shape_still_answers(
    service: InferenceService, old_roles: tuple[str, ...]
) -> None:
    new = revision(service)
    starting = tuple(service.pools)
    shown = [*pods(OLD, *old_roles), *pods(new, *starting, ready=False), *pods("", "router")]
    kinds = [*deployments(OLD, *old_roles), *deployments(new, *starting)]
    desired = Counts(len(starting) - 1, 1)
    serving = parsed(vllm_spec()) if service is VLLM else parsed({"transfer": {"verify": "Warn"}})
    found = status_of(serving, shown, kinds, desired, Phase.Progressing)
    assert says(found)["Available"] == ("True", "Serving")


@pytest.mark.parametrize(("work", "found"), [({"svc-decode-x": 3}, 3), ({"svc-decode-y": 2}, 0)])
def test_the_work_of_a_pod_is_found_by_its_name(work: dict[str, int], found: int) -> None:
    assert open_work({"metadata": {"name": "svc-decode-x"}}, work) == found
