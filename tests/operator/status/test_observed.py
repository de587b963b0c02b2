"""Raw Kubernetes objects, as API servers send them, turned into what decisions look at."""

from __future__ import annotations

from typing import Any

import pytest

from diptych_operator.api.names import REVISION_LABEL, ROLE_LABEL
from diptych_operator.api.pools import Counts
from diptych_operator.status.observed import (
    DeploymentView,
    PodView,
    deployment_view,
    observe,
    pod_view,
)

Raw = dict[str, Any]
REV = "aaaaaaaa"
NOW = "2026-11-21T07:00:00Z"


def deployment(
    *,
    role: str = "decode",
    revision: str = REV,
    wanted: int = 2,
    generation: int = 3,
    **status: Any,
) -> Raw:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": f"svc-{role}", "namespace": "ns", "generation": generation,
            "labels": {ROLE_LABEL: role, REVISION_LABEL: revision},
        },
        "spec": {"replicas": wanted},
        "status": {"observedGeneration": generation, **status},
    }  # fmt: skip


WHOLE: dict[str, Any] = {
    "replicas": 2,
    "updatedReplicas": 2,
    "readyReplicas": 2,
    "availableReplicas": 2,
}


def test_a_whole_deployment() -> None:
    assert deployment_view(deployment(**WHOLE)) == DeploymentView(
        "svc-decode", "decode", REV, wanted=2, ready=2, updated=2, settled=True
    )


@pytest.mark.parametrize(
    ("status", "ready", "settled"),
    [
        # One that was made a moment ago has an empty status.
        ({"observedGeneration": 0}, 0, False),
        # The controller has not seen the newest spec: what serves still serves, nothing is settled.
        ({**WHOLE, "observedGeneration": 2}, 2, False),
        # Kubernetes leaves out zeros.
        ({"replicas": 2, "updatedReplicas": 2, "unavailableReplicas": 2}, 0, True),
        # One pod of the newest template beside two older ones.
        ({"replicas": 3, "updatedReplicas": 1, "readyReplicas": 2}, 2, False),
        # All are of the newest template, one older pod is still there.
        ({"replicas": 3, "updatedReplicas": 2, "readyReplicas": 3}, 3, False),
        # More are ready than are wanted, while a smaller number settles.
        ({"replicas": 4, "updatedReplicas": 4, "readyReplicas": 4}, 4, False),
    ],
)
def test_ready_and_settled(status: Raw, ready: int, settled: bool) -> None:
    view = deployment_view(deployment(**status))
    assert (view.ready, view.settled) == (ready, settled)


def test_a_deployment_without_pods_is_settled_once_the_controller_says_so() -> None:
    assert deployment_view(deployment(wanted=0)).settled
    assert not deployment_view(deployment(wanted=0, observedGeneration=2)).settled


@pytest.mark.parametrize("status", ["True", "False"])
def test_pods_that_cannot_be_created(status: str) -> None:
    conditions = [
        {"type": "Available", "status": "False", "message": "not this one"},
        {"type": "ReplicaFailure", "status": status, "reason": "FailedCreate",
         "lastTransitionTime": NOW,
         "message": 'pods "svc-decode-1" is forbidden: exceeded quota: small'},
    ]  # fmt: skip
    view = deployment_view(deployment(conditions=conditions))
    refused = status == "True"
    assert view.failure == (conditions[1]["message"] if refused else "")
    assert view.refused_at == (NOW if refused else "")


def test_only_a_quota_that_is_full_gets_room_when_others_leave() -> None:
    condition = {
        "type": "ReplicaFailure", "status": "True", "lastTransitionTime": NOW,
        "message": 'pods "svc-decode-1" is forbidden: violates PodSecurity "restricted:latest"',
    }  # fmt: skip
    assert deployment_view(deployment(conditions=[condition])).refused_at == ""


def test_objects_without_labels_status_or_replicas() -> None:
    view = deployment_view({"metadata": {"name": "x", "generation": 1}, "spec": {}})
    assert view == DeploymentView("x", "", "", wanted=1, ready=0, updated=0, settled=False)
    pod = pod_view({"metadata": {"name": "x"}})
    assert pod == PodView("x", "", "", "Unknown", ready=False, terminating=False)


# --- pods -------------------------------------------------------------------------------------


def pod(
    name: str = "d0", role: str = "decode", revision: str = REV, *, phase: str = "Running",
    deleted: bool = False, **status: Any,
) -> Raw:  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name, "namespace": "ns",
            "labels": {ROLE_LABEL: role, REVISION_LABEL: revision},
            **({"deletionTimestamp": NOW} if deleted else {}),
        },
        "status": {"phase": phase, **status},
    }  # fmt: skip


def conditions(*, ready: bool, **more: Any) -> list[Raw]:
    return [
        {"type": "Initialized", "status": "True", "lastTransitionTime": NOW},
        {"type": "Ready", "status": "True" if ready else "False", "lastTransitionTime": NOW},
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": NOW, **more},
    ]


def container(name: str = "engine", restarts: int = 0, **states: Any) -> Raw:
    return {
        "name": name, "image": "diptych-engine:0.1.0", "restartCount": restarts,
        "state": states.get("state", {"running": {"startedAt": NOW}}),
        "lastState": states.get("last", {}),
    }  # fmt: skip


def ended(code: int, reason: str, message: str = "") -> Raw:
    told = {"message": message} if message else {}
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": NOW, **told}}


def test_a_ready_pod() -> None:
    raw = pod(conditions=conditions(ready=True), containerStatuses=[container()], podIP="10.0.0.7")
    assert pod_view(raw) == PodView(
        "d0", "decode", REV, "Running", ready=True, terminating=False, ip="10.0.0.7",
        image="diptych-engine:0.1.0",
    )  # fmt: skip


def test_a_pod_on_its_way_out_may_be_ready_still() -> None:
    view = pod_view(pod(deleted=True, conditions=conditions(ready=True)))
    assert view.ready
    assert view.terminating


def test_a_pod_that_fits_nowhere() -> None:
    said = "0/3 nodes are available: 3 Insufficient cpu."
    scheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": said,
    }
    view = pod_view(pod(phase="Pending", conditions=[scheduled]))
    assert view.unschedulable == said
    assert not view.ready


def test_another_reason_for_not_being_scheduled_is_none_to_tell_of() -> None:
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": "x"}
    assert pod_view(pod(phase="Pending", conditions=[gated])).unschedulable == ""


def test_the_init_container_that_waits_comes_before_what_waits_for_it() -> None:
    raw = pod(
        phase="Pending",
        initContainerStatuses=[
            container("model", 3, state={"waiting": {"reason": "CrashLoopBackOff", "message": "m"}},
                      last=ended(1, "Error", "diptych model: error: no such repository"))
        ],
        containerStatuses=[container(state={"waiting": {"reason": "PodInitializing"}})],
    )  # fmt: skip
    view = pod_view(raw)
    assert view.waiting_reason == "CrashLoopBackOff"
    assert (view.ended_container, view.last_exit_reason) == ("model", "Error")
    assert view.last_exit == "diptych model: error: no such repository"


def test_an_init_container_that_ended_well_is_passed_over() -> None:
    raw = pod(
        initContainerStatuses=[container("model", state=ended(0, "Completed", "done"))],
        containerStatuses=[
            container(restarts=2, state={"waiting": {"reason": "CrashLoopBackOff"}},
                      last=ended(137, "OOMKilled"))
        ],
    )  # fmt: skip
    view = pod_view(raw)
    assert (view.ended_container, view.last_exit_reason) == ("engine", "OOMKilled")
    assert view.waiting_reason == "CrashLoopBackOff"


@pytest.mark.parametrize(
    "states",
    [
        {"state": ended(1, "Error", "boom")},  # it has just ended
        {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "last": ended(1, "Error", "boom")},
        {"last": ended(1, "Error", "boom")},  # it runs again
    ],
)
def test_a_crash_tells_the_same_story_in_all_of_its_states(states: Raw) -> None:
    view = pod_view(pod(containerStatuses=[container(restarts=1, **states)]))
    assert (view.ended_container, view.last_exit, view.last_exit_reason) == (
        "engine", "boom", "Error",
    )  # fmt: skip


def test_a_container_that_ended_well_is_no_crash() -> None:
    view = pod_view(pod(containerStatuses=[container(last=ended(0, "Completed", "bye"))]))
    assert (view.ended_container, view.last_exit, view.last_exit_reason) == ("", "", "")


def test_an_image_that_cannot_be_pulled_is_named() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'}
    sidecar = container("proxy") | {"image": "proxy:1"}
    raw = pod(phase="Pending", containerStatuses=[sidecar, container(state={"waiting": waiting})])
    view = pod_view(raw)
    assert view.image == "diptych-engine:0.1.0"
    assert (view.waiting_reason, view.waiting_message) == (waiting["reason"], waiting["message"])


# --- all together -----------------------------------------------------------------------------


def test_everything_is_in_an_order_that_does_not_depend_on_the_watch() -> None:
    raws = [deployment(role=role, **WHOLE) for role in ("prefill", "decode")]
    pods = [pod(name) for name in ("b", "a")]
    assert observe(raws, pods) == observe(reversed(raws), reversed(pods))


def test_revisions_are_those_of_deployments_and_of_pods_that_outlive_them() -> None:
    seen = observe(
        [deployment(), deployment(role="router", revision="")], [pod("left", revision="bbbbbbbb")]
    )
    assert seen.revisions() == (REV, "bbbbbbbb")
    assert seen.wanted(REV) == Counts(0, 2)
    assert seen.wanted("bbbbbbbb") == Counts(0, 0)


@pytest.mark.parametrize(
    ("phase", "deleted", "present"),
    [
        ("Pending", False, 1), ("Running", False, 1), ("Running", True, 1),
        ("Failed", False, 0), ("Succeeded", False, 0),
    ],
)  # fmt: skip
def test_dead_pods_are_not_present_and_leaving_ones_are(
    phase: str, deleted: bool, present: int
) -> None:
    seen = observe([], [pod(phase=phase, deleted=deleted)])
    assert seen.present(REV) == Counts(0, present)
