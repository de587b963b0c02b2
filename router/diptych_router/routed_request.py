"""One request's way through the pools, as a small state machine over engine outputs.

    PREFILL ──token + lease──▶ DECODE ──finish──▶ done
       │ error / loss             │ error / loss
       └──────────▶ a new attempt with prompt + tokens so far ◀──────────┘

Pure: it says what to send next; PoolClient sends it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import msgspec

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVTransferParams,
    SamplingParams,
)

MAX_ATTEMPTS = 3


class Stage(enum.Enum):
    PREFILL = enum.auto()
    DECODE = enum.auto()


@dataclass(slots=True)
class RoutedRequest:
    """A request as the user meant it, and how far it has come."""

    original: EngineCoreRequest
    max_model_len: int
    generated: list[int] = field(default_factory=list)
    """Every token that has been delivered to the user."""
    attempts: int = 0
    stage: Stage = Stage.PREFILL
    engine: str = ""
    """Key of the engine that works on it now."""
    decode_engine: str = ""
    """Key of the engine chosen to take over after prefill."""
    lease: dict[str, Any] | None = None
    """kv_transfer_params of a lease that no decode engine has taken over yet."""
    cost: int = 0
    """What it adds to its engine's open tokens."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.original.prompt_token_ids or ())

    @property
    def tokens_left(self) -> int:
        """How many tokens may still be generated."""
        by_length = self.max_model_len - self.prompt_tokens - len(self.generated)
        wanted = self.original.params.max_tokens
        return by_length if wanted is None else min(by_length, wanted - len(self.generated))

    @property
    def can_retry(self) -> bool:
        return self.attempts < MAX_ATTEMPTS

    def prefill_request(self) -> EngineCoreRequest:
        """For P: compute the KV, sample one token, keep the KV for a decode engine.

        When one token is all that is wanted there is nothing to hand off.
        """
        if self.tokens_left <= 1:
            return self.aggregated_request()
        params = self.original.params
        max_tokens = len(self.generated) + 1
        first = msgspec.structs.replace(
            params,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            extra_args=self._extra_args(KVTransferParams(do_remote_decode=True).to_dict()),
        )
        return self._with(first)

    def decode_request(self) -> EngineCoreRequest:
        """For D: take the KV over and go on after the tokens that the user has."""
        return self._with(
            msgspec.structs.replace(self.original.params, extra_args=self._extra_args(self.lease))
        )

    def aggregated_request(self) -> EngineCoreRequest:
        """For one engine that does everything."""
        return self._with(
            msgspec.structs.replace(self.original.params, extra_args=self._extra_args(None))
        )

    def _extra_args(self, kv_transfer_params: dict[str, Any] | None) -> dict[str, Any] | None:
        extra = dict(self.original.params.extra_args or {})
        extra.pop("kv_transfer_params", None)
        if kv_transfer_params is not None:
            extra["kv_transfer_params"] = kv_transfer_params
        return extra or None

    def _with(self, params: SamplingParams) -> EngineCoreRequest:
        return msgspec.structs.replace(
            self.original,
            sampling_params=params,
            generated_token_ids=list(self.generated) or None,
        )

    def absorb(self, output: EngineCoreOutput) -> bool:
        """Take an output of the engine in charge; True if prefill is done and D's turn has come.

        What is only the end of a stage is made to look unfinished to the user.
        """
        self.generated += output.new_token_ids
        hands_off = (
            self.stage is Stage.PREFILL
            and output.finish_reason is FinishReason.LENGTH
            and self.tokens_left > 0
        )
        if hands_off:
            self.lease = output.kv_transfer_params
            output.finish_reason = None
        output.kv_transfer_params = None
        return hands_off
