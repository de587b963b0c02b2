"""Real vLLM servers with our connector, on the CPU. Our own packages come from this tree.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from free_ports import free_port
from model_kit.sensitive_model import save_sensitive_model
from vllm_kit.environment import ENVIRONMENT, OPTIONS, ROOT, SERVE, START_S
from vllm_kit.sensitive_models import complete_for_vllm
from waits import FOR_EVER_S, wait_until

from diptych_vllm.figures import FIGURES

MODEL = "sensitive"
OURS = ("protocol", "frontend", "kernels", "kv_transfer", "vllm_connector")


def save_model_for_vllm(folder: Path) -> str:
    """The sensitive model, with heads of a size that vLLM's CPU backend computes."""
    save_sensitive_model(folder, heads=4)
    return complete_for_vllm(folder)


def connector_config(**settings: Any) -> dict[str, Any]:
    """vLLM's `--kv-transfer-config` for our connector."""
    return {
        "kv_connector": "DiptychConnector",
        "kv_connector_module_path": "diptych_vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


class VllmServer:
    """One `vllm serve`, in a process group of its own."""

    def __init__(
        self,
        model: str,
        log: Path,
        kv_transfer: Mapping[str, Any] | None,
        *more: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self._log = log
        ours = ":".join(str(ROOT / folder) for folder in OURS)
        variables = os.environ | ENVIRONMENT | {"PYTHONPATH": ours} | dict(environment or {})
        command = [
            *SERVE, model, "--port", str(self.port), "--served-model-name", MODEL, *OPTIONS,
            "--max-model-len", "1024", "--block-size", "32", "--num-gpu-blocks-override", "512",
            *(("--kv-transfer-config", json.dumps(kv_transfer)) if kv_transfer else ()), *more,
        ]  # fmt: skip
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # A connection for each request: vLLM closes idle ones, and a test may stop it in between.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=FOR_EVER_S,
            limits=limits,
            trust_env=False,
        )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_ready(self) -> None:
        wait_until(self._is_ready, f"vLLM starts; {self._log}", START_S)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log[-4000:]
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to each process of the server."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait()
        self.client.close()

    # --- requests -----------------------------------------------------------------------------

    def post(self, prompt: list[int], max_tokens: int, **fields: Any) -> httpx.Response:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        return self.client.post("/v1/completions", json=body | fields)

    def answer(self, prompt: list[int], max_tokens: int, **fields: Any) -> list[int] | None:
        """The tokens of the answer; None if the request has failed."""
        response = self.post(prompt, max_tokens, **fields)
        if response.status_code == 500:
            return None
        assert response.status_code == 200, response.text
        tokens: list[int] = response.json()["choices"][0]["token_ids"]
        return tokens

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Compute a prompt for another engine. Returns the reference to its KV."""
        return self.begin(prompt)[1]

    def begin(
        self, prompt: list[int], lease_id: str | None = None, **fields: Any
    ) -> tuple[list[int], dict[str, Any]]:
        """The same; returns the answer's first token, too. lease_id: the one that the lease is to
        have."""
        fields["kv_transfer_params"] = {"do_remote_decode": True, "lease_id": lease_id}
        body = self.post(prompt, 1, **fields).json()
        return body["choices"][0]["token_ids"], body["kv_transfer_params"]

    def reject(self, params: dict[str, Any]) -> None:
        """Give a lease back: with a request that vLLM's front-end refuses."""
        refused = self.post([1], 1, model="another", kv_transfer_params=params)
        assert refused.status_code == 404, refused.text

    # --- what it holds ------------------------------------------------------------------------

    def metric(self, name: str) -> float:
        """The sum of a metric, over all labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    def figures(self) -> dict[str, float]:
        """What the connector has counted, by the names of `diptych_vllm.figures`."""
        return {name: self.metric(f"vllm:diptych_{name}_total") for name in FIGURES}

    def holds_nothing(self) -> bool:
        """No block is in use, by a request or for another engine."""
        return self.metric("vllm:kv_cache_usage_perc") == 0.0
