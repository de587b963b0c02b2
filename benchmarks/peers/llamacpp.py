"""A process of llama.cpp's, beside this one."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from benchmarks.machine import HERE
from benchmarks.peers.servers import QUIET, VARIABLE, parse_peers
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

WORKER = Path(__file__).with_name("llamacpp_worker.py")
INSTALLED = HERE.parent / ".peers" / "llamacpp" / "bin" / "python"
"""Where `make llamacpp` puts it."""
MISSING = f"llama.cpp is not installed: `make llamacpp` does it, or {VARIABLE} names it"


def python() -> str | None:
    """The interpreter of llama.cpp's environment, if there is one."""
    named = parse_peers(os.environ.get(VARIABLE, "")).get("llamacpp")
    return named or (str(INSTALLED) if INSTALLED.exists() else None)


class LlamaCpp:
    """Calls of `llamacpp_worker.Worker`. Use it in a `with` block."""

    def __init__(self, interpreter: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._process = subprocess.Popen(
            [interpreter, str(WORKER)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | QUIET, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._folder.cleanup()

    def call(self, *call: Any) -> Any:
        """The result of a method. Raises `RuntimeError` if the process has ended."""
        if not (self._process.stdin and self._process.stdout):
            raise RuntimeError("llama.cpp has no pipes")
        self._process.stdin.write(json.dumps(call) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended in {call[0]!r}: what it wrote says why")
        return json.loads(line)

    def logits(self, token_ids: list[int], prompt: int) -> NDArray[np.float32]:
        """[tokens, vocabulary]; see `Worker.logits`."""
        target = Path(self._folder.name) / "logits.npy"
        self.call("logits", token_ids, prompt, str(target))
        found: NDArray[np.float32] = np.load(target)
        return found

    def quantise(self, values: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:
        """[rows, columns] -> [rows, bytes], by llama.cpp's own quantiser."""
        source, target = (Path(self._folder.name) / name for name in ("values.npy", "bytes.npy"))
        np.save(source, values)
        self.call("quantise", int(kind), str(source), str(target))
        found: NDArray[np.uint8] = np.load(target)
        return found
