"""The seed of a test that draws one: another in each run, and the same again if it is given back.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import os
import random

VARIABLE = "DIPTYCH_TEST_SEED"


def drawn_seed() -> int:
    """The one that the environment names, or any; the test's output says which."""
    seed = random.randrange(2**32)
    if given := os.environ.get(VARIABLE):
        seed = int(given)
    print(f"again: {VARIABLE}={seed}")
    return seed
