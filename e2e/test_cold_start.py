"""From a request to a service that sleeps to its first token, phase by phase: with the model in the
engine's image, fetched by each pod, and kept and packed on the node."""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from e2e.chart import Chart
from e2e.conftest import image
from e2e.figures import Figures
from e2e.kubectl import Kubectl, Object, wait_for
from e2e.service import ENGINE_ROLES, READY_TIMEOUT_S, Service
from e2e.traffic import Client

STORE = "model-store"
SCRIPT = Path(__file__).with_name("store_pod.py")
NODE_FOLDER = "/tmp"
ROUNDS = 3
PATIENCE_S = 5
HOLD_S = 120
KUBELET_S = 1.5
"""It may say only after the first token that a pod is ready."""
PHASES = ("seen", "bound", "init_began", "init_ended", "engine_began", "ready", "first_token")


@pytest.fixture(scope="module")
def store(kubectl: Kubectl, client: Client) -> Iterator[str]:
    """An S3 store with the demo's model. Returns a folder of the node for the namespace's cache."""
    folder = f"{NODE_FOLDER}/{kubectl.namespace}-models"
    meta = {"name": STORE, "labels": {"app.kubernetes.io/name": STORE}}
    container = {
        "name": "store",
        "image": image("router"),
        "command": ["python", f"/e2e/{SCRIPT.name}", f"{folder}/{kubectl.namespace}"],
        "volumeMounts": [
            {"name": "script", "mountPath": "/e2e"},
            {"name": "node", "mountPath": NODE_FOLDER},
        ],
        "readinessProbe": {"tcpSocket": {"port": 8000}},
    }
    spec = {
        "containers": [container],
        "volumes": [
            {"name": "script", "configMap": {"name": STORE}},
            {"name": "node", "hostPath": {"path": NODE_FOLDER}},
        ],
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
    }
    port = {"port": 8000, "protocol": "TCP"}
    endpoint = f"http://{STORE}.{kubectl.namespace}.svc:8000"
    kubectl.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta,
         "data": {SCRIPT.name: SCRIPT.read_text()}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque",
         "stringData": {"endpoint": endpoint}},
        {"apiVersion": "v1", "kind": "Service", "metadata": meta,
         "spec": {"selector": meta["labels"], "ports": [port]}},
        {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec},
    )  # fmt: skip
    wait_for("the store serves", lambda: _moment(kubectl.get("pod", STORE) or {}, "Ready"), 120)
    yield folder
    kubectl.exec(STORE, "rm", "-rf", folder)
    kubectl.delete("pod", STORE, grace_s=1)


@pytest.mark.slow
def test_a_sleeping_service_answers_whichever_way_its_model_comes(
    kubectl: Kubectl, client: Client, chart: Chart, example: Object, store: str, figures: Figures
) -> None:
    """In turn, so that a busy machine is as busy for each."""
    fetched = {"uri": f"s3://models/{STORE}.gguf", "credentials": {"secretName": STORE}}
    sampling = example["spec"]["model"]["sampling"]
    models: dict[str, Object] = {
        "image": example["spec"]["model"],
        "fetched": {**fetched, "sampling": sampling},
        "packed": {**fetched, "sampling": sampling, "cache": {"hostPath": store}},
    }
    pool = {
        "autoscaling": {"minReplicas": 0, "maxReplicas": 1, "scaleDownSeconds": PATIENCE_S},
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}},
    }
    services = {way: Service(kubectl, client, way) for way in models}
    for way, service in services.items():
        pools = dict.fromkeys(ENGINE_ROLES, pool)
        spec = {"model": models[way], **pools, "router": {"holdSeconds": HOLD_S},
                "engine": {"kvCacheMemory": "256Mi"}}  # fmt: skip
        service.apply({**example, "spec": spec})
    found: dict[str, list[dict[str, int]]] = {way: [] for way in models}
    answers = set()
    for _ in range(ROUNDS):
        for way, service in services.items():
            service.says("Available", "True", "Asleep", READY_TIMEOUT_S)
            for role in ENGINE_ROLES:
                service.has_ready(role, 0)
            phases, text = woken(kubectl, service)
            found[way].append(phases)
            answers.add(text)
    for way, runs in found.items():
        figures.add(
            f"wake, model {way}",
            {f"{name}_ms": round(statistics.median(run[name] for run in runs)) for name in PHASES},
        )
    for service in services.values():
        service.delete()
        service.gone()
    assert len(answers) == 1


def woken(kubectl: Kubectl, service: Service) -> tuple[dict[str, int], str]:
    """When each phase was reached by the last of both engines, in milliseconds after the request,
    and the answer."""
    with forwarded(kubectl, f"service/{service.name}-router") as url, watched(kubectl) as events:
        began = time.time()
        text, first = ask(url, service.name)
        time.sleep(KUBELET_S)
    last: dict[str, float] = {}
    for role in ENGINE_ROLES:
        seen: dict[str, float] = {}
        for at, pod in events:
            labels = pod["metadata"]["labels"]
            mine = labels.get("diptych.dev/service") == service.name
            if mine and labels["diptych.dev/role"] == role and at > began:
                for phase in _reached(pod):
                    seen.setdefault(phase, at)
        for phase, at in seen.items():
            last[phase] = max(last.get(phase, 0.0), at)
    last["first_token"] = first
    absent = dict.fromkeys(("init_began", "init_ended"), last["bound"])
    return {name: round(1000 * ((absent | last)[name] - began)) for name in PHASES}, text


def _reached(pod: Object) -> Iterator[str]:
    yield "seen"
    if _moment(pod, "PodScheduled"):
        yield "bound"
    for state in (each["state"] for each in pod["status"].get("initContainerStatuses", [])):
        if "running" in state or "terminated" in state:
            yield "init_began"
        if "terminated" in state:
            yield "init_ended"
    if any("running" in each["state"] for each in pod["status"].get("containerStatuses", [])):
        yield "engine_began"
    if _moment(pod, "Ready"):
        yield "ready"


def _moment(pod: Object, condition: str) -> bool:
    said = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == condition and each["status"] == "True" for each in said)


@contextmanager
def watched(kubectl: Kubectl) -> Iterator[list[tuple[float, Object]]]:
    """All that happens to the namespace's pods, and when it was heard of."""
    command = kubectl.command("get", "pods", "--watch", "--output", "json")
    events: list[tuple[float, Object]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:

        def read() -> None:
            lines: list[str] = []
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                if line == "}\n":
                    events.append((time.time(), json.loads("".join(lines))))
                    lines.clear()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield events
        finally:
            process.terminate()
            reader.join()


@contextmanager
def forwarded(kubectl: Kubectl, target: str) -> Iterator[str]:
    """A local URL that leads to the port 8000 of a pod or service."""
    command = kubectl.command("port-forward", target, ":8000")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = process.stdout.readline()
            yield f"http://127.0.0.1:{said.split(':')[1].split()[0]}"
        finally:
            process.terminate()


def ask(url: str, model: str) -> tuple[str, float]:
    """A streamed answer, and when its first token came."""
    message = {"role": "user", "content": "In one word: what do bees make?"}
    body = {"model": model, "messages": [message], "max_tokens": 8, "temperature": 0}
    data = json.dumps(body | {"stream": True}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
    pieces: list[str] = []
    first = 0.0
    with urllib.request.urlopen(request, timeout=HOLD_S) as response:
        for line in response:
            if line.startswith(b"data: {"):
                piece = json.loads(line[6:])["choices"][0]["delta"].get("content")
                if piece:
                    first = first or time.time()
                    pieces.append(piece)
    return "".join(pieces), first
