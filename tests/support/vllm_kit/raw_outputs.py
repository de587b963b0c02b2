"""Prints what becomes of a core's outputs in vLLM's own output processor, as JSON, in vLLM's own
environment. One request, `raw`, takes them raw, and another one, `other`, does not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import IterationStats, PrefillStats

from diptych_vllm.versions import RawOutputs, add_raw, offer_raw_outputs


class Llm:
    """What `AsyncLLM` does with its output processor."""

    def __init__(self) -> None:
        self.output_processor = OutputProcessor(None, log_stats=True)
        offer_raw_outputs(self)

    async def add_request(self, name: str) -> RequestOutputCollector:
        params = SamplingParams(max_tokens=3, detokenize=False, output_kind=RequestOutputKind.DELTA)
        request = EngineCoreRequest(
            f"{name}-1", [1, 2], None, params, None, 0.0, None, None, None, external_req_id=name
        )
        queue = RequestOutputCollector(params.output_kind, request.request_id)
        self.output_processor.add_request(request, None, None, 0, queue)
        return queue

    def make(self, *outputs: EngineCoreOutput) -> IterationStats:
        stats = IterationStats()
        self.output_processor.process_outputs(list(outputs), 1.0, stats)
        return stats


def made(name: str, token: int, **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(f"{name}-1", [token], **fields)


async def whole_answers() -> dict[str, Any]:
    llm, taken = Llm(), list[Any]()
    raw = RawOutputs(taken.append)
    await add_raw(llm, raw, "raw")
    queue = await llm.add_request("other")
    prompt = PrefillStats(num_prompt_tokens=2, num_external_cached_tokens=1)
    first = llm.make(made("raw", 7, prefill_stats=prompt), made("other", 8))
    told: Any = queue.get_nowait()
    was_open = not raw.ended.done()
    last = llm.make(made("raw", 9, finish_reason=FinishReason.STOP))
    await raw.ended
    return {
        "name": raw.request_id,
        "taken": [
            [x.new_token_ids, None if x.finish_reason is None else str(x.finish_reason)]
            for x in taken
        ],
        "received": taken[0].prefill_stats.num_external_cached_tokens,
        "other": told.outputs[0].token_ids,
        "was_open": was_open,
        "counted": [first.num_generation_tokens, len(last.finished_requests)],
        "left": list(llm.output_processor.request_states),
    }


async def aborted() -> list[Any]:
    """What a request takes after its abort."""
    llm, taken = Llm(), list[Any]()
    raw = RawOutputs(taken.append)
    await add_raw(llm, raw, "raw")
    assert raw.request_id is not None
    known = llm.output_processor.abort_requests([raw.request_id], internal=True)
    llm.make(made("raw", 7))
    return [known, taken]


async def failed() -> list[str]:
    """How requests end that fail: by vLLM, and by themselves."""

    def take(output: Any) -> None:
        raise ValueError(f"token {output.new_token_ids[0]}")

    llm, ends = Llm(), [RawOutputs(print), RawOutputs(take)]
    await add_raw(llm, ends[0], "raw")
    await add_raw(llm, ends[1], "bad")
    queue = await llm.add_request("other")
    llm.make(made("bad", 7), made("other", 8))
    told: Any = queue.get_nowait()
    llm.output_processor.propagate_error(RuntimeError("the core has died"))
    return [str(end.ended.exception()) for end in ends] + [str(told.outputs[0].token_ids)]


async def main() -> None:
    told = {"whole": await whole_answers(), "aborted": await aborted(), "failed": await failed()}
    print(json.dumps(told))


if __name__ == "__main__":
    asyncio.run(main())
