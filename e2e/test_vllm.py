"""Pools of vLLM: from nothing to hand-offs that were verified, and what users notice when an engine
is killed and when a new revision comes. Skipped where no node has vLLM's image; see README.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from e2e.bench import Bench
from e2e.chart import Chart
from e2e.conftest import EXAMPLES, TAG
from e2e.figures import Figures
from e2e.kubectl import Kubectl, Object
from e2e.service import Service
from e2e.traffic import Client
from vllm_kit.tiny_model import save_tiny_model

IMAGE = f"diptych-e2e-vllm:{TAG}"
MODEL = Path(__file__).resolve().parent.parent / "build/images/vllm-model"
"""A folder of this machine, which is the node's machine too."""
START_S = 1500.0
"""vLLM takes minutes to start where several start on two cores."""
SMALL = {"requests": {"cpu": "100m", "memory": "512Mi"}}
CONNECTORS = os.environ.get("DIPTYCH_E2E_CONNECTORS", "diptych").split(",")


def mounted(container: str, env: list[Object]) -> Object:
    """A podTemplate that brings the model into pods."""
    mount = {"name": "model", "mountPath": "/models/tiny", "readOnly": True}
    volume = {"name": "model", "hostPath": {"path": str(MODEL), "type": "Directory"}}
    changed = {"name": container, "env": env, "volumeMounts": [mount]}
    return {"spec": {"containers": [changed], "volumes": [volume]}}


def adapted(example: Object, connector: str) -> Object:
    """The example for CPUs, with two engines in each pool and what this cluster has.

    With NIXL there is one in each: each of them has threads that take a core even at rest.
    """
    spec = dict(example["spec"])
    [threads] = spec["prefill"]["podTemplate"]["spec"]["containers"]
    replicas = 1 if connector == "nixl" else 2
    pool = {
        "replicas": replicas,
        "resources": SMALL,
        "podTemplate": mounted("engine", threads["env"]),
    }
    engine = spec["engine"] | {
        "image": IMAGE,
        "args": [
            "--dtype=float32", "--max-model-len=1024", "--max-num-seqs=16",
            "--kv-cache-memory-bytes=67108864", "--enforce-eager",
        ],
    }  # fmt: skip
    spec |= {
        "model": {"uri": "file:///models/tiny"},
        "engine": engine,
        "transfer": {"connector": connector},
        "prefill": pool,
        "decode": pool,
        "router": {"podTemplate": mounted("router", [])},
        "rollout": {"progressDeadlineSeconds": int(START_S)},
    }
    return {**example, "spec": spec}


@pytest.fixture(scope="module", params=CONNECTORS)
def bench(
    request: pytest.FixtureRequest,
    kubectl: Kubectl,
    client: Client,
    chart: Chart,
    figures: Figures,
) -> Iterator[Bench]:
    """A service whose pools are ready."""
    nodes = kubectl.list("nodes", {})
    held = [name for node in nodes for x in node["status"]["images"] for name in x["names"] or ()]
    if not any(name.endswith(IMAGE) for name in held):
        pytest.skip(f"no node has the image {IMAGE}: `make vllm`, then `make images`")
    if not (MODEL / "config.json").exists():
        MODEL.mkdir(parents=True, exist_ok=True)
        save_tiny_model(MODEL)
        for file in MODEL.iterdir():  # pods run as another user
            file.chmod(0o644)
    example = yaml.safe_load((EXAMPLES / "vllm-cpu.yaml").read_text())
    service = Service(kubectl, client, f"vllm-{request.param}")
    service.apply(adapted(example, request.param))
    service.settled(START_S)
    yield Bench(service, client, chart, kubectl, figures, concurrency=2)
    service.delete()
    service.gone()


def test_a_service_of_vllm_is_verified_and_answers(bench: Bench) -> None:
    assert bench.service.condition("KVTransferVerified") == "True"
    answer = bench.service.chat("Who are you?")
    assert answer["usage"]["completion_tokens"] > 0
    assert bench.disrupt("vllm: nothing", lambda: None).failures == {}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_of_vllm_is_killed(bench: Bench, role: str) -> None:
    report = bench.disrupt(f"vllm: kill a {role} pod", lambda: bench.kill(role, START_S))
    assert report.failures == {}


def test_a_new_revision_of_vllm_rolls_out(bench: Bench) -> None:
    # One engine in each pool: the engines of both revisions run at the same time.
    one = {"replicas": 1}
    bench.service.patch_spec({"prefill": one, "decode": one})
    bench.service.settled(START_S)
    first = bench.service.revision()

    def disruption() -> None:
        args = [*bench.service.observed()["spec"]["engine"]["args"], "--max-num-batched-tokens=512"]
        bench.service.patch_spec({"engine": {"args": args}})
        bench.service.settled(2 * START_S)

    assert bench.disrupt("vllm: roll out", disruption).failures == {}
    assert bench.service.revision() != first
