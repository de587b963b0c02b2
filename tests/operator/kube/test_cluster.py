"""What a cluster can do, from its discovery, and where its objects are."""

from __future__ import annotations

import pytest

from diptych_operator.kube.client import object_path
from diptych_operator.kube.cluster import read_cluster


@pytest.mark.parametrize(
    ("served", "policy"),
    [
        (["policy/older", "policy/v1"], "policy/v1"),
        (["policy/older", "policy/oldest"], "policy/older"),
        (["apps/v1", "policy/v1"], "policy/v1"),
    ],
)
def test_budgets_are_of_version_1_or_what_the_cluster_puts_first(
    served: list[str], policy: str
) -> None:
    assert read_cluster("1", "27", served, "ns").policy_api == policy


@pytest.mark.parametrize(
    ("minor", "version", "image_volumes"),
    [("20", (1, 20), False), ("20+", (1, 20), False), ("30", (1, 30), False),
     ("31", (1, 31), True), ("34+", (1, 34), True)],
)  # fmt: skip
def test_features_follow_from_the_version(
    minor: str, version: tuple[int, int], image_volumes: bool
) -> None:
    cluster = read_cluster("1", minor, ["policy/v1"], "ns")
    assert (cluster.version, cluster.has_image_volumes) == (version, image_volumes)


def test_a_cluster_without_any_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="PodDisruptionBudget"):
        read_cluster("1", "99", ["apps/v1"], "ns")


def test_a_name_that_somebody_made_up_leads_to_no_other_object() -> None:
    """Some names of Secrets are read from annotations."""
    path = object_path("v1", "Secret", "here", "a-keys-x/../../../there/secrets/theirs?watch=1")
    assert path == (
        "/api/v1/namespaces/here/secrets/a-keys-x%2F..%2F..%2F..%2Fthere%2Fsecrets%2Ftheirs%3Fwatch%3D1"
    )
