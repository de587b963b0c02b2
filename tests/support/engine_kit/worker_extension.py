"""Worker methods for tests of `collective_rpc`; see `EngineConfig.worker_extension`."""

from __future__ import annotations

import time
from typing import Any


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
