"""What the end-to-end tests share: a namespace of their own with an operator and a client in it."""

from __future__ import annotations

import os
import secrets
import tomllib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from e2e.bench import Bench
from e2e.chart import Chart
from e2e.figures import ARTIFACTS, Figures
from e2e.kubectl import Kubectl, KubectlError, Object
from e2e.service import KIND, Service
from e2e.traffic import Client

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
REGISTRY = os.environ.get("DIPTYCH_E2E_REGISTRY", "")
"""Where the cluster gets the images from, such as `registry.example/me/`; empty: it has them."""
PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
TAG = tomllib.loads(PROJECT.read_text())["project"]["version"]
IN_USE = pytest.StashKey[Kubectl]()
"""The namespace of the module that runs now."""


def image(component: str) -> str:
    return f"{REGISTRY}diptych-{component}:{TAG}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Dump the namespace at the moment of the failure, before anything heals."""
    report = yield
    if report.failed and (kubectl := item.config.stash.get(IN_USE, None)) is not None:
        kubectl.dump(ARTIFACTS / item.name)
    return report


@pytest.fixture(scope="session")
def figures() -> Figures:
    return Figures()


@contextmanager
def namespace(name: str) -> Iterator[Kubectl]:
    """A fresh namespace, deleted with all that is in it."""
    kubectl = Kubectl(name)
    try:
        kubectl.run("create", "namespace", kubectl.namespace)
    except KubectlError as exc:
        pytest.fail(f"these tests need a cluster, such as that of e2e/kind: {exc}", pytrace=False)
    yield kubectl
    # A namespace waits for its pods, longer than they take: let none be left.
    kubectl.run("delete", "pods", "--all", "--grace-period=1", "--timeout=180s", timeout_s=190)
    kubectl.delete("namespace", kubectl.namespace)
    kubectl.gone("namespace", [kubectl.namespace])


@pytest.fixture(scope="module")
def kubectl(request: pytest.FixtureRequest) -> Iterator[Kubectl]:
    """A namespace for each module."""
    with namespace(f"diptych-e2e-{secrets.token_hex(3)}") as kubectl:
        request.config.stash[IN_USE] = kubectl
        yield kubectl
        del request.config.stash[IN_USE]


@pytest.fixture(scope="module")
def client(kubectl: Kubectl) -> Client:
    client = Client(kubectl, image("router"))
    client.start()
    return client


@pytest.fixture(scope="module")
def chart(kubectl: Kubectl) -> Iterator[Chart]:
    """The operator, of this one namespace. It goes after the services it looks after, which it has
    to take down."""
    with operating(Chart(kubectl, REGISTRY, serves=kubectl.namespace), kubectl) as chart:
        yield chart


@contextmanager
def operating(chart: Chart, kubectl: Kubectl) -> Iterator[Chart]:
    """The chart is installed while tests have services in a namespace."""
    try:
        chart.install()
        yield chart
        kubectl.run("delete", KIND, "--all", "--timeout=120s", timeout_s=130)
    finally:
        chart.uninstall()


@pytest.fixture(scope="module")
def smollm2(kubectl: Kubectl, client: Client, chart: Chart) -> Service:
    """The example's service; not yet applied."""
    return Service(kubectl, client, "smollm2")


@pytest.fixture(scope="module")
def unapplied(
    smollm2: Service, client: Client, chart: Chart, kubectl: Kubectl, figures: Figures
) -> Bench:
    """The example's service and all that disturbs it."""
    return Bench(smollm2, client, chart, kubectl, figures)


@pytest.fixture(scope="session")
def example() -> Object:
    """examples/smollm2.yaml as it is: the chart knows which images this cluster has."""
    manifest: Object = yaml.safe_load((EXAMPLES / "smollm2.yaml").read_text())
    return manifest
