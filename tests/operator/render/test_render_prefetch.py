"""A model that nodes have before an engine comes: the pods that fetch it, and until when."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cluster_kit.kube_schemas import complaints
from cluster_kit.reconciling import KEY, Object, Store, operating

from diptych_operator.api.base import SpecError
from diptych_operator.api.images import Images
from diptych_operator.api.names import ENGINE_ANNOTATION
from diptych_operator.api.parse import parse_object
from diptych_operator.render import ServiceSecrets, render
from diptych_operator.status.observed import prefetched
from diptych_protocol import CurveKeys, EngineConfig

SECRETS = ServiceSecrets(CurveKeys("P" * 40, "S" * 40), "token")
MODEL = {"uri": "hf://org/repo", "credentials": {"secretName": "hub"}}
ON_NODES = {"hostPath": "/m", "prefetch": True}
GPU = {"resources": {"limits": {"nvidia.com/gpu": 1, "cpu": 4, "memory": "64Gi"}}}


def objects(ahead: bool = True, **spec: Any) -> list[Object]:
    model = MODEL | {"cache": ON_NODES | {"prefetch": ahead}}
    parts = {"model": model, "prefill": {}, "decode": {}} | spec
    raw = {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "svc", "namespace": "models"},
        "spec": {name: part for name, part in parts.items() if part is not None},
    }
    made = render(parse_object(raw, Images()), SECRETS)
    found: list[Object] = msgspec.json.decode(msgspec.json.encode(made))
    return found


def of_kind(found: list[Object], kind: str) -> list[Object]:
    return [obj for obj in found if obj["kind"] == kind]


def pod_of(pool: str, found: list[Object], kind: str = "Deployment") -> Object:
    """The spec of a pool's pods, or of those that fetch for it."""
    (spec,) = (
        obj["spec"]["template"]["spec"]
        for obj in of_kind(found, kind)
        if obj["metadata"]["name"].startswith(f"svc-{pool}-")
    )
    return dict(spec)


def template(**spec: Any) -> Object:
    return {"podTemplate": {"spec": spec}}


OWN_INIT = {"name": "own", "image": "own:1", "volumeMounts": [{"name": "own", "mountPath": "/o"}]}
VLLM = {"runtime": "vllm", "image": "vllm/vllm-openai:v0.32.0"}
STARTS: dict[str, dict[str, Any]] = {
    "the smallest": {},
    "limited": {"decode": {"resources": {"limits": {"cpu": 2, "memory": "8Gi"}}}},
    "on GPUs": {"prefill": GPU, "decode": GPU},
    "with a draft model": {
        "engine": {"speculativeConfig": {"method": "draft_model", "model": "hf://org/small"}}
    },
    "behind a proxy": {
        "decode": template(
            initContainers=[{"name": "model", "env": [{"name": "HTTPS_PROXY", "value": "p"}]}]
        )
    },
    "with an init container of its own": {
        "decode": template(initContainers=[OWN_INIT], volumes=[{"name": "own", "emptyDir": {}}])
    },
    "vLLM": {"engine": VLLM, "decode": GPU},
}


@pytest.mark.parametrize("start", STARTS)
def test_pods_that_fetch_ahead_start_as_engines_do_and_ask_for_next_to_nothing(start: str) -> None:
    found = objects(**STARTS[start])
    sets = of_kind(found, "DaemonSet")
    assert not [words for each in sets for words in complaints(each)]
    for each in sets:
        pool = each["metadata"]["name"].split("-")[1]
        engine, ahead = pod_of(pool, found), pod_of(pool, found, "DaemonSet")
        for container in (engine, ahead):
            for one in container["initContainers"]:
                one["limits"] = one.pop("resources", {}).get("limits", {})
        # ... but for what it takes of a node.
        assert ahead["initContainers"] == engine["initContainers"]
        mounted = {m["name"] for c in ahead["initContainers"] for m in c["volumeMounts"]}
        assert {volume["name"] for volume in ahead["volumes"]} == mounted
        volumes = {volume["name"]: volume for volume in engine["volumes"]}
        for volume in ahead["volumes"]:
            assert volume["name"] == "config" or volume == volumes[volume["name"]]
        for part in ("securityContext", "serviceAccountName", "automountServiceAccountToken"):
            assert ahead[part] == engine[part]


@pytest.mark.parametrize("start", STARTS)
def test_what_waits_costs_no_device_and_next_to_nothing(start: str) -> None:
    found = objects(**STARTS[start])
    for each in of_kind(found, "DaemonSet"):
        pod = each["spec"]["template"]["spec"]
        (sleeping,) = pod["containers"]
        pool = each["metadata"]["name"].split("-")[1]
        assert sleeping["image"] == pod_of(pool, found)["containers"][0]["image"]
        assert sleeping["command"] == ["sleep", "infinity"]
        assert sleeping["securityContext"]["readOnlyRootFilesystem"] is True
        assert not {"env", "ports", "volumeMounts"} & sleeping.keys()
        for container in (*pod["initContainers"], sleeping):
            assert container["resources"]["requests"] == {"cpu": "10m", "memory": "32Mi"}
            assert container["resources"].get("limits", {}).keys() <= {"cpu", "memory"}


NODES: Object = {
    "nodeSelector": {"gpu": "yes"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "imagePullSecrets": [{"name": "registry"}],
    "runtimeClassName": "nvidia",
}
NODE_AFFINITY: Object = {
    "requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]
    }
}
ENGINES_ONLY: Object = {
    "readinessGates": [{"conditionType": "a/b"}],
    "schedulingGates": [{"name": "a/b"}],
    "resourceClaims": [{"name": "gpu", "resourceClaimName": "gpu"}],
    "topologySpreadConstraints": [],
}


def test_they_go_to_the_nodes_of_engines_whatever_keeps_engines_apart() -> None:
    apart: Object = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": []}}
    affinity = {"affinity": apart | {"nodeAffinity": NODE_AFFINITY}}
    pool = template(**NODES, **ENGINES_ONLY, **affinity)
    found = objects(prefill=pool, decode=pool)
    (made,) = of_kind(found, "DaemonSet")
    pod = made["spec"]["template"]["spec"]
    assert {part: pod[part] for part in NODES} == NODES
    assert pod["affinity"] == {"nodeAffinity": NODE_AFFINITY}
    assert not ENGINES_ONLY.keys() & pod.keys()


@pytest.mark.parametrize(
    ("spec", "pools"),
    [
        ({}, ["prefill"]),
        (
            {"prefill": {"resources": {"limits": {"cpu": 4}}}, "decode": {"replicas": 3}},
            ["prefill"],
        ),
        ({"prefill": None, "engine": VLLM, "decode": GPU}, ["decode"]),
        ({"prefill": template(nodeSelector={"gpu": "yes"})}, ["prefill", "decode"]),
        ({"prefill": GPU}, ["prefill", "decode"]),
    ],
    ids=["alike", "of other sizes", "one", "on other nodes", "one packs"],
)
def test_pools_that_start_alike_on_the_same_nodes_have_one_pod_a_node(
    spec: dict[str, Any], pools: list[str]
) -> None:
    found = objects(**spec)
    names = [each["metadata"]["name"] for each in of_kind(found, "DaemonSet")]
    assert names == [f"svc-{pool}-prefetch" for pool in pools]


def test_nothing_takes_them_for_engines_or_for_each_other() -> None:
    found = objects(prefill=template(nodeSelector={"gpu": "yes"}))
    sets = of_kind(found, "DaemonSet")
    assert len(sets) == 2
    for each in sets:
        spec = each["spec"]
        labels = spec["template"]["metadata"]["labels"]
        # By this the operator knows the service's pods.
        assert "diptych.dev/service" not in labels
        assert each["metadata"]["labels"]["diptych.dev/service"] == "svc"
        selecting = {
            obj["metadata"]["name"]: obj["spec"].get("selector") or obj["spec"].get("podSelector")
            for obj in found
            if obj.get("spec")
        }
        taking = [
            name
            for name, selector in selecting.items()
            if selector and selector.get("matchLabels", selector).items() <= labels.items()
        ]
        assert taking == [each["metadata"]["name"]]


def test_they_read_what_engines_are_told_without_the_file_of_a_revision() -> None:
    found = objects(engine={"maxNumSeqs": 9})
    (made,) = of_kind(found, "DaemonSet")
    pod = made["spec"]["template"]
    (item,) = (
        item
        for volume in pod["spec"]["volumes"]
        for item in volume.get("downwardAPI", {}).get("items", ())
    )
    assert item == {
        "path": "engine.json",
        "fieldRef": {"fieldPath": f"metadata.annotations['{ENGINE_ANNOTATION}']"},
    }
    told = pod["metadata"]["annotations"][ENGINE_ANNOTATION]
    (file,) = (c["data"]["engine.json"] for c in of_kind(found, "ConfigMap")
               if c["metadata"]["name"].startswith("svc-prefill"))  # fmt: skip
    ahead, engine = (msgspec.json.decode(text, type=EngineConfig) for text in (told, file))
    assert ahead == msgspec.structs.replace(engine, revision="")


def test_who_does_not_pack_is_not_replaced_when_engines_are_told_otherwise() -> None:
    sets = (
        of_kind(objects(engine={"maxNumSeqs": number}, prefill=GPU, decode=GPU), "DaemonSet")
        for number in (8, 9)
    )
    first, second = sets
    assert first == second


def test_to_switch_it_on_changes_no_other_object() -> None:
    off, on = objects(ahead=False), objects()
    assert [obj for obj in on if obj["kind"] != "DaemonSet"] == off
    assert len(on) == len(off) + 1


@pytest.mark.parametrize(
    "spec",
    [
        {"affinity": "soft"},
        {"initContainers": [OWN_INIT | {"volumeMounts": "all"}]},
        {"initContainers": [OWN_INIT | {"resources": [1]}]},
    ],
)
def test_a_pod_template_that_is_none_is_refused_by_name(spec: Object) -> None:
    with pytest.raises(SpecError, match=r"^spec\.decode\.podTemplate: has a field of another kind"):
        objects(decode=template(**spec))


# --- in a cluster -----------------------------------------------------------------------------


def fetching(store: Store) -> dict[str, Object]:
    return {
        obj["metadata"]["name"]: obj for obj in store.children(KEY) if obj["kind"] == "DaemonSet"
    }


def image_of(store: Store) -> str:
    (made,) = fetching(store).values()
    return str(made["spec"]["template"]["spec"]["containers"][0]["image"])


async def test_they_stay_without_engines_and_go_when_it_is_switched_off() -> None:
    store, ahead = Store(), {"model": MODEL | {"cache": ON_NODES}}
    asleep = {"autoscaling": {"minReplicas": 0, "maxReplicas": 2, "scaleDownSeconds": 0}}
    store.spec = ahead | {"suspend": True}
    async with operating(store) as reconciler:
        await reconciler.reconcile(KEY)
        assert fetching(store).keys() == {"svc-prefill-prefetch"}
        assert not any(d["spec"]["replicas"] for d in store.deployments())
        store.spec = ahead | {"prefill": asleep, "decode": asleep}
        await reconciler.reconcile(KEY)
        store.settle()
        await reconciler.reconcile(KEY)
        assert fetching(store)
        store.spec = {"model": MODEL | {"cache": {"hostPath": "/m"}}}
        await reconciler.reconcile(KEY)
        assert not fetching(store)
        assert store.deployments()


async def test_a_changed_model_is_fetched_for_a_service_that_is_suspended() -> None:
    store, ahead = Store(), {"model": MODEL | {"cache": ON_NODES}, "suspend": True}
    store.spec = ahead | {"engine": {"image": "engine:1"}}
    async with operating(store) as reconciler:
        await reconciler.reconcile(KEY)
        before = image_of(store)
        store.spec = ahead | {"engine": {"image": "engine:2"}}
        await reconciler.reconcile(KEY)
    assert (before, image_of(store)) == ("engine:1", "engine:2")


async def test_the_status_says_how_many_nodes_have_it() -> None:
    store = Store()
    store.spec = {"model": MODEL | {"cache": ON_NODES}}
    async with operating(store) as reconciler:
        await reconciler.reconcile(KEY)
        (made,) = fetching(store).values()
        made["status"] = {
            "observedGeneration": 1, "desiredNumberScheduled": 5, "numberReady": 4,
            "updatedNumberScheduled": 3,
        }  # fmt: skip
        await reconciler.reconcile(KEY)
        assert store.service(KEY)["status"]["prefetched"] == "3/5"
        store.spec = {}
        for _ in range(2):
            await reconciler.reconcile(KEY)
        assert "prefetched" not in store.service(KEY)["status"]


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ([], ""),
        ([{}], "0/0"),
        ([(1, 5, 5, 5)], "5/5"),
        ([(0, 5, 5, 5)], "0/5"),  # the controller has not seen the newest model
        ([(1, 5, 4, 5)], "4/5"),
        ([(1, 2, 2, 2), (1, 3, 0, 3)], "2/5"),
    ],
)
def test_a_node_with_an_older_model_or_a_part_does_not_count(
    statuses: list[Any], said: str
) -> None:
    parts = (
        "observedGeneration",
        "desiredNumberScheduled",
        "numberReady",
        "updatedNumberScheduled",
    )
    children = [
        {
            "kind": "DaemonSet",
            "metadata": {"generation": 1},
            "status": dict(zip(parts, status, strict=True)) if status else {},
        }
        for status in statuses
    ]
    assert prefetched([*children, {"kind": "Deployment"}]) == said
