"""What the engines of each runtime can do, as data.

A request that asks for more is refused when it comes, by name: it would be refused by every engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from diptych_protocol import EngineCoreRequest, InvalidRequestError, RouterConfig
from diptych_protocol.config import Connector, Runtime

Asks = Callable[[EngineCoreRequest], object]
"""Whether a request asks for a feature."""


@dataclass(frozen=True, slots=True)
class Features:
    """What engines of one runtime can do besides generating tokens from tokens."""

    runtime: Runtime
    connectors: tuple[Connector, ...] = ("diptych",)
    """What can hand KV over from a prefill to a decode engine."""
    needs_prefill_pool: bool = True
    """The decode pool alone is no service."""
    tells_received: bool = True
    """Says how much of each prompt it has received, so that a canary can tell by that."""
    embeddings: bool = True
    prompt_embeds: bool = True
    images: bool = True
    adapters: bool = True
    prompt_logprobs: bool = True
    logits_processors: bool = True
    goes_on_with_forms: bool = True
    """Goes on in the middle of an answer that must have a form, where another engine stopped."""


LEAST_LEASE_OF_NIXL_S: Final = 6.0
"""vLLM renews a lease each sixth of its time, in whole seconds."""

FEATURES: Final[dict[Runtime, Features]] = {
    "diptych": Features("diptych"),
    "vllm": Features(
        "vllm",
        connectors=("diptych", "nixl", "none"),
        needs_prefill_pool=False,
        tells_received=False,
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


class Lack(NamedTuple):
    """A feature that engines may lack."""

    feature: str
    """The field of `Features`."""
    field: str
    """Where users ask for it."""
    asks: Asks
    remedy: str
    """What to do instead."""


_ASKED: Final = (
    Lack("embeddings", "input", lambda r: r.pooling_params is not None,
         "ask a service for embeddings whose engines have another runtime"),
    Lack("prompt_embeds", "prompt_embeds", lambda r: r.prompt_embeds is not None,
         "send the prompt as text or token ids"),
    Lack("images", "image_url", lambda r: bool(r.mm_features), "send text only"),
    Lack("adapters", "model", lambda r: r.lora_request is not None, "name the base model"),
    Lack("prompt_logprobs", "prompt_logprobs", _sampled("prompt_logprobs"), "leave it out"),
    Lack("logits_processors", "logits_processors", _sampled("logits_processors"), "leave it out"),
)  # fmt: skip


def check_pools(config: RouterConfig, *, prefill: bool) -> None:
    """Raise `InvalidRequestError` if the pools that a router is given are not for its engines.

    prefill: there is a prefill pool.
    """
    features = FEATURES[config.runtime]
    if prefill and config.connector == "none":
        raise InvalidRequestError(
            "--prefill: engines without a KV connector compute whole requests; leave it out and "
            "name all engines in --decode, or set connector to the one that the engines have",
            param="--prefill",
        )
    if features.needs_prefill_pool and not prefill:
        raise InvalidRequestError(
            f"--prefill: a service whose engines are of the runtime {features.runtime} has a "
            "prefill pool; name its engines",
            param="--prefill",
        )
    if config.connector == "nixl" and config.lease_seconds < LEAST_LEASE_OF_NIXL_S:
        raise InvalidRequestError(
            f"lease_seconds: {config.lease_seconds:g} is less than the {LEAST_LEASE_OF_NIXL_S:g} s "
            "in which NIXL renews a lease",
            param="lease_seconds",
        )
    if config.connector not in features.connectors:
        raise InvalidRequestError(
            f"connector: engines of the runtime {features.runtime} hand KV over by "
            f"{' or '.join(features.connectors)}, and not by {config.connector}",
            param="connector",
        )


def lacking(features: Features) -> tuple[Lack, ...]:
    """What these engines lack; mostly nothing."""
    return tuple(lack for lack in _ASKED if not getattr(features, lack.feature))


def check_features(runtime: Runtime, lacks: tuple[Lack, ...], request: EngineCoreRequest) -> None:
    """Raise `InvalidRequestError`, naming the field, if a request asks for something of these."""
    for lack in lacks:
        if lack.asks(request):
            raise InvalidRequestError(
                f"{lack.field}: the engines of this service are of the runtime {runtime}, which "
                f"does not offer {lack.feature.replace('_', ' ')} here; {lack.remedy}",
                param=lack.field,
                code="unsupported_by_runtime",
            )
