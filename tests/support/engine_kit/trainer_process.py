"""A trainer in a process of its own: `python -m engine_kit.trainer_process PORT SEED…`.

Joins the engine's workers, and for each seed sends all tensors of that random checkpoint.
"""

from __future__ import annotations

import sys

from model_kit.checkpoints import random_tensors
from waits import PATIENCE_S

from diptych_engine.weights.trainer import WeightSender


def main() -> None:
    port, *seeds = map(int, sys.argv[1:])
    sender = WeightSender("127.0.0.1", port, num_workers=1, timeout_s=PATIENCE_S)
    sender.join()
    for seed in seeds:
        sender.send(random_tensors(seed))


if __name__ == "__main__":
    main()
