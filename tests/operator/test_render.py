"""What one InferenceService becomes: golden files per feature, and properties for all."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from diptych_operator.api_types import InferenceService
from diptych_operator.errors import SpecError
from diptych_operator.parse import parse
from diptych_operator.render import ServiceSecrets, render
from diptych_protocol import CurveKeys, EngineConfig, RouterConfig

GOLDEN = Path(__file__).parent / "golden"
SECRETS = ServiceSecrets(CurveKeys("P" * 40, "S" * 40))

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
        "spec": smallest | spec,
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


def test_config_files_decode_to_the_configs_of_the_programs() -> None:
    objects = render(service(FEATURES["engine_settings"]), SECRETS)
    configs = by_kind(objects, "ConfigMap")
    engines = [
        msgspec.json.decode(configs[name]["data"]["engine.json"], type=EngineConfig)
        for name in ("svc-prefill", "svc-decode")
    ]
    router = msgspec.json.decode(configs["svc-router"]["data"]["router.json"], type=RouterConfig)
    assert engines[0] == engines[1]
    assert engines[0].kv_cache_bytes == 24 << 30
    assert engines[0].kv_transfer is not None
    assert engines[0].kv_transfer.lease_seconds == 45
    assert router == RouterConfig(model="file:///models/qwen", served_name="qwen")


def test_the_secret_holds_the_key_files_that_programs_read() -> None:
    secret = by_kind(render(service({}), SECRETS), "Secret")["svc-curve"]
    files = {name: base64.b64decode(text).decode() for name, text in secret["data"].items()}
    assert files == {"curve-public": "P" * 40, "curve-secret": "S" * 40}


@pytest.mark.parametrize(
    ("limit", "threads"), [(4, 4), ("2", 2), ("2500m", 2), ("500m", 1), ("1.5", 1), ("3k", 3000)]
)
def test_a_cpu_limit_sets_the_threads(limit: int | str, threads: int) -> None:
    spec = {"prefill": {"replicas": 1, "resources": {"limits": {"cpu": limit}}}}
    data = by_kind(render(service(spec), SECRETS), "ConfigMap")["svc-prefill"]["data"]
    assert msgspec.json.decode(data["engine.json"], type=EngineConfig).num_threads == threads


def test_a_changed_setting_rolls_both_pools_and_not_the_router() -> None:
    def hashes(spec: dict[str, Any]) -> list[str]:
        deployments = by_kind(render(service(spec), SECRETS), "Deployment").values()
        templates = [deployment["spec"]["template"] for deployment in deployments]
        return [item["metadata"]["annotations"]["diptych.dev/config-hash"] for item in templates]

    before, after = hashes({}), hashes({"engine": {"blockSize": 32}})
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, False, True]
    assert hashes({"prefill": {"replicas": 9}}) == before


def test_a_router_is_not_restarted_because_a_pool_is_empty() -> None:
    router = by_kind(render(service({}), SECRETS), "Deployment")["svc-router"]
    container = router["spec"]["template"]["spec"]["containers"][0]
    assert "httpGet" not in container["livenessProbe"]
    assert "startupProbe" not in container


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"metadata": {"labels": {"diptych.dev/role": "decode"}}},
         "spec.prefill.podTemplate.metadata.labels: diptych.dev/role must stay 'prefill'"),
        ({"metadata": None},
         "spec.prefill.podTemplate.metadata.labels: diptych.dev/service must stay 'svc'"),
        ({"spec": {"containers": None}},
         "spec.prefill.podTemplate.spec.containers: the container 'engine' must stay"),
        ({"spec": {"containers": [{"image": "x"}]}},
         "spec.prefill.podTemplate.spec.containers[0].name: is missing; entries are merged by it"),
    ],
)  # fmt: skip
def test_a_pod_template_cannot_break_the_service(template: dict[str, Any], message: str) -> None:
    spec = {"prefill": {"replicas": 1, "podTemplate": template}}
    with pytest.raises(SpecError) as caught:
        render(service(spec), SECRETS)
    assert str(caught.value) == message


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
    labels = template["metadata"]["labels"]
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
