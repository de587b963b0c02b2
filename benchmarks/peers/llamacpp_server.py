"""llama.cpp's server by the wheel `xllamacpp`: FILE PORT THREADS. Runs in a peer's environment."""

from __future__ import annotations

import signal
import sys

import xllamacpp

SLOTS = 64
TOKENS_OF_A_SLOT = 1280


def main(file: str, port: int, threads: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.model_alias = {"smollm2"}
    params.port = port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * TOKENS_OF_A_SLOT
    params.cont_batching = True
    server = xllamacpp.Server(params)  # serves from threads of its own
    print("listening at", server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
