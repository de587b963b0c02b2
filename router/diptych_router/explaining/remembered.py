"""What is remembered of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych_router.explaining.course import Placement, TokenTimes
from diptych_router.policy import FETCH, Decision


@dataclass(slots=True)
class Attempt:
    """A choice of engines. Times are on the loop's clock."""

    began_s: float
    decision: Decision
    """Without `weighed` once that is forgotten."""
    prefill: str
    """Name of the engine that computes the prompt; empty: the one that decodes."""
    decode: str
    output_tokens: float
    first_token_s: float | None = None
    cached_tokens: int | None = None
    hand_off_s: float | None = None
    received_tokens: int = 0
    decoded_by: list[str] = field(default_factory=list)
    """Keys."""
    setback: str = ""
    why: str = ""
    setback_s: float | None = None

    @property
    def first_token_expected_s(self) -> float | None:
        """None: the policy does not say."""
        terms = self.decision.terms
        if "wait_s" not in terms:
            return None
        return terms["wait_s"] + terms["compute_s"] + terms.get(FETCH, 0.0)

    @property
    def hand_off_expected_s(self) -> float | None:
        """With the step of decode that follows. None: there is to be none, or the policy does not
        say."""
        terms = self.decision.terms
        if "transfer_s" not in terms or self.output_tokens <= 0:
            return None
        return terms["transfer_s"] + terms["steps_s"] / self.output_tokens


@dataclass(slots=True)
class Explained:
    """What is remembered of one request."""

    request_id: str
    """The client's."""
    core_id: str
    began_s: float
    unix_time: float
    prompt_tokens: int
    attempts: list[Attempt] = field(default_factory=list)
    num_attempts: int = 0
    num_bytes: int = 0
    """How much what was weighed takes."""
    ended_s: float | None = None
    outcome: str = ""
    output_tokens: int = 0
    tenant: str = ""
    placements: list[Placement] = field(default_factory=list)
    tokens: TokenTimes = field(default_factory=TokenTimes)
