"""Sets up the log lines of all processes: one format, to stderr."""

from __future__ import annotations

import faulthandler
import logging
import os


def setup_logging(name: str) -> None:
    """`DIPTYCH_LOG_LEVEL` (default INFO) sets the level; `name` is the process's name in each line.

    A crash of native code writes the Python stack of each thread there too.
    """
    faulthandler.enable()
    level = os.environ.get("DIPTYCH_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(
        level=level if level in logging.getLevelNamesMapping() else "INFO",
        format=f"%(asctime)s %(levelname).1s [{name}] %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
