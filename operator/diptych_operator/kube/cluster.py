"""What a cluster can do, read from its discovery; the operator uses the newest that it knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

POLICY_API: Final = "policy/v1"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Pure facts; the defaults are those of every Kubernetes since 1.31."""

    version: tuple[int, int] = (1, 31)
    policy_api: str = POLICY_API
    """The API version of PodDisruptionBudgets."""
    operator_namespace: str = "diptych-system"
    """From where admin ports may be called."""
    has_pool_scalers: bool = True
    """PoolScalers can be watched: their CRD is there, and so is the right."""

    @property
    def has_image_volumes(self) -> bool:
        """Whether `oci://` models can be mounted, if only behind a gate, which 1.35 has on.

        Whether the gate is on shows when the API server is asked to accept such a pod.
        """
        return self.version >= (1, 31)


def read_cluster(
    major: str,
    minor: str,
    group_versions: Iterable[str],
    operator_namespace: str,
    *,
    has_pool_scalers: bool = True,
) -> Cluster:
    """From `/version` (whose minor may end in a plus) and the group versions of `/apis`.

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
    return Cluster((first, second), policy, operator_namespace, has_pool_scalers)
