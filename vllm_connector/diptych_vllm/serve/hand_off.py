"""What vLLM's KV connector is told of a hand-off, and what a router is told of it. Pure; the clock
is passed in.

Our connector signs its references and checks them. NIXL's reads whatever the blocks of a reference
hold by then. So a reference of NIXL's gets a name and a time here when prefill has answered, and is
given to the connector of a decode engine once, and early enough that the blocks are certainly still
those of its prompt.

    named ──take──▶ taken ──unread──▶ named
      └──given back──▶ taken
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any, Final

from diptych_kv_transfer.signing.references import References
from diptych_protocol import (
    DiptychError,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
)
from diptych_protocol.kv_transfer_params import PARAM
from diptych_vllm.lending import lease_given_back
from diptych_vllm.serve.requests import OURS

LENDS: Final = "do_remote_decode"
FETCHES: Final = "do_remote_prefill"
MARGIN: Final = 1 / 3
"""This part of a lease must be left when a decode engine is asked. From the moment on at which it
has scheduled the request, it renews the lease itself."""
NAME, COMPAT, UNTIL = "lease_id", "compat", "take_before"
"""Added to a reference of NIXL's: its name, the fingerprint of engines that can read its blocks,
and the time, in seconds since 1970, after which it is too late."""


class TooLateError(DiptychError):
    """A reference must not be used; says why. No engine is to blame."""


def asked_of(request: EngineCoreRequest) -> dict[str, Any]:
    """What a router wants of the KV connector; empty: nothing."""
    params = request.sampling_params
    asked = None if params is None else (params.extra_args or {}).get(PARAM)
    return asked if isinstance(asked, dict) else {}


def passes_token_on(params: SamplingParams, connector: str) -> bool:
    """Whether a decode engine goes on after the token of the prefill engine.

    It gets that token as a part of its prompt. Our connector can do that. With another one it must
    be sent just what the prefill engine has computed, and generates the token itself. So it does
    where an answer depends on which tokens are generated and which are of the prompt.
    """
    return connector == OURS and not (
        params.structured_outputs is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.bad_words
    )


class VllmHandOffs:
    """The hand-offs of one engine."""

    def __init__(
        self,
        connector: str,
        compat: str,
        lease_seconds: float,
        references: References | None,
        clock: Callable[[], float] = time.time,
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        """
        Args:
            connector: vLLM's name of it.
            compat: the fingerprint of what this engine says of itself.
            lease_seconds: how long blocks are kept for somebody who says nothing.
            references: checks those of our connector; None for another.
        """
        self._connector, self._compat, self._lease_seconds = connector, compat, lease_seconds
        self._references = references
        self._clock, self._random_bits = clock, random_bits
        self._taken: dict[str, float] = {}
        """References that were given to the connector or given back -> when they are too old."""

    @property
    def patience_s(self) -> float | None:
        """An engine that stood still for longer may have read blocks too late; None: that is
        checked."""
        return self._lease_seconds * MARGIN if self._connector not in ("", OURS) else None

    def told(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What vLLM's connector gets, which knows nothing of null. Raises `TooLateError`."""
        if asked.get(LENDS):
            lent: dict[str, Any] = {LENDS: True, FETCHES: False}
            if isinstance(asked.get(NAME), str):
                lent[NAME] = asked[NAME]
            return lent
        if not asked.get(FETCHES) or self._connector == OURS:
            return {name: x for name, x in asked.items() if x is not None and x is not False}
        name, until = str(asked.get(NAME)), asked.get(UNTIL)
        now = self._clock()
        self._forget(now)
        if name in self._taken:
            raise TooLateError("the reference to its KV was used before")
        if not isinstance(until, int | float) or now > until:
            raise TooLateError(
                "the reference to its KV is too old: its blocks are kept for "
                f"{self._lease_seconds:g} s only"
            )
        self._taken[name] = until
        return _bare(asked)

    def unread(self, asked: dict[str, Any]) -> None:
        """vLLM has refused the request, so its connector reads nothing."""
        self._taken.pop(str(asked.get(NAME)), None)

    def given_back(self, lease: dict[str, Any]) -> dict[str, Any] | None:
        """What to tell the connector when nobody wants these blocks; None: nothing, because it may
        be reading them, or knows it. Raises `InvalidRequestError` for what nobody has signed."""
        if self._references is not None:
            return lease_given_back(self._references, lease)
        name, until = str(lease.get(NAME)), lease.get(UNTIL)
        if name in self._taken or not isinstance(until, int | float):
            return None
        now = self._clock()
        self._forget(now)
        lives_until = until + self._lease_seconds * MARGIN
        if now >= lives_until:
            return None
        self._taken[name] = lives_until
        return {**_bare(lease), FETCHES: True}

    def answer(self, request: EngineCoreRequest, output: EngineCoreOutput) -> None:
        """Make an output of vLLM's what a router expects of a prefill engine."""
        if output.finish_reason is not FinishReason.LENGTH or not asked_of(request).get(LENDS):
            output.kv_transfer_params = None
            return
        if not passes_token_on(request.sampling, self._connector):
            output.new_token_ids, output.new_logprobs = [], None
        if output.kv_transfer_params is not None and self._connector != OURS:
            output.kv_transfer_params |= {
                NAME: f"{self._random_bits(128):032x}",
                COMPAT: self._compat,
                UNTIL: self._clock() + self._lease_seconds * (1 - MARGIN),
            }

    def _forget(self, now: float) -> None:
        for name in [name for name, until in self._taken.items() if until < now]:
            del self._taken[name]


def _bare(reference: dict[str, Any]) -> dict[str, Any]:
    """As vLLM made it."""
    return {name: x for name, x in reference.items() if name not in (NAME, COMPAT, UNTIL)}
