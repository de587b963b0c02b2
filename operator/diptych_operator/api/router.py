"""`spec.router`: the settings that a router has anywhere, and what only its pods have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from diptych_operator.api.base import (
    ClaimName,
    ImageReference,
    Rule,
    SecretName,
    SpecPart,
    spec_part,
)
from diptych_operator.api.pools import PodTemplate, PodTemplateRemove, Resources
from diptych_protocol.router_settings import BatchSettings, CachePerKey, RouterSettings


class ApiKeys(SpecPart, frozen=True):
    secret_name: Annotated[
        SecretName,
        Meta(
            description="A Secret in this namespace. Each entry is a key: its name is the "
            "client's, for metrics and logs, its value the bearer token. Routers follow its "
            "changes."
        ),
    ]
    cache_per_key: CachePerKey = False


class Tls(SpecPart, frozen=True):
    secret_name: Annotated[
        SecretName,
        Meta(
            description="A Secret of type kubernetes.io/tls in this namespace, as cert-manager "
            "makes them. Routers follow its changes."
        ),
    ]


class BatchVolume(SpecPart, frozen=True):
    claim_name: Annotated[
        ClaimName,
        Meta(
            description="A PersistentVolumeClaim in this namespace, which routers write to. "
            "Several routers need ReadWriteMany, and locks (flock) that hold across nodes."
        ),
    ]


if TYPE_CHECKING:

    class Batches(BatchSettings, SpecPart, frozen=True):
        """`BatchSettings` as a part of the spec, with where files and batches are kept."""

        pvc: BatchVolume | None = None
        size: str = "10Gi"

    class Router(RouterSettings, SpecPart, frozen=True):
        """`RouterSettings` as a part of the spec, with what only pods have."""

        image: str = ""
        replicas: int = 1
        api_keys: ApiKeys | None = None
        tls: Tls | None = None
        batches: Batches | None = None
        resources: Resources = Resources()
        pod_template: dict[str, Any] = {}
        pod_template_remove: list[str] = []

else:
    Batches = spec_part(
        "Batches",
        BatchSettings,
        pvc=(
            Annotated[
                BatchVolume | None,
                Meta(
                    description="A volume for files and batches; left out, they go with the "
                    "router's pod."
                ),
            ],
            None,
        ),
        size=(
            Annotated[
                str,
                Meta(
                    pattern=r"^[1-9][0-9]{0,8}(Mi|Gi|Ti)$",
                    title="a size such as 10Gi",
                    description="The most that all files and batches may take; one API key may "
                    "have half of it. Less than the volume has: while a batch ends, its answers "
                    "are there twice.",
                    examples=["10Gi"],
                ),
            ],
            "10Gi",
        ),
    )
    Router = spec_part(
        "Router",
        RouterSettings,
        names={"policy"},
        image=(
            Annotated[
                ImageReference,
                Meta(description="Container image of the router pods; left out, the operator's."),
            ],
            "",
        ),
        replicas=(Annotated[int, Meta(ge=1, le=100, description="Router pods.")], 1),
        api_keys=(
            Annotated[
                ApiKeys | None,
                Meta(description="Who may use the API; left out, whoever reaches it."),
            ],
            None,
        ),
        tls=(Annotated[Tls | None, Meta(description="Serve HTTPS; left out, plain HTTP.")], None),
        batches=(
            Annotated[
                Batches | None,
                Meta(
                    description="Serve /v1/files and /v1/batches: requests in files, answered "
                    "when there is room; left out, they are off.",
                    examples=["{pvc: {claimName: batches}}"],
                ),
            ],
            None,
        ),
        resources=(
            Annotated[Resources, Meta(description="Compute resources of each router pod.")],
            Resources(),
        ),
        pod_template=(PodTemplate, {}),
        pod_template_remove=(PodTemplateRemove, []),
    )


ONE_ROUTER_WITHOUT_VOLUME = Rule(
    "!has(self.batches) || has(self.batches.pvc) || self.replicas <= 1",
    lambda router: router.batches is None or bool(router.batches.pvc) or router.replicas <= 1,
    "needs a pvc if there are several routers: another one would not find a client's files",
    ".batches",
)
