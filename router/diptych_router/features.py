"""What the engines of each runtime can do, as data.

A request that asks for more is refused when it comes, by name: it would be refused by every engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from diptych_protocol import EngineCoreRequest, InvalidRequestError
from diptych_protocol.config import Runtime

Asks = Callable[[EngineCoreRequest], object]
"""Whether a request asks for a feature."""


@dataclass(frozen=True, slots=True)
class Features:
    """What engines of one runtime can do besides generating tokens from tokens."""

    runtime: Runtime
    prefill_pool: bool = True
    """A prefill engine hands requests over to a decode engine."""
    embeddings: bool = True
    prompt_embeds: bool = True
    images: bool = True
    adapters: bool = True
    prompt_logprobs: bool = True
    logits_processors: bool = True
    goes_on_with_forms: bool = True
    """Goes on in the middle of an answer that must have a form, where another engine stopped."""


FEATURES: Final[dict[Runtime, Features]] = {
    "diptych": Features("diptych"),
    "vllm": Features(
        "vllm",
        prefill_pool=False,
        embeddings=False,
        prompt_embeds=False,
        images=False,
        adapters=False,
        prompt_logprobs=False,
        logits_processors=False,
        goes_on_with_forms=False,
    ),
}


def _sampled(field: str) -> Asks:
    """Whether a field of the sampling parameters is set."""

    def asks(request: EngineCoreRequest) -> object:
        params = request.sampling_params
        return params is not None and getattr(params, field) not in (None, [])

    return asks


_ASKED: Final[tuple[tuple[str, str, Asks, str], ...]] = (
    ("embeddings", "input", lambda r: r.pooling_params is not None,
     "ask a service for embeddings whose engines have another runtime"),
    ("prompt_embeds", "prompt_embeds", lambda r: r.prompt_embeds is not None,
     "send the prompt as text or token ids"),
    ("images", "image_url", lambda r: bool(r.mm_features), "send text only"),
    ("adapters", "model", lambda r: r.lora_request is not None, "name the base model"),
    ("prompt_logprobs", "prompt_logprobs", _sampled("prompt_logprobs"), "leave it out"),
    ("logits_processors", "logits_processors", _sampled("logits_processors"), "leave it out"),
)  # fmt: skip
"""Feature, the field by which users ask for it, whether a request does, and what to do instead."""


def check_pools(features: Features, *, prefill: bool) -> None:
    """Raise `InvalidRequestError` if the pools that a router is given are not for these engines.

    prefill: there is a prefill pool.
    """
    if prefill and not features.prefill_pool:
        raise InvalidRequestError(
            f"--prefill: engines of the runtime {features.runtime} compute whole requests; leave "
            "it out, and name all engines in --decode",
            param="--prefill",
        )
    if not prefill and features.prefill_pool:
        raise InvalidRequestError(
            f"--prefill: a service whose engines are of the runtime {features.runtime} has a "
            "prefill pool; name its engines",
            param="--prefill",
        )


def check_features(features: Features, request: EngineCoreRequest) -> None:
    """Raise `InvalidRequestError`, naming the field, if a request asks for what these engines do
    not have."""
    for feature, field, asks, remedy in _ASKED:
        if not getattr(features, feature) and asks(request):
            raise InvalidRequestError(
                f"{field}: the engines of this service are of the runtime {features.runtime}, "
                f"which does not offer {feature.replace('_', ' ')} here; {remedy}",
                param=field,
                code="unsupported_by_runtime",
            )
