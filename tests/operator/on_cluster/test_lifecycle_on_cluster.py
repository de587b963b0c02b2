"""The life of a service on a real API server: refused, stuck, suspended, its keys turned, deleted.

Only where DIPTYCH_TEST_KUBECONFIG names an administrator's kubeconfig of a cluster that has the
CRDs. Pods fit no node; where a ready one is needed, a test says so in its status, as a kubelet
would.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_kit.namespaces import KUBECONFIG, Namespace, Object, resting, until
from cluster_kit.charts import OLDEST_MINOR
from cluster_kit.operators import NO_IMAGE, NOWHERE, STUCK, Home, Identity, Operator, running

from diptych_operator.api.names import (
    CURRENT_KEYS_ANNOTATION,
    KEYS_LABEL,
    PREVIOUS_KEYS_ANNOTATION,
    REVISION_LABEL,
    ROLE_LABEL,
    ROTATE_ANNOTATION,
)

LONG_S = 90
"""A pod counts as turned away after 30 s."""

pytestmark = pytest.mark.skipif(
    not KUBECONFIG, reason="DIPTYCH_TEST_KUBECONFIG names no cluster to run the operator against"
)


# --- what is refused, and what does not get ready ---------------------------------------------

BAD_TEMPLATES: dict[str, tuple[Object, str]] = {
    "an unknown field": ({"spec": {"hostNetworking": True}}, "hostNetworking"),
    "a wrong type": ({"spec": {"enableServiceLinks": "perhaps"}}, "enableServiceLinks"),
    "an impossible value": ({"spec": {"restartPolicy": "Never"}}, "restartPolicy"),
    "a label that must stay": (
        {"metadata": {"labels": {ROLE_LABEL: "prefill"}}},
        "spec.decode.podTemplate.metadata.labels: diptych.dev/role must stay 'decode'",
    ),
}


@pytest.mark.parametrize("what", BAD_TEMPLATES)
def test_a_bad_pod_template_is_refused_before_anything_is_changed(home: Home, what: str) -> None:
    template, words = BAD_TEMPLATES[what]
    namespace, name = home.namespace, f"bad-{list(BAD_TEMPLATES).index(what)}"
    namespace.serve(name, **STUCK)
    namespace.degraded(name, "Unschedulable")
    before = resting(namespace, name)
    spec = {
        "decode": {"podTemplate": template}, "network": {"policy": "None"},
        "router": {"holdSeconds": 7},
    }  # fmt: skip
    namespace.merge("InferenceService", name, {"spec": spec})
    assert words in namespace.degraded(name, "PodTemplateRejected")
    after = namespace.versions(name)
    del before["InferenceService", name], after["InferenceService", name]
    assert after == before
    namespace.delete("InferenceService", name)


def test_a_bad_spec_is_told_of_where_the_cluster_does_not_check_it(home: Home) -> None:
    namespace = home.namespace
    if namespace.minor >= OLDEST_MINOR:
        pytest.skip("this cluster checks the rules of the CRD itself")
    scaling = {"replicas": 1, "autoscaling": {"maxReplicas": 2}}
    namespace.serve("unclear", decode=scaling)
    words = namespace.degraded("unclear", "SpecInvalid")
    assert "spec.decode: give replicas or autoscaling, not both" in words
    assert not namespace.children("unclear")
    namespace.merge("InferenceService", "unclear", {"spec": {"decode": {"autoscaling": None}}})
    until("it goes on", lambda: len(namespace.children("unclear")) > 10)
    namespace.delete("InferenceService", "unclear")


def test_pods_that_fit_no_node_are_told_of(home: Home) -> None:
    namespace = home.namespace
    namespace.serve("nowhere", **STUCK)
    words = namespace.degraded("nowhere", "Unschedulable")
    assert "fits no node" in words
    assert "Check nodeSelector and affinity in spec.prefill.podTemplate.spec" in words
    assert namespace.condition("nowhere", "Progressing")["status"] == "True"
    reason = "the pool's condition says so too"
    until(reason, lambda: _reason(namespace, "nowhere", "DecodeReady") == "Unschedulable")
    namespace.delete("InferenceService", "nowhere")


def _reason(namespace: Namespace, name: str, condition: str) -> str:
    return str(namespace.condition(name, condition).get("reason"))


def test_an_image_that_cannot_be_pulled_is_told_of(home: Home) -> None:
    namespace = home.namespace
    # Never pulled, so that the test does not wait in the node's queue.
    container = {"name": "engine", "imagePullPolicy": "Never"}
    decode = {"podTemplate": {"spec": {"containers": [container]}}}
    spec = {"router": NOWHERE, "prefill": NOWHERE, "decode": decode}
    namespace.serve("unpulled", **spec, engine={"image": NO_IMAGE})
    words = namespace.degraded("unpulled", "ImageCannotBePulled", 60)
    assert f'cannot pull image "{NO_IMAGE}"' in words
    assert "Check spec.engine.image" in words
    namespace.delete("InferenceService", "unpulled")


# --- suspend, rotate, delete ------------------------------------------------------------------


def test_what_an_orphaning_deletion_left_belongs_to_the_service_that_is_made_anew(
    home: Home,
) -> None:
    namespace = home.namespace
    namespace.serve("left", **STUCK)
    namespace.degraded("left", "Unschedulable")
    before = {key: child["metadata"]["uid"] for key, child in namespace.children("left").items()}
    namespace.delete("InferenceService", "left", policy="Orphan")
    until("the service is gone", lambda: namespace.get("InferenceService", "left") is None)
    uid = namespace.serve("left", **STUCK)["metadata"]["uid"]

    def adopted() -> bool:
        metas = [child["metadata"] for child in namespace.children("left").values()]
        return all([o["uid"] for o in meta.get("ownerReferences", [])] == [uid] for meta in metas)

    until("the new service owns them all", adopted)
    resting(namespace, "left")
    after = {key: child["metadata"]["uid"] for key, child in namespace.children("left").items()}
    assert after == before
    assert namespace.condition("left", "Degraded")["reason"] == "Unschedulable"
    namespace.delete("InferenceService", "left")


def test_suspend_and_back(home: Home) -> None:
    namespace = home.namespace
    namespace.serve("nap", **STUCK)
    namespace.settled("nap", "Progressing")

    def sizes() -> set[int]:
        found = namespace.children("nap").items()
        return {item["spec"]["replicas"] for (kind, _), item in found if kind == "Deployment"}

    until("pods are wanted", lambda: sizes() == {1})
    namespace.merge("InferenceService", "nap", {"spec": {"suspend": True}})
    namespace.settled("nap", "Suspended")
    assert sizes() == {0}
    assert namespace.condition("nap", "Available")["reason"] == "Suspended"
    namespace.merge("InferenceService", "nap", {"spec": {"suspend": False}})
    namespace.settled("nap", "Progressing")
    until("pods are wanted again", lambda: sizes() == {1})
    namespace.delete("InferenceService", "nap")


def test_a_rotation_never_leaves_anybody_without_the_right_key(home: Home) -> None:
    namespace = home.namespace
    namespace.serve("turn", **STUCK, transfer={"verify": "Off"})
    _served(namespace, "turn")
    (old,) = _key_sets(namespace, "turn")
    rotate = {"metadata": {"annotations": {ROTATE_ANNOTATION: "1"}}}
    namespace.merge("InferenceService", "turn", rotate)
    until("a second Secret", lambda: len(_key_sets(namespace, "turn")) == 2)
    (new,) = _key_sets(namespace, "turn") - {old}

    # Routers first, with both; engines with the new one wait for them.
    until("routers are to hold both", lambda: _router_keys(namespace, "turn") == (new, old))
    assert _mounted_keys(namespace, "turn") == {f"turn-keys-{new}", f"turn-keys-{old}"}
    resting(namespace, "turn")
    assert _engine_keys(namespace, "turn") == {old}
    namespace.make_ready("turn", "router")
    until("engines with the new keys", lambda: new in _engine_keys(namespace, "turn"))
    assert _key_sets(namespace, "turn") == {old, new}

    _served(namespace, "turn")
    until("only the new keys are left", lambda: _key_sets(namespace, "turn") == {new})
    assert _engine_keys(namespace, "turn") == {new}
    # Routers are not replaced once more only to drop what is gone.
    assert _router_keys(namespace, "turn") == (new, old)
    namespace.delete("InferenceService", "turn")


def test_a_second_rotation_in_the_midst_of_one_keeps_what_engines_hold(home: Home) -> None:
    namespace = home.namespace
    namespace.serve("twice", **STUCK, transfer={"verify": "Off"})
    _served(namespace, "twice")
    (first,) = _key_sets(namespace, "twice")
    for value in ("1", "2"):  # before any engine has the keys of the first
        rotate = {"metadata": {"annotations": {ROTATE_ANNOTATION: value}}}
        before = _router_keys(namespace, "twice")[0]
        namespace.merge("InferenceService", "twice", rotate)
        until("routers turn", lambda past=before: _router_keys(namespace, "twice")[0] != past)  # type: ignore[misc]
        assert _router_keys(namespace, "twice")[1] == first
    _served(namespace, "twice")
    last = _router_keys(namespace, "twice")[0]
    until("only the last keys are left", lambda: _key_sets(namespace, "twice") == {last})
    namespace.delete("InferenceService", "twice")


def test_where_no_node_has_room_a_rollout_fails_or_goes_on_in_place_as_it_is_told(
    home: Home,
) -> None:
    namespace = home.namespace
    pool = {"replicas": 2, **NOWHERE}
    pools = {"prefill": pool, "decode": pool, "router": NOWHERE}
    namespace.serve("full", **pools, transfer={"verify": "Off"}, rollout={"whenFull": "Fail"})
    _served(namespace, "full")
    old = namespace.status("full")["currentRevision"]
    namespace.merge("InferenceService", "full", {"spec": {"engine": {"maxNumSeqs": 48}}})
    until("one more pair", lambda: _sizes(namespace, "full", old) == ([2, 2], [1, 1]))
    failed = "RolloutFailed"
    until("it fails", lambda: _reason(namespace, "full", "Progressing") == failed, LONG_S)
    assert "spec.rollout.whenFull" in namespace.condition("full", "Progressing")["message"]
    until("the pair is given up", lambda: _sizes(namespace, "full", old) == ([2, 2], [0, 0]))

    namespace.merge("InferenceService", "full", {"spec": {"rollout": {"whenFull": None}}})
    until("a pair gives way", lambda: _sizes(namespace, "full", old) == ([1, 1], [1, 1]), LONG_S)
    assert namespace.condition("full", "Available")["reason"] != "PrefillNotReady"
    _served(namespace, "full")
    assert namespace.status("full")["currentRevision"] != old
    namespace.delete("InferenceService", "full")


def _sizes(namespace: Namespace, name: str, old: str) -> tuple[list[int], list[int]]:
    """The replicas of both pools of the old revision, and of the others."""
    found = [
        (d["metadata"]["labels"][REVISION_LABEL] == old, d["spec"]["replicas"])
        for d in _deployments(namespace, name)
        if REVISION_LABEL in d["metadata"]["labels"]
    ]
    return [size for is_old, size in found if is_old], [
        size for is_old, size in found if not is_old
    ]


def _served(namespace: Namespace, name: str) -> None:
    """Have every pod that comes up be ready, until the rollout is over."""

    def look() -> bool:
        for role in ("prefill", "decode", "router"):
            namespace.make_ready(name, role)
        found = namespace.there("InferenceService", name)
        status = found.get("status") or {}
        newest = status.get("observedGeneration") == found["metadata"]["generation"]
        over = (status.get("rollout") or {}).get("phase") == "Idle"
        held = {d["metadata"]["labels"].get(REVISION_LABEL) for d in _deployments(namespace, name)}
        return newest and over and held - {None} == {status.get("currentRevision")}

    until(f"{name} serves with one revision", look)


def _deployments(namespace: Namespace, name: str) -> list[Object]:
    return [o for (kind, _), o in namespace.children(name).items() if kind == "Deployment"]


def _key_sets(namespace: Namespace, name: str) -> set[str]:
    children = namespace.children(name)
    return {child.rpartition("-")[2] for kind, child in children if kind == "Secret"}


def _engine_keys(namespace: Namespace, name: str) -> set[str]:
    labels = (item["metadata"]["labels"] for item in _deployments(namespace, name))
    return {found[KEYS_LABEL] for found in labels if KEYS_LABEL in found}


def _router_keys(namespace: Namespace, name: str) -> tuple[str, str]:
    marks = namespace.there("Deployment", f"{name}-router")["metadata"]["annotations"]
    return marks[CURRENT_KEYS_ANNOTATION], marks[PREVIOUS_KEYS_ANNOTATION]


def _mounted_keys(namespace: Namespace, name: str) -> set[str]:
    pods = namespace.there("Deployment", f"{name}-router")["spec"]["template"]["spec"]
    (keys,) = (volume for volume in pods["volumes"] if volume["name"] == "keys")
    return {source["secret"]["name"] for source in keys["projected"]["sources"]}


def test_a_deleted_service_takes_everything_along(home: Home) -> None:
    namespace = home.namespace
    namespace.serve("short", **STUCK)
    namespace.degraded("short", "Unschedulable")
    assert not namespace.there("InferenceService", "short")["metadata"].get("finalizers")
    namespace.delete("InferenceService", "short")
    until("all is gone", lambda: not namespace.children("short"))
    assert namespace.get("InferenceService", "short") is None


def test_a_service_made_anew_at_once_gets_children_and_keys_of_its_own(home: Home) -> None:
    namespace = home.namespace
    namespace.serve("again", suspend=True)
    namespace.settled("again")
    count = len(resting(namespace, "again")) - 1
    namespace.delete("InferenceService", "again")
    uid = namespace.serve("again", suspend=True)["metadata"]["uid"]

    def look() -> bool:
        owners = [
            child["metadata"]["ownerReferences"][0]["uid"]
            for child in namespace.children("again").values()
        ]
        return owners == [uid] * count

    until("all children are the new service's", look)
    namespace.settled("again")
    assert namespace.condition("again", "Degraded")["status"] == "False"
    namespace.delete("InferenceService", "again")


def test_a_service_can_be_deleted_while_no_operator_is_there(
    apart: tuple[Namespace, Identity], tmp_path: Path
) -> None:
    namespace, identity = apart
    operator = Operator(tmp_path / "log", identity.arguments, identity.kubeconfig)
    with running(operator):
        namespace.serve("left", suspend=True)
        namespace.settled("left")
    namespace.delete("InferenceService", "left")
    until("all is gone", lambda: not namespace.children("left"))
    assert namespace.get("InferenceService", "left") is None


def test_its_rights_sufficed_for_all_that_and_its_log_gives_nothing_away(home: Home) -> None:
    home.check_log()
