"""Reads from its discovery API what a cluster supports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

POLICY_API: Final = "policy/v1"
HTTP_ROUTE_API, HTTP_ROUTE_KIND = "gateway.networking.k8s.io/v1", "HTTPRoute"
POOL_API, POOL_KIND = "inference.networking.k8s.io/v1", "InferencePool"
SET_API, SET_KIND = "disaggregatedset.x-k8s.io/v1", "DisaggregatedSet"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Facts about a cluster. The defaults hold for every Kubernetes since 1.31."""

    version: tuple[int, int] = (1, 31)
    policy_api: str = POLICY_API
    """The API version of PodDisruptionBudgets."""
    operator_namespace: str = "diptych-system"
    """The namespace from which admin ports may be called."""
    has_pool_scalers: bool = True
    """Whether PoolScalers can be watched: their CRD exists, and the operator has the right."""
    has_gateways: bool = True
    """The same of HTTPRoutes and InferencePools."""
    has_routes: bool = True
    """The same of ModelRoutes."""
    has_sets: bool = True
    """The same of DisaggregatedSets."""

    @property
    def has_image_volumes(self) -> bool:
        """Whether `oci://` models can be mounted, behind a feature gate (on in 1.35).

        Only asking the API server to accept such a pod shows whether the gate is on.
        """
        return self.version >= (1, 31)


def read_cluster(
    major: str,
    minor: str,
    group_versions: Iterable[str],
    operator_namespace: str,
    *,
    has_pool_scalers: bool = True,
    has_gateways: bool = True,
    has_routes: bool = True,
    has_sets: bool = True,
) -> Cluster:
    """Read the cluster from `/version` (whose minor may end in a plus) and the group versions of
    `/apis`.

    Raises `ValueError` for a cluster that serves no PodDisruptionBudget.
    """
    served = list(group_versions)
    # Every promised cluster serves v1. Older ones, for development, put theirs first.
    policies = [version for version in served if version.startswith("policy/")]
    if not policies:
        raise ValueError("the cluster serves no version of policy, so no PodDisruptionBudget")
    policy = POLICY_API if POLICY_API in policies else policies[0]
    numbers = (int("".join(filter(str.isdigit, part)) or 0) for part in (major, minor))
    first, second = numbers
    served_kinds = (has_pool_scalers, has_gateways, has_routes, has_sets)
    return Cluster((first, second), policy, operator_namespace, *served_kinds)
