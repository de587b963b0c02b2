"""Which versions of vLLM were tested, and what is read of vLLM that it does not call public.

vLLM promises nothing about the names below. A test of each, in a real vLLM, says when one is gone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
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


def hear_of_prompts(llm: Any, received: Callable[[str, int], None]) -> None:
    """Call `received` with the id of each request whose prompt has KV from elsewhere, and with the
    number of such tokens, before its first output. vLLM tells only the sum with the prefix cache.
    """
    processor = llm.output_processor
    process, states = processor.process_outputs, processor.request_states

    def process_outputs(outputs: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        for output in outputs:
            prompt = output.prefill_stats
            if prompt is not None and prompt.num_external_cached_tokens:
                state = states.get(output.request_id)
                if state is not None:
                    received(state.external_req_id, prompt.num_external_cached_tokens)
        return process(outputs, *args, **kwargs)

    processor.process_outputs = process_outputs


async def handshakes(llm: Any) -> list[dict[str, Any]]:
    """What the KV connector of each worker says of itself, as a mapping of its fields."""
    answers = await llm.collective_rpc("get_kv_connector_handshake_metadata")
    return [about for answer in answers if answer for about in answer.values()]


def http_server_of(app: Any) -> Any:
    """The uvicorn server of vLLM's application. It ends in good order when its `should_exit` is
    set."""
    return app.state.server
