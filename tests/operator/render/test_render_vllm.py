"""The pods of a service that runs vLLM, and what is part of its revision."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from cluster_kit.crds import inference_service, vllm_spec
from hypothesis import given
from hypothesis import strategies as st

from diptych_operator.api.base import SpecError
from diptych_operator.api.engine import (
    NOT_FOR_VLLM,
    VLLM_HAS,
    VLLM_INSTEAD,
    Engine,
)
from diptych_operator.api.images import Images
from diptych_operator.api.parse import parse_object
from diptych_operator.api.service import InferenceService
from diptych_operator.api.vllm_arguments import OWNED_ARGUMENTS
from diptych_operator.render import ServiceSecrets, render
from diptych_operator.revision import key_set, revision
from diptych_protocol import CurveKeys, RouterConfig

SECRETS = ServiceSecrets(CurveKeys("P" * 40, "S" * 40), "token")
IMAGE = "vllm/vllm-openai:v0.32.0"


def service(**spec: Any) -> InferenceService:
    return parse_object(inference_service(vllm_spec(**spec)), Images())


def rendered(wanted: InferenceService, kind: str) -> dict[str, dict[str, Any]]:
    objects = render(wanted, SECRETS)
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


def deployment(wanted: InferenceService) -> dict[str, Any]:
    return rendered(wanted, "Deployment")[f"svc-decode-{revision(wanted)}"]


def pod_of(wanted: InferenceService) -> dict[str, Any]:
    pod: dict[str, Any] = deployment(wanted)["spec"]["template"]["spec"]
    return pod


def container_of(wanted: InferenceService) -> dict[str, Any]:
    container: dict[str, Any] = pod_of(wanted)["containers"][0]
    return container


def test_there_is_one_pool_and_of_the_other_only_closed_ports() -> None:
    """A service that had two pools may still have pods of the other one."""
    objects = render(service(), SECRETS)
    names = sorted(item["metadata"]["name"] for item in objects if item["kind"] == "Deployment")
    assert names == [f"svc-decode-{revision(service())}", "svc-router"]
    others = [item for item in objects if item["metadata"]["name"] == "svc-prefill"]
    assert [item["kind"] for item in others] == ["NetworkPolicy"]
    rest = [item for item in objects if item not in others]
    assert "prefill" not in msgspec.json.encode(rest).decode()


def test_what_the_operator_decides_comes_after_what_the_service_gives() -> None:
    """vLLM takes the last of an argument that is there twice."""
    args = container_of(service(engine={"args": ["--seed=1", "--max-model-len=64"]}))["args"]
    assert args[1:3] == ["--seed=1", "--max-model-len=64"]
    names = [arg.partition("=")[0] for arg in args]
    for owned in ("--host", "--port", "--served-model-name", "--middleware"):
        assert names.index(owned) > names.index("--max-model-len")


def test_all_that_the_operator_gives_a_service_may_not_give() -> None:
    owned = {name for names in OWNED_ARGUMENTS.values() for name in names}
    given = [arg for arg in container_of(service())["args"] if arg.startswith("--")]
    names = {arg[2:].partition("=")[0] for arg in given}
    assert names - {"middleware"} <= owned, "vLLM adds up what is given of that"


def test_an_engine_knows_who_where_and_of_which_revision_it_is() -> None:
    """The wire says it to routers."""
    wanted = service()
    known = {entry["name"]: entry for entry in container_of(wanted)["env"]}
    assert known["DIPTYCH_REVISION"]["value"] == revision(wanted)
    assert known["DIPTYCH_BIND_HOST"]["value"] == "0.0.0.0"
    assert known["DIPTYCH_CORE_PORT"]["value"] == "5557"
    for name in ("POD_NAME", "POD_IP", "NODE_NAME", "NODE_ZONE"):
        assert "fieldRef" in known[name]["valueFrom"]


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///models/a%20b", "/models/a b"),
        ("pvc://claim/llama/8b/", "/var/lib/diptych/model/llama/8b"),
        ("hf://org/repo", "/var/cache/diptych/models/org-repo-"),
    ],
)
def test_the_model_is_a_folder_in_the_pod(uri: str, path: str) -> None:
    container = container_of(service(model={"uri": uri}))
    assert container["args"][0].startswith(path)
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert uri.startswith("file") or any(path.startswith(f"{mount}/") for mount in mounts)


def test_a_model_is_fetched_by_a_program_of_ours_which_an_image_of_vllm_has_not() -> None:
    ours = Images("registry.example/engine:1", "registry.example/router:1")
    pod = pod_of(parse_object(inference_service(vllm_spec()), ours))
    images = {container["name"]: container["image"] for container in pod["initContainers"]}
    assert images == {"model": ours.router, "connector": ours.vllm_connector}
    assert pod["containers"][0]["image"] == IMAGE


@given(text=st.text(st.sampled_from("$()A "), max_size=8))
def test_nothing_in_an_argument_is_expanded_by_kubernetes(text: str) -> None:
    args = container_of(service(engine={"args": [f"--hf-overrides={text}"]}))["args"]
    kept = re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else "expanded", args[1])
    assert kept == f"--hf-overrides={text}"


@pytest.mark.parametrize(("ranks", "gib"), [(1, 2), (8, 16)])
def test_ranks_have_shared_memory_and_what_they_compile_a_place(ranks: int, gib: int) -> None:
    wanted = service(engine={"tensorParallelSize": ranks})
    pod, container = pod_of(wanted), container_of(wanted)
    assert f"--tensor-parallel-size={ranks}" in container["args"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{gib}Gi"}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts["shm"]["mountPath"] == "/dev/shm"
    assert "readOnly" not in mounts["home"]
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    home = mounts["home"]["mountPath"]
    assert environment["HOME"] == home
    assert environment["VLLM_CACHE_ROOT"].startswith(f"{home}/")


def test_a_service_may_put_a_volume_of_its_own_in_place_of_these() -> None:
    claim = {"name": "home", "persistentVolumeClaim": {"claimName": "compiled"}}
    pod = pod_of(service(decode={"podTemplate": {"spec": {"volumes": [claim]}}}))
    assert [volume for volume in pod["volumes"] if volume["name"] == "home"] == [claim]


def test_a_start_may_take_an_hour_and_until_then_nobody_asks_whether_it_lives() -> None:
    container = container_of(service())
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 3600
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[kind]["httpGet"] == {"path": "/health", "port": "http"}


@pytest.mark.parametrize("drain_s", [5, 600])
def test_a_pod_that_goes_has_the_time_to_be_forgotten_and_to_end_its_streams(drain_s: int) -> None:
    wanted = service(availability={"drainSeconds": drain_s})
    assert f"--shutdown-timeout={drain_s}" in container_of(wanted)["args"]
    assert pod_of(wanted)["terminationGracePeriodSeconds"] > drain_s


def test_pods_of_vllm_hold_the_services_keys_and_have_no_rights() -> None:
    pod = pod_of(service())
    (secret,) = (v["secret"] for v in pod["volumes"] if "secret" in v)
    assert secret["secretName"] == f"svc-keys-{key_set(service())}"
    files = [item["key"] for item in secret["items"]]
    assert files == ["curve-public", "curve-secret"], "and not the token of admin ports"
    assert deployment(service())["metadata"]["labels"]["diptych.dev/keys"] == key_set(service())
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    security = pod["containers"][0]["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_only_the_services_own_pods_reach_the_api_of_vllm() -> None:
    """It asks for no key, and may be paused and emptied by whoever reaches it."""
    ingress = rendered(service(), "NetworkPolicy")["svc-decode"]["spec"]["ingress"]
    own = {"podSelector": {"matchLabels": {"diptych.dev/service": "svc"}}}
    assert ingress[0] == {"from": [own]}
    others = {port["port"] for rule in ingress[1:] for port in rule["ports"]}
    ports = {port["containerPort"] for port in container_of(service())["ports"]}
    assert not others & ports


def test_routers_are_told_of_one_pool() -> None:
    wanted = service(transfer={"verify": "Required"})
    (text,) = rendered(wanted, "ConfigMap")["svc-router"]["data"].values()
    config = msgspec.json.decode(text, type=RouterConfig)
    assert config.verify == "Off"
    router = rendered(wanted, "Deployment")["svc-router"]["spec"]["template"]["spec"]
    (container,) = router["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables["DIPTYCH_DECODE_TARGETS"] == "svc-decode.default.svc:5557"
    assert "--prefill" not in container["args"]
    assert rendered(wanted, "Service").keys() == {"svc-decode", "svc-router"}


OTHER_REVISION: list[dict[str, Any]] = [
    {"engine": {"image": "vllm/vllm-openai:v0.33.0"}},
    {"engine": {"args": ["--block-size=32"]}},
    {"engine": {"tensorParallelSize": 2}},
    {"model": {"uri": "hf://org/other"}},
    {"router": {"image": "registry.example/router:2"}},  # it fetches the model
]
SAME_REVISION: list[dict[str, Any]] = [
    {"decode": {"replicas": 9, "resources": {"limits": {"nvidia.com/gpu": 1}}}},
    {"router": {"replicas": 3}},
    {"availability": {"drainSeconds": 90}},
    {"engine": {"reasoningParser": "none"}},
]


@pytest.mark.parametrize("spec", OTHER_REVISION, ids=str)
def test_what_engines_are_is_part_of_the_revision(spec: dict[str, Any]) -> None:
    assert revision(service(**spec)) != revision(service())


@pytest.mark.parametrize("spec", SAME_REVISION, ids=str)
def test_what_engines_are_not_is_no_part_of_it(spec: dict[str, Any]) -> None:
    assert revision(service(**spec)) == revision(service())


def test_an_image_that_fetches_nothing_is_no_part_of_the_revision() -> None:
    mounted: dict[str, Any] = {"model": {"uri": "pvc://models/llama"}}
    other = {"router": {"image": "registry.example/router:2"}}
    assert revision(service(**mounted, **other)) == revision(service(**mounted))


def test_a_rotation_of_keys_replaces_engines() -> None:
    before = service()
    metadata = msgspec.structs.replace(
        before.metadata, annotations={"diptych.dev/rotate-secrets": "2"}
    )
    after = msgspec.structs.replace(before, metadata=metadata)
    assert revision(after) != revision(before)


def test_another_runtime_is_another_revision_and_ours_keeps_its_name() -> None:
    ours = parse_object(inference_service({"model": {"uri": "hf://org/repo"}}), Images())
    assert revision(ours) != revision(service())
    assert "runtime" not in msgspec.json.encode(render(ours, SECRETS)).decode()


def test_each_field_is_vllms_too_or_refused_where_vllm_runs() -> None:
    fields = set(Engine.__struct_fields__)
    assert VLLM_HAS | VLLM_INSTEAD.keys() <= fields
    assert not VLLM_HAS & VLLM_INSTEAD.keys()
    assert len(NOT_FOR_VLLM) == len(fields - VLLM_HAS)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ({"engine": {"dtype": "bfloat16"}},
         "spec.engine.dtype: is not for the runtime vllm; give --dtype in engine.args"),
        ({"engine": {"cpuLevel": "avx2"}},
         "spec.engine.cpuLevel: is not for the runtime vllm, which lacks it"),
        ({"engine": {"args": ["--tensor-parallel-size=2"]}},
         "spec.engine.args: must not hold --tensor-parallel-size, whole or abbreviated: set "
         "spec.engine.tensorParallelSize"),
        ({"engine": {"args": ["--kv-transfer-config.kv_role=kv_both"]}},
         "spec.engine.args: must not hold --kv-transfer-config, --kv-events-config, --tokens-only, "
         "--skip-tokenizer-init, --disable-log-stats, whole or abbreviated: the operator says how "
         "routers and engines speak"),
        ({"engine": {"args": ["--kv-transfer-conf.kv_role=kv_both"]}},
         "spec.engine.args: must not hold --kv-transfer-config, --kv-events-config, --tokens-only, "
         "--skip-tokenizer-init, --disable-log-stats, whole or abbreviated: the operator says how "
         "routers and engines speak"),
        ({"engine": {"args": ["--max-model-len", "8192"]}},
         "spec.engine.args.1: must be --name or --name=value (at most 1024 characters) such as "
         "--enforce-eager or --max-model-len=16384, not '8192'"),
        ({"engine": {"args": ["-tp=2"]}},
         "spec.engine.args.0: must be --name or --name=value (at most 1024 characters) such as "
         "--enforce-eager or --max-model-len=16384, not '-tp=2'"),
        ({"engine": {"args": {"max-model-len": 8192}}},
         "spec.engine.args: must be a list, not an object"),
        ({"engine": {"runtime": "sglang"}},
         "spec.engine.runtime: must be diptych or vllm, not 'sglang'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_remedy(spec: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecError) as caught:
        service(**spec)
    assert str(caught.value) == complaint
