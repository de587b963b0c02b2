"""`spec.router.batches`: where routers keep the files and batches of clients."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from diptych_operator.api.base import ClaimName, Rule, SpecPart


class BatchVolume(SpecPart, frozen=True):
    claim_name: Annotated[
        ClaimName,
        Meta(
            description="A PersistentVolumeClaim in this namespace, which routers write to. For "
            "several router pods it must be ReadWriteMany, and locks (flock) must hold across "
            "nodes, as on NFS 4 and CephFS.",
        ),
    ]


class Batches(SpecPart, frozen=True):
    pvc: Annotated[
        BatchVolume | None,
        Meta(
            description="A volume for files and batches; left out, they are on the disk of the "
            "router pod's node, and go with the pod."
        ),
    ] = None
    size: Annotated[
        str,
        Meta(
            pattern=r"^[1-9][0-9]{0,8}(Mi|Gi|Ti)$",
            title="a size such as 10Gi",
            description="The most that all files and batches may take; one API key may have half "
            "of it. It is to be less than the volume has: while a batch ends, its answers are "
            "there twice.",
            examples=["10Gi"],
        ),
    ] = "10Gi"
    concurrency: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="The most requests of batches that each process of a router has under way.",
        ),
    ] = 16


ONE_ROUTER_WITHOUT_VOLUME = Rule(
    "!has(self.batches) || has(self.batches.pvc) || self.replicas <= 1",
    lambda router: router.batches is None or bool(router.batches.pvc) or router.replicas <= 1,
    "needs a pvc if there are several routers: another one would not find a client's files",
    ".batches",
)
