"""Namespaces and operators for the tests that need a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_kit.namespaces import Namespace
from cluster_kit.kube_tools import ToolUnavailable, find_tool
from cluster_kit.operators import Home, Identity, Operator, running


@pytest.fixture(scope="session")
def tools() -> None:
    """helm and kubectl, with which the chart's rights are set up."""
    try:
        find_tool("helm")
        find_tool("kubectl")
    except ToolUnavailable as exc:
        pytest.skip(str(exc))


@pytest.fixture(scope="module")
def home(tools: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A namespace with an operator that tells all it does, for all tests of a file."""
    folder = tmp_path_factory.mktemp("operator")
    with Namespace("home") as namespace:
        identity = Identity(namespace, folder)
        arguments = [*identity.arguments, "--log-level=debug"]
        operator = Operator(folder / "log", arguments, identity.kubeconfig)
        with running(operator):
            yield Home(namespace, identity, operator)


@pytest.fixture
def apart(tools: None, tmp_path: Path) -> Iterator[tuple[Namespace, Identity]]:
    """A namespace that nobody serves yet, and who may."""
    with Namespace("apart") as namespace:
        yield namespace, Identity(namespace, tmp_path)
