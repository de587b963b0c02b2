"""Classes of the user's that run the model; see `EngineConfig.executor_class`."""

from __future__ import annotations

import time
from typing import Any, Final

from diptych_engine.execution.runner import ModelRunner
from diptych_engine.scheduling.request import Pending, StepPlan, StepResult

PACED: Final = "engine_kit.executor:PacedExecutor"
PACE_S = 0.01


class CountingExecutor(ModelRunner):
    """Counts what it launches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.worker_methods["launched"] = lambda: self.count
        self.count = 0

    def launch(self, plan: StepPlan) -> Pending:
        self.count += 1
        return super().launch(plan)


class PacedExecutor(ModelRunner):
    """Rests after each step: answers last on any machine, and take little of its processors."""

    def launch(self, plan: StepPlan) -> Pending:
        pending = super().launch(plan)

        def result() -> StepResult:
            found = pending()
            time.sleep(PACE_S)
            return found

        return result
