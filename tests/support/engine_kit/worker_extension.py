"""Worker methods and functions for tests of `collective_rpc` and `apply_model`."""

from __future__ import annotations

import time
from typing import Any


def num_blocks(worker: Any, plus: int) -> int:
    return int(worker.num_blocks) + plus


def names_of_weights(model: Any) -> list[str]:
    return sorted(model.slots)


class Extension:
    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def echo(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [list(args), kwargs]

    def count_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.worker.model.parameters())

    def fail(self, message: str) -> None:
        raise RuntimeError(message)

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def unsendable(self) -> object:
        return object()

    def _private(self) -> None:
        raise AssertionError("no client gets here")


class Unmakeable:
    def __init__(self, worker: Any) -> None:
        raise RuntimeError("not today")
