"""`helm test`: the cluster serves the CRD, an operator is ready, and a service, if there is one for
the test, answers with KV that was handed over. Standard library only."""

# ruff: noqa: INP001 (a script that the chart puts into a pod, not part of a package)

from __future__ import annotations

import json
import os
import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 5
ANSWER_S = 60
DEADLINE_S = 60
SERVICE_DEADLINE_S = 900
"""Nodes may have to pull its images first. `helm test --timeout` ends the test before."""
PAUSE_S = 2


def check_crd() -> str:
    """Discovery, which every account may read, names the kind."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    if ":" in host:
        host = f"[{host}]"
    request = urllib.request.Request(
        f"https://{host}:{port}/apis/diptych.dev/v1alpha1",
        headers={"Authorization": f"Bearer {(ACCOUNT / 'token').read_text()}"},
    )
    trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trust) as answer:
        resources = json.load(answer)["resources"]
    if not any(resource["name"] == "inferenceservices" for resource in resources):
        raise LookupError("diptych.dev/v1alpha1 is served, but without inferenceservices")
    return "the CRD is served"


def check_operator() -> str:
    with urllib.request.urlopen(os.environ["OPERATOR_READYZ"], timeout=TIMEOUT_S) as answer:
        return f"the operator answers {answer.status}"


def ask(path: str, body: object = None) -> bytes:
    """What the service's router answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        os.environ["SERVICE"] + path, data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        content: bytes = answer.read()
    return content


def check_service() -> str:
    model = json.loads(ask("/v1/models"))["data"][0]["id"]
    prompt = "Name three rivers, and say of each through which countries it flows."
    messages = [{"role": "user", "content": prompt}]
    body = {"model": model, "messages": messages, "max_tokens": 8}
    tokens = json.loads(ask("/v1/chat/completions", body))["usage"]["completion_tokens"]
    loads = re.findall(
        r'^diptych:kv_transfer_loads_total{.*outcome="completed".*} (\S+)',
        ask("/metrics").decode(),
        re.MULTILINE,
    )
    if not sum(map(float, loads)):
        raise LookupError(f"it answered {tokens} tokens, but no KV was handed over")
    return f"the service answered {tokens} tokens, and KV was handed over"


def settled(check: Callable[[], str], deadline: float) -> bool:
    """Repeat the check until it passes; say how it went."""
    while True:
        try:
            print(f"ok: {check()}", flush=True)
            return True
        except (OSError, LookupError, ValueError) as exc:
            if time.monotonic() + PAUSE_S > deadline:
                print(f"failed: {check.__name__}: {exc}", flush=True)
                return False
        time.sleep(PAUSE_S)


def main() -> int:
    deadline = time.monotonic() + DEADLINE_S
    results = [settled(check, deadline) for check in (check_crd, check_operator)]
    good = all(results)
    if good and "SERVICE" in os.environ:
        good = settled(check_service, time.monotonic() + SERVICE_DEADLINE_S)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
