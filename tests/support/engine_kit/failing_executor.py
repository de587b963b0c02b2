"""Classes that run the model, and fail when they are asked to; see `EngineConfig.executor_class`.

On the import path of the tests (pytest's `pythonpath`), and of the engines that they start.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from diptych_engine.execution.runner import ModelRunner
from diptych_engine.scheduling.request import Pending, StepPlan, StepResult
from diptych_protocol import DiptychError, EngineGenerateError

POISON = 13
"""A token that no model survives here."""


class FailingExecutor(ModelRunner):
    """Fails in the middle of an answer to a prompt that begins with `POISON`."""

    def launch(self, plan: StepPlan) -> Pending:
        for share in plan.scheduled:
            request = share.request
            begun = len(request.token_ids) > request.num_prompt_tokens
            if begun and request.token_ids[0] == POISON:
                raise RuntimeError("the model swallowed poison")
        return super().launch(plan)


FAILS_WHILE = "DIPTYCH_TEST_FAILS_WHILE"
"""Environment: while this file exists, `MoodyExecutor` fails."""


class MoodyExecutor(ModelRunner):
    """Fails with every request of a step for a while, and lives on."""

    def launch(self, plan: StepPlan) -> Pending:
        pending = super().launch(plan)

        def result() -> StepResult:
            found = pending()
            if not Path(os.environ[FAILS_WHILE]).exists():
                return found
            mood = EngineGenerateError("not in the mood")
            failed: dict[str, DiptychError] = dict.fromkeys(
                (share.request.request_id for share in plan.scheduled), mood
            )
            return dataclasses.replace(found, failed=failed)

        return result
