"""Makes the requests that are simulated. A seed decides everything."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diptych.simulator.prefixes import PromptPart
from diptych.simulator.workload import Request


@dataclass(frozen=True, slots=True)
class LengthSpread:
    """A distribution of numbers of tokens: lognormal with this mean, or fixed."""

    mean: float
    sigma: float = 0.0
    """Standard deviation of the logarithm of the length; 0: all lengths are equal."""
    most: int = 1 << 17

    def draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        if self.sigma == 0:
            return np.full(count, round(self.mean))
        mu = np.log(self.mean) - self.sigma**2 / 2
        drawn = np.rint(random.lognormal(mu, self.sigma, count))
        return np.clip(drawn, 1, self.most).astype(np.int64)

    @classmethod
    def parse(cls, text: str) -> LengthSpread:
        """`512`, or `512:0.8` for a lognormal. Raises `ValueError` for anything else."""
        mean, _, sigma = text.partition(":")
        lengths = cls(float(mean), float(sigma or 0))
        if lengths.mean < 1 or lengths.sigma < 0:
            raise ValueError(f"{text!r} is not a mean of at least 1 and a sigma of at least 0")
        return lengths


@dataclass(frozen=True, slots=True)
class Sharing:
    """Some of the prompts begin with one of a few common prefixes, which are put before them."""

    part: float = 0.0
    """Fraction of the requests that begin with a common prefix."""
    groups: int = 1
    tokens: int = 0
    """Length, in tokens, of each common prefix."""
    skew: float = 1.0
    """The k-th most popular prefix is asked for in proportion to k to the power of minus this."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What users ask for, apart from when."""

    prompt: LengthSpread
    output: LengthSpread
    sharing: Sharing = Sharing()

    def requests(
        self, arrivals: NDArray[np.float64], seed: int, users: int | None = None
    ) -> list[Request]:
        """One request for each arrival. users: so many send the first ones, and each the next one
        when it has its answer."""
        random = np.random.default_rng([seed, 1])
        count = len(arrivals)
        prompts = self.prompt.draw(random, count)
        outputs = self.output.draw(random, count)
        shared = random.random(count) < self.sharing.part
        weights = np.arange(1, self.sharing.groups + 1) ** -self.sharing.skew
        drawn = random.choice(self.sharing.groups, count, p=weights / weights.sum())
        common = np.where(shared, self.sharing.tokens, 0)
        waits = np.arange(count) >= (count if users is None else users)
        chains = [
            (PromptPart(prefix, self.sharing.tokens),) if begins_with_it else ()
            for prefix, begins_with_it in zip(drawn.tolist(), shared.tolist(), strict=True)
        ]
        columns = (c.tolist() for c in (arrivals, prompts + common, outputs))
        return [Request(*row) for row in zip(*columns, chains, waits.tolist(), strict=True)]


def poisson(rate: float, count: int, seed: int) -> NDArray[np.float64]:
    """Arrivals of users who do not know of each other; `rate` a second."""
    return bursty(rate, count, seed, 1.0)


def bursty(rate: float, count: int, seed: int, variation: float) -> NDArray[np.float64]:
    """Arrivals with gamma-distributed gaps. `variation`: their standard deviation over their mean;
    1 is Poisson, more comes in bursts."""
    shape = variation**-2
    gaps = np.random.default_rng([seed, 0]).gamma(shape, 1 / (rate * shape), count)
    return gaps.cumsum()
