"""Constant traffic from inside the cluster, and what became of each request."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from e2e.kubectl import Kubectl, wait_for

POD = "client"
SCRIPT = Path(__file__).with_name("client_pod.py")
START_TIMEOUT_S = 180.0
"""The first answers are learnt one by one."""
STOP_TIMEOUT_S = 300.0
FETCH_TIMEOUT_S = 150.0
"""Routers may hold a request until pods are there."""
SLOW_FACTOR = 3.0
"""A request this many times slower than the median of its run counts as slowed."""


@dataclass(frozen=True)
class Report:
    """All requests of one run. Nothing was sent twice."""

    requests: list[Mapping[str, Any]]

    @property
    def failed(self) -> list[str]:
        return [request["error"] for request in self.requests if request["error"]]

    @property
    def failures(self) -> dict[str, int]:
        """How often each failure came, shortened."""
        return dict(Counter(error[:120] for error in self.failed))

    def figures(self) -> dict[str, float | int]:
        good = [request for request in self.requests if not request["error"]]
        seconds = sorted(request["seconds"] for request in good) or [0.0]
        median = statistics.median(seconds)
        return {
            "requests": len(self.requests),
            "failed": len(self.failed),
            "slowed": sum(value > SLOW_FACTOR * median for value in seconds),
            "median_s": round(median, 2),
            "slowest_s": round(seconds[-1], 2),
            "median_ttft_s": round(statistics.median([r["ttft"] for r in good] or [0.0]), 2),
            "longest_pause_s": round(max((r.get("pause", 0.0) for r in good), default=0.0), 2),
        }


class Client:
    """A pod from which the service is used as its users do: through the router's Service."""

    def __init__(self, kubectl: Kubectl, image: str) -> None:
        self._kubectl = kubectl
        self._image = image

    def start(self) -> None:
        meta = {"name": POD, "labels": {"app.kubernetes.io/name": "diptych-e2e"}}
        script = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta,
                  "data": {SCRIPT.name: SCRIPT.read_text()}}  # fmt: skip
        container = {
            "name": "client",
            "image": self._image,
            # A first process has no default signal handlers, hence the shell as its parent.
            "command": ["sh", "-c", "trap exit TERM; sleep infinity & wait"],
            "volumeMounts": [{"name": "script", "mountPath": "/e2e"}],
        }
        spec = {
            "containers": [container],
            "volumes": [{"name": "script", "configMap": {"name": POD}}],
            "terminationGracePeriodSeconds": 2,
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
        # A new namespace's own account comes a moment after it, and pods are refused until then.
        wait_for(
            "the default ServiceAccount", lambda: self._kubectl.get("serviceaccount", "default"), 60
        )
        self._kubectl.apply(script, pod)
        wait_for("the client pod runs", self._runs, 120)

    def _runs(self) -> bool:
        pod = self._kubectl.get("pod", POD)
        return pod is not None and pod["status"]["phase"] == "Running"

    def fetch(self, url: str, body: Mapping[str, Any] | None = None, key: str = "") -> str:
        """The answer's body. Raises `KubectlError` for a refusal or an HTTP error."""
        post = () if body is None else ("--body", json.dumps(body))
        own = ("--key", key) if key else ()
        command = ("python", f"/e2e/{SCRIPT.name}", "fetch", url, *post, *own)
        return self._kubectl.exec(POD, *command, timeout_s=FETCH_TIMEOUT_S)

    def upload(self, url: str, content: str, *, purpose: str) -> str:
        """The answer to a file. Raises `KubectlError` for a refusal or an HTTP error."""
        own = ("--purpose", purpose, "--content", content)
        command = ("python", f"/e2e/{SCRIPT.name}", "upload", url, *own)
        return self._kubectl.exec(POD, *command, timeout_s=FETCH_TIMEOUT_S)

    def traffic(
        self, url: str, model: str, *, concurrency: int, max_tokens: int, record: Path
    ) -> Traffic:
        """Traffic that is not yet flowing; `record` is the file for all that it sees."""
        command = ("python", "-u", f"/e2e/{SCRIPT.name}", "traffic", url, "--model", model,
                   "--concurrency", str(concurrency), "--max-tokens", str(max_tokens))  # fmt: skip
        return Traffic(self._kubectl.command("exec", "--stdin", POD, "--", *command), record)


class Traffic:
    """A context manager: traffic flows inside it, and `report` is there after it."""

    def __init__(self, command: list[str], record: Path) -> None:
        self._command = command
        self._record = record
        self.report = Report([])

    def __enter__(self) -> Self:
        self._record.parent.mkdir(parents=True, exist_ok=True)
        with self._record.open("w") as out:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            wait_for("traffic flows", self._started, START_TIMEOUT_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self._end()
        records = self._events()
        self.report = Report([r for r in records if r["event"] == "request"])
        ended_well = records[-1]["event"] == "stopped" and not records[-1]["stuck"]
        if exc_type is None and not ended_well:
            raise AssertionError(f"the traffic did not end in order; see {self._record}")

    def served(self) -> int:
        """Requests that have ended so far, well or not."""
        return sum(event["event"] == "request" for event in self._events())

    def wait_served(self, more: int, timeout_s: float) -> None:
        """Wait until `more` further requests have ended. Raises `TooLate`."""
        goal = self.served() + more
        wait_for(f"{more} more requests", lambda: self.served() >= goal, timeout_s)

    def _started(self) -> bool:
        if self._process.poll() is not None:
            raise AssertionError(f"no traffic: {self._record.read_text()[-2000:]}")
        return any(event["event"] == "started" for event in self._events())

    def _end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _events(self) -> list[dict[str, Any]]:
        """What was written so far, less a line that is not yet whole."""
        lines = self._record.read_text().splitlines(keepends=True)
        return [json.loads(x) for x in lines if x.startswith("{") and x.endswith("\n")]
