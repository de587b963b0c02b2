"""The second of two LLMEngines that step together: python idle_rank.py STORE

It has no request of its own.
"""

from __future__ import annotations

import sys

from diptych_engine.serving.llm_engine import LLMEngine
from diptych_protocol import EngineConfig


def main() -> None:
    engine = LLMEngine(
        EngineConfig(
            model="dummy://", num_blocks=64, num_threads=1, data_parallel_size=2,
            data_parallel_rank=1, data_parallel_lockstep=True, data_parallel_store=sys.argv[1],
        )
    )  # fmt: skip
    steps = 0
    while engine.has_unfinished_requests():
        assert engine.step() == []
        steps += 1
    print("empty steps beside", steps)


if __name__ == "__main__":
    main()
