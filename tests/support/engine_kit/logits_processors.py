"""Functions that change logits; see `EngineConfig.logits_processors`.

On the import path of the tests (pytest's `pythonpath`), and of the engines that they start.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

NAMES = [f"{__name__}:{name}" for name in ("count_up", "repeat_prompt", "fail", "shrink")]


def _only(token: int, logits: Tensor) -> Tensor:
    changed = torch.full_like(logits, -torch.inf)
    changed[token] = 0.0
    return changed


def count_up(output: list[int], logits: Tensor) -> Tensor:
    """10, 11, 12…"""
    return _only(10 + len(output), logits)


def repeat_prompt(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    return _only(prompt[len(output) % len(prompt)], logits)


def repeat_once(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    """Fails after the prompt's end."""
    return _only(prompt[len(output)], logits)


def fail(output: list[int], logits: Tensor) -> Tensor:
    raise LookupError("nothing suits me")


def shrink(output: list[int], logits: Tensor) -> Tensor:
    return logits[:3]


HANGS_AFTER = 8
"""Tokens of the output."""


def hang(output: list[int], logits: Tensor) -> Tensor:
    """The step does not come to its end within any test."""
    if len(output) >= HANGS_AFTER:
        time.sleep(600.0)
    return logits
