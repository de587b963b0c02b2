"""Rendered Kubernetes objects become processes of one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from cases import each

from diptych.laptop.pod_spec import UnsupportedPodError
from diptych.laptop.pods import (
    LocalPod,
    expand,
    files,
    local_pods,
    port_runs,
)
from diptych_operator.api.parse import parse
from diptych_operator.render import ServiceSecrets, render
from diptych_operator.revision import key_set, revision
from diptych_protocol import CurveKeys, EngineConfig

RUN_DIR = Path("/run/here")
SERVICE: dict[str, Any] = {
    "apiVersion": "diptych.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "svc"},
    "spec": {
        "model": {"uri": "dummy://"},
        "transfer": {"transport": "tcp"},
        "prefill": {"replicas": 1},
        "decode": {"replicas": 2},
    },
}

PARSED = parse(yaml.safe_dump(SERVICE))
REVISION, KEYS = revision(PARSED), key_set(PARSED)


def rendered(**spec: Any) -> list[dict[str, Any]]:
    parts = {name: part for name, part in (SERVICE["spec"] | spec).items() if part is not None}
    service = SERVICE | {"spec": parts}
    secrets = ServiceSecrets(CurveKeys("P" * 40, "S" * 40), "token")
    return render(parse(yaml.safe_dump(service)), secrets)


def pods(**spec: Any) -> dict[str, LocalPod]:
    objects = rendered(**spec)
    ports = range(20000, 20000 + sum(port_runs(objects)))
    return {pod.name: pod for pod in local_pods(objects, RUN_DIR, ports, 8080)}


@each(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("$(A)", "1"),
        ("x$(A)y$(B)", "x1y2"),
        ("$(MISSING)", "$(MISSING)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$", "$"),
        ("$A", "$A"),
        ("$(A", "$(A"),
        ("cost: 5$", "cost: 5$"),
    ],
)
def test_variables_expand_as_in_kubernetes(text: str, expected: str) -> None:
    assert expand(text, {"A": "1", "B": "2"}) == expected


def test_the_engine_command_speaks_of_local_paths_and_ports() -> None:
    pod = pods()["svc-prefill-0"]
    assert pod.command == (
        "python", "-m", "diptych_engine",
        "--config", f"/run/here/configmaps/svc-prefill-{REVISION}/engine.json",
        "--keys", f"/run/here/secrets/svc-keys-{KEYS}",
        "--engine-id", "svc-prefill-0",
        "--node", "localhost",
        "--zone", "",
        "--host", "127.0.0.1",
        "--advertise-host", "127.0.0.1",
        "--port", str(pod.ports["http"]),
        "--admin-port", str(pod.ports["admin"]),
        "--core-port", str(pod.ports["core"]),
        "--kv-port", str(pod.ports["kv"]),
    )  # fmt: skip
    assert pod.env["UCX_TLS"] == "tcp,self,cuda_copy"


VLLM: dict[str, Any] = {
    "model": {"uri": "file:///models/llama"},
    "engine": {
        "runtime": "vllm",
        "image": "vllm/vllm-openai:v0.32.0",
        "args": ["--max-num-seqs=8"],
    },
    "transfer": {},
    "prefill": None,
}


PROGRAMS = {"vllm": "/home/me/vllm/bin/vllm"}


def test_vllm_is_the_one_that_is_installed_here_with_the_users_own_home() -> None:
    objects = rendered(**VLLM)
    ports = range(20000, 20000 + sum(port_runs(objects)))
    made = local_pods(objects, RUN_DIR, ports, 8080, programs=PROGRAMS)
    local = {pod.name: pod for pod in made}
    assert local.keys() == {"svc-decode-0", "svc-decode-1", "svc-router-0"}
    engines = [local[f"svc-decode-{index}"] for index in range(2)]
    for engine in engines:
        port = engine.ports["http"]
        assert engine.command[:4] == (
            PROGRAMS["vllm"], "serve", "/models/llama", "--max-num-seqs=8",
        )  # fmt: skip
        assert {"--host=127.0.0.1", f"--port={port}"} <= set(engine.command)
        assert engine.env["VLLM_HOST_IP"] == "127.0.0.1"
        assert not {"HOME", "VLLM_CACHE_ROOT"} & engine.env.keys(), "places in volumes of pods"
        assert engine.readiness is not None
        assert engine.readiness.url == f"http://127.0.0.1:{port}/health"
        assert engine.env["DIPTYCH_CORE_PORT"] == str(engine.ports["core"])
        assert engine.env["DIPTYCH_BIND_HOST"] == "127.0.0.1"
        assert Path(engine.env["DIPTYCH_KEYS_DIR"]).parent == RUN_DIR / "secrets"
        assert engine.env["PYTHONPATH"] == str(RUN_DIR / "packages")
    addresses = ",".join(f"127.0.0.1:{engine.ports['core']}" for engine in engines)
    assert local["svc-router-0"].command[-2:] == ("--decode", addresses)
    assert "--prefill" not in local["svc-router-0"].command


def vllm_pods(ranks: int = 1, **transfer: Any) -> dict[str, LocalPod]:
    """Two pools of vLLM, two pods each."""
    pools: dict[str, Any] = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    engine = VLLM["engine"] | {"tensorParallelSize": ranks}
    objects = rendered(**VLLM | {"transfer": transfer, "engine": engine} | pools)
    ports = range(20000, 20000 + sum(port_runs(objects)))
    made = local_pods(objects, RUN_DIR, ports, 8080, programs=PROGRAMS)
    return {pod.name: pod for pod in made}


def transfer_config(pod: LocalPod) -> dict[str, Any]:
    (text,) = (a for a in pod.command if a.startswith("--kv-transfer-config="))
    config: dict[str, Any] = msgspec.json.decode(text.partition("=")[2])
    return config


def test_each_vllm_of_two_pools_has_ports_of_its_own() -> None:
    local = vllm_pods(connector="nixl")
    engines = [pod for name, pod in local.items() if "router" not in name]
    for engine in engines:
        assert engine.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
        assert engine.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(engine.ports["nixl"])
    taken = [port for engine in engines for port in engine.ports.values()]
    assert len(set(taken)) == len(taken) == 4 * 3
    roles = {name: transfer_config(local[f"svc-{name}-1"])["kv_role"] for name in ROLES_OF_NIXL}
    assert roles == ROLES_OF_NIXL
    addresses = ["--prefill", "--decode"]
    for at, (option, pool) in enumerate(zip(addresses, ROLES_OF_NIXL, strict=True)):
        told = local["svc-router-0"].command[-4 + 2 * at : -2 + 2 * at or None]
        ports = [local[f"svc-{pool}-{index}"].ports["core"] for index in range(2)]
        assert told == (option, ",".join(f"127.0.0.1:{port}" for port in ports))


ROLES_OF_NIXL = {"prefill": "kv_producer", "decode": "kv_consumer"}


def test_our_connector_listens_on_loopback_with_the_keys_of_the_run() -> None:
    for name, pod in vllm_pods(leaseSeconds=20).items():
        if "router" not in name:
            extra = transfer_config(pod)["kv_connector_extra_config"]
            keys = Path(extra["keys"])
            assert keys.parent == RUN_DIR / "secrets"
            assert keys.name.startswith("svc-keys-")
            assert extra["listen_host"] == extra["advertise_host"] == "127.0.0.1"
            assert extra["listen_port"] == pod.ports["kv"]
            assert extra["lease_seconds"] == 20
            assert pod.env["PYTHONPATH"] == str(RUN_DIR / "packages")


def test_ranks_of_our_connector_have_neighbouring_ports_which_are_nobody_elses() -> None:
    local = vllm_pods(ranks=2)
    for name, pod in local.items():
        if "router" not in name:
            extra = transfer_config(pod)["kv_connector_extra_config"]
            assert (extra["listen_port"], extra["listen_port"] + 1) == (
                pod.ports["kv"], pod.ports["kv-1"],
            )  # fmt: skip
    taken = [port for pod in local.values() for port in pod.ports.values()]
    assert len(set(taken)) == len(taken) == 4 * 4 + 2


def test_ports_that_are_neighbours_in_a_pod_are_reserved_as_neighbours() -> None:
    ports = {"kv": 5558, "a": 7, "kv-1": 5559, "b": 9, "kv-2": 5560}
    listed = [{"name": n, "containerPort": port} for n, port in ports.items()]
    container = {"name": "engine", "ports": listed}
    deployment = {
        "kind": "Deployment",
        "spec": {"replicas": 2, "template": {"spec": {"containers": [container]}}},
    }
    assert port_runs([deployment, {"kind": "Service"}]) == [1, 1, 3, 1, 1, 3]


def test_an_image_that_has_the_connector_is_a_vllm_that_has_it() -> None:
    local = vllm_pods(connectorImage=VLLM["engine"]["image"])
    assert "PYTHONPATH" not in local["svc-prefill-0"].env


def test_the_router_is_told_of_every_engine_and_takes_the_given_port() -> None:
    local = pods()
    router = local["svc-router-0"]
    prefill = f"127.0.0.1:{local['svc-prefill-0'].ports['core']}"
    decode = ",".join(f"127.0.0.1:{local[f'svc-decode-{i}'].ports['core']}" for i in range(2))
    assert router.ports["http"] == 8080
    assert router.command[-4:] == ("--prefill", prefill, "--decode", decode)
    assert router.readiness is not None
    assert router.readiness.url == "http://127.0.0.1:8080/health"


def test_no_two_pods_share_a_port() -> None:
    taken = [port for pod in pods(router={"replicas": 2}).values() for port in pod.ports.values()]
    assert len(taken) == 3 * 4 + 2 * 2
    assert len(set(taken)) == len(taken)


@pytest.mark.parametrize(
    ("cores", "prefill", "decode"), [(1, 1, 1), (2, 2, 1), (3, 3, 1), (8, 8, 2), (12, 12, 4)]
)
def test_prefill_may_use_all_cores_and_decode_its_share(
    cores: int, prefill: int, decode: int
) -> None:
    made = files(rendered(), cores)
    for pool, threads in (("prefill", prefill), ("decode", decode)):
        content = made[f"configmaps/svc-{pool}-{REVISION}/engine.json"]
        assert msgspec.json.decode(content, type=EngineConfig).num_threads == threads


def test_decode_gives_way_to_prefill() -> None:
    local = pods()
    assert local["svc-decode-0"].niceness > local["svc-prefill-0"].niceness == 0


def test_no_vllm_gives_way_to_one_whose_threads_never_rest() -> None:
    assert {pod.niceness for pod in vllm_pods(connector="nixl").values()} == {0}


def test_a_cpu_limit_overrules_the_sharing() -> None:
    limited = {"replicas": 2, "resources": {"limits": {"cpu": 4}}}
    content = files(rendered(decode=limited), 64)[f"configmaps/svc-decode-{REVISION}/engine.json"]
    assert msgspec.json.decode(content, type=EngineConfig).num_threads == 3


def test_the_files_are_those_of_the_mounts() -> None:
    found = files(rendered(), 2)
    assert found[f"secrets/svc-keys-{KEYS}/curve-public"] == b"P" * 40
    assert found[f"secrets/svc-keys-{KEYS}/curve-secret"] == b"S" * 40
    assert "configmaps/svc-router/router.json" in found


def test_variables_of_a_pod_template_reach_the_process() -> None:
    env = [{"name": "LEVEL", "value": "info"}, {"name": "WHO", "value": "$(POD_NAME) at $(LEVEL)"}]
    template = {"spec": {"containers": [{"name": "engine", "env": env}]}}
    pod = pods(prefill={"replicas": 1, "podTemplate": template})["svc-prefill-0"]
    assert pod.env["WHO"] == "svc-prefill-0 at info"


@pytest.mark.parametrize(
    ("container", "removed", "message"),
    [
        ({"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]}, [],
         "svc-prefill-0: env X: a laptop knows only fieldRef of"),
        ({}, ["command"], "svc-prefill-0: command is missing"),
        ({"readinessProbe": {"exec": {"command": ["true"]}}}, ["readinessProbe.httpGet"],
         "svc-prefill-0: readinessProbe: a laptop knows only httpGet"),
    ],
)  # fmt: skip
def test_what_only_a_cluster_can_give_is_refused_in_words(
    container: dict[str, Any], removed: list[str], message: str
) -> None:
    pool = {
        "replicas": 1,
        "podTemplate": {"spec": {"containers": [{"name": "engine", **container}]}},
        "podTemplateRemove": [f"spec.containers[engine].{path}" for path in removed],
    }
    with pytest.raises(UnsupportedPodError, match=message):
        pods(prefill=pool)


@each(
    ("container", "field", "remedy"),
    [
        ({"command": ["python", 5]}, "command[1]", "put it in quotes"),
        ({"args": [{"port": 5}]}, "args[0]", "correct it"),
        ({"env": [{"name": "X", "value": 5}]}, "env[X].value", "put it in quotes"),
        ({"env": [{"name": "X", "valueFrom": "Y"}]}, "env[X].valueFrom", "correct it"),
        ({"ports": [{"containerPort": "80", "name": "x"}]}, "ports[x].containerPort", "correct"),
        ({"volumeMounts": [{"mountPath": "/x"}]}, "volumeMounts[3]", "correct it"),
        ({"readinessProbe": {"periodSeconds": "5"}}, "readinessProbe.periodSeconds", "correct it"),
        (
            {"startupProbe": {"httpGet": {"scheme": "ftp"}}},
            "startupProbe.httpGet.scheme",
            "correct",
        ),
    ],
)
def test_what_kubernetes_would_not_take_is_refused_by_its_field(
    container: dict[str, Any], field: str, remedy: str
) -> None:
    template = {"spec": {"containers": [{"name": "engine", **container}]}}
    with pytest.raises(UnsupportedPodError) as refused:
        pods(prefill={"replicas": 1, "podTemplate": template})
    where, problem = str(refused.value).split(": ", 1)
    assert where == f"spec.prefill.podTemplate.spec.containers[engine].{field}"
    assert f"; {remedy}" in problem


@each(
    ("spec", "removed", "message"),
    [
        ({"volumes": [{"name": "v", "configMap": {}}]}, [], r"spec\.volumes\[v\]\.configMap: "),
        ({}, ["spec.containers[engine].ports"], "is named 'http'; correct its podTemplate"),
    ],
)
def test_what_a_pod_lacks_is_named(spec: dict[str, Any], removed: list[str], message: str) -> None:
    pool = {"replicas": 1, "podTemplate": {"spec": spec}, "podTemplateRemove": removed}
    with pytest.raises(UnsupportedPodError, match=message):
        pods(prefill=pool)


def test_an_engine_has_an_api_where_the_service_asks_for_one() -> None:
    for asked in (False, True):
        network = {"engineApi": "OwnPods"} if asked else {}
        for pod in (pods(network=network)[f"svc-{role}-0"] for role in ("prefill", "decode")):
            assert ("--api-port" in pod.command) == asked
            if asked:
                at = pod.command.index("--api-port")
                assert pod.command[at + 1] == str(pod.ports["api"])
