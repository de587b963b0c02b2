"""The ModelRoute: one address and one list of keys for the models of several services.

Its types, CRD and defaults derive from this module.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from diptych_operator.api.base import ImageReference, SecretName, SpecPart
from diptych_operator.api.pools import PodTemplate, PodTemplateRemove, Resources
from diptych_operator.api.router import Tls
from diptych_operator.api.service import NAME_PATTERN, Availability, ObjectMeta, Rollout
from diptych_operator.api.status import Condition
from diptych_protocol.router_settings import HostNames

ROUTE_KIND = "ModelRoute"
ROUTE_PLURAL = "modelroutes"
ModelName = Annotated[
    str,
    Meta(
        pattern=r"^[!-~]+$",
        max_length=253,
        title="a name without blanks",
        description="A name in requests.",
    ),
]


class RoutedService(SpecPart, frozen=True):
    """A service that answers."""

    name: Annotated[
        str,
        Meta(
            pattern=NAME_PATTERN,
            max_length=40,
            description="An InferenceService in this namespace.",
        ),
    ]
    model: Annotated[
        str,
        Meta(
            pattern=r"^[!-~]*$",
            max_length=253,
            description="The model's or an adapter's name there; left out, the service's.",
        ),
    ] = ""
    weight: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Its share of the requests; with 0 it is asked only when no other service "
            "takes one.",
        ),
    ] = 1


class RoutedModel(SpecPart, frozen=True):
    """A model, and who answers for it."""

    name: Annotated[ModelName, Meta(description="The model's name in requests.")]
    services: Annotated[
        list[RoutedService],
        Meta(
            min_length=1,
            max_length=16,
            description="Who answers. If one cannot take a request, the next gets it.",
        ),
    ]
    aliases: Annotated[
        list[ModelName], Meta(max_length=32, description="Further names of the model.")
    ] = []


class KeyList(SpecPart, frozen=True):
    secret_name: Annotated[
        SecretName,
        Meta(
            description="A Secret in this namespace, in the form of an InferenceService's "
            "router.apiKeys. Services get the client's key: give them the same Secret, or none."
        ),
    ]


class RouteSpec(SpecPart, frozen=True, kw_only=True):
    rollout: ClassVar[Rollout] = Rollout()
    availability: ClassVar[Availability] = Availability()
    """How its pods are replaced and evicted: as a service's that says nothing of it."""

    models: Annotated[
        list[RoutedModel],
        Meta(min_length=1, max_length=64, description="What clients may ask for."),
    ]
    api_keys: Annotated[
        KeyList | None, Meta(description="Who may use the API; left out, whoever reaches it.")
    ] = None
    tls: Annotated[Tls | None, Meta(description="Serve HTTPS; left out, plain HTTP.")] = None
    allowed_hosts: HostNames = []
    image: Annotated[
        ImageReference, Meta(description="Container image of the pods; left out, the routers'.")
    ] = ""
    replicas: Annotated[int, Meta(ge=1, le=100, description="Pods of the route.")] = 1
    resources: Annotated[Resources, Meta(description="Compute resources of each pod.")] = (
        Resources()
    )
    pod_template: PodTemplate = {}
    pod_template_remove: PodTemplateRemove = []


class RouteStatus(msgspec.Struct, frozen=True, rename="camel", kw_only=True, omit_defaults=True):
    observed_generation: Annotated[
        int, Meta(description="The metadata.generation that this status speaks of.")
    ]
    url: Annotated[str, Meta(description="Base URL of the OpenAI API inside the cluster.")]
    conditions: Annotated[
        list[Condition], Meta(description="Ready: it serves, and its services can answer.")
    ]
    ready: Annotated[str, Meta(description="Ready of wanted pods, such as 2/2.")] = ""


class ModelRoute(SpecPart, frozen=True, kw_only=True):
    """One address, and one list of keys, for the models of several InferenceServices."""

    api_version: Annotated[
        Literal["diptych.dev/v1alpha1"], Meta(description="Group and version of this kind.")
    ]
    kind: Annotated[Literal["ModelRoute"], Meta(description="Always ModelRoute.")]
    metadata: ObjectMeta
    spec: Annotated[RouteSpec, Meta(description="What is wanted.")]
    status: Annotated[
        RouteStatus | None, Meta(description="What is there, as the operator sees it.")
    ] = None

    @property
    def services(self) -> list[str]:
        """The names of its services, each once."""
        return [*dict.fromkeys(each.name for model in self.spec.models for each in model.services)]

    @property
    def twice(self) -> str:
        """A name that is there twice; empty if none."""
        seen: set[str] = set()
        for model in self.spec.models:
            for name in (model.name, *model.aliases):
                if name in seen:
                    return name
                seen.add(name)
        return ""
