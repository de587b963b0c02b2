"""`diptych up` with engines that are vLLM: they start, answer, and none is ever left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from free_ports import free_port
from vllm_kit.environment import START_S, VENV, needs_nixl, needs_vllm
from vllm_kit.tiny_model import save_tiny_model
from waits import PATIENCE_S, wait_until

Service = dict[str, Any]
pytestmark = [*needs_vllm, pytest.mark.slow, pytest.mark.timeout(START_S + 4 * PATIENCE_S)]
VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


@dataclass
class Run:
    """One `diptych up` that has come up."""

    process: subprocess.Popen[bytes]
    output: Path
    state: Path
    port: int

    def pod(self, name: str) -> dict[str, Any]:
        pods = msgspec.json.decode(self.state.read_bytes())["pods"]
        return next(pod for pod in pods if pod["name"] == name)


@pytest.fixture
def connector(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "none"))


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> int:
    return int(getattr(request, "param", 1))


@pytest.fixture
def service(tmp_path: Path, connector: str, ranks: int) -> Service:
    env = [{"name": name, "value": value} for name, value in VARIABLES.items()]
    template = {"spec": {"containers": [{"name": "engine", "env": env}]}}
    pool = {"replicas": 1, "podTemplate": template}
    return {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"uri": Path(save_tiny_model(tmp_path / "model")).as_uri()},
            "engine": {
                "runtime": "vllm",
                "tensorParallelSize": ranks,
                "image": "vllm/vllm-openai:v0.32.0",
                "args": [
                    "--dtype=float32", "--enforce-eager", "--num-gpu-blocks-override=32",
                    "--max-model-len=256", "--block-size=32",
                ],
            },
            "transfer": {"connector": connector},
            **({} if connector == "none" else {"prefill": pool}),
            "decode": pool,
        },
    }  # fmt: skip


@pytest.fixture
def run(service: Service, service_file: Callable[[Service], Path], tmp_path: Path) -> Iterator[Run]:
    output, port = tmp_path / "output", free_port()
    environment = {"XDG_RUNTIME_DIR": str(tmp_path), "NO_COLOR": "1", "DIPTYCH_VLLM": str(VENV)}
    with output.open("wb") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "diptych.main", "up", str(service_file(service))),
                *("--port", str(port)),
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
        )
    try:
        wait_until(
            lambda: "ready in" in output.read_text() or process.poll() is not None,
            "the service is ready",
            START_S,
        )
        assert process.poll() is None, output.read_text()
        (state,) = tmp_path.glob("diptych-tiny-*/state.json")
        yield Run(process, output, state, port)
    finally:
        process.kill()
        process.wait()


def test_vllm_starts_answers_through_the_router_and_goes_with_ctrl_c(run: Run) -> None:
    engine = run.pod("tiny-decode-0")
    addresses = [f"http://127.0.0.1:{port}" for port in (run.port, engine["ports"]["http"])]
    routed, direct = (_answer(address) for address in addresses)
    assert routed == direct

    (known,) = _router_state(run)["engines"]
    assert (known["engine_id"], known["usable"]) == ("tiny-decode-0", True)
    assert known["revision"]

    family = psutil.Process(run.process.pid).children(recursive=True)
    assert len(family) >= 5, "two leashes, the router, vLLM's server and its core"
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(PATIENCE_S) == 0, run.output.read_text()
    wait_until(lambda: not any(map(_lives, family)), "all processes have ended")


@pytest.mark.parametrize(
    ("connector", "ranks"),
    [("diptych", 1), ("diptych", 2), pytest.param("nixl", 1, marks=needs_nixl)],
    indirect=True,
)
def test_a_vllm_that_computes_prompts_hands_them_over_to_one_that_answers(run: Run) -> None:
    prefill, decode = (run.pod(f"tiny-{pool}-0")["ports"]["http"] for pool in ("prefill", "decode"))
    question = "Two panels and a hinge? " * 8
    assert _answer(f"http://127.0.0.1:{run.port}", question) == _answer(
        f"http://127.0.0.1:{prefill}", question
    )
    assert [engine["usable"] for engine in _router_state(run)["engines"]] == [True, True]
    metrics = httpx.get(f"http://127.0.0.1:{decode}/metrics", timeout=PATIENCE_S).text.splitlines()
    (fetched,) = (
        float(line.rpartition(" ")[2])
        for line in metrics
        if line.startswith("vllm:prompt_tokens_by_source_total")
        and 'source="external_kv_transfer"' in line
    )
    assert fetched >= 32, "at least one block of the prompt came from the other engine"


def _answer(address: str, question: str = "Two panels and a hinge?") -> str:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": question}],
        "max_tokens": 8, "temperature": 0,
    }  # fmt: skip
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def _router_state(run: Run) -> dict[str, Any]:
    (token,) = run.state.parent.glob("secrets/*/admin-token")
    port = run.pod("tiny-router-0")["ports"]["admin"]
    headers = {"Authorization": f"Bearer {token.read_text()}"}
    answer = httpx.get(f"http://127.0.0.1:{port}/admin/state", headers=headers, timeout=PATIENCE_S)
    state: dict[str, Any] = answer.json()
    return state


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
