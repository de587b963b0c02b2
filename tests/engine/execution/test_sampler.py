"""The sampler against plain loops, and its promises about randomness."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from cases import each
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_engine.execution.sampler import Sampler
from diptych_engine.execution.sampling_math import uniforms
from diptych_engine.scheduling.request import Request, StepResult
from diptych_kernels.sampling.reference import NARROW, keep_floor
from diptych_protocol import SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0}


def request(
    seed: int = 0, prompt: list[int] | None = None, output: list[int] | None = None, **params: Any
) -> Request:
    prompt = prompt if prompt is not None else [0]
    return Request(
        request_id="r", client=b"", params=SamplingParams(**params),
        token_ids=prompt + (output or []), num_prompt_tokens=len(prompt),
        eos_token_id=2, max_total_tokens=100, seed=seed,
    )  # fmt: skip


def sample(logits: torch.Tensor, requests: list[Request]) -> StepResult:
    """One step of a fresh sampler, the requests in rows that are not their places."""
    sampler = make_sampler(len(requests) + 3, logits.shape[1])
    rows = [len(requests) + 2 - index for index in range(len(requests))]
    for row, one in zip(rows, requests, strict=True):
        sampler.admit(row, one)
    return choose(sampler, logits.clone(), rows, requests)


def make_sampler(rows: int, vocabulary: int) -> Sampler:
    return Sampler(rows, vocabulary, torch.device("cpu"))


def choose(
    sampler: Sampler, logits: torch.Tensor, rows: list[int], requests: list[Request]
) -> StepResult:
    places = np.array([one.num_tokens for one in requests])
    return sampler.sample(logits, rows, requests, places, keep=False)()


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, vocabulary, generator=generator)


# --- the choice -----------------------------------------------------------------------------------


def test_greedy_takes_the_largest() -> None:
    logits = random_logits(5, 40)
    result = sample(logits, [request(**GREEDY) for _ in range(5)])
    assert result == StepResult(logits.argmax(-1).tolist(), None, None)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_the_narrowest_filter_is_greedy(options: dict[str, Any]) -> None:
    logits = random_logits(20, 500)
    requests = [request(seed=i, **options) for i in range(20)]
    assert sample(logits, requests).token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        pytest.param({}, [0.4, 0.3, 0.2, 0.1], id="all"),
        pytest.param({"temperature": 0.5}, [0.16, 0.09, 0.04, 0.01], id="temperature"),
        pytest.param({"top_k": 2}, [0.4, 0.3, 0, 0], id="top_k"),
        pytest.param({"top_p": 0.69}, [0.4, 0.3, 0, 0], id="top_p within the second"),
        pytest.param({"top_p": 0.71}, [0.4, 0.3, 0.2, 0], id="top_p just past the second"),
        pytest.param({"min_p": 0.45}, [0.4, 0.3, 0.2, 0], id="min_p"),
        # Of what top_k leaves, 0.4 / 0.9 and 0.7 / 0.9 lie on either side of 0.5.
        pytest.param({"top_k": 3, "top_p": 0.5}, [0.4, 0.3, 0, 0], id="top_p after top_k"),
    ],
)
def test_frequencies_follow_the_distribution(options: dict[str, Any], kept: list[float]) -> None:
    """Chi-square over 8000 draws; the bound is that of one false alarm in 10 000 for 3 degrees."""
    draws = 8000
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(draws, 4)
    requests = [request(seed=seed, **options) for seed in range(draws)]
    counts = np.bincount(sample(logits, requests).token_ids, minlength=4)
    expected = draws * np.array(kept) / sum(kept)
    assert not counts[expected == 0].any()
    present = expected > 0
    distance = ((counts - expected)[present] ** 2 / expected[present]).sum()
    assert distance < 21.1


@each("vocabulary", [50, NARROW, 3 * NARROW])
@each("scale", [0.01, 1.0, 5.0], ids=["flat", "usual", "peaked"])
def test_filters_equal_a_full_sort(vocabulary: int, scale: float) -> None:
    """Whatever the few best candidates tell, and whatever needs the whole vocabulary."""
    cases = [
        (top_k, top_p, min_p)
        for top_k in (0, 1, 7, NARROW, NARROW + 50)
        for top_p in (1.0, 0.95, 0.3)
        for min_p in (0.0, 0.02, 0.5)
    ]
    scaled = random_logits(len(cases), vocabulary) * scale
    floors = keep_floor(
        scaled,
        torch.tensor([top_k for top_k, _, _ in cases]),
        torch.tensor([top_p for _, top_p, _ in cases], dtype=torch.float64),
        torch.tensor([min_p for _, _, min_p in cases]),
    )
    for row, floor, case in zip(scaled, floors, cases, strict=True):
        assert int((row >= floor).sum()) == plainly_kept(row, *case), case


def plainly_kept(row: torch.Tensor, top_k: int, top_p: float, min_p: float) -> int:
    """How many tokens survive min-p, then top-k, then top-p."""
    probabilities = sorted(row.double().softmax(0).tolist(), reverse=True)
    kept = [p for p in probabilities if p >= min_p * probabilities[0]]
    kept = kept[:top_k] if top_k else kept
    total, mass, count = sum(kept), 0.0, 0
    for p in kept:
        if top_p < 1 and mass >= top_p * total:
            break
        mass += p
        count += 1
    return count


# --- randomness -----------------------------------------------------------------------------------

GOLDEN = [0.2817612977223689, 0.2191151301312857, 0.8475309899413332]

OPTIONS: list[dict[str, Any]] = [
    {},
    GREEDY,
    {"temperature": 0.7, "top_k": 5},
    {"top_p": 0.9, "logprobs": 2},
    {"min_p": 0.1, "presence_penalty": 1.0},
    {"top_k": 400, "top_p": 0.99},
    {"repetition_penalty": 1.5, "min_tokens": 4},
]


@given(
    order=st.permutations(range(14)), size=st.integers(1, 14), vocabulary=st.sampled_from([30, 700])
)
@settings(max_examples=40)
def test_a_request_is_independent_of_its_batch(
    order: list[int], size: int, vocabulary: int
) -> None:
    """Alone or among any neighbours, in any row: the same token and log-probabilities."""
    logits = random_logits(14, vocabulary)
    requests = [
        request(seed=i, prompt=[1, 2], output=[i, 5], **OPTIONS[i % len(OPTIONS)])
        for i in range(14)
    ]
    members = order[:size]
    together = sample(logits[members], [requests[i] for i in members])
    for place, i in enumerate(members):
        alone = sample(logits[i : i + 1], [requests[i]])
        assert together.token_ids[place] == alone.token_ids[0]
        if alone.logprobs is not None:
            assert together.logprobs is not None
            assert together.logprobs[place] == alone.logprobs[0]


def test_the_stream_depends_on_seed_and_position_only() -> None:
    logits = torch.zeros(1, 1000)
    first = sample(logits, [request(seed=7, prompt=[0] * 5)]).token_ids
    assert sample(logits, [request(seed=7, prompt=[9, 8, 7], output=[6, 5])]).token_ids == first
    assert sample(logits, [request(seed=8, prompt=[0] * 5)]).token_ids != first
    assert sample(logits, [request(seed=7, prompt=[0] * 6)]).token_ids != first


def test_the_stream_never_changes() -> None:
    """Golden values: engines of different versions may share a request."""
    actual = uniforms(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 5, 8191], np.uint64))
    assert actual.tolist() == GOLDEN


def test_uniforms_are_even_along_seeds_and_positions() -> None:
    counter = np.arange(100_000, dtype=np.uint64)
    constant = np.full_like(counter, 3)
    for values in (uniforms(counter, constant), uniforms(constant, counter)):
        counts = np.histogram(values, 64, (0.0, 1.0))[0]
        expected = len(values) / 64
        assert ((counts - expected) ** 2 / expected).sum() < 120  # 63 degrees of freedom
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.015


def test_a_negative_seed_is_a_seed() -> None:
    logits = torch.zeros(2, 1000)
    tokens = sample(logits, [request(seed=-1), request(seed=1)]).token_ids
    assert tokens[0] != tokens[1]


# --- changes to the logits ------------------------------------------------------------------------


@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    output=st.lists(st.integers(0, 9), max_size=12),
    presence=st.sampled_from([0.0, -1.5, 0.7]),
    frequency=st.sampled_from([0.0, -0.4, 2.0]),
    repetition=st.sampled_from([1.0, 0.5, 1.8]),
)
@settings(max_examples=100)
def test_penalties_equal_a_plain_loop(
    prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float
) -> None:
    logits = random_logits(2, 10)
    expected = logits[0].tolist()
    for token in range(10):
        if token in prompt or token in output:
            expected[token] *= 1 / repetition if expected[token] > 0 else repetition
        expected[token] -= frequency * output.count(token) + presence * (token in output)
    growing = request(
        prompt=prompt, temperature=0.0, presence_penalty=presence,
        frequency_penalty=frequency, repetition_penalty=repetition,
    )  # fmt: skip
    sampler = make_sampler(2, 10)
    sampler.admit(0, growing)
    sampler.admit(1, request(**GREEDY))
    both = [growing, request(**GREEDY)]
    for token in output:  # seen one by one, as in a real generation
        choose(sampler, logits.clone(), [0, 1], both)
        growing.token_ids.append(token)
    changed = logits.clone()
    choose(sampler, changed, [0, 1], both)
    torch.testing.assert_close(changed[0], torch.tensor(expected))
    assert torch.equal(changed[1], logits[1])


@pytest.mark.parametrize(
    ("options", "output", "expected"),
    [
        pytest.param({}, [], 5, id="eos is kept out"),
        pytest.param({}, [9, 9, 9], 2, id="until there are enough tokens"),
        pytest.param({"ignore_eos": True}, [], 2, id="eos does not end it anyway"),
        pytest.param({"stop_token_ids": [5, 99]}, [], 7, id="stop ids too"),
    ],
)
def test_min_tokens(options: dict[str, Any], output: list[int], expected: int) -> None:
    logits = torch.zeros(1, 10)
    logits[0, 2], logits[0, 5], logits[0, 7] = 9.0, 8.0, 7.0
    one = request(output=output, temperature=0.0, min_tokens=3, **options)
    assert sample(logits, [one]).token_ids == [expected]


def test_a_row_forgets_its_previous_owner() -> None:
    sampler = make_sampler(1, 10)
    sampler.admit(0, request(logprobs=3, repetition_penalty=2.0))
    sampler.release(0)
    later = request()
    sampler.admit(0, later)
    assert choose(sampler, random_logits(1, 10), [0], [later]).logprobs is None


# --- reports --------------------------------------------------------------------------------------


def test_logprobs_are_of_the_unchanged_logits() -> None:
    logits = random_logits(3, 12)
    options: dict[str, Any] = {"seed": 4, "temperature": 3.0, "frequency_penalty": 2.0}
    requests = [
        request(logprobs=2, output=[1, 1], **options),
        request(**GREEDY),
        request(logprobs=0, **options),
    ]
    result = sample(logits, requests)
    assert result.logprobs is not None
    assert result.logprobs[1] is None
    for row, count in ((0, 2), (2, 0)):
        described = result.logprobs[row]
        assert described is not None
        token_ids, values, rank = described
        plain = logits[row].double().log_softmax(0)
        ordered = plain.sort(descending=True)
        assert token_ids == [result.token_ids[row], *ordered.indices[:count].tolist()]
        assert values == pytest.approx([float(plain[token]) for token in token_ids], abs=1e-5)
        assert rank == 1 + ordered.indices.tolist().index(result.token_ids[row])


@pytest.mark.parametrize("options", [GREEDY, {}, {"top_p": 0.5}, {"logprobs": 1}], ids=str)
def test_nans_are_counted_and_stay_in_their_row(options: dict[str, Any]) -> None:
    logits = random_logits(3, 600)
    clean = sample(logits, [request(**options) for _ in range(3)])
    assert clean.num_nans is None
    logits[1, 3:5] = math.nan
    result = sample(logits, [request(**options) for _ in range(3)])
    assert result.num_nans == [0, 2, 0]
    assert all(0 <= token < 600 for token in result.token_ids)
    assert result.token_ids[::2] == clean.token_ids[::2]
