"""Prometheus, as Debian has it: its checker, and a server that scrapes what a test names.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from free_ports import free_port
from waits import PATIENCE_S, wait_until

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(
    not (PROMETHEUS and PROMTOOL),
    reason="needs prometheus and promtool on the path: `apt-get install prometheus`",
)
INTERVAL_S = 1


def promtool(*arguments: str | Path) -> str:
    """What it says. Fails the test if it finds something wrong."""
    done = subprocess.run(
        [str(PROMTOOL), *arguments], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Prometheus:
    """A server that runs."""

    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(
            f"{self.url}/api/v1/{path}", params=parameters, timeout=PATIENCE_S, trust_env=False
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def values(self, expression: str) -> list[float]:
        """Those of the series that there are now; NaN, as of a share of nothing, is no value."""
        found = [float(each["value"][1]) for each in self.ask("query", query=expression)["result"]]
        return [value for value in found if value == value]


@contextmanager
def scraping(
    folder: Path, targets: Sequence[tuple[str, Mapping[str, str]]], rules: Path
) -> Iterator[Prometheus]:
    """A server until the end of the block. targets: host:port, and the labels of what it has."""
    static = [{"targets": [address], "labels": dict(labels)} for address, labels in targets]
    config = {
        "global": {"scrape_interval": f"{INTERVAL_S}s", "evaluation_interval": f"{INTERVAL_S}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "all", "honor_labels": True, "static_configs": static}],
    }
    file, address = folder / "prometheus.yml", f"127.0.0.1:{free_port()}"
    file.write_text(yaml.safe_dump(config))
    promtool("check", "config", file)
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(str(PROMETHEUS), f"--config.file={file}", f"--web.listen-address={address}"),
                f"--storage.tsdb.path={folder / 'data'}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        server = Prometheus(f"http://{address}")
        wait_until(lambda: process.poll() is not None or _is_ready(server.url))
        assert process.poll() is None, (folder / "prometheus.log").read_text()
        yield server
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=PATIENCE_S, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
