"""`helm test`: the cluster serves the CRD, and an operator is ready. Standard library only."""

# ruff: noqa: INP001 (a script that the chart puts into a pod, not part of a package)

from __future__ import annotations

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 5
DEADLINE_S = 60
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
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
