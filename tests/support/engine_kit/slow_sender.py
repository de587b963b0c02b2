"""An engine whose KV takes long on its way to others: an `executor_class` for a test.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import time
from typing import Final

from diptych_engine.execution.runner import ModelRunner
from diptych_frontend.model_files.model_source import ModelSource
from diptych_kv_transfer.hinge_thread import HingeThread
from diptych_kv_transfer.tables.actions import SendBlocks
from diptych_protocol import EngineConfig

SLOW_S: Final = 0.5
"""Seconds that each batch of blocks waits before it is sent."""


class SlowSender(ModelRunner):
    """Computes like any other."""

    def __init__(self, config: EngineConfig, source: ModelSource) -> None:
        """See `ModelRunner`."""
        send = HingeThread._send

        def send_late(thread: HingeThread, ready: list[SendBlocks]) -> None:
            time.sleep(SLOW_S)
            send(thread, ready)

        HingeThread._send = send_late  # type: ignore[assignment, method-assign]
        super().__init__(config, source)
