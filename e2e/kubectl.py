"""The verbs that the tests use on a cluster, by way of `kubectl` and whatever $KUBECONFIG says."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cluster_kit.kube_schemas import complaints
from cluster_kit.kube_tools import find_tool

Object = Mapping[str, Any]
T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
DELETION_TIMEOUT_S = 120.0
"""A kubelet under load takes its time to let go of a pod whose container has ended."""
POLL_S = 0.5


class KubectlError(Exception):
    """kubectl said no; the message is what it said."""


class TooLate(AssertionError):
    """What should have come about did not, within its deadline."""


def wait_for(what: str, look: Callable[[], T | None], timeout_s: float) -> T:
    """The first result of `look` that is neither None nor False.

    Raises `TooLate`, with `what` and the last refusal of the cluster if there was one.
    """
    deadline = time.monotonic() + timeout_s
    trouble = ""
    while True:
        try:
            if (found := look()) is not None and found is not False:
                return found
            trouble = ""
        except KubectlError as exc:
            trouble = f": {exc}"
        if time.monotonic() > deadline:
            raise TooLate(f"{what}: not within {timeout_s:g} s{trouble}")
        time.sleep(POLL_S)


class Kubectl:
    """kubectl in one namespace."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._program = find_tool("kubectl")

    def command(self, *arguments: str) -> list[str]:
        return [str(self._program), "--namespace", self.namespace, *arguments]

    def run(self, *arguments: str, stdin: str = "", timeout_s: float = CALL_TIMEOUT_S) -> str:
        """kubectl's standard output. Raises `KubectlError`."""
        try:
            done = subprocess.run(
                self.command(*arguments),
                input=stdin,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as exc:
            raise KubectlError(f"kubectl {arguments[0]}: no answer in {timeout_s:g} s") from exc
        if done.returncode:
            raise KubectlError(f"kubectl {arguments[0]}: {done.stderr.strip()}")
        return done.stdout

    def get(self, kind: str, name: str) -> Object | None:
        """None if there is no such object."""
        said = self.run("get", kind, name, "--ignore-not-found", "--output", "json")
        found: Object | None = json.loads(said) if said else None
        return found

    def list(self, kind: str, labels: Mapping[str, str] | None = None) -> list[Object]:
        selector = ",".join(f"{key}={value}" for key, value in (labels or {}).items())
        said = self.run("get", kind, "--selector", selector, "--output", "json")
        items: list[Object] = json.loads(said)["items"]
        return items

    def apply(self, *objects: Object) -> None:
        """Also holds them against the oldest and the newest Kubernetes, whichever this is."""
        wrong = [told for obj in objects for told in complaints(obj)]
        assert not wrong, "; ".join(wrong)
        listing = {"apiVersion": "v1", "kind": "List", "items": objects}
        self.run("apply", "--filename", "-", stdin=json.dumps(listing))

    def merge(self, kind: str, name: str, patch: Object) -> None:
        """A JSON merge patch: null removes a field."""
        self.run("patch", kind, name, "--type", "merge", "--patch", json.dumps(patch))

    def delete(self, kind: str, *names: str, grace_s: int | None = None) -> None:
        """Ask for deletion and return at once; 0 seconds of grace is a kill."""
        grace = []
        if grace_s is not None:
            grace = [f"--grace-period={grace_s}", *(["--force"] if grace_s == 0 else [])]
        self.run("delete", kind, *names, "--wait=false", "--ignore-not-found", *grace)

    def gone(self, kind: str, names: Sequence[str], timeout_s: float = DELETION_TIMEOUT_S) -> None:
        """Wait until the cluster knows none of them any more. Raises `TooLate`."""
        wait_for(
            f"{kind} {', '.join(names)} gone",
            lambda: not any(self.get(kind, name) for name in names),
            timeout_s,
        )

    def exec(self, pod: str, *command: str, timeout_s: float = CALL_TIMEOUT_S) -> str:
        return self.run("exec", pod, "--", *command, timeout_s=timeout_s)

    def logs(self, pod: str, *options: str) -> str:
        return self.run("logs", pod, "--all-containers", *options)

    def drain(self, node: str, selector: str, timeout_s: float) -> bool:
        """Cordon the node and evict the selected pods of all namespaces; PDBs are heeded.

        Returns whether all of them went in time.
        """
        options = ("--force", "--delete-emptydir-data", "--ignore-daemonsets")
        try:
            self.run(
                *("drain", node, *options, "--pod-selector", selector, f"--timeout={timeout_s:g}s"),
                timeout_s=timeout_s + CALL_TIMEOUT_S,
            )
        except KubectlError as exc:
            if "timeout" not in str(exc):
                raise
            return False
        return True

    def dump(self, folder: Path) -> None:
        """Write all that helps to understand a failure: objects, events, logs, also of the dead."""
        folder.mkdir(parents=True, exist_ok=True)

        def save(name: str, *arguments: str) -> None:
            try:
                text = self.run(*arguments)
            except KubectlError as exc:
                text = f"{exc}\n"
            (folder / name).write_text(text)

        save("pods.txt", "get", "pods", "--output", "wide")
        save("events.txt", "get", "events", "--sort-by", ".lastTimestamp")
        save("objects.yaml", "get", "all,configmaps", "--output", "yaml")
        save("services.yaml", "get", "inferenceservices", "--output", "yaml")
        for pod in self.list("pods"):
            name = pod["metadata"]["name"]
            save(f"{name}.log", "logs", name, "--all-containers", "--timestamps")
            if any(c["restartCount"] for c in pod.get("status", {}).get("containerStatuses", [])):
                save(f"{name}.previous.log", "logs", name, "--all-containers", "--previous")
