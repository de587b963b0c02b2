"""Helm, for the tests of the chart."""

from __future__ import annotations

import pytest
from cluster_kit.charts import Helm
from cluster_kit.kube_tools import ToolUnavailable, find_tool


@pytest.fixture(scope="session")
def helm() -> Helm:
    try:
        return Helm(find_tool("helm"))
    except ToolUnavailable as exc:
        pytest.skip(str(exc))
