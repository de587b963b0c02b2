"""A service that is made anew owns what an earlier one of its name left, and nothing else."""

from __future__ import annotations

import pytest
from cluster_kit.reconciling import KEY, SECRETS, Object, Store, one_pass, operating

from diptych_operator.api.names import REVISION_LABEL, SERVICE_LABEL
from diptych_operator.kube.watch import trimmed

EXTERNAL = {"autoscaling": {"by": "External", "minReplicas": 1, "maxReplicas": 8}}
OTHER = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "theirs", "uid": "o1"}


@pytest.fixture
def store() -> Store:
    return Store()


def children(store: Store) -> dict[str, Object]:
    """All that a service owns, Secrets too."""
    foreign = ("Event", "InferenceService")
    return {path: obj for path, obj in store.objects.items() if obj["kind"] not in foreign}


def owners(store: Store) -> dict[str, list[str]]:
    return {
        path: [owner["uid"] for owner in obj["metadata"].get("ownerReferences", [])]
        for path, obj in children(store).items()
    }


def leave_orphans(store: Store) -> None:
    """As `kubectl delete --cascade=orphan` does; then somebody makes the service anew."""
    for obj in children(store).values():
        del obj["metadata"]["ownerReferences"]
    store.objects = children(store)
    store.uid = "u2"


async def test_orphans_are_adopted_with_their_keys_and_older_revisions(store: Store) -> None:
    await one_pass(store)
    before = owners(store)
    (secret,) = store.names("secrets")
    keys = store.objects[f"{SECRETS}/{secret}"]["data"]
    (first,) = {d["metadata"]["labels"].get(REVISION_LABEL, "") for d in store.deployments()} - {""}
    leave_orphans(store)
    store.spec = {"engine": {"blockSize": 32}}
    await one_pass(store)
    assert set(before) < set(children(store)), "a new revision stands beside the old one"
    assert set(map(tuple, owners(store).values())) == {("u2",)}
    assert store.objects[f"{SECRETS}/{secret}"]["data"] == keys
    assert first in {d["metadata"]["labels"].get(REVISION_LABEL) for d in store.deployments()}
    assert store.condition("Degraded")["reason"] != "ObjectNotOurs"


async def test_a_pool_scaler_that_was_left_keeps_the_size_that_it_asks_for(store: Store) -> None:
    store.spec = {"prefill": EXTERNAL}
    await one_pass(store)
    (path,) = (p for p, obj in store.objects.items() if obj["kind"] == "PoolScaler")
    store.objects[path]["spec"] = {"replicas": 5}
    leave_orphans(store)
    await one_pass(store)
    assert owners(store)[path] == ["u2"]
    assert store.objects[path]["spec"] == {"replicas": 5}


@pytest.mark.parametrize("kind", ["Deployment", "Secret", "Service"])
@pytest.mark.parametrize("mark", ["owned", "of another service", "on its way out"])
async def test_what_another_owns_or_we_have_not_labelled_is_reported(
    store: Store, kind: str, mark: str
) -> None:
    await one_pass(store)
    leave_orphans(store)
    path, alien = next((p, obj) for p, obj in store.objects.items() if obj["kind"] == kind)
    meta = alien["metadata"]
    if mark == "owned":
        meta["ownerReferences"] = [OTHER]
    elif mark == "of another service":
        meta["labels"][SERVICE_LABEL] = "another"
    else:
        meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    found = owners(store)[path]
    await one_pass(store)
    assert owners(store)[path] == found
    assert store.condition("Degraded")["reason"] == "ObjectNotOurs"


async def test_what_somebodys_finalizer_keeps_is_named(store: Store) -> None:
    """Nothing of the same name can be made before, such as that of a revision to go back to."""
    await one_pass(store)
    made = store.deployments()[0]["metadata"]
    for finalizers, kept in (["foregroundDeletion"], False), (["example.org/x"], True):
        made |= {"deletionTimestamp": "2026-11-29T07:00:00Z", "finalizers": finalizers}
        assert trimmed(store.deployments()[0])["metadata"]["finalizers"] == finalizers
        await one_pass(store)
        said = f"the Deployment {made['name']} is deleted, but kept by the finalizer example.org/x"
        assert (said in store.condition("Degraded")["message"]) == kept


@pytest.mark.parametrize(
    ("ends", "finalizers", "words"),
    [
        ("2026-01-01T00:00:00Z", [], "its node n1 does not say that it has; bring the node back"),
        ("2026-01-01T00:00:00Z", ["x.io/f"], "kept by the finalizer x.io/f; let its owner end"),
        ("2999-01-01T00:00:00Z", ["x.io/f"], ""),
    ],
)
async def test_a_pod_that_stays_after_its_end_is_named_with_the_reason(
    store: Store, ends: str, finalizers: list[str], words: str
) -> None:
    """As on a lost node. Who recreates, suspends or makes a service anew waits for it."""
    await one_pass(store)
    store.start_pods()
    (pod,) = (p for p in store.pods_here if "decode" in p["metadata"]["name"])
    pod["metadata"] |= {"deletionTimestamp": ends, "finalizers": finalizers}
    pod["spec"] = {**pod["spec"], "nodeName": "n1"}
    store.spec = {"suspend": True}
    async with operating(store) as reconciler:
        rest = await reconciler.reconcile(KEY)
    assert rest is not None, "nothing else would tell when it is late"
    said = store.condition("Degraded")["message"]
    assert pod["metadata"]["name"] in said if words else said == "Nothing wants attention."
    assert words in said


async def test_a_pod_whose_labels_somebody_changed_is_named_until_it_is_gone(store: Store) -> None:
    """Its ReplicaSet has let go of it and made another one, and nobody else would end it."""
    await one_pass(store)
    store.start_pods()
    await one_pass(store)
    assert store.condition("Degraded")["message"] == "Nothing wants attention."
    pod = store.pods_here[0]
    owners = pod["metadata"].pop("ownerReferences")
    await one_pass(store)
    said = store.condition("Degraded")["message"]
    assert f"the Pod {pod['metadata']['name']} belongs to nothing" in said
    pod["metadata"]["ownerReferences"] = owners
    await one_pass(store)
    assert store.condition("Degraded")["message"] == "Nothing wants attention."
