"""The front-end of an engine pod."""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import closing
from typing import Any

import pytest
from waits import PATIENCE_S

from diptych_engine import pod
from diptych_protocol import EngineConfig, EngineDeadError


class Loading:
    """An engine whose core dies when everything else is there."""

    model_name = "model"
    steps: list[str]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.steps = Loading.steps

    def stats_by_engine(self) -> dict[str, Any]:
        return {}

    async def ready(self) -> None:
        self.steps.append("awaited")
        raise EngineDeadError("it has no more memory")

    def shutdown(self) -> None:
        self.steps.append("shut down")


async def test_the_api_is_built_while_the_core_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    Loading.steps = []
    monkeypatch.setattr(pod, "listen", lambda *_: object())
    monkeypatch.setattr(pod, "AsyncLLM", Loading)
    monkeypatch.setattr(
        "diptych_frontend.app.build_app", lambda *_, **__: Loading.steps.append("built")
    )
    args = argparse.Namespace(host="127.0.0.1", port=0, api_port=0, admin_port=None, keys=None)
    config = EngineConfig(model="dummy://")
    with closing(pod.Standby(config, None, None)) as standby, pytest.raises(EngineDeadError):
        await pod.serve(args, config, None, None, standby)
    assert Loading.steps == ["built", "awaited", "shut down"]


FORKED = """
import multiprocessing, sys
from diptych_frontend.core_client.launcher import CORE, ForkedCore
from diptych_frontend.program import PROGRAMS

def be_core():
    process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(3,))
    process.start()
    process.join()
    sys.exit(process.exitcode)

PROGRAMS[CORE] = be_core
sys.exit(ForkedCore([]).wait())
"""


def test_a_forked_core_may_start_processes() -> None:
    """Those of `multiprocessing` that end with their parent may not."""
    assert subprocess.run([sys.executable, "-c", FORKED], timeout=PATIENCE_S).returncode == 3
