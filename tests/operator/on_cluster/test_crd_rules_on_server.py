"""The rules of the CRD, enforced by a real API server with CEL.

Only where DIPTYCH_TEST_CRD_SERVER is its URL and DIPTYCH_TEST_CRD_SERVER_PKI a directory with
ca.crt, and admin.crt and admin.key of an administrator. It needs to serve nothing but CRDs and
their objects. The CRD is installed in a group of the test's own and removed with it.
"""

from __future__ import annotations

import os
import secrets
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cases import each
from cluster_kit.crds import (
    BROKEN,
    EXAMPLES,
    GOOD,
    SCHEMA,
    Broken,
    definition_in,
    inference_service,
    service_of,
    with_defaults,
)
from waits import PATIENCE_S, Deadline

SERVER = os.environ.get("DIPTYCH_TEST_CRD_SERVER")
PKI = Path(os.environ.get("DIPTYCH_TEST_CRD_SERVER_PKI", "."))
pytestmark = pytest.mark.skipif(
    not SERVER, reason="DIPTYCH_TEST_CRD_SERVER is the URL of no API server with CEL"
)
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class Server:
    """An API server with the CRD in a group of this test run's own."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.group = f"t{secrets.token_hex(4)}.diptych.dev"
        self.definition = definition_in(self.group)

    def install(self) -> None:
        answer = self.http.post(DEFINITIONS, json=self.definition)
        assert answer.status_code == 201, answer.text
        deadline = Deadline("the CRD is served")
        while self.create(inference_service({})).status_code == 404:
            deadline.check()
            time.sleep(0.1)

    def remove(self) -> None:
        self.http.delete(f"{DEFINITIONS}/{self.definition['metadata']['name']}")

    def create(self, service: dict[str, Any]) -> httpx.Response:
        """The answer to a new object, which is judged but not kept."""
        version = f"{self.group}/v1alpha1"
        return self.http.post(
            f"/apis/{version}/namespaces/default/inferenceservices",
            params={"dryRun": "All", "fieldValidation": "Strict"},
            json=service | {"apiVersion": version},
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    trust = ssl.create_default_context(cafile=str(PKI / "ca.crt"))
    trust.load_cert_chain(PKI / "admin.crt", PKI / "admin.key")
    with httpx.Client(base_url=str(SERVER), verify=trust, timeout=PATIENCE_S) as http:
        server = Server(http)
        server.install()
        try:
            yield server
        finally:
            server.remove()


@each("spec", GOOD.values(), ids=GOOD.keys())
def test_a_good_service_is_admitted_and_completed(server: Server, spec: dict[str, Any]) -> None:
    service = inference_service(spec)
    answer = server.create(service)
    assert answer.status_code == 201, answer.text
    assert answer.json()["spec"] == with_defaults(service, SCHEMA)["spec"]


@each("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_rule_is_refused_with_its_field_and_message(
    server: Server, broken: Broken
) -> None:
    answer = server.create(inference_service(broken.spec))
    assert answer.status_code == 422, answer.text
    (cause,) = answer.json()["details"]["causes"]
    where, message = broken.at_server
    assert cause["field"] == where
    assert cause["message"].endswith(f": {message}")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_admitted(server: Server, example: Path) -> None:
    answer = server.create(service_of(example))
    assert answer.status_code == 201, answer.text


def test_an_unknown_field_is_refused(server: Server) -> None:
    answer = server.create(inference_service({"prefill": {"dtype": "float32"}}))
    assert answer.status_code == 400
    assert 'unknown field "spec.prefill.dtype"' in answer.json()["message"]
