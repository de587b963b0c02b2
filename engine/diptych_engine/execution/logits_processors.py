"""Functions of the operator's own that change logits before a token is chosen.

`EngineConfig.logits_processors` names them as `module:function`; a request names those that it
wants. As in vLLM's V0, one takes the output's token ids and the logits of the next token, or the
prompt's token ids before them, and returns the logits. It is called again for a request that comes
back, so what it does may depend on these arguments alone.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from diptych_engine.execution.named_class import named_class, refusal
from diptych_engine.scheduling.request import Request

log = logging.getLogger(__name__)

Processor = Callable[[list[int], list[int], Tensor], Tensor]
"""(prompt's token ids, output's token ids, logits [vocabulary] float32) -> logits."""
PARAM = "logits_processors"


def load_processors(names: Iterable[str]) -> Mapping[str, Processor]:
    """The functions of these names. Raises `InvalidRequestError` for one that cannot be used."""
    return {name: _load(name) for name in names}


def _load(name: str) -> Processor:
    function = named_class(name, PARAM)
    try:
        num_arguments = len(inspect.signature(function).parameters)
    except (TypeError, ValueError) as exc:
        raise refusal(name, PARAM, exc) from exc
    if num_arguments == 3:
        processor: Processor = function
        return processor
    if num_arguments == 2:
        return lambda _prompt, output, logits: function(output, logits)
    raise refusal(name, PARAM, TypeError(f"it takes {num_arguments} arguments, not 2 or 3"))


def process_logits(
    logits: Tensor,
    wanted: Sequence[tuple[int, Sequence[Processor]]],
    requests: Sequence[Request],
) -> dict[str, str]:
    """Let each of the `wanted` rows be changed by its functions, in place.

    logits: [requests, vocabulary].
    Returns the ids of requests that cannot go on, with the reasons.
    """
    failed: dict[str, str] = {}
    for row, processors in wanted:
        request = requests[row]
        split = request.num_prompt_tokens
        prompt, output = request.token_ids[:split], request.token_ids[split:]
        changed = logits[row].clone()
        try:
            for processor in processors:
                changed = processor(prompt, output, changed)
            logits[row] = changed
        except Exception as exc:  # somebody else's code
            log.exception("request %s: a logits processor failed", request.request_id)
            failed[request.request_id] = f"{PARAM}: {type(exc).__name__}: {exc}"
    return failed
