"""What one InferenceService becomes: golden files per feature, and properties for all."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from cases import each
from hypothesis import given
from hypothesis import strategies as st

from diptych_frontend.browsers import BrowserRules
from diptych_operator.api.base import SpecError
from diptych_operator.api.images import Images, PodDefaults, with_images
from diptych_operator.api.names import ROLE_LABEL
from diptych_operator.api.parse import parse
from diptych_operator.api.service import InferenceService
from diptych_operator.kube.cluster import Cluster
from diptych_operator.render import (
    KeySets,
    ServiceSecrets,
    fixed_counts,
    render,
    render_revision,
    render_shared,
)
from diptych_operator.revision import revision
from diptych_protocol import Batches, CurveKeys, EngineConfig, RouterConfig, Slo
from diptych_protocol.router_settings import Serving
from diptych_protocol.sampling import SamplingDefaults

GOLDEN = Path(__file__).parent / "golden"
SECRETS = ServiceSecrets(CurveKeys("P" * 40, "S" * 40), "token")

FEATURES: dict[str, dict[str, Any]] = {
    "smallest": {},
    "engine_settings": {
        "model": {"uri": "file:///models/qwen", "servedName": "qwen"},
        "engine": {
            "image": "example.org/engine:1", "device": "cuda", "dtype": "bfloat16",
            "blockSize": 32, "kvCacheMemory": "24Gi", "maxModelLen": 16384, "maxNumSeqs": 256,
            "maxNumBatchedTokens": 8192, "maxNumWaiting": 99, "enablePrefixCaching": False,
        },
        "transfer": {"leaseSeconds": 45, "transport": "rdma"},
    },
    "pools_that_differ": {
        "prefill": {"replicas": 3, "resources": {"limits": {"cpu": 4, "nvidia.com/gpu": 1}}},
        "decode": {"replicas": 5, "resources": {"requests": {"cpu": "500m", "memory": "2Gi"}}},
        "router": {"replicas": 2, "image": "example.org/router:1"},
    },
    "front_door": {
        "router": {"apiKeys": {"secretName": "clients"}, "tls": {"secretName": "llm.example.org"}},
        "network": {"engineApi": "OwnPods"},
    },
    "batches": {
        "router": {
            "replicas": 2,
            "batches": {"pvc": {"claimName": "batches"}, "size": "64Gi", "concurrency": 128},
        },
    },
    "vllm": {
        "model": {"uri": "pvc://models/llama", "servedName": "llama"},
        "engine": {
            "runtime": "vllm", "image": "vllm/vllm-openai:v0.32.0",
            "args": ["--max-model-len=8192", "--enforce-eager"], "tensorParallelSize": 2,
        },
        "prefill": None,
        "decode": {"replicas": 2, "resources": {"limits": {"nvidia.com/gpu": 2}}},
    },
    "vllm_by_our_connector": {
        "model": {"uri": "pvc://models/llama"},
        "engine": {"runtime": "vllm", "image": "vllm/vllm-openai:v0.32.0"},
        "transfer": {"leaseSeconds": 45.5, "connectorImage": "example.org/connector:1"},
        "prefill": {"resources": {"limits": {"cpu": 8, "nvidia.com/gpu": 1}}},
        "decode": {"replicas": 2},
    },
    "vllm_by_nixl": {
        "model": {"uri": "pvc://models/llama"},
        "engine": {
            "runtime": "vllm", "image": "vllm/vllm-openai:v0.32.0",
            "args": ["--max-model-len=8192", "--max-num-seqs=64"], "tensorParallelSize": 2,
        },
        "transfer": {"connector": "nixl", "leaseSeconds": 45.5},
        "prefill": {
            "engine": {
                "image": "example.org/vllm:arm64", "args": ["--max-num-seqs=8"],
                "tensorParallelSize": 1,
            },
        },
        "decode": {"replicas": 2, "resources": {"limits": {"nvidia.com/gpu": 2}}},
    },
    "disaggregated_set": {"workload": "DisaggregatedSet", "decode": {"replicas": 2}},
    "pod_template": {
        "prefill": {
            "replicas": 1,
            "podTemplate": {
                "metadata": {"annotations": {"team": "a"}},
                "spec": {
                    "nodeSelector": {"disk": "fast"},
                    "containers": [
                        {"name": "engine", "env": [{"name": "UCX_LOG_LEVEL", "value": "info"}],
                         "volumeMounts": [{"name": "models", "mountPath": "/models"}]},
                        {"name": "sidecar", "image": "example.org/sidecar:1"},
                    ],
                    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "m"}}],
                },
            },
        },
    },
}  # fmt: skip


def service(spec: dict[str, Any], name: str = "svc") -> InferenceService:
    smallest = {
        "model": {"uri": "dummy://"},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 1},
    }
    raw = {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": "models"},
        "spec": {name: part for name, part in (smallest | spec).items() if part is not None},
    }
    return parse(yaml.safe_dump(raw))


def by_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_renders_as_its_golden_file(feature: str) -> None:
    """`UPDATE_GOLDEN=1 pytest tests/operator` writes the files anew."""
    objects = msgspec.to_builtins(render(service(FEATURES[feature]), SECRETS))
    path = GOLDEN / f"{feature}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        plain = msgspec.json.decode(msgspec.json.encode(objects))
        path.write_text(yaml.safe_dump_all(plain, sort_keys=False, width=100))
    assert list(yaml.safe_load_all(path.read_text())) == objects


def test_engines_of_both_pools_are_told_their_node_and_zone_and_routers_are_not() -> None:
    objects = msgspec.to_builtins(render(service({}), SECRETS))
    for name, deployment in by_kind(objects, "Deployment").items():
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        fields = {
            entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"]
            for entry in container["env"]
            if "valueFrom" in entry
        }
        assert fields["POD_NAME"] == "metadata.name"
        arguments = " ".join(container["args"])
        told = "--node $(NODE_NAME) --zone $(NODE_ZONE)" in arguments
        if name == "svc-router":
            assert not told
            assert "NODE_NAME" not in fields
        else:
            assert told
            assert fields["NODE_NAME"] == "spec.nodeName"
            assert fields["NODE_ZONE"] == "metadata.labels['topology.kubernetes.io/zone']"


def test_engines_are_told_where_their_init_container_packs() -> None:
    model = {"uri": "hf://org/repo/x.gguf", "cache": {"hostPath": "/m"}}
    deployments = by_kind(render(service({"model": model}), SECRETS), "Deployment")
    assert len(deployments) == 3
    for name, deployment in deployments.items():
        pod = deployment["spec"]["template"]["spec"]
        (first,), (program,) = pod["initContainers"], pod["containers"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in first["volumeMounts"]} <= volumes
        packs, reads = (
            {each["value"] for each in one["env"] if each["name"] == "DIPTYCH_NODE_WEIGHTS"}
            for one in (first, program)
        )
        assert packs == reads
        assert len(reads) == (name != "svc-router")


def test_config_files_decode_to_the_configs_of_the_programs() -> None:
    objects = render(service(FEATURES["engine_settings"]), SECRETS)
    name = revision(service(FEATURES["engine_settings"]))
    configs = by_kind(objects, "ConfigMap")
    engines = [
        msgspec.json.decode(configs[f"svc-{pool}-{name}"]["data"]["engine.json"], type=EngineConfig)
        for pool in ("prefill", "decode")
    ]
    assert engines[0].revision == name
    router = msgspec.json.decode(configs["svc-router"]["data"]["router.json"], type=RouterConfig)
    assert engines[0] == engines[1]
    assert engines[0].kv_cache_bytes == 24 << 30
    assert engines[0].kv_transfer is not None
    assert engines[0].kv_transfer.lease_seconds == 45
    assert router == RouterConfig(
        model="file:///models/qwen", served_name="qwen", drain_seconds=60, hold_seconds=30,
        allowed_hosts=["svc-router.models"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("said", "policy"),
    [
        ({}, "prefix_aware"),
        ({"policy": "leastLoaded"}, "least_loaded"),
        ({"policy": "least_loaded"}, "least_loaded"),
        ({"policy": "fullestFirst"}, "fullest_first"),
    ],
)
def test_routers_get_the_name_of_a_policy_as_its_file_is_called(
    said: dict[str, Any], policy: str
) -> None:
    """Whether there is one of that name is for the routers to say."""
    named = service({"router": said})
    text = by_kind(render(named, SECRETS), "ConfigMap")["svc-router"]["data"]["router.json"]
    assert msgspec.json.decode(text, type=RouterConfig).policy == policy
    assert ("policy" in msgspec.json.decode(text)) == bool(said)


@pytest.mark.parametrize(
    ("said", "slo"),
    [
        ({}, Slo()),
        ({"ttftMs": 800}, Slo(ttft_ms=800)),
        ({"ttftMs": 800, "interTokenMs": 40}, Slo(ttft_ms=800, inter_token_ms=40)),
    ],
)
def test_routers_promise_what_the_service_says(said: dict[str, Any], slo: Slo) -> None:
    promising = service({"slo": said})
    maps = by_kind(render(promising, SECRETS), "ConfigMap")
    text = maps["svc-router"]["data"]["router.json"]
    assert msgspec.json.decode(text, type=RouterConfig).slo == slo
    assert ("slo" in msgspec.json.decode(text)) == bool(said)
    assert revision(promising) == revision(service({})), "no engine pod is replaced for it"


def test_routers_sample_as_the_service_says() -> None:
    said = {"temperature": 0.2, "topP": 0.9, "topK": 0, "minP": 0.1}
    sampling = service({"model": {"uri": "dummy://", "sampling": said}})
    text = by_kind(render(sampling, SECRETS), "ConfigMap")["svc-router"]["data"]["router.json"]
    found = msgspec.json.decode(text, type=RouterConfig).sampling
    assert found == SamplingDefaults(temperature=0.2, top_p=0.9, top_k=0, min_p=0.1)


@pytest.mark.parametrize(
    ("said", "settings", "volume"),
    [
        (None, Batches(), None),
        ({}, Batches(), {"emptyDir": {}}),
        (
            {"pvc": {"claimName": "b"}, "size": "3Mi", "concurrency": 2},
            Batches(max_bytes=3 << 20, concurrency=2),
            {"persistentVolumeClaim": {"claimName": "b"}},
        ),
    ],
)
def test_routers_keep_batches_where_the_service_says(
    said: dict[str, Any] | None, settings: Batches, volume: dict[str, Any] | None
) -> None:
    asking = service({} if said is None else {"router": {"batches": said}})
    objects = render(asking, SECRETS)
    text = by_kind(objects, "ConfigMap")["svc-router"]["data"]["router.json"]
    assert msgspec.json.decode(text, type=RouterConfig).batches == settings
    pod = by_kind(objects, "Deployment")["svc-router"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    arguments = container["args"]
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert ("--batch-directory" in arguments) == (said is not None)
    assert volumes.get("batches") == volume
    if said is not None:
        (mount,) = (m for m in container["volumeMounts"] if m["name"] == "batches")
        path = arguments[arguments.index("--batch-directory") + 1]
        assert mount == {"name": "batches", "mountPath": path}
    assert revision(asking) == revision(service({})), "no engine pod is replaced for it"


@pytest.mark.parametrize(
    ("said", "ui"), [({}, False), ({"ui": False}, False), ({"ui": True}, True)]
)
def test_routers_have_a_page_only_if_the_service_asks_for_it(
    said: dict[str, Any], ui: bool
) -> None:
    shown = service({"router": said})
    text = by_kind(render(shown, SECRETS), "ConfigMap")["svc-router"]["data"]["router.json"]
    assert msgspec.json.decode(text, type=RouterConfig).ui == ui
    assert revision(shown) == revision(service({})), "no engine pod is replaced for it"


@pytest.mark.parametrize(
    ("said", "kept_apart"),
    [
        ({}, False),
        ({"apiKeys": {"secretName": "clients"}}, False),
        ({"apiKeys": {"secretName": "clients", "cachePerKey": True}}, True),
    ],
)
def test_keys_share_no_caches_if_the_service_asks_for_it(
    said: dict[str, Any], kept_apart: bool
) -> None:
    asking = service({"router": said})
    text = by_kind(render(asking, SECRETS), "ConfigMap")["svc-router"]["data"]["router.json"]
    assert msgspec.json.decode(text, type=RouterConfig).cache_per_key == kept_apart
    assert revision(asking) == revision(service({})), "no engine pod is replaced for it"


def test_routers_answer_under_their_own_names_and_those_that_the_service_allows() -> None:
    said = {"allowedHosts": ["llm.example.com"], "allowedOrigins": ["https://app.example.com"]}
    asking = service({"router": said})
    text = by_kind(render(asking, SECRETS), "ConfigMap")["svc-router"]["data"]["router.json"]
    config = msgspec.json.decode(text, type=RouterConfig)
    assert config.allowed_hosts == ["svc-router.models", "llm.example.com"]
    assert config.allowed_origins == ["https://app.example.com"]
    rules = BrowserRules(frozenset(config.allowed_hosts))
    for name in ("svc-router", "svc-router.models", "svc-router.models.svc.cluster.local"):
        rules.check_host("/", {b"host": f"{name}:8080".encode()})
    assert revision(asking) == revision(service({})), "no engine pod is replaced for it"


def test_one_field_makes_all_pods_send_spans() -> None:
    url = "http://otel:4318/v1/traces"
    traced = service({"engine": {"otlpTracesEndpoint": url}})
    files = {
        name: msgspec.json.decode(text)["otlp_traces_endpoint"]
        for config in by_kind(render(traced, SECRETS), "ConfigMap").values()
        for name, text in config["data"].items()
        if name != "serving.json"
    }
    assert files == {"engine.json": url, "router.json": url}


@pytest.mark.parametrize(("said", "share"), [({}, 0.9), ({"gpuMemoryUtilization": 0.6}, 0.6)])
def test_kv_cache_memory_may_be_left_to_the_engine(said: dict[str, Any], share: float) -> None:
    asked = service({"engine": {"kvCacheMemory": "auto", **said}})
    maps = by_kind(render(asked, SECRETS), "ConfigMap")
    text = maps[f"svc-decode-{revision(asked)}"]["data"]["engine.json"]
    config = msgspec.json.decode(text, type=EngineConfig)
    assert (config.kv_cache_bytes, config.gpu_memory_utilization) == (None, share)


def test_kv_cache_disk_is_told_to_engines_in_bytes() -> None:
    asked = service({"engine": {"kvCacheDisk": "3Gi"}})
    maps = by_kind(render(asked, SECRETS), "ConfigMap")
    for pool in ("prefill", "decode"):
        text = maps[f"svc-{pool}-{revision(asked)}"]["data"]["engine.json"]
        assert msgspec.json.decode(text, type=EngineConfig).kv_disk_bytes == 3 << 30


@pytest.mark.parametrize(("asked", "size"), [("2Gi", "2176Mi"), ("auto", "1088Mi")])
def test_kept_kv_lies_in_memory_that_outlives_a_container(asked: str, size: str) -> None:
    spec = service({"engine": {"kvKeep": "/dev/shm", "kvCacheMemory": asked}})
    deployments = by_kind(render(spec, SECRETS), "Deployment")
    for pool in ("prefill", "decode"):
        pod = deployments[f"svc-{pool}-{revision(spec)}"]["spec"]["template"]["spec"]
        volume = {"name": "kept-kv", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
        assert volume in pod["volumes"]
        mount = {"name": "kept-kv", "mountPath": "/dev/shm"}
        assert mount in pod["containers"][0]["volumeMounts"]
    router = deployments["svc-router"]["spec"]["template"]["spec"]
    assert "kept-kv" not in str(router)


def test_the_secret_holds_the_key_files_that_programs_read() -> None:
    (secret,) = by_kind(render(service({}), SECRETS), "Secret").values()
    files = {name: base64.b64decode(text).decode() for name, text in secret["data"].items()}
    assert files == {"curve-public": "P" * 40, "curve-secret": "S" * 40, "admin-token": "token"}


@pytest.mark.parametrize(
    ("limit", "threads"), [(4, 3), ("2", 2), ("2500m", 2), ("500m", 1), ("1.5", 1), ("3k", 2999)]
)
def test_a_cpu_limit_sets_the_threads(limit: int | str, threads: int) -> None:
    spec = {"prefill": {"replicas": 1, "resources": {"limits": {"cpu": limit}}}}
    wanted = service(spec)
    data = by_kind(render(wanted, SECRETS), "ConfigMap")[f"svc-prefill-{revision(wanted)}"]["data"]
    assert msgspec.json.decode(data["engine.json"], type=EngineConfig).num_threads == threads


SAME_REVISION: list[dict[str, Any]] = [
    {"prefill": {"replicas": 9}},
    {"decode": {"replicas": 1, "resources": {"limits": {"cpu": 2}}}},
    {"decode": {"replicas": 1, "podTemplate": {"spec": {"nodeSelector": {"a": "b"}}}}},
    {"router": {"replicas": 3}},
    {"transfer": {"leaseSeconds": 20}},
    {"suspend": True},
    {"router": {"apiKeys": {"secretName": "clients"}, "tls": {"secretName": "tls"}}},
    {"network": {"engineApi": "OwnPods"}},
]
OTHER_REVISION: list[dict[str, Any]] = [
    {"model": {"uri": "dummy://?num_hidden_layers=3"}},
    {"engine": {"image": "example.org/engine:2"}},
    {"engine": {"blockSize": 32}},
    {"engine": {"dtype": "bfloat16"}},
    {"engine": {"reasoningParser": "none"}},
    {"transfer": {"transport": "tcp"}},
]


@each("spec", SAME_REVISION)
def test_what_pods_of_a_pair_may_differ_in_makes_no_new_revision(spec: dict[str, Any]) -> None:
    assert revision(service(spec)) == revision(service({}))


@pytest.mark.parametrize("spec", OTHER_REVISION)
def test_what_pods_of_a_pair_must_share_makes_a_new_revision(spec: dict[str, Any]) -> None:
    assert revision(service(spec)) != revision(service({}))


def test_a_service_stored_with_the_first_defaults_keeps_its_name() -> None:
    assert revision(service({"engine": {"reasoningParser": "none"}})) == "7541b6a1"


def test_a_rotation_of_the_keys_makes_a_new_revision_with_a_secret_of_its_own() -> None:
    before = service({})
    annotations = {"diptych.dev/rotate-secrets": "2"}
    metadata = msgspec.structs.replace(before.metadata, annotations=annotations)
    after = msgspec.structs.replace(before, metadata=metadata)
    assert revision(after) != revision(before)
    secrets = [set(by_kind(render(one, SECRETS), "Secret")) for one in (before, after)]
    assert not secrets[0] & secrets[1]


def test_routers_hold_the_older_keys_too_while_engines_may_have_them() -> None:
    objects = render_shared(service({}), Cluster(), KeySets("new", "old"), Serving())
    router = by_kind(objects, "Deployment")["svc-router"]
    volumes = {v["name"]: v for v in router["spec"]["template"]["spec"]["volumes"]}
    new, old = (source["secret"] for source in volumes["keys"]["projected"]["sources"])
    assert (new["name"], old["name"]) == ("svc-keys-new", "svc-keys-old")
    assert {item["path"] for item in old["items"]} == {
        "previous-curve-public", "previous-curve-secret", "previous-admin-token",
    }  # fmt: skip


@pytest.mark.parametrize("policy", ["policy/v1", "policy/older"])
def test_budgets_are_written_in_the_version_that_the_cluster_serves(
    policy: str,
) -> None:
    cluster = Cluster(policy_api=policy)
    objects = render_shared(service({}), cluster, KeySets("k"), Serving())
    budgets = by_kind(objects, "PodDisruptionBudget").values()
    assert [budget["apiVersion"] for budget in budgets] == [policy] * 3


def test_only_the_services_own_pods_reach_the_ports_of_engines() -> None:
    objects = render_shared(service({}), Cluster(), KeySets("k"), Serving())
    for policy in by_kind(objects, "NetworkPolicy").values():
        own, anybody, operator = policy["spec"]["ingress"]
        (peer,) = own["from"]
        assert peer == {"podSelector": {"matchLabels": {"diptych.dev/service": "svc"}}}
        assert "from" not in anybody
        assert [port["port"] for port in anybody["ports"]] == [8000]
        assert [port["port"] for port in operator["ports"]] == [8081]
        assert operator["from"][0]["podSelector"]


@pytest.mark.parametrize("engine_api", ["None", "OwnPods"])
def test_engines_take_requests_of_the_services_own_pods_only_and_if_asked(engine_api: str) -> None:
    objects = render(service({"network": {"engineApi": engine_api}}), SECRETS)
    asked = engine_api == "OwnPods"
    engines = [
        d for d in by_kind(objects, "Deployment").values() if "router" not in str(d["metadata"])
    ]
    assert len(engines) == 2
    for deployment in engines:
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ("--api-port" in container["args"]) == ("api" in ports) == asked
        assert ports.get("api", 8001) == 8001
    for name in ("svc-prefill", "svc-decode"):
        policy = by_kind(objects, "NetworkPolicy")[name]["spec"]["ingress"]
        others = [rule for rule in policy if "from" not in rule or "namespaceSelector" in str(rule)]
        opened = {port["port"] for rule in others for port in rule["ports"]}
        assert opened == {8000, 8081}, "scrapers, and the operator"


def test_a_router_reads_its_keys_and_its_certificate_from_secrets_of_the_user() -> None:
    objects = render(service(FEATURES["front_door"]), SECRETS)
    router = by_kind(objects, "Deployment")["svc-router"]["spec"]["template"]
    container = router["spec"]["containers"][0]
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"] if m.get("readOnly")}
    volumes = {volume["name"]: volume.get("secret", {}) for volume in router["spec"]["volumes"]}
    for option, name, secret in (
        ("--api-keys", "api-keys", "clients"), ("--tls", "tls", "llm.example.org")
    ):  # fmt: skip
        assert container["args"][container["args"].index(option) + 1] == mounts[name]
        assert volumes[name] == {"secretName": secret, "defaultMode": 0o440}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[kind]["httpGet"]["scheme"] == "HTTPS"
    (port,) = by_kind(objects, "Service")["svc-router"]["spec"]["ports"]
    assert (port["name"], port["appProtocol"], port["port"]) == ("https", "https", 8000)
    assert router["metadata"]["annotations"]["prometheus.io/scheme"] == "https"
    assert by_kind(objects, "Secret").keys().isdisjoint({"clients", "llm.example.org"})


@pytest.mark.parametrize(
    ("spec", "missing"),
    [
        ({"availability": {"podDisruptionBudget": "None"}}, "PodDisruptionBudget"),
        ({"network": {"policy": "None"}}, "NetworkPolicy"),
    ],
)
def test_what_is_not_to_be_managed_is_not_rendered(spec: dict[str, Any], missing: str) -> None:
    assert by_kind(render(service({}), SECRETS), missing)
    assert not by_kind(render(service(spec), SECRETS), missing)


def test_pods_get_the_time_to_drain_and_no_access_to_the_api() -> None:
    objects = render(service({"availability": {"drainSeconds": 90}}), SECRETS)
    accounts = by_kind(objects, "ServiceAccount")
    for deployment in by_kind(objects, "Deployment").values():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > 90
        assert pod["automountServiceAccountToken"] is False
        assert accounts[pod["serviceAccountName"]]["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["livenessProbe"]["httpGet"]["path"] == "/live"


def test_a_suspended_service_keeps_its_objects_and_has_no_pods() -> None:
    running, suspended = (render(service({"suspend": s}), SECRETS) for s in (False, True))
    assert {d["spec"]["replicas"] for d in by_kind(suspended, "Deployment").values()} == {0}
    assert [(o["kind"], o["metadata"]["name"]) for o in running] == [
        (o["kind"], o["metadata"]["name"]) for o in suspended
    ]


def test_only_a_pool_that_is_replaced_in_place_is_given_no_room_for_another_pod() -> None:
    asked, keys = service({}), KeySets("k")
    objects = render_revision(asked, Cluster(), "r", keys, fixed_counts(asked), {"decode"})
    assert {
        name: deployment["spec"]["strategy"]["rollingUpdate"]
        for name, deployment in by_kind(objects, "Deployment").items()
    } == {
        "svc-prefill-r": {"maxSurge": 1, "maxUnavailable": 0},
        "svc-decode-r": {"maxSurge": 0, "maxUnavailable": 1},
    }


def test_what_somebody_paused_goes_on_as_the_operator_says_of_every_deployment() -> None:
    for deployment in by_kind(render(service({}), SECRETS), "Deployment").values():
        assert deployment["spec"]["paused"] is False


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"metadata": {"labels": {"diptych.dev/role": "decode"}}},
         "spec.prefill.podTemplate.metadata.labels: diptych.dev/role must stay 'prefill'"),
        # The operator would no longer see the pods.
        ({"metadata": {"labels": {"app.kubernetes.io/managed-by": "platform"}}},
         "spec.prefill.podTemplate.metadata.labels: app.kubernetes.io/managed-by must stay "
         "'diptych'"),
        ({"metadata": None},
         "spec.prefill.podTemplate.metadata: is null, which kubectl apply does not send; to remove "
         "the field, name its path in podTemplateRemove"),
        ({"spec": {"containers": [{"image": "x"}]}},
         "spec.prefill.podTemplate.spec.containers[0].name: is missing; entries are merged by it"),
    ],
)  # fmt: skip
def test_a_pod_template_cannot_break_the_service(template: dict[str, Any], message: str) -> None:
    spec = {"prefill": {"replicas": 1, "podTemplate": template}}
    with pytest.raises(SpecError) as caught:
        render(service(spec), SECRETS)
    assert str(caught.value) == message


def refusal(**part: Any) -> str:
    with pytest.raises(SpecError) as caught:
        render(service({"prefill": {"replicas": 1, **part}}), SECRETS)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("metadata.labels[diptych.dev/service]",
         "spec.prefill.podTemplate.metadata.labels: diptych.dev/service must stay 'svc'"),
        ("spec.containers[engine]",
         "spec.prefill.podTemplate.spec.containers: the container 'engine' must stay"),
        ("spec.terminationGracePeriodSeconds",
         "spec.prefill.podTemplate.spec.terminationGracePeriodSeconds: must be at least 78"),
        ("spec.containers[engine].readinessProbe",
         "spec.prefill.podTemplate.spec.containers[engine].readinessProbe: must stay"),
        ("spec.nothing", "spec.prefill.podTemplateRemove: 'spec.nothing' names nothing"),
    ],
)  # fmt: skip
def test_what_the_service_relies_on_cannot_be_removed(path: str, words: str) -> None:
    assert refusal(podTemplateRemove=[path]).startswith(words)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("metadata.labels", ["x"], "must be an object, not ['x']"),
        ("metadata.annotations", 5, "must be an object, not 5"),
        ("spec.securityContext", "x", "must be an object, not 'x'"),
        ("spec.containers", {"x": {}}, "must be a list, not {'x': {}}"),
        ("spec.volumes", 1.5, "must be a list, not 1.5"),
    ],
)
def test_a_field_that_is_removed_is_given_anew_in_its_shape(
    path: str, value: Any, words: str
) -> None:
    part, field = path.split(".")
    told = refusal(podTemplate={part: {field: value}}, podTemplateRemove=[path])
    assert told == f"spec.prefill.podTemplate.{path}: {words}"


PRE_STOP = {"preStop": {"exec": {"command": ["sleep", "1000"]}}}


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("terminationGracePeriodSeconds", [-5, 0, 30, 77, 77.5, "78", True]),
        ("restartPolicy", ["Never", "OnFailure"]),
        ("activeDeadlineSeconds", [0, 3600]),
        ("shareProcessNamespace", [True, "true"]),
        ("containers[engine].lifecycle", [PRE_STOP, {"stopSignal": "SIGKILL"}, "x"]),
    ],
)
def test_a_pod_template_cannot_defeat_the_drain(field: str, values: list[Any]) -> None:
    *_, last = field.split(".")
    for value in values:
        changed = {last: value}
        if field != last:
            changed = {"containers": [{"name": "engine", **changed}]}
        said = refusal(podTemplate={"spec": changed})
        assert said.startswith(f"spec.prefill.podTemplate.spec.{field}: must "), value


def test_what_harms_no_drain_is_left_to_the_pod_template() -> None:
    post_start = {"postStart": {"exec": {"command": ["true"]}}}
    changed = {
        "terminationGracePeriodSeconds": 78, "restartPolicy": "Always",
        "containers": [
            {"name": "engine", "lifecycle": post_start},
            {"name": "other", "image": "other:1", "lifecycle": PRE_STOP},
        ],
    }  # fmt: skip
    part = {"replicas": 1, "podTemplate": {"spec": changed}}
    render(service({"prefill": part, "decode": part, "router": {}}), SECRETS)


def test_pods_name_no_user_where_the_cluster_chooses_it() -> None:
    """As OpenShift's constraint restricted-v2 wants it; all else is as before."""
    asked, left = (
        with_images(service({}), Images(cluster_chooses_user=chosen)) for chosen in (False, True)
    )
    named, open_ = (by_kind(render(each, SECRETS), "Deployment") for each in (asked, left))
    assert named.keys() == open_.keys()
    for name, deployment in named.items():
        context = deployment["spec"]["template"]["spec"]["securityContext"]
        for field in ("runAsUser", "runAsGroup", "fsGroup"):
            assert context.pop(field) == 10001
        assert deployment["spec"]["template"] == open_[name]["spec"]["template"]


POD_DEFAULTS = msgspec.convert(
    {
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccountName": "models",
        "priorityClassName": "serving",
        "engineResources": {"limits": {"cpu": 4}},
        "routerResources": {"limits": {"cpu": "500m"}},
    },
    PodDefaults,
)


def test_pods_have_the_operators_defaults_where_a_service_says_nothing_else() -> None:
    own = {
        "podTemplate": {
            "spec": {"priorityClassName": "low", "imagePullSecrets": [{"name": "own"}]}
        },
        "resources": {"limits": {"cpu": 2}},
    }
    plain = service({"prefill": {"replicas": 1}, "decode": {"replicas": 1, **own}})
    found = with_images(plain, Images(pods=POD_DEFAULTS))
    assert revision(found) == revision(plain), "no engines of another revision"
    pods = {
        each["spec"]["template"]["metadata"]["labels"][ROLE_LABEL]: each["spec"]["template"]["spec"]
        for each in by_kind(render(found, SECRETS), "Deployment").values()
    }
    for role, cpu in (("prefill", "4"), ("router", "500m")):
        assert pods[role]["imagePullSecrets"] == [{"name": "registry"}]
        assert pods[role]["priorityClassName"] == "serving"
        assert pods[role]["containers"][0]["resources"] == {"limits": {"cpu": cpu}}
    decode = pods["decode"]
    assert decode["imagePullSecrets"] == [{"name": "registry"}, {"name": "own"}]
    assert decode["priorityClassName"] == "low"
    assert decode["containers"][0]["resources"] == {"limits": {"cpu": "2"}}
    assert {pod["serviceAccountName"] for pod in pods.values()} == {"models"}


def test_without_defaults_a_service_is_as_it_was_and_errors_name_its_own_field() -> None:
    named = with_images(service({}), Images())
    assert with_images(named, Images(pods=PodDefaults())) == named
    wrong = service({"prefill": {"podTemplate": {"spec": "x"}}})
    with pytest.raises(SpecError, match=r"spec\.prefill\.podTemplate\.spec"):
        with_images(wrong, Images(pods=POD_DEFAULTS))


pools = st.fixed_dictionaries(
    {"replicas": st.integers(1, 1000)},
    optional={
        "resources": st.fixed_dictionaries({"limits": st.just({"cpu": "2", "memory": "4Gi"})})
    },
)
specs = st.fixed_dictionaries(
    {"prefill": pools, "decode": pools},
    optional={
        "transfer": st.fixed_dictionaries(
            {"transport": st.sampled_from(["auto", "rdma", "tcp", "shm"])}
        ),
        "engine": st.fixed_dictionaries({"maxNumSeqs": st.integers(1, 512)}),
        "router": st.fixed_dictionaries({"replicas": st.integers(1, 100)}),
    },
)
names = st.from_regex(r"\A[a-z]([-a-z0-9]{0,38}[a-z0-9])?\Z")


@given(spec=specs, name=names)
def test_every_rendering_hangs_together(spec: dict[str, Any], name: str) -> None:
    wanted = service(spec, name)
    objects = render(wanted, SECRETS)
    assert render(wanted, SECRETS) == objects
    msgspec.json.encode(objects)
    assert all(len(item["metadata"]["name"]) <= 63 for item in objects)
    identities = [(item["kind"], item["metadata"]["name"]) for item in objects]
    assert len(set(identities)) == len(identities)

    templates = []
    for deployment in by_kind(objects, "Deployment").values():
        template = deployment["spec"]["template"]
        assert selects(deployment["spec"]["selector"]["matchLabels"], template)
        check_references(template, identities)
        templates.append(template)
    for headless in by_kind(objects, "Service").values():
        chosen = [item for item in templates if selects(headless["spec"]["selector"], item)]
        assert len(chosen) == 1
        ports = {port["name"] for port in chosen[0]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in headless["spec"]["ports"]} <= ports


def selects(selector: dict[str, str], template: dict[str, Any]) -> bool:
    labels: dict[str, str] = template["metadata"]["labels"]
    assert all(len(value) <= 63 for value in labels.values())
    return selector.items() <= labels.items()


def check_references(template: dict[str, Any], identities: list[tuple[str, str]]) -> None:
    """Every variable, volume, ConfigMap, Secret and port that a pod names is there."""
    pod, container = template["spec"], template["spec"]["containers"][0]
    variables = {variable["name"] for variable in container["env"]}
    for argument in container["args"]:
        assert "$(" not in argument or argument[2:].partition(")")[0] in variables
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "configMap" in volume:
            assert ("ConfigMap", volume["configMap"]["name"]) in identities
        if "secret" in volume:
            assert ("Secret", volume["secret"]["secretName"]) in identities
    ports = {port["name"] for port in container["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(kind, {})
        assert {action["port"] for action in probe.values() if isinstance(action, dict)} <= ports
