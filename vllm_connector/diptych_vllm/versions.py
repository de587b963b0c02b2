"""Which versions of vLLM were tested, and what is read of vLLM that it does not call public.

vLLM promises nothing about the names below. A test of each, in a real vLLM, says when one is gone.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from diptych_protocol import InvalidRequestError

TESTED: Final = ("0.32", "0.33")
"""The tested versions. vLLM promises nothing about the methods of a connector: another version may
call other methods, or none, and answer from blocks that nobody filled."""


def series_of(found: str) -> str:
    """Return the tested version that a version of vLLM is: `0.32` for `0.32.1+cpu`.

    Raises `InvalidRequestError` for one that was not tested.
    """
    numbers = re.match(r"\d+\.\d+(?=\.|\+|$)", found)
    if numbers is None or numbers.group() not in TESTED:
        raise InvalidRequestError(
            f"the Diptych connector was tested with vLLM {', '.join(TESTED)}, and this is vLLM "
            f"{found}: install a tested version",
            param="vllm",
        )
    return numbers.group()


def add_stat_logger(llm: Any, logger: Any) -> None:
    """Have a logger hear of each step of an `AsyncLLM`. vLLM takes loggers only before it starts.

    Raises `InvalidRequestError` if vLLM was told to log nothing.
    """
    loggers = llm.logger_manager
    if loggers is None:
        raise InvalidRequestError(
            "vLLM reports no load: leave --disable-log-stats out", param="disable_log_stats"
        )
    loggers.stat_loggers.append(logger)


def num_cores(llm: Any) -> int:
    """How many data-parallel cores an `AsyncLLM` has. Raises `InvalidRequestError` if it shares
    them with others, which vLLM gives neither all outputs nor the port of the wire."""
    parallel = llm.vllm_config.parallel_config
    if parallel._api_process_count > 1:
        raise InvalidRequestError(
            f"vLLM has {parallel._api_process_count} API servers, and the wire is in one: add "
            "--api-server-count 1",
            param="api_server_count",
        )
    return len(llm.engine_core.engine_ranks_managed)


class RawOutputs:
    """Passes the outputs of one request on as vLLM's core made them.

    It replaces what makes texts of them in vLLM's record of the request. vLLM still keeps its
    statistics and its traces, and ends the request.
    """

    def __init__(self, take: Callable[[Any], None]) -> None:
        self._take = take
        self._output: Any = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails if the request does. Once it is done, no output is passed on."""
        self.request_id: str | None = None
        """vLLM's own name of the request, as soon as it is known there."""

    def replace_parts(self, record: Any) -> None:
        """Replace the parts of a `RequestState`."""
        self.request_id = record.request_id
        record.detokenizer = record.logprobs_processor = record.queue = self
        record.make_request_output = self._pass_on

    def num_output_tokens(self) -> int:
        """Return 0, as a detokenizer that has seen no token."""
        return 0

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> None:
        """Find no stop string, because front-ends look for them."""

    def update_from_output(self, output: Any) -> None:
        """Keep the output that is being processed."""
        self._output = output

    def put(self, failure: Exception) -> None:
        """End the request with an exception."""
        if not self.ended.done():
            self.ended.set_exception(failure)

    def _pass_on(self, *_: Any, **__: Any) -> None:
        output, self._output = self._output, None
        if output is None or self.ended.done():  # vLLM calls this for an abort, too
            return
        try:
            self._take(output)
        except Exception as exc:  # it would end vLLM's loop over all outputs
            self.put(exc)
            return
        if output.finish_reason is not None:
            self.ended.set_result(None)


_raw: ContextVar[RawOutputs | None] = ContextVar("_raw", default=None)


def offer_raw_outputs(llm: Any) -> None:
    """Let `add_raw` work with an `AsyncLLM`."""
    processor = llm.output_processor
    add = processor.add_request

    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        raw = _raw.get()
        if raw is not None:
            raw.replace_parts(processor.request_states[request.request_id])

    processor.add_request = add_request


async def add_raw(llm: Any, raw: RawOutputs, *args: Any, **kwargs: Any) -> None:
    """Add a request, as `AsyncLLM.add_request` does. Raises what that raises."""
    token = _raw.set(raw)
    try:
        await llm.add_request(*args, **kwargs)
    finally:
        _raw.reset(token)


async def handshakes(llm: Any) -> list[dict[str, Any]]:
    """What the KV connector of each worker says of itself, as a mapping of its fields."""
    answers = await llm.collective_rpc("get_kv_connector_handshake_metadata")
    return [about for answer in answers if answer for about in answer.values()]


def http_server_of(app: Any) -> Any:
    """The uvicorn server of vLLM's application. It ends in good order when its `should_exit` is
    set."""
    return app.state.server
