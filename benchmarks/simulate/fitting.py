"""Fits the costs of steps to measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diptych.simulator.costs import StepCost, StepShape, hats


@dataclass(frozen=True, slots=True)
class Fit:
    """A model and how far it is from what was measured."""

    cost: StepCost
    errors: tuple[float, ...]
    """Fitted over measured, less one, for each measurement."""


def fit(shapes: Sequence[StepShape], seconds: Sequence[float], knots: Sequence[int]) -> Fit:
    """The cost model with the smallest relative errors (squared). No part of it is negative, and
    more tokens never take less time.

    knots: numbers of tokens, rising; each should have been measured.
    """
    rows = []
    for shape in shapes:
        # A knot's value is the sum of the steps up to it, so that steps >= 0 makes it rise.
        steps = hats(knots, shape.tokens)[::-1].cumsum()[::-1]
        rows.append([*steps, shape.sampled, shape.pairs, shape.kv_tokens])
    measured = np.array(seconds)
    design = np.array(rows, dtype=np.float64) / measured[:, None]
    solution = non_negative(design, np.ones(len(measured)))
    values = solution[: len(knots)].cumsum()
    cost = StepCost(
        tuple(zip(knots, values.tolist(), strict=True)), *solution[len(knots) :].tolist()
    )
    return Fit(cost, tuple((design @ solution - 1.0).tolist()))


def non_negative(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 that minimises |ax - b|: the active-set method of Lawson and Hanson (1974)."""
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    a = a / scale
    count = a.shape[1]
    x, passive = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        gradient = a.T @ (b - a @ x)
        gradient[passive] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10:
            break
        passive[best] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
            below = passive & (trial <= 0)
            if not below.any():
                break
            part = float((x[below] / (x[below] - trial[below])).min())
            x = x + part * (trial - x)
            passive &= x > 1e-14
            x[~passive] = 0.0
        x = trial
    return np.asarray(x / scale)
