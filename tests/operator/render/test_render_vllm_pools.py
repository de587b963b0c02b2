"""Two pools of vLLM: how each is told to hand KV over, and what its pods have for that."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cluster_kit.crds import inference_service, vllm_spec

from diptych_operator.api.images import Images, published
from diptych_operator.api.parse import parse_object
from diptych_operator.api.service import InferenceService
from diptych_operator.render import ServiceSecrets, render
from diptych_operator.revision import revision
from diptych_protocol import CurveKeys, RouterConfig
from diptych_protocol.config import RANKS_OF_CONNECTOR
from diptych_vllm.settings import ConnectorSettings

SECRETS = ServiceSecrets(CurveKeys("P" * 40, "S" * 40), "token")
IMAGE = "vllm/vllm-openai:v0.32.0"
NIXL: dict[str, Any] = {"transfer": {"connector": "nixl"}}
DIPTYCH: dict[str, Any] = {"transfer": {}}
WIRE = "diptych_vllm.serve.middleware.Wire"


def service(**spec: Any) -> InferenceService:
    return parse_object(inference_service(vllm_spec(**{"prefill": {}, **spec})), Images())


def rendered(wanted: InferenceService, kind: str) -> dict[str, dict[str, Any]]:
    objects = render(wanted, SECRETS)
    return {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}


def deployment(wanted: InferenceService, pool: str) -> dict[str, Any]:
    return rendered(wanted, "Deployment")[f"svc-{pool}-{revision(wanted)}"]


def pod_of(wanted: InferenceService, pool: str) -> dict[str, Any]:
    pod: dict[str, Any] = deployment(wanted, pool)["spec"]["template"]["spec"]
    return pod


def container_of(wanted: InferenceService, pool: str) -> dict[str, Any]:
    container: dict[str, Any] = pod_of(wanted, pool)["containers"][0]
    return container


def variables(wanted: InferenceService, pool: str) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in container_of(wanted, pool)["env"]}


def transfer_config(wanted: InferenceService, pool: str) -> dict[str, Any]:
    """What vLLM reads in a pod whose address is 10.0.0.7."""
    args = container_of(wanted, pool)["args"]
    (text,) = (arg for arg in args if arg.startswith("--kv-transfer-config="))
    told = {name: value or "" for name, value in variables(wanted, pool).items()}
    for name, value in (told | {"POD_IP": "10.0.0.7"}).items():
        text = text.replace(f"$({name})", value)
    config: dict[str, Any] = msgspec.json.decode(text.partition("=")[2])
    return config


POOLS_AND_ROLES = [("prefill", "kv_producer"), ("decode", "kv_consumer")]


@pytest.mark.parametrize(("pool", "role"), POOLS_AND_ROLES)
def test_nixl_knows_its_role_its_lease_and_its_address(pool: str, role: str) -> None:
    wanted = service(transfer={"connector": "nixl", "leaseSeconds": 45.9})
    assert transfer_config(wanted, pool) == {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": 45},
    }
    told = variables(wanted, pool)
    assert told["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
    ports = {port["name"]: port["containerPort"] for port in container_of(wanted, pool)["ports"]}
    assert told["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(ports["nixl"]) == "5600"
    assert not {"UCX_TLS", "UCX_NET_DEVICES"} & told.keys(), "these are the podTemplate's"


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_our_connector_knows_where_it_is_reached_its_keys_and_its_revision(pool: str) -> None:
    wanted = service(transfer={"leaseSeconds": 45.5})
    assert transfer_config(wanted, pool) == {
        "kv_connector": "DiptychConnector",
        "kv_connector_module_path": "diptych_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "listen_host": "0.0.0.0",
            "listen_port": 5558,
            "advertise_host": "10.0.0.7",
            "lease_seconds": 45.5,
            "keys": "/etc/diptych/keys",
            "revision": revision(wanted),
        },
    }


def test_our_connector_takes_the_settings_that_it_is_given() -> None:
    extra = transfer_config(service(), "decode")["kv_connector_extra_config"]
    settings = ConnectorSettings.parse(extra)
    assert (settings.listen_port, settings.keys) == (5558, "/etc/diptych/keys")


@pytest.mark.parametrize("ranks", RANKS_OF_CONNECTOR)
def test_each_rank_of_our_connector_has_the_port_behind_that_of_the_rank_before(ranks: int) -> None:
    """The connector is told the first."""
    wanted = service(engine={"tensorParallelSize": ranks})
    ports = {p["name"]: p["containerPort"] for p in container_of(wanted, "decode")["ports"]}
    of_ranks = ["kv", *(f"kv-{rank}" for rank in range(1, ranks))]
    assert [ports[name] for name in of_ranks] == [*range(5558, 5558 + ranks)]
    assert ports.keys() == {"http", "core", *of_ranks}
    assert len(set(ports.values())) == len(ports), "no rank listens where another listens"


def test_the_pool_with_more_ranks_says_how_many_ports_there_are() -> None:
    wanted = service(prefill={"engine": {"tensorParallelSize": 4}})
    for pool in ("prefill", "decode"):
        ports = {port["name"] for port in container_of(wanted, pool)["ports"]}
        assert {"kv", "kv-1", "kv-2", "kv-3"} < ports


def test_nixl_has_one_port_for_all_ranks() -> None:
    wanted = service(engine={"tensorParallelSize": 4}, **NIXL)
    ports = {port["name"] for port in container_of(wanted, "decode")["ports"]}
    assert ports == {"http", "core", "nixl"}


def test_our_middleware_is_added_to_what_a_service_has_of_that_kind() -> None:
    own = service(engine={"runtime": "vllm", "image": IMAGE, "args": ["--middleware=their.own"]})
    for wanted, expected in ((own, ["their.own", WIRE]), (service(**NIXL), [WIRE])):
        for pool in ("prefill", "decode"):
            container = container_of(wanted, pool)
            found = [x.partition("=")[2] for x in container["args"] if "--middleware" in x]
            assert found == expected
            assert "VLLM_PLUGINS" not in variables(wanted, pool), "others' plugins stay on"


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_an_init_container_brings_our_connector_for_the_engine_alone(pool: str) -> None:
    resources = {"limits": {"cpu": 4, "nvidia.com/gpu": 1}}
    wanted = service(**{pool: {"resources": resources}})
    pod = pod_of(wanted, pool)
    copy = next(c for c in pod["initContainers"] if c["name"] == "connector")
    assert copy["image"] == published("vllm-connector")
    assert copy["command"][-2] == variables(wanted, pool)["PYTHONPATH"] == "/opt/diptych/vllm"
    assert copy["volumeMounts"] == [{"name": "connector", "mountPath": copy["command"][-1]}]
    assert copy["resources"] == {"limits": {"cpu": "4"}}, "it copies files, and needs no GPU"
    assert "env" not in copy
    (mount,) = (m for m in container_of(wanted, pool)["volumeMounts"] if m["name"] == "connector")
    assert mount == {"name": "connector", "mountPath": "/opt/diptych/vllm", "readOnly": True}
    assert {"name": "connector", "emptyDir": {}} in pod["volumes"]
    router = rendered(wanted, "Deployment")["svc-router"]["spec"]["template"]["spec"]
    assert "connector" not in msgspec.json.encode(router["volumes"]).decode()


@pytest.mark.parametrize("spec", [NIXL, {"prefill": None}], ids=["nixl", "one pool"])
def test_every_vllm_gets_what_it_lacks_to_speak_to_routers(spec: dict[str, Any]) -> None:
    wanted = service(**spec)
    for pool in wanted.pools:
        names = [container["name"] for container in pod_of(wanted, pool)["initContainers"]]
        assert names == ["connector", "model"]
        assert variables(wanted, pool)["PYTHONPATH"] == "/opt/diptych/vllm"


def test_nothing_is_copied_where_nothing_is_missing() -> None:
    wanted = service(transfer={"connectorImage": IMAGE})
    for pool in ("prefill", "decode"):
        names = [container["name"] for container in pod_of(wanted, pool)["initContainers"]]
        assert names == ["model"]
        assert "PYTHONPATH" not in variables(wanted, pool)


def test_a_pool_of_another_image_gets_the_copy_that_the_other_needs_not() -> None:
    other = {"engine": {"image": "example.org/vllm:arm64"}}
    wanted = service(transfer={"connectorImage": IMAGE}, prefill=other)
    names = {
        pool: [container["name"] for container in pod_of(wanted, pool)["initContainers"]]
        for pool in ("prefill", "decode")
    }
    assert names == {"prefill": ["connector", "model"], "decode": ["model"]}


@pytest.mark.parametrize("spec", [NIXL, DIPTYCH], ids=["nixl", "diptych"])
def test_only_the_services_own_pods_reach_engines(spec: dict[str, Any]) -> None:
    wanted = service(**spec)
    for pool in ("prefill", "decode"):
        own, *others = rendered(wanted, "NetworkPolicy")[f"svc-{pool}"]["spec"]["ingress"]
        assert own.keys() == {"from"}, "UCX listens on ports of its own choice"
        (pods,) = own["from"]
        assert pods == {"podSelector": {"matchLabels": {"diptych.dev/service": "svc"}}}
        named = {p["name"]: p["containerPort"] for p in container_of(wanted, pool)["ports"]}
        assert {named.get("nixl"), named.get("kv")} - {None}
        open_to_others = {port["port"] for rule in others for port in rule["ports"]}
        assert not open_to_others & set(named.values())


ROUTERS = [
    (DIPTYCH, "Required"),
    ({"transfer": {"connector": "nixl", "leaseSeconds": 12.7, "verify": "Warn"}}, "Warn"),
    ({"transfer": {"leaseSeconds": 12.5, "verify": "Off"}}, "Off"),
    ({"prefill": None, **NIXL}, "Off"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "told"), ROUTERS, ids=str)
def test_canaries_are_sent_where_kv_is_handed_over(spec: dict[str, Any], told: str) -> None:
    (text,) = rendered(service(**spec), "ConfigMap")["svc-router"]["data"].values()
    assert msgspec.json.decode(text, type=RouterConfig).verify == told


def test_routers_find_both_pools_as_they_find_those_of_our_own_engines() -> None:
    router = rendered(service(), "Deployment")["svc-router"]["spec"]["template"]["spec"]
    (container,) = router["containers"]
    told = {entry["name"]: entry.get("value") for entry in container["env"]}
    for pool in ("prefill", "decode"):
        assert told[f"DIPTYCH_{pool.upper()}_TARGETS"] == f"svc-{pool}.default.svc:5557"
        assert f"--{pool}" in container["args"]


def test_prefill_engines_may_have_an_image_ranks_and_arguments_of_their_own() -> None:
    image, more = "example.org/vllm:arm64", ["--max-num-seqs=8"]
    own = {"image": image, "args": more, "tensorParallelSize": 2}
    wanted = service(
        **NIXL,
        engine={"args": ["--max-num-seqs=64", "--block-size=32"], "tensorParallelSize": 4},
        prefill={"engine": own},
    )
    expected = {
        "prefill": (image, ["--max-num-seqs=64", "--block-size=32", *more], 2),
        "decode": (IMAGE, ["--max-num-seqs=64", "--block-size=32"], 4),
    }
    for pool, (its_image, args, ranks) in expected.items():
        container = container_of(wanted, pool)
        assert container["image"] == its_image
        assert container["args"][1 : 1 + len(args)] == args
        assert container["args"][1 + len(args)].startswith("--host=")
        assert f"--tensor-parallel-size={ranks}" in container["args"]
        (shm,) = (v for v in pod_of(wanted, pool)["volumes"] if v["name"] == "shm")
        assert shm["emptyDir"]["sizeLimit"] == f"{2 * ranks}Gi"


OTHER_REVISION: list[dict[str, Any]] = [
    NIXL,
    {"prefill": None},
    {"transfer": {"connectorImage": "example.org/connector:2"}},
    {"prefill": {"engine": {"image": "example.org/vllm:2"}}},
    {"prefill": {"engine": {"args": ["--max-num-seqs=8"]}}},
]
SAME_REVISION: list[dict[str, Any]] = [
    {"prefill": {"replicas": 7}},
    {"prefill": {"engine": {}}},
    {"prefill": {"engine": {"tensorParallelSize": 1, "image": IMAGE}}},
    {"transfer": {"leaseSeconds": 20, "verify": "Off"}},
    {"transfer": {"connectorImage": published("vllm-connector")}},
]


@pytest.mark.parametrize("spec", OTHER_REVISION, ids=str)
def test_what_engines_are_is_part_of_the_revision(spec: dict[str, Any]) -> None:
    assert revision(service(**spec)) != revision(service())


@pytest.mark.parametrize("spec", SAME_REVISION, ids=str)
def test_what_engines_are_not_is_no_part_of_it(spec: dict[str, Any]) -> None:
    assert revision(service(**spec)) == revision(service())


def test_another_default_for_what_vllm_lacks_is_rolled_out() -> None:
    newer = Images(vllm_connector="example.org/connector:2")
    for spec in (DIPTYCH, NIXL, {"prefill": None}):
        raw = inference_service(vllm_spec(**{"prefill": {}, **spec}))
        assert revision(parse_object(raw, newer)) != revision(service(**spec))


def test_both_pools_have_the_pods_that_they_are_given() -> None:
    wanted = service(prefill={"replicas": 2}, decode={"replicas": 3})
    replicas = {
        pool: deployment(wanted, pool)["spec"]["replicas"] for pool in ("prefill", "decode")
    }
    assert replicas == {"prefill": 2, "decode": 3}
