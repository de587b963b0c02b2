"""What callers who use a client in an old way are told, once in each process."""

from __future__ import annotations

import logging
from functools import cache

from diptych_protocol import EngineCoreRequest

log = logging.getLogger(__name__)


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def warn_of_made_requests(request_id: str, request: EngineCoreRequest) -> None:
    """Say once what callers who make their own `EngineCoreRequest` should know."""
    _warn_once(
        "a prompt that is an EngineCoreRequest is deprecated: give add_request what the "
        "renderer's render_prompt or render_chat returns"
    )
    if request_id != request.request_id:
        _warn_once(
            "add_request was given another request_id than its EngineCoreRequest has: "
            "the latter is used"
        )
