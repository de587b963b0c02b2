"""What a router's processes tell each other, as msgpack. All of them are of one version."""

from __future__ import annotations

import msgspec

from diptych_protocol import SchedulerStats
from diptych_protocol.admin import Explanation, RequestList, RouterReport
from diptych_router.page.panels import Panels


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """One line of an exposition."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True, frozen=True):
    """One metric with all its samples, as `prometheus_client` collects it."""

    name: str
    meaning: str
    kind: str
    samples: list[Sample]


class WorkerReport(msgspec.Struct, array_like=True, frozen=True):
    """A worker's answer to its parent's question that is empty."""

    state: RouterReport
    metrics: list[Family]
    """What it counted itself."""
    engines: dict[str, SchedulerStats]
    """What engines told it last, by their names."""


class Why(msgspec.Struct, tag=True, frozen=True):
    """The parent asks a worker for an `Explanation`, or a worker its parent for that of all."""

    request_id: str


class Newest(msgspec.Struct, tag=True, frozen=True):
    """The parent asks a worker for a `RequestList`."""

    limit: int


class Look(msgspec.Struct, tag=True, frozen=True):
    """A process is asked for `Panels`: a worker for those of the whole router, or by its parent for
    what it sees itself."""


class Listening(msgspec.Struct, tag=True, frozen=True):
    """The worker takes connections from now on."""


class Scrape(msgspec.Struct, tag=True, frozen=True):
    """A client asks the worker for the metrics of the whole router."""

    accept: str
    """The client's Accept header, or as much of it as matters."""


class Exposition(msgspec.Struct, array_like=True, frozen=True):
    """The parent's answer to `Scrape`."""

    text: bytes
    content_type: str


ToParent = Listening | Scrape | Look | Why
ToWorker = Why | Newest | Look

encode = msgspec.msgpack.Encoder().encode
to_parent = msgspec.msgpack.Decoder(ToParent).decode
to_worker = msgspec.msgpack.Decoder(ToWorker).decode
report_of = msgspec.msgpack.Decoder(WorkerReport).decode
explanation_of = msgspec.msgpack.Decoder(Explanation).decode
panels_of = msgspec.msgpack.Decoder(Panels).decode
requests_of = msgspec.msgpack.Decoder(RequestList).decode
exposition_of = msgspec.msgpack.Decoder(Exposition).decode
