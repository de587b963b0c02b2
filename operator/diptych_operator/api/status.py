"""The status of an InferenceService, which the operator writes.

It is read leniently (`msgspec.convert` skips unknown fields), because an older operator may meet
the status of a newer one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

ConditionStatus = Literal["True", "False", "Unknown"]


MAX_MESSAGE = 1024
"""Characters in the message of a condition, a rollout or an event, whose limit this is."""


@dataclass(frozen=True, slots=True)
class EventNote:
    """A Kubernetes Event to post; if a status has the same content, after that is written."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


class _Status(msgspec.Struct, frozen=True, rename="camel", kw_only=True, omit_defaults=True):
    """Common to all parts that the operator writes.

    What is empty or 0 is left out: so do Kubernetes' own kinds, server-side apply then removes it,
    and older API servers turn an empty text into a null that they refuse.
    """


class Condition(_Status, frozen=True):
    """One statement about the service, in the form of all Kubernetes conditions."""

    type: Annotated[str, Meta(max_length=316, description="What it speaks of (docs/status.md).")]
    status: Annotated[
        ConditionStatus, Meta(description="Whether it is so; Unknown if that cannot be told.")
    ]
    reason: Annotated[
        str, Meta(max_length=1024, description="Why, as one CamelCase word for programs.")
    ]
    message: Annotated[
        str, Meta(max_length=32768, description="Why, as a sentence for people, with the remedy.")
    ]
    last_transition_time: Annotated[
        str,
        Meta(
            description="When the status last changed to what it is.",
            extra_json_schema={"format": "date-time"},
        ),
    ]
    observed_generation: Annotated[
        int, Meta(description="The metadata.generation that this condition speaks of.")
    ] = 0


class PoolStatus(_Status, frozen=True):
    summary: Annotated[str, Meta(description="Ready of wanted pods, such as 2/2.")] = ""
    desired: Annotated[int, Meta(description="Pods wanted now.")] = 0
    ready: Annotated[int, Meta(description="Pods that are ready, of any revision.")] = 0
    updated: Annotated[int, Meta(description="Ready pods of the newest revision.")] = 0
    draining: Annotated[int, Meta(description="Pods that are on their way out.")] = 0


class TransferStatus(_Status, frozen=True):
    """The newest canary of the current revision that received its KV from prefill."""

    verified_revision: Annotated[
        str, Meta(description="The revision whose engines the canary went through.")
    ] = ""
    verified_at: Annotated[str, Meta(description="When it arrived.")] = ""
    verified_engines: Annotated[int, Meta(description="Engines that a canary went through.")] = 0
    blocks: Annotated[int, Meta(description="KV blocks that the last canary moved.")] = 0
    bytes: Annotated[int, Meta(description="The size of those blocks.")] = 0
    milliseconds: Annotated[float, Meta(description="How long they took.")] = 0.0
    transport: Annotated[str, Meta(description="What carried them, such as tcp or cma.")] = ""


class RolloutStatus(_Status, frozen=True):
    phase: Annotated[
        str, Meta(description="Idle, Progressing, Verifying, Switching, Failed or Suspended.")
    ] = ""
    message: Annotated[str, Meta(description="What the rollout does or waits for now.")] = ""
    last_progress_at: Annotated[
        str, Meta(description="When the newest revision last came closer to its wanted numbers.")
    ] = ""
    progress: Annotated[
        str, Meta(description="What was counted then; a change of it is progress.")
    ] = ""
    canary: Annotated[
        dict[str, Annotated[str, Meta(description="One fact.")]],
        Meta(description="Where a canary stands."),
    ] = {}


class ImagesStatus(_Status, frozen=True):
    """The images in use: those that the spec names, or else the operator's."""

    engine: Annotated[str, Meta(description="Image of the engines of updateRevision.")] = ""
    router: Annotated[str, Meta(description="Image of the routers.")] = ""


class Status(_Status, frozen=True):
    observed_generation: Annotated[
        int, Meta(description="The metadata.generation that this status speaks of.")
    ] = 0
    url: Annotated[str, Meta(description="Base URL of the OpenAI API inside the cluster.")] = ""
    access: Annotated[
        str, Meta(description="Who may use that API, and whether it is encrypted.")
    ] = ""
    current_revision: Annotated[
        str, Meta(description="The revision that last served at its full size.")
    ] = ""
    update_revision: Annotated[str, Meta(description="The revision that the spec asks for.")] = ""
    images: Annotated[
        ImagesStatus,
        Meta(description="The images that the spec asks for or that the operator has."),
    ] = ImagesStatus()
    prefill: Annotated[PoolStatus, Meta(description="The prefill pool.")] = PoolStatus()
    decode: Annotated[PoolStatus, Meta(description="The decode pool.")] = PoolStatus()
    router: Annotated[PoolStatus, Meta(description="The routers.")] = PoolStatus()
    prefetched: Annotated[
        str, Meta(description="Nodes with model and images, of those that are to: 3/5.")
    ] = ""
    transfer: Annotated[TransferStatus, Meta(description="What the last canary found.")] = (
        TransferStatus()
    )
    rollout: Annotated[RolloutStatus, Meta(description="How far a change has come.")] = (
        RolloutStatus()
    )
    conditions: Annotated[
        list[Condition],
        Meta(
            max_length=32,
            description="The state of the service, one condition per type.",
            extra_json_schema={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
        ),
    ] = []

    def condition(self, kind: str) -> Condition | None:
        return next((each for each in self.conditions if each.type == kind), None)
