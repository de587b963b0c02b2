"""The front-end of an engine pod."""

from __future__ import annotations

import argparse
from contextlib import closing
from typing import Any

import pytest

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
    monkeypatch.setattr(pod, "AsyncLLM", Loading)
    monkeypatch.setattr(
        "diptych_frontend.app.build_app", lambda *_, **__: Loading.steps.append("built")
    )
    args = argparse.Namespace(host="127.0.0.1", port=0, api_port=0, admin_port=None, keys=None)
    config = EngineConfig(model="dummy://")
    with closing(pod.Standby(config, None, None)) as standby, pytest.raises(EngineDeadError):
        await pod.serve(args, config, None, None, standby)
    assert Loading.steps == ["built", "awaited", "shut down"]
