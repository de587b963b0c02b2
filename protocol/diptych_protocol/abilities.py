"""What engines can do beyond generating tokens from tokens, and the refusal of what they cannot.

A request that needs more is refused by name when it arrives, because every engine would refuse it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from diptych_protocol.errors import InvalidRequestError
from diptych_protocol.sampling import POOLING_TASKS
from diptych_protocol.wire import EngineCoreRequest, EngineDescription


class _Feature(NamedTuple):
    """What engines may lack."""

    name: str
    field: str
    """The field by which users request it."""
    asks: Callable[[EngineCoreRequest], object]
    """Whether a request needs it."""
    has: Callable[[EngineDescription], bool]
    """Whether an engine reports that it can do it."""
    remedy: str
    """What to do instead."""


class Lack(NamedTuple):
    """A feature that engines of a service do not have."""

    field: str
    asks: Callable[[EngineCoreRequest], object]
    message: str
    """Why a request that needs it is refused."""


def _sampled(field: str) -> Callable[[EngineCoreRequest], object]:
    """Whether a field of the sampling parameters is set."""

    def asks(request: EngineCoreRequest) -> object:
        params = request.sampling_params
        return params is not None and getattr(params, field) not in (None, [])

    return asks


_FEATURES: Final = (
    _Feature(
        "embeddings",
        "input",
        lambda request: request.pooling_params is not None,
        lambda about: any(task in about.tasks for task in POOLING_TASKS),
        "ask a service for embeddings whose engines have another runtime",
    ),
    _Feature(
        "prompt embeds",
        "prompt_embeds",
        lambda request: request.prompt_embeds is not None,
        lambda about: about.abilities.prompt_embeds,
        "send the prompt as text or token ids",
    ),
    _Feature(
        "images",
        "image_url",
        lambda request: bool(request.mm_features),
        lambda about: about.abilities.images,
        "send text only",
    ),
    _Feature(
        "adapters",
        "model",
        lambda request: request.lora_request is not None,
        lambda about: about.abilities.adapters,
        "name the base model",
    ),
    _Feature(
        "prompt logprobs",
        "prompt_logprobs",
        _sampled("prompt_logprobs"),
        lambda about: about.abilities.prompt_logprobs,
        "leave it out",
    ),
    _Feature(
        "logits processors",
        "logits_processors",
        _sampled("logits_processors"),
        lambda about: about.abilities.logits_processors,
        "leave it out",
    ),
)


def lacks_of(engines: Iterable[EngineDescription]) -> tuple[Lack, ...]:
    """Return what one or more of these engines cannot do; mostly nothing."""
    return tuple(
        Lack(
            feature.field,
            feature.asks,
            f"{feature.field}: the engines of this service are of the runtime {about.runtime}, "
            f"which does not offer {feature.name} here; {feature.remedy}",
        )
        for about in engines
        for feature in _FEATURES
        if not feature.has(about)
    )


def check_abilities(lacks: Sequence[Lack], request: EngineCoreRequest) -> None:
    """Raise `InvalidRequestError`, naming the field, if a request needs one of these."""
    for lack in lacks:
        if lack.asks(request):
            raise InvalidRequestError(lack.message, param=lack.field, code="unsupported_by_runtime")
