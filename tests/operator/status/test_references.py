"""What pods refer to and is not there is named, with its remedy."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_kit.reconciling import SECRETS, Store, one_pass

from diptych_operator.status.diagnose import diagnose
from diptych_operator.status.observed import DeploymentView, Observed, PodView, pod_view
from diptych_operator.status.reasons import Reason
from diptych_operator.status.references import Reference, references

KEY = {"name": "x", "key": "k"}
NEEDED: dict[str, tuple[dict[str, Any], str]] = {
    "a volume": ({"volumes": [{"secret": {"secretName": "x"}}]}, "Secret"),
    "a volume of a map": ({"volumes": [{"configMap": {"name": "x"}}]}, "ConfigMap"),
    "a part of a volume": (
        {"volumes": [{"projected": {"sources": [{"secret": {"name": "x"}}]}}]}, "Secret",
    ),
    "a variable": (
        {"containers": [{"env": [{"name": "E", "valueFrom": {"secretKeyRef": KEY}}]}]}, "Secret",
    ),
    "a variable of an init container": (
        {"initContainers": [{"env": [{"valueFrom": {"configMapKeyRef": KEY}}]}]}, "ConfigMap",
    ),
    "all variables": (
        {"containers": [{"envFrom": [{"configMapRef": {"name": "x"}}]}]}, "ConfigMap",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "kind"), NEEDED.values(), ids=NEEDED.keys())
def test_each_way_to_refer_to_an_object_is_seen(spec: dict[str, Any], kind: str) -> None:
    assert references(spec) == {Reference(kind, "x")}


def test_what_is_optional_or_of_another_kind_is_not_waited_for() -> None:
    spec: dict[str, Any] = {
        "volumes": [
            {"secret": {"secretName": "x", "optional": True}}, {"emptyDir": {}},
            {"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}},
        ],
        "containers": [
            {"env": [{"name": "E", "value": "v"},
                     {"valueFrom": {"secretKeyRef": KEY | {"optional": True}}},
                     {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
             "envFrom": [{"secretRef": {"name": "x", "optional": True}}]},
        ],
    }  # fmt: skip
    assert references(spec) == set()


@pytest.mark.parametrize(
    ("reason", "needed"),
    [("PodInitializing", set()), ("CrashLoopBackOff", set()),
     ("ImagePullBackOff", {Reference("Secret", "x")})],
)  # fmt: skip
def test_a_registrys_password_is_missed_only_where_an_image_is_not_got(
    reason: str, needed: set[Reference]
) -> None:
    """A node that has the image, or gets it without, starts the pod all the same."""
    pod = {
        "metadata": {"name": "svc-decode-1a2b3c4d-0"},
        "spec": {"imagePullSecrets": [{"name": "x"}]},
        "status": {"containerStatuses": [{"state": {"waiting": {"reason": reason}}}]},
    }
    assert pod_view(pod).refers == needed


async def test_a_missing_secret_of_the_model_is_named_until_it_is_there() -> None:
    """The node says nothing: a pod whose volume is not there is just not begun."""
    store = Store()
    store.spec = {"model": {"uri": "hf://org/repo", "credentials": {"secretName": "hub"}}}
    await one_pass(store)
    store.start_pods()
    waiting = {"waiting": {"reason": "PodInitializing"}}
    for pod in store.pods_here:
        pod["spec"] = {"volumes": [{"secret": {"secretName": "hub"}}]}
        pod["status"] = {"phase": "Pending", "containerStatuses": [{"state": waiting}]}
    await one_pass(store)
    degraded = store.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "ContainerConfigError")
    assert 'waits for the Secret "hub", which is not there' in degraded["message"]
    assert "in the namespace ns, or correct spec.model.credentials." in degraded["message"]
    assert store.condition("PrefillReady")["reason"] == "ContainerConfigError"
    store.objects[f"{SECRETS}/hub"] = {"kind": "Secret", "metadata": {"name": "hub"}}
    await one_pass(store)
    assert store.condition("Degraded")["status"] == "False"


REFUSED = {
    'error looking up service account ns/x: serviceaccount "x" not found': "ServiceAccount",
    "no PriorityClass with name x was found": "PriorityClass",
    'pod rejected: RuntimeClass "x" not found': "RuntimeClass",
}


@pytest.mark.parametrize(("words", "kind"), REFUSED.items(), ids=REFUSED.values())
def test_what_keeps_pods_from_being_created_is_named(words: str, kind: str) -> None:
    said = f'pods "svc-decode-1" is forbidden: {words}'
    view = DeploymentView("svc-decode", "decode", "r", 1, 0, 0, False, failure=said)
    (found,) = diagnose(Observed(deployments=(view,)), "decode")
    assert found.reason is Reason.PODS_REFUSED
    assert found.remedy == f'Create the {kind} "x", or correct spec.decode.podTemplate.'


def test_a_missing_claim_is_named() -> None:
    said = '0/3 nodes are available: persistentvolumeclaim "x" not found.'
    pod = PodView("d", "decode", "r", "Pending", ready=False, terminating=False, unschedulable=said)
    (found,) = diagnose(Observed(pods=(pod,)), "decode")
    assert 'Create the PersistentVolumeClaim "x"' in found.remedy


def test_what_is_missing_is_told_beside_what_the_pod_says_and_not_twice() -> None:
    secret = Reference("Secret", "x")
    observed = Observed(
        pods=(
            PodView("a", "decode", "r", "Pending", ready=False, terminating=False,
                    unschedulable="Insufficient cpu", refers=frozenset({secret})),
            PodView("b", "decode", "r", "Pending", ready=False, terminating=False,
                    waiting_reason="CreateContainerConfigError",
                    waiting_message='secret "x" not found', refers=frozenset({secret})),
        ),
        missing={secret: "Create it."},
    )  # fmt: skip
    reasons = [finding.reason for finding in diagnose(observed, "decode")]
    assert reasons == [Reason.CONTAINER_CONFIG_ERROR, Reason.UNSCHEDULABLE]
