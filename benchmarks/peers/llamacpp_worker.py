"""llama.cpp's own functions, from the wheel `xllamacpp`: logits, times, and its quantiser.

Runs in a peer's environment. Each line of standard input is a call, `["name", arguments...]`, and
each line of standard output its result, both JSON; arrays are in files of NumPy's.

llama.cpp takes its parameters as structures by value, which grow from release to release. So they
are declared larger than they are here: defaults come from llama.cpp itself, and the few fields that
are changed lie in front, or are found by their defaults.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

WORDS = 256
DEFAULTS = [512, 2048, 512]
"""The first fields of a context: tokens, tokens a call, tokens a step."""
HALF, SINGLE = 1, 0
"""Types of keys and values."""
ROWS_A_CALL = 4096


QUIETLY = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
"""It writes hundreds of lines a model."""


class Params(ctypes.Structure):
    """Those of a model or of a context, and room behind them."""

    _fields_ = [("words", ctypes.c_int32 * WORDS)]


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


def library() -> Any:
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise SystemExit("the package xllamacpp is not installed in this environment")
    lib = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("xllamacpp*.so"))))
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    for name, result, arguments in (
        ("llama_model_default_params", Params, []),
        ("llama_context_default_params", Params, []),
        ("llama_model_load_from_file", pointer, [ctypes.c_char_p, Params]),
        ("llama_init_from_model", pointer, [pointer, Params]),
        ("llama_batch_init", Batch, [number, number, number]),
        ("llama_decode", number, [pointer, Batch]),
        ("llama_get_logits_ith", pointer, [pointer, number]),
        ("llama_get_memory", pointer, [pointer]),
        ("llama_memory_clear", None, [pointer, ctypes.c_bool]),
        ("llama_model_get_vocab", pointer, [pointer]),
        ("llama_vocab_n_tokens", number, [pointer]),
        ("llama_n_ctx", ctypes.c_uint32, [pointer]),
        ("llama_n_threads", number, [pointer]),
        ("llama_set_n_threads", None, [pointer, number, number]),
        ("llama_print_system_info", ctypes.c_char_p, []),
        ("ggml_quantize_chunk", ctypes.c_size_t,
         [number, pointer, pointer, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, pointer]),
    ):  # fmt: skip
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    lib.llama_log_set(QUIETLY, None)
    lib.llama_backend_init()
    return lib


class Worker:
    """A model of llama.cpp's, and the calls to it."""

    def __init__(self) -> None:
        self._lib = library()

    def about(self) -> str:
        """What instructions this build uses."""
        said: bytes = self._lib.llama_print_system_info()
        return said.decode()

    def load(self, path: str, threads: int, context: int, exact_cache: bool) -> None:
        """exact_cache: keys and values in float32 in place of float16."""
        lib = self._lib
        self._model = lib.llama_model_load_from_file(
            path.encode(), lib.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        params = lib.llama_context_default_params()
        words = list(params.words)
        halves = [at for at in range(16, 40) if words[at : at + 2] == [HALF, HALF]]
        if words[:3] != DEFAULTS or len(halves) != 1:
            raise RuntimeError("this release of llama.cpp has other parameters of a context")
        params.words[0] = params.words[1] = context
        if exact_cache:
            params.words[halves[0]] = params.words[halves[0] + 1] = SINGLE
        self._context = lib.llama_init_from_model(self._model, params)
        lib.llama_set_n_threads(self._context, threads, threads)
        if not self._context or lib.llama_n_threads(self._context) != threads:
            raise RuntimeError("llama.cpp makes no such context")
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(context, 0, 1)

    def logits(self, token_ids: list[int], prompt: int, target: str) -> None:
        """[tokens, vocabulary] as a file: the first `prompt` tokens in one call, each of the others
        in one of its own."""
        self._forget()
        rows, start = [], 0
        while start < len(token_ids):
            end = prompt if start < prompt else start + 1
            self._decode(token_ids[start:end], start, all_logits=True)
            rows += [self._logits_at(at) for at in range(end - start)]
            start = end
        np.save(target, np.stack(rows))

    def seconds(self, token_ids: list[int], answer: int) -> list[float]:
        """The processor's seconds for a prompt, and for `answer` greedy tokens after it."""
        self._forget()
        start = time.process_time()
        self._decode(token_ids, 0, all_logits=False)
        token = int(self._logits_at(-1).argmax())
        first = time.process_time()
        for position in range(len(token_ids), len(token_ids) + answer):
            self._decode([token], position, all_logits=False)
            token = int(self._logits_at(-1).argmax())
        return [first - start, time.process_time() - first]

    def quantise(self, kind: int, values: str, target: str) -> None:
        """Float32 [rows, columns] of a file as bytes of a GGML type, [rows, bytes]."""
        data = np.load(values, mmap_mode="r")
        pieces = [data[at : at + ROWS_A_CALL] for at in range(0, len(data), ROWS_A_CALL)]

        def one(piece: np.ndarray) -> np.ndarray:
            own = np.ascontiguousarray(piece, np.float32)
            out = np.empty(own.nbytes, np.uint8)
            size = self._lib.ggml_quantize_chunk(
                kind, own.ctypes.data, out.ctypes.data, 0, *own.shape, None
            )
            return out[:size].reshape(len(own), -1)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            np.save(target, np.concatenate(list(pool.map(one, pieces))))

    def _forget(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _decode(self, token_ids: list[int], position: int, *, all_logits: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(token_ids)
        for at, token in enumerate(token_ids):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position + at, 1
            batch.seq_id[at][0] = 0
            batch.logits[at] = all_logits or at == len(token_ids) - 1
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama.cpp computes no such step")

    def _logits_at(self, row: int) -> np.ndarray:
        address = self._lib.llama_get_logits_ith(self._context, row)
        return np.copy(
            np.ctypeslib.as_array((ctypes.c_float * self._vocabulary).from_address(address))
        )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # llama.cpp may write to standard output itself
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, name)(*arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
