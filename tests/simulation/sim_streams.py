"""What clients asked for, what they ought to get, and what they got."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sim_model import oracle

from diptych_engine.control.core import INTERNAL_ERROR
from diptych_engine.scheduling.adapter import cache_identity
from diptych_protocol import (
    DiptychError,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    SamplingParams,
)


@dataclass(slots=True, eq=False)
class Stream:
    """One answer, from its request to its end."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    cache_salt: str | None = None
    eos_token_id: int | None = None
    first_token_ids: tuple[int, ...] = ()
    """What its client says that was sampled elsewhere; right or not, engines go on after it."""
    kept_as: str = ""
    """What engines call it for a client that may come back."""
    expected: list[int] = field(init=False)
    delivered: list[int] = field(default_factory=list)
    ended: str = ""
    """How it came to its end; empty before."""

    def __post_init__(self) -> None:
        known = self.prompt + self.first_token_ids
        left = max(0, self.max_tokens - len(self.first_token_ids))
        tokens = [*self.first_token_ids, *oracle(known, left, self.identity)[0]]
        if self.eos_token_id in tokens:
            tokens = tokens[: tokens.index(self.eos_token_id) + 1]
        self.expected = tokens

    @property
    def identity(self) -> str | None:
        """What engines call its salt."""
        return cache_identity(self.cache_salt, None)

    def request(self, extra_args: dict[str, Any] | None = None) -> EngineCoreRequest:
        """What is sent."""
        params = SamplingParams(max_tokens=self.max_tokens, temperature=0.0, extra_args=extra_args)
        return EngineCoreRequest(
            request_id=self.request_id,
            prompt_token_ids=list(self.prompt),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            eos_token_id=self.eos_token_id,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=self.cache_salt,
            data_parallel_rank=None,
            kept_as=self.kept_as,
        )

    def tell(self, output: EngineCoreOutput) -> None:
        """A part of the answer has come. Raises `AssertionError` if it is wrong."""
        assert not self.ended, f"P6: {self.request_id} is told something after its end"
        self.delivered += output.new_token_ids
        wanted = self.expected[: len(self.delivered)]
        assert self.delivered == wanted, (
            f"P2: {self.request_id} got {self.delivered}, a single engine answers {self.expected}"
        )
        if output.finish_reason is FinishReason.ERROR:
            assert output.error != INTERNAL_ERROR, f"P4: {self.request_id}: a defect"
            self.end(f"error: {output.error}")
        elif output.finish_reason is FinishReason.ABORT:
            self.end("given up")
        elif output.finish_reason is not None:
            assert self.delivered == self.expected, (
                f"P6: {self.request_id} ends with {len(self.delivered)} of "
                f"{len(self.expected)} tokens"
            )
            self.end("whole")

    def fail(self, error: DiptychError) -> None:
        """It ends with an error."""
        assert not self.ended, f"P6: {self.request_id} fails after its end"
        self.end(f"error: {error}")

    def end(self, how: str) -> None:
        self.ended = how
