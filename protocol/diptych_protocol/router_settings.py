"""The settings of a router: each is declared once, with its type, its range and its meaning.

The router's configuration (`config.py`), its checks and its command line, the custom resource with
its CRD, and the reference page are derived from the fields of `RouterSettings`. A new setting is a
field here, and the code that uses it. Names in backticks are fields or policies. Where the custom
resource shows a description, they are written in its form.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Disaggregate = Literal["auto", "always", "never"]
UnknownFields = Literal["warn", "refuse"]
CachePerKey = Annotated[
    bool,
    Meta(
        description="What a key's requests leave in engines' caches serves that key only: no time "
        "tells what others have asked."
    ),
]
"""In the custom resource it stands among the settings of API keys."""


HostNames = Annotated[
    list[
        Annotated[
            str,
            Meta(
                pattern=r"^[a-z0-9]([-._a-z0-9]*[a-z0-9])?$",
                max_length=253,
                title="a DNS name in lower case, without a port",
                description="A DNS name in lower case, without a port.",
            ),
        ]
    ],
    Meta(
        max_length=64,
        title="DNS names",
        description="Names under which clients reach the router, as an Ingress's. Without API "
        "keys it answers only under these, addresses, names without a dot, and names that end in "
        ".localhost, .svc or .svc.cluster.local.",
        examples=[["llm.example.com"]],
    ),
]
Origins = Annotated[
    list[
        Annotated[
            str,
            Meta(
                pattern=r"^[a-z][-+.a-z0-9]*://[-._:\[\]a-z0-9]+$",
                max_length=512,
                title="an origin, such as https://app.example.com",
                description="An origin: scheme, host and port of a site.",
            ),
        ]
    ],
    Meta(
        max_length=64,
        title="origins of web sites",
        description="Origins of web sites whose pages may use the API from browsers (CORS). Left "
        "out, only the router's own page may.",
        examples=[["https://app.example.com"]],
    ),
]


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All routers of a service have the same."""

    policy: Annotated[
        str,
        Meta(
            # Which names there are is the router's business: each is a file there.
            pattern=r"^[a-z][A-Za-z0-9_]*$",
            max_length=63,
            title="the name of a policy",
            description="Which engines get a request. `prefix_aware`: those where it costs the "
            "fewest seconds. `least_loaded`: those with the fewest open tokens. `round_robin`: "
            "whose turn it is. A router that does not know the name never gets ready.",
        ),
    ] = "prefix_aware"
    disaggregate: Annotated[
        Disaggregate,
        Meta(
            description="Whether a prefill engine computes the prompt. always: if there is one. "
            "never: the decode engine does. auto: the decode engine does where that costs less; "
            "`least_loaded` and `round_robin` take it for always."
        ),
    ] = "always"
    elastic_roles: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Engines change their roles as the promises of `slo` need it; this many "
            "keep each role. 0: roles are fixed.",
        ),
    ] = 0
    hold_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="How long a request waits for an engine when there is none, as after "
            "scaling to zero.",
        ),
    ] = 30.0
    unknown_fields: Annotated[
        UnknownFields,
        Meta(
            description="What becomes of a field of a request that nobody here knows, outside of "
            "messages. warn: it is ignored, as the answer's `warnings` say. refuse: a 400."
        ),
    ] = "warn"
    allowed_hosts: HostNames = []
    allowed_origins: Origins = []
    ui: Annotated[
        bool,
        Meta(
            description="Serve a page at /: a chat, and both pools beside it. What it shows needs "
            "a key if the API does."
        ),
    ] = False


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a router works on the batches of clients."""

    concurrency: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="The most requests of batches that each process of a router has under way.",
        ),
    ] = 16


class RouteTarget(msgspec.Struct, frozen=True):
    """A service that answers for a model of a route."""

    service: str
    """Its name, for metrics and logs."""
    url: str
    """Where its routers are: scheme, host and port."""
    model: str
    """The model's name there."""
    weight: int = 1
    """Its share of the requests; with 0 it is asked only when others cannot answer."""
    certificate: str = ""
    """A file with the certificate that its routers show; empty: they serve plain HTTP."""
    other_certificate: str = ""
    """One with that which some of them show; empty: all show the same."""


class RouteModel(msgspec.Struct, frozen=True):
    """A model of a route, under each of its names."""

    names: list[str]
    targets: list[RouteTarget]


class RouteConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """Everything that a route needs to know. It is sent to the process as JSON."""

    name: str
    models: list[RouteModel]
    allowed_hosts: list[str] = []
    drain_seconds: float = 30.0


class Serving(msgspec.Struct, frozen=True):
    """What the operator tells routers while they run, in `serving.json`. Unknown fields are
    ignored: a newer operator may add some."""

    revisions: tuple[str, ...] = ()
    """Revisions that get new requests; empty means all."""
    asleep: bool = False
    """When pools are empty, it is on purpose: hold requests until they are not, and be ready."""
    canary: str = ""
    """The one of `revisions` that is on trial; empty if none is."""
    weight: int = 0
    """Percent of new requests that it gets."""
