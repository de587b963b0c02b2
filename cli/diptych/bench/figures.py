"""Sums up what the users of a run saw. It performs no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from diptych.bench.stream import Sample

BUCKETS = 60
"""The number of parts of a run for which rates are computed."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request and its outcome."""

    at_s: float
    """Seconds since the run began."""
    outcome: Sample | str
    """A whole answer, or one line that says why there is none."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The limits that a good answer keeps, in milliseconds. None: no limit."""

    ttft_ms: float | None = None
    inter_token_ms: float | None = None
    """The mean of an answer's tokens after the first."""

    def kept_by(self, sample: Sample) -> bool:
        """Whether an answer is good."""
        return (self.ttft_ms is None or sample.ttft_s * 1e3 <= self.ttft_ms) and (
            self.inter_token_ms is None or sample.tpot_s * 1e3 <= self.inter_token_ms
        )


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of times, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures. Rates are per second of the run."""

    seconds: float
    requests: int
    """Whole answers and failures, without requests that were cut off."""
    failed: int
    cut_off: int
    """Requests that were open when the run was ended early."""
    reasons: dict[str, int]
    """How often each failure occurred, the most frequent first."""
    requests_per_s: float
    """Whole answers per second."""
    prompt_tokens_per_s: float | None
    """None if the server does not report it."""
    output_tokens_per_s: float
    cached_share: float | None
    """Share of prompt tokens found in a prefix cache, 0 to 1; None if the server does not say."""
    tokens_counted: bool
    """The server reports no numbers of tokens, so every event of a stream counts as one."""
    good: float | None
    """Share of all requests that kept the goal, 0 to 1; None without requests."""
    goodput_per_s: float
    ttft_ms: Distribution | None
    """None, as below, if there were no answers."""
    inter_token_ms: Distribution | None
    """Pauses between two events of an answer, of all answers together."""
    e2e_ms: Distribution | None


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolate between the two nearest values. A single value is returned as it is. Raises
    `ValueError` for an empty list."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def distribution(values: Sequence[float]) -> Distribution | None:
    """Return the statistics; None for an empty list."""
    if not values:
        return None
    ordered = sorted(values)
    mean = sum(ordered) / len(ordered)
    p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
    return Distribution(mean, p50, p90, p99, ordered[-1])


def answers(sent: Sequence[Sent]) -> list[Sample]:
    """Return the whole answers."""
    return [each.outcome for each in sent if isinstance(each.outcome, Sample)]


def gaps_ms(samples: Sequence[Sample]) -> list[float]:
    """Return all pauses between tokens."""
    return [gap * 1e3 for sample in samples for gap in sample.gaps_s]


def summary(sent: Sequence[Sent], seconds: float, goal: Goal, cut_off: int = 0) -> Summary:
    """Sum up a run of this many seconds, which must be more than 0."""
    samples = answers(sent)
    good = sum(map(goal.kept_by, samples))
    reasons = Counter(each.outcome for each in sent if isinstance(each.outcome, str))
    prompts = _sum_if_known([sample.prompt_tokens for sample in samples])
    cached = _sum_if_known([sample.cached_tokens for sample in samples])
    return Summary(
        seconds=seconds,
        requests=len(sent),
        failed=len(sent) - len(samples),
        cut_off=cut_off,
        reasons=dict(reasons.most_common()),
        requests_per_s=len(samples) / seconds,
        prompt_tokens_per_s=None if prompts is None else prompts / seconds,
        output_tokens_per_s=sum(sample.output_tokens for sample in samples) / seconds,
        cached_share=cached / prompts if cached is not None and prompts else None,
        tokens_counted=any(sample.prompt_tokens is None for sample in samples),
        good=good / len(sent) if sent else None,
        goodput_per_s=good / seconds,
        ttft_ms=distribution([sample.ttft_s * 1e3 for sample in samples]),
        inter_token_ms=distribution(gaps_ms(samples)),
        e2e_ms=distribution([sample.e2e_s * 1e3 for sample in samples]),
    )


def _sum_if_known(values: Sequence[int | None]) -> int | None:
    """None if there are none, or one is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def rates(sent: Sequence[Sent], seconds: float, buckets: int = BUCKETS) -> list[float]:
    """Return the events with tokens per second, in equal parts of a run."""
    width = seconds / buckets
    counts = [0] * buckets
    for each in sent:
        if not isinstance(each.outcome, Sample):
            continue
        when = each.at_s + each.outcome.ttft_s
        for gap in (0.0, *each.outcome.gaps_s):
            when += gap
            counts[min(buckets - 1, int(when / width))] += 1
    return [count / width for count in counts]
