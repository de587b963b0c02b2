"""An EngineCore in the test's own process, and requests that run in it.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from waits import Deadline

from diptych_engine.control.core import EngineCore
from diptych_engine.serving.build_core import build_core
from diptych_protocol import (
    CurveKeys,
    EngineConfig,
    EngineCoreOutput,
    EngineCoreRequest,
    SamplingParams,
)

CLIENT = b"client"
VOCABULARY = 64
DUMMY = f"dummy://?vocab_size={VOCABULARY}&num_hidden_layers=2&hidden_size=32"
"""A small model with random weights and no tokenizer."""
EXACT = "none"
"""Weight packing of tests that compare the tokens of a few small batches."""
BATCHED = "q8"
"""The same where many tokens are drawn: torch's products of floats differ with the batch on some
processors, so that one of 5,000 tokens of a temperature did."""


def make_core(
    model: str = DUMMY,
    *,
    keys: CurveKeys | None = None,
    stand_by: Callable[[], None] = lambda: None,
    **options: Any,
) -> EngineCore:
    fields: dict[str, Any] = {
        "num_blocks": 64,
        "num_threads": 1,
        "max_num_seqs": 8,
        "weight_packing": EXACT,
    }
    return build_core(EngineConfig(model=model, **{**fields, **options}), keys, stand_by)


def guess_always(core: EngineCore) -> None:
    """Have it guess as much as it can, however long that takes."""
    core.scheduler.spare_rows, core.scheduler.stakes = 1000.0, None
    core.scheduler.draft_share = 0.0


def core_request(request_id: str, prompt: list[int], **fields: Any) -> EngineCoreRequest:
    """A greedy request; other fields than those of the message are sampling parameters."""
    message = {
        name: fields.pop(name)
        for name in EngineCoreRequest.__struct_fields__
        if name in fields and name != "sampling_params"
    }
    return EngineCoreRequest(
        **{
            "request_id": request_id,
            "prompt_token_ids": prompt,
            "mm_features": None,
            "sampling_params": SamplingParams(**{"temperature": 0.0, **fields}),
            "pooling_params": None,
            "eos_token_id": None,
            "arrival_time": 0.0,
            "lora_request": None,
            "cache_salt": None,
            "data_parallel_rank": None,
            **message,
        }
    )


def step(core: EngineCore) -> list[EngineCoreOutput]:
    """One step, and everything that it has to tell."""
    core.finish_step(*core.start_step())
    return [output for of_client in core.take_outputs().values() for output in of_client]


def run(core: EngineCore, *requests: EngineCoreRequest) -> dict[str, list[EngineCoreOutput]]:
    """The outputs of each request, run together to their ends."""
    for request in requests:
        core.add(request, CLIENT)
    outputs: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    deadline = Deadline("an end of every request")
    while not all(made and made[-1].finished for made in outputs.values()):
        deadline.check()
        for output in step(core):
            outputs[output.request_id].append(output)
    return outputs


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def generate(core: EngineCore, prompt: list[int], **fields: Any) -> list[int]:
    """The tokens of one request, alone; its last output must not be an error."""
    [outputs] = run(core, core_request("one", prompt, **fields)).values()
    assert outputs[-1].error is None
    return tokens(outputs)
