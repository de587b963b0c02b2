"""Carries a pooling request's answer from the core to its consumer."""

from __future__ import annotations

from typing import Final

from diptych_frontend.text.collector import Collector
from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineGenerateError,
    PoolingOutput,
    PoolingRequestOutput,
)


class PoolingAnswer:
    """Waits for the vectors of one prompt."""

    parent: Final = None
    """Always None: a prompt is pooled once, so it has no siblings."""

    def __init__(
        self, request: EngineCoreRequest, collector: Collector[PoolingRequestOutput]
    ) -> None:
        self.request_id = request.request_id
        self.external_id = request.shown_id
        self.collector = collector
        self._prompt_token_ids = request.prompt_token_ids or []

    def advance(self, output: EngineCoreOutput) -> bool:
        """Take a step's output; True if it was the last one. An aborted request has no vectors, so
        its consumer gets an error."""
        if not output.finished:
            return False
        if output.pooling_output is None:
            self.collector.fail(EngineGenerateError("aborted before the prompt was pooled"))
        else:
            self.collector.put(
                PoolingRequestOutput(
                    self.external_id,
                    PoolingOutput(output.pooling_output),
                    self._prompt_token_ids,
                    num_cached_tokens=output.num_cached_tokens,
                )
            )
        return True
