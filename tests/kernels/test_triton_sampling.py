"""The sampling kernel against the reference, and against its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diptych_kernels.sampling import Filters, reference
from diptych_kernels.sampling import triton as sampling

# The interpreter computes with NumPy, which says when a logarithm is infinite.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")

BLOCK = 256
"""Tokens that the kernel looks at together: few, so that a small vocabulary takes several turns."""
POINTS = 6
"""Draws from each distribution, evenly spread over it."""

FILTERS = [
    pytest.param(0, 1.0, 0.0, id="all off"),
    pytest.param(1, 1.0, 0.0, id="top-k 1"),
    pytest.param(5, 1.0, 0.0, id="top-k"),
    pytest.param(10**6, 0.5, 0.0, id="top-k beyond the vocabulary"),
    pytest.param(0, 0.9, 0.0, id="top-p"),
    pytest.param(0, 1e-6, 0.0, id="top-p of less than the likeliest"),
    pytest.param(0, 1.0, 0.2, id="min-p"),
    pytest.param(0, 1.0, 1.0, id="min-p 1"),
    pytest.param(20, 0.8, 0.05, id="all three"),
]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BLOCK", BLOCK)


def points(device: torch.device) -> Tensor:
    """Multiples of 2^-40 in [0, 1), the least and the largest among them."""
    where = torch.linspace(0, 1, POINTS, dtype=torch.float64, device=device)
    return (where * (2**40 - 1)).floor() / 2**40


def filters(top_k: int, top_p: float, min_p: float, device: torch.device) -> Filters:
    return Filters(
        torch.full((POINTS,), top_k, device=device),
        torch.full((POINTS,), top_p, dtype=torch.float64, device=device),
        torch.full((POINTS,), min_p, dtype=torch.float32, device=device),
    )


def check(logits: Tensor, temperature: float, options: Filters | None) -> None:
    """Draw at every point of one row's distribution, by kernel and by reference.

    They may differ where a point lies on a border between two tokens: within 2^-20 of it, for the
    reference's probabilities are rounded to 24 bits.
    """
    rows = logits.expand(POINTS, -1).contiguous()
    temperatures = torch.full((POINTS,), temperature, device=logits.device)
    where = points(logits.device)
    drawn = sampling.sample(rows, temperatures, where, options)
    expected = reference.sample(rows, temperatures, where, options)
    scaled = rows / temperatures.unsqueeze(1)
    if options is not None:
        scaled = scaled.masked_fill(scaled < reference.keep_floor(scaled, *options), -torch.inf)
    probabilities = scaled.double().softmax(-1)
    assert probabilities.gather(1, drawn.unsqueeze(1)).min() > 0
    upper = probabilities.cumsum(-1)
    lower = upper - probabilities
    for token, of_reference, row in zip(drawn, expected, range(POINTS), strict=True):
        if token != of_reference:
            low, high = lower[row, token], upper[row, token]
            assert low - 2**-20 <= where[row] <= high + 2**-20


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), FILTERS)
def test_draws_as_the_reference_does(
    top_k: int, top_p: float, min_p: float, device: torch.device
) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(200, device=device)
    check(logits, 0.7, filters(top_k, top_p, min_p, device))


@pytest.mark.parametrize("vocabulary", [1, 2 * BLOCK - 7])
def test_any_vocabulary(vocabulary: int, device: torch.device) -> None:
    torch.manual_seed(0)
    check(2 * torch.randn(vocabulary, device=device), 1.5, filters(20, 0.8, 0.05, device))


def test_without_filters(device: torch.device) -> None:
    torch.manual_seed(0)
    check(torch.randn(2 * BLOCK + 1, device=device), 1.0, None)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (3, 0.5), (0, 0.6)])
def test_ties_with_the_last_survivor_survive(
    top_k: int, top_p: float, device: torch.device
) -> None:
    logits = torch.tensor([0.0, 2.0, -1.0, 1.0, 1.0, 1.0, 0.0, 1.0], device=device)
    check(logits, 1.0, filters(top_k, top_p, 0.0, device))


def test_excluded_tokens_are_never_drawn(device: torch.device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, device=device).where(torch.rand(200, device=device) < 0.1, -torch.inf)
    check(logits, 1.0, filters(50, 1.0, 0.0, device))
    check(logits, 1.0, filters(0, 0.99, 0.0, device))
    check(logits, 1.0, None)


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(POINTS, 200, device=device)
    temperatures = torch.rand(POINTS, device=device) + 0.5
    options = Filters(
        torch.randint(0, 50, (POINTS,), device=device),
        torch.rand(POINTS, dtype=torch.float64, device=device),
        torch.zeros(POINTS, device=device),
    )
    where = points(device)
    together = sampling.sample(logits, temperatures, where, options)
    for row in range(0, POINTS, 3):
        one = slice(row, row + 1)
        alone = sampling.sample(
            logits[one], temperatures[one], where[one], Filters(*[o[one] for o in options])
        )
        assert alone == together[row]
