"""What `make lint` says of objects that some promised Kubernetes would not take, and how the chart
comes to a cluster older than that, for tests alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster_kit.charts import CHART, NAMESPACE, OLDEST_MINOR, RELEASE, Helm
from cluster_kit.kube_schemas import complaints, is_served
from cluster_kit.old_clusters import chart_for, newest

GROUP = "policy"  # its beta version went before the oldest promised Kubernetes
BUDGET = {"kind": "PodDisruptionBudget", "metadata": {"name": "a"}, "spec": {"maxUnavailable": 1}}


@pytest.mark.parametrize(
    ("api", "spec", "told"),
    [
        ("v1", {}, []),
        ("v1beta1", {}, [f"no PodDisruptionBudget in {GROUP}/v1beta1"] * 2),
        ("v1", {"minAvailible": 1}, ["'minAvailible' was unexpected"] * 2),
    ],
    ids=["what both know", "an API that has gone", "a field that none has"],
)
def test_objects_are_held_against_the_oldest_and_the_newest_kubernetes(
    api: str, spec: dict[str, int], told: list[str]
) -> None:
    budget = BUDGET | {"apiVersion": f"{GROUP}/{api}", "spec": {"maxUnavailable": 1, **spec}}
    found = list(complaints(budget))
    assert [expected in words for expected, words in zip(told, found, strict=True)] == [True] * len(
        told
    )
    assert is_served(f"{GROUP}/{api}") is (api == "v1")


def test_kinds_that_are_not_of_kubernetes_are_not_judged() -> None:
    assert not list(complaints({"apiVersion": "diptych.dev/v9", "kind": "Any", "metadata": {}}))


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        (["v1", "v2beta2", "v2beta1"], "v2beta2"),
        (["v2beta2", "v2", "v1", "v3alpha1"], "v3alpha1"),
        (["v1alpha2", "v1beta1"], "v1beta1"),
        (["v1beta1", "v1"], "v1"),
    ],
)
def test_the_newest_version_of_a_group_is_found(served: list[str], expected: str) -> None:
    versions = ["books/v7", *(f"scaling/{version}" for version in served), "other.scaling/v9"]
    assert newest("scaling", versions) == f"scaling/{expected}"


def test_the_chart_is_fitted_to_an_older_cluster_and_to_no_other(
    helm: Helm, tmp_path: Path
) -> None:
    def cluster(minor: int, *arguments: str) -> str:
        answers = {"version": json.dumps({"serverVersion": {"minor": f"{minor}+"}}),
                   "api-versions": f"v1\n{GROUP}/v1beta1\n"}  # fmt: skip
        return answers[arguments[0]]

    assert chart_for(lambda *arguments: cluster(OLDEST_MINOR, *arguments), tmp_path) == CHART
    old = ("--kube-version", f"1.{OLDEST_MINOR - 1}.0")
    refused = helm("template", RELEASE, str(CHART), *old)
    assert "incompatible with Kubernetes" in refused.stderr
    chart = chart_for(lambda *arguments: cluster(OLDEST_MINOR - 1, *arguments), tmp_path)
    made = helm("template", RELEASE, str(chart), "-n", NAMESPACE, *old)
    assert f"apiVersion: {GROUP}/v1beta1\n" in made.stdout
    assert "openAPIV3Schema" in made.stdout
    assert "x-kubernetes-validations" not in made.stdout
