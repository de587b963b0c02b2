"""What the end-to-end tests share: a namespace of their own with an operator and a client in it."""

from __future__ import annotations

import os
import secrets
import tomllib
from collections.abc import Callable, Generator, Iterator
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


def image(component: str) -> str:
    return f"{REGISTRY}diptych-{component}:{TAG}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Dump the namespace at the moment of the failure, before anything heals."""
    report = yield
    if report.failed and isinstance(kubectl := item.funcargs.get("kubectl"), Kubectl):
        kubectl.dump(ARTIFACTS / item.name)
    return report


@pytest.fixture(scope="session")
def figures() -> Figures:
    return Figures()


@pytest.fixture(scope="session")
def namespaces() -> Iterator[Callable[[str], Kubectl]]:
    """Makes fresh namespaces. They go when all tests have ended, at the same time."""
    prefix = f"diptych-e2e-{secrets.token_hex(3)}"
    made: list[Kubectl] = []

    def make(name: str) -> Kubectl:
        kubectl = Kubectl(f"{prefix}-{name}")
        try:
            kubectl.run("create", "namespace", kubectl.namespace)
        except KubectlError as exc:
            words = f"these tests need a cluster, such as that of e2e/kind: {exc}"
            pytest.fail(words, pytrace=False)
        made.append(kubectl)
        return kubectl

    yield make
    # A namespace waits for its pods, longer than they take: let none be left.
    for wait in ("--wait=false", "--timeout=180s"):
        for each in made:
            each.run("delete", "pods", "--all", "--grace-period=1", wait, timeout_s=190)
    for each in made:
        each.delete("namespace", each.namespace)
    for each in made:
        each.gone("namespace", [each.namespace])


@pytest.fixture(scope="session")
def kubectl(namespaces: Callable[[str], Kubectl]) -> Kubectl:
    """The namespace of all modules but one, each of which leaves no service there."""
    return namespaces("all")


@pytest.fixture(scope="session")
def client(kubectl: Kubectl) -> Client:
    return started_client(kubectl)


def started_client(kubectl: Kubectl) -> Client:
    client = Client(kubectl, image("router"))
    client.start()
    return client


@pytest.fixture(scope="session")
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
def smollm2(kubectl: Kubectl, client: Client, chart: Chart) -> Iterator[Service]:
    """The example's service; not yet applied."""
    service = Service(kubectl, client, "smollm2")
    yield service
    service.delete()
    service.gone()


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
