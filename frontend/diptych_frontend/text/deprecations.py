"""Warnings for callers who use a client in an outdated way, once in each process."""

from __future__ import annotations

import logging
from functools import cache

from diptych_protocol import EngineCoreRequest

log = logging.getLogger(__name__)


@cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def warn_of_truncation() -> None:
    """Warn once that `encode` does not truncate as the caller asked."""
    _warn_once(
        "truncate_prompt_tokens of encode() is deprecated and ignored; use tokenization_kwargs "
        "with truncation and max_length."
    )


def warn_of_made_requests(client: object, request_id: str, request: EngineCoreRequest) -> None:
    """Warn once callers who make their own `EngineCoreRequest`.

    The text is vLLM's, which users search for, except for the names of the renderer's methods.
    """
    name = type(client).__name__
    _warn_once(
        f"Passing EngineCoreRequest to {name}.generate() and .add_requests() is deprecated. You "
        "should instead pass the outputs of the renderer's render_prompt() or render_chat()."
    )
    if request_id != request.request_id:
        _warn_once(
            f"{name}.add_request() was passed a request_id parameter that does not match the "
            "EngineCoreRequest.request_id attribute. The latter will be used, and the former will "
            "be ignored."
        )
