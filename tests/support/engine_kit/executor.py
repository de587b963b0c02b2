"""A class of the user's that runs the model; see `EngineConfig.executor_class`."""

from __future__ import annotations

from typing import Any

from diptych_engine.execution.runner import ModelRunner
from diptych_engine.scheduling.request import Pending, StepPlan


class CountingExecutor(ModelRunner):
    """Counts what it launches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.worker_methods["launched"] = lambda: self.count
        self.count = 0

    def launch(self, plan: StepPlan) -> Pending:
        self.count += 1
        return super().launch(plan)
