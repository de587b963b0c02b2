"""The operator's children on a real API server: made, owned, repaired, and nobody else's touched.

Only where DIPTYCH_TEST_KUBECONFIG names an administrator's kubeconfig of a cluster that has the
CRDs. Everything happens in a namespace of the tests' own. The operator has the rights of the
chart's Role in it, and no more. No pod runs: none fits a node.
"""

from __future__ import annotations

import pytest
from chaos_kit.namespaces import KUBECONFIG, Namespace, Object, editable, resting, until
from cluster_kit.operators import NO_IMAGE, STUCK, Home

from diptych_operator.api.names import (
    KEYS_LABEL,
    PREVIOUS_KEYS_ANNOTATION,
    REVISION_LABEL,
    ROLE_LABEL,
    SERVICE_LABEL,
)

pytestmark = pytest.mark.skipif(
    not KUBECONFIG, reason="DIPTYCH_TEST_KUBECONFIG names no cluster to run the operator against"
)


# --- children ---------------------------------------------------------------------------------


def test_ten_lines_become_all_children_and_all_are_owned(home: Home) -> None:
    namespace = home.namespace
    made = namespace.serve("ten", **STUCK)
    revision = until("a revision", lambda: namespace.status("ten").get("updateRevision"))
    expected = {
        *(("Deployment", f"ten-{part}") for part in (f"prefill-{revision}", f"decode-{revision}")),
        *(("ConfigMap", f"ten-{part}") for part in (f"prefill-{revision}", f"decode-{revision}")),
        *(("ConfigMap", name) for name in ("ten-router", "ten-serving")),
        ("Deployment", "ten-router"),
        *(
            (kind, f"ten-{role}")
            for kind in ("Service", "ServiceAccount", "PodDisruptionBudget", "NetworkPolicy")
            for role in ("prefill", "decode", "router")
        ),
    }
    until("all children", lambda: len(namespace.children("ten")) > len(expected))
    children = namespace.children("ten")
    (secret,) = (name for kind, name in children if kind == "Secret")
    assert secret.startswith("ten-keys-")
    assert set(children) == expected | {("Secret", secret)}
    for child in children.values():
        (owner,) = child["metadata"]["ownerReferences"]
        assert owner["uid"] == made["metadata"]["uid"]
        assert owner["controller"]
        assert not child["metadata"].get("finalizers")
    namespace.delete("InferenceService", "ten")


DRIFT: dict[str, tuple[str, str, Object]] = {
    "a Service's selector": (
        "Service", "decode", {"spec": {"selector": {ROLE_LABEL: "nobody"}}},
    ),
    "a Service's ports": (
        "Service", "router",
        {"spec": {"ports": [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 80}]}},
    ),
    "a Deployment's replicas": ("Deployment", "decode-{revision}", {"spec": {"replicas": 3}}),
    "what its node shows pods": (
        "Deployment", "prefill-{revision}",
        {"spec": {"template": {"spec": {"hostPID": True, "hostNetwork": True}}}},
    ),
    "a NetworkPolicy's rules": ("NetworkPolicy", "router", {"spec": {"ingress": [{}]}}),
    "a budget": ("PodDisruptionBudget", "prefill", {"spec": {"maxUnavailable": 0}}),
    "a ConfigMap's file": ("ConfigMap", "serving", {"data": {"serving.json": "{}"}}),
    "a ServiceAccount's token": (
        "ServiceAccount", "prefill", {"automountServiceAccountToken": True},
    ),
    "the label that is watched": (
        "NetworkPolicy", "decode", {"metadata": {"labels": {SERVICE_LABEL: None}}},
    ),
    "a label of an unversioned kind": (
        "Service", "prefill", {"metadata": {"labels": {ROLE_LABEL: None}}},
    ),
    "a Deployment's role": (
        "Deployment", "prefill-{revision}", {"metadata": {"labels": {ROLE_LABEL: None}}},
    ),
    "a Deployment's revision": (
        "Deployment", "prefill-{revision}", {"metadata": {"labels": {REVISION_LABEL: None}}},
    ),
    "a Deployment's keys": (
        "Deployment", "prefill-{revision}", {"metadata": {"labels": {KEYS_LABEL: "other"}}},
    ),
    "the keys that routers hold": (
        "Deployment", "router", {"metadata": {"annotations": {PREVIOUS_KEYS_ANNOTATION: None}}},
    ),
    "an owner": ("Deployment", "decode-{revision}", {"metadata": {"ownerReferences": []}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def drifting(home: Home) -> str:
    """A service that gets no further and stays; its revision."""
    home.namespace.serve("drift", **STUCK)
    home.namespace.degraded("drift", "Unschedulable")
    resting(home.namespace, "drift")
    revision: str = home.namespace.status("drift")["updateRevision"]
    return revision


@pytest.mark.parametrize("what", DRIFT)
def test_drift_is_repaired(home: Home, drifting: str, what: str) -> None:
    kind, part, patch = DRIFT[what]
    name = f"drift-{part.format(revision=drifting)}"
    before = home.namespace.there(kind, name)
    _repaired(home.namespace, before, patch)


def test_another_image_is_repaired(home: Home, drifting: str) -> None:
    before = home.namespace.there("Deployment", f"drift-decode-{drifting}")
    (container,) = before["spec"]["template"]["spec"]["containers"]
    patch = {"containers": [container | {"image": NO_IMAGE}]}
    _repaired(home.namespace, before, {"spec": {"template": {"spec": patch}}})


def _repaired(namespace: Namespace, before: Object, patch: Object) -> None:
    kind, name = before["kind"], before["metadata"]["name"]
    edited = namespace.merge(kind, name, patch)
    assert editable(edited) != editable(before), "the edit changed nothing"
    until("it is as before", lambda: editable(namespace.there(kind, name)) == editable(before))
    assert namespace.there(kind, name)["metadata"]["uid"] == before["metadata"]["uid"]


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("Deployment", "router"), ("Deployment", "decode-{revision}"), ("ConfigMap", "serving"),
        ("Service", "prefill"), ("ServiceAccount", "router"), ("PodDisruptionBudget", "decode"),
        ("NetworkPolicy", "prefill"),
    ],
)  # fmt: skip
def test_a_deleted_child_comes_back(home: Home, drifting: str, kind: str, part: str) -> None:
    namespace, name = home.namespace, f"drift-{part.format(revision=drifting)}"
    before = namespace.there(kind, name)
    namespace.delete(kind, name)

    def look() -> bool:
        now = namespace.get(kind, name)
        return now is not None and now["metadata"]["uid"] != before["metadata"]["uid"]

    until("it is back", look)
    assert editable(namespace.there(kind, name)) == editable(before)


def test_fields_of_others_are_left_alone(home: Home, drifting: str) -> None:
    namespace, name = home.namespace, f"drift-decode-{drifting}"
    theirs = {"example.com/team": "a"}
    checked = {
        "type": "example.com/Checked", "status": "True", "reason": "Checked", "message": "",
        "lastTransitionTime": "2026-11-21T07:00:00Z", "lastUpdateTime": "2026-11-21T07:00:00Z",
    }  # fmt: skip
    marks = {"metadata": {"annotations": theirs, "labels": theirs}}
    namespace.merge("Deployment", name, marks)
    conditions = namespace.there("Deployment", name)["status"].get("conditions", [])
    status = {"status": {"conditions": [*conditions, checked]}}
    namespace.merge("Deployment", name, status, part="status")
    before = namespace.there("Deployment", name)
    edited = namespace.merge("Deployment", name, {"spec": {"replicas": 2}})
    repaired = until(
        "the size is ours again",
        lambda: (now := namespace.there("Deployment", name))["spec"]["replicas"] == 1 and now,
    )
    assert isinstance(repaired, dict)
    assert int(repaired["metadata"]["generation"]) > int(edited["metadata"]["generation"])
    assert editable(repaired) == editable(before)
    assert theirs.items() <= repaired["metadata"]["annotations"].items()
    assert theirs.items() <= repaired["metadata"]["labels"].items()
    assert "example.com/Checked" in {c["type"] for c in repaired["status"]["conditions"]}


@pytest.mark.parametrize("labelled", [False, True], ids=["plain", "with our labels"])
@pytest.mark.parametrize("kind", ["Deployment", "Service", "Secret"])
def test_what_belongs_to_somebody_else_is_not_touched(
    home: Home, drifting: str, kind: str, labelled: bool
) -> None:
    namespace = home.namespace
    service = f"alien-{kind.lower()}{'-labelled' if labelled else ''}"
    keys = namespace.there("Deployment", f"drift-decode-{drifting}")["metadata"]["labels"]
    name = f"{service}-keys-{keys[KEYS_LABEL]}" if kind == "Secret" else f"{service}-router"
    labels = {**keys, SERVICE_LABEL: service} if labelled else {}
    theirs = namespace.create(_alien(kind, name, namespace.name, labels))
    namespace.serve(service, suspend=True)
    words = namespace.degraded(service, "ObjectNotOurs")
    assert f"{kind} {name} exists and does not belong to this service" in words
    assert namespace.condition(service, "Available")["status"] != "True"
    now = namespace.there(kind, name)
    assert editable(now) == editable(theirs)
    assert not now["metadata"].get("ownerReferences")
    namespace.delete("InferenceService", service)
    namespace.delete(kind, name)


def _alien(kind: str, name: str, namespace: str, labels: dict[str, str]) -> Object:
    meta = {"name": name, "namespace": namespace, "labels": labels}
    if kind == "Secret":
        return {"kind": kind, "metadata": meta, "stringData": {"admin-token": "theirs"}}
    if kind == "Service":
        return {"kind": kind, "metadata": meta, "spec": {"ports": [{"port": 80}]}}
    pods = {"app": "theirs"}
    containers = [{"name": "theirs", "image": NO_IMAGE}]
    template = {"metadata": {"labels": pods}, "spec": {"containers": containers}}
    spec = {"replicas": 0, "selector": {"matchLabels": pods}, "template": template}
    return {"kind": kind, "metadata": meta, "spec": spec}


def test_parts_that_the_spec_switches_off_go_and_come_back(home: Home) -> None:
    namespace = home.namespace
    model = {"uri": "hf://org/repo", "cache": {"hostPath": "/nowhere", "prefetch": True}}
    namespace.serve("parts", suspend=True, model=model, **STUCK)
    namespace.settled("parts")

    def kinds() -> set[str]:
        return {kind for kind, _ in namespace.children("parts")}

    optional = {"DaemonSet", "PodDisruptionBudget", "NetworkPolicy"}
    off = {
        "availability": {"podDisruptionBudget": "None"}, "network": {"policy": "None"},
        "model": {"cache": {"prefetch": False}},
    }  # fmt: skip
    until("they are there", lambda: kinds() >= optional)
    namespace.merge("InferenceService", "parts", {"spec": off})
    until("they are gone", lambda: not kinds() & optional)
    assert kinds() == {"Deployment", "ConfigMap", "Service", "ServiceAccount", "Secret"}
    on = {
        "availability": {"podDisruptionBudget": "Managed"}, "network": {"policy": "Managed"},
        "model": {"cache": {"prefetch": True}},
    }  # fmt: skip
    namespace.merge("InferenceService", "parts", {"spec": on})
    until("they are back", lambda: kinds() >= optional)
    namespace.delete("InferenceService", "parts")


def test_its_rights_sufficed_for_all_that_and_its_log_gives_nothing_away(home: Home) -> None:
    home.check_log()
