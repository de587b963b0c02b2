"""Decides what vLLM's KV connector and a router are told of a hand-off. It performs no I/O, and the
caller passes the time.

Our connector signs its references and checks them. NIXL's connector reads whatever the blocks of a
reference contain by then. So this module gives each reference of NIXL's a name and a time when the
prefill engine has answered. It gives the reference to the connector of a decode engine only once,
and only while the blocks certainly still belong to its prompt.

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
from diptych_vllm.serve.translation import OURS

LENDS: Final = "do_remote_decode"
FETCHES: Final = "do_remote_prefill"
MARGIN: Final = 1 / 3
"""At least this part of a lease must remain when a router asks a decode engine. As soon as the
decode engine has scheduled the request, it renews the lease itself."""
NAME, COMPAT, UNTIL = "lease_id", "compat", "take_before"
"""The fields that this module adds to a reference of NIXL's: its name, the fingerprint of the
engines that can read its blocks, and the Unix time after which nobody may read them."""


class TooLateError(DiptychError):
    """A reference must not be used any more, as the message says. No engine is at fault."""


def asked_of(request: EngineCoreRequest) -> dict[str, Any]:
    """Return the parameters of a request for the KV connector; empty if there are none."""
    params = request.sampling_params
    asked = None if params is None else (params.extra_args or {}).get(PARAM)
    return asked if isinstance(asked, dict) else {}


def passes_token_on(params: SamplingParams, connector: str) -> bool:
    """Whether a decode engine continues after the token of the prefill engine.

    If so, the decode engine receives the token as a part of its prompt. Our connector supports
    that. With any other connector, the decode engine must receive exactly the tokens that the
    prefill engine has computed, and generates the first token itself. It also does so if the answer
    depends on which tokens are generated and which belong to the prompt.
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
            connector: the name that vLLM has for it.
            compat: the fingerprint of this engine's description.
            lease_seconds: how long an engine keeps blocks for a reader that does not renew its
            lease.
            references: checks the references of our connector; None for another connector.
        """
        self._connector, self._compat, self._lease_seconds = connector, compat, lease_seconds
        self._references = references
        self._clock, self._random_bits = clock, random_bits
        self._taken: dict[str, float] = {}
        """References that the connector has received or that were given back -> the time after
        which they are too old."""

    @property
    def patience_s(self) -> float | None:
        """An engine that stood still for longer than this may have read blocks too late; None: the
        connector checks that."""
        return self._lease_seconds * MARGIN if self._connector not in ("", OURS) else None

    def told(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return vLLM's connector's parameters, without nulls. Raises `TooLateError`."""
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
        """Record that vLLM has refused the request, so that its connector reads nothing."""
        self._taken.pop(str(asked.get(NAME)), None)

    def given_back(self, lease: dict[str, Any]) -> dict[str, Any] | None:
        """Return what to tell the connector if nobody wants these blocks; None if it reads them or
        knows already. Raises `InvalidRequestError` for an invalid signature."""
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
        """Change an output of vLLM's into the one that a router expects of a prefill engine."""
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
    """Return the reference as vLLM made it."""
    return {name: x for name, x in reference.items() if name not in (NAME, COMPAT, UNTIL)}
