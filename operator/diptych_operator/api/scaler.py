"""The PoolScaler, through which an external autoscaler sets the size of one pool.

A kind can have only one `/scale`, but a service has two pools. So each pool that is scaled from
outside gets an object of its own. Its types, CRD and defaults derive from this module.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from diptych_operator.api.base import SpecPart

SCALER_KIND = "PoolScaler"
SCALER_PLURAL = "poolscalers"


class PoolScalerSpec(SpecPart, frozen=True, kw_only=True):
    replicas: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Pods that the pool is to have. The operator reads it within the bounds "
            "of the pool's autoscaling.minReplicas and maxReplicas, and never writes it again "
            "once the object is made.",
        ),
    ]


class PoolScalerStatus(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    replicas: Annotated[
        int,
        Meta(
            description="Pods of the pool that are there, of any revision, ready or not, without "
            "those that are leaving. This is what an HPA calculates with."
        ),
    ]
    ready_replicas: Annotated[int, Meta(description="Those of them that are ready.")]
    selector: Annotated[
        str, Meta(max_length=256, description="The labels that pick the pool's pods.")
    ]


class PoolScaler(SpecPart, frozen=True, kw_only=True):
    """The size of one pool of an InferenceService, for `kubectl scale`, an HPA or KEDA to set."""

    api_version: Annotated[
        Literal["diptych.dev/v1alpha1"], Meta(description="Group and version of this kind.")
    ]
    kind: Annotated[Literal["PoolScaler"], Meta(description="Always PoolScaler.")]
    spec: Annotated[PoolScalerSpec, Meta(description="What is wanted.")]
    status: Annotated[
        PoolScalerStatus | None, Meta(description="What is there, as the operator sees it.")
    ] = None
