"""A service whose pods run a small program of the tests instead of an engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from free_ports import free_port
from waits import PATIENCE_S, wait_until

SMALL_POD = Path(__file__).parent / "small_pod.py"
Service = dict[str, Any]


def small_pod(container: str, *options: str, **overrides: Any) -> Service:
    """A podTemplate that runs `small_pod.py` in place of the real program."""
    command = ["python", str(SMALL_POD), *options]
    spec = {"containers": [{"name": container, "command": command, "args": [], **overrides}]}
    return {"spec": spec}


def small_service(
    *, prefill: Service | None = None, decode: Service | None = None, **spec: Any
) -> Service:
    """An InferenceService as plain values; the options are podTemplates."""
    pools = {"prefill": prefill, "decode": decode}
    return {
        "apiVersion": "diptych.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "small"},
        "spec": {
            "model": {"uri": "dummy://?num_hidden_layers=1"},
            **{
                pool: {"replicas": 1, "podTemplate": template or small_pod("engine")}
                for pool, template in pools.items()
            },
            "router": {"podTemplate": small_pod("router")},
            **spec,
        },
    }


@pytest.fixture
def service_file(tmp_path: Path) -> Callable[[Service], Path]:
    """Write a service to a file."""

    def write(service: Service) -> Path:
        path = tmp_path / "service.yaml"
        path.write_text(yaml.safe_dump(service))
        return path

    return write


@pytest.fixture(scope="module")
def small_server() -> Iterator[str]:
    """Base URL, without /v1, of a running `small_pod.py`."""
    port = free_port()
    own = {"DIPTYCH_BIND_HOST": "127.0.0.1", "DIPTYCH_HTTP_PORT": str(port), "POD_NAME": "small"}
    server = subprocess.Popen(
        [sys.executable, str(SMALL_POD)], env=os.environ | own, stdout=subprocess.DEVNULL
    )
    base = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: server.poll() is not None or _answers(base))
        assert server.poll() is None
        yield base
    finally:
        server.kill()
        server.wait()


def _answers(base: str) -> bool:
    try:
        return httpx.get(f"{base}/health", timeout=PATIENCE_S).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(name="small_pod")
def small_pod_fixture() -> Callable[..., Service]:
    return small_pod


@pytest.fixture(name="small_service")
def small_service_fixture() -> Callable[..., Service]:
    return small_service
