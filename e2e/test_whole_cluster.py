"""The quick start with an operator in a namespace of its own that serves the whole cluster.

The other tests have an operator that serves one namespace, which it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from e2e.chart import Chart
from e2e.conftest import REGISTRY, operating, started_client
from e2e.kubectl import Kubectl, Object
from e2e.service import Service
from e2e.traffic import Client


@pytest.fixture(scope="module")
def kubectl(namespaces: Callable[[str], Kubectl]) -> Kubectl:
    return namespaces("whole")


@pytest.fixture(scope="module")
def client(kubectl: Kubectl) -> Client:
    return started_client(kubectl)


@pytest.fixture(scope="module")
def chart(namespaces: Callable[[str], Kubectl], kubectl: Kubectl) -> Iterator[Chart]:
    with operating(Chart(namespaces("system"), REGISTRY, serves=""), kubectl) as chart:
        yield chart


def test_a_service_of_another_namespace_is_served_and_taken_down(
    smollm2: Service, client: Client, example: Object, chart: Chart
) -> None:
    chart.test()
    smollm2.apply(example)
    smollm2.settled()
    for condition in ("Available", "KVTransferVerified"):
        assert smollm2.condition(condition) == "True"
    answer = smollm2.chat("In a word: what is a painting on two panels called?")
    assert answer["choices"][0]["message"]["content"]
    smollm2.delete()
    smollm2.gone()
