"""The bytes of the wire: they may grow at the end, and never change otherwise."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from diptych_protocol import (
    FINISH_REASON_STRINGS,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    LogprobsLists,
    SamplingParams,
    SchedulerStats,
    UtilityOutput,
    wire,
)

REQUEST_FIELDS = """
    request_id prompt_token_ids mm_features sampling_params pooling_params eos_token_id arrival_time
    lora_request cache_salt data_parallel_rank prompt_embeds client_index current_wave priority
    trace_headers external_req_id
"""
OUTPUT_FIELDS = """
    request_id new_token_ids new_logprobs new_prompt_logprobs_tensors pooling_output finish_reason
    stop_reason kv_transfer_params trace_headers num_cached_tokens routed_experts num_nans_in_logits
"""
OUTPUTS_FIELDS = """
    engine_index outputs scheduler_stats timestamp utility_output finished_requests journey_events
    wave_complete start_wave
"""


def make_request(**kwargs: object) -> EngineCoreRequest:
    return EngineCoreRequest(
        "r", [1, 2], None, SamplingParams(max_tokens=3), None, 2, 1.5, None, None, None, **kwargs
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("struct", "fields"),
    [
        (EngineCoreRequest, REQUEST_FIELDS),
        (EngineCoreOutput, OUTPUT_FIELDS),
        (EngineCoreOutputs, OUTPUTS_FIELDS),
    ],
)
def test_the_contract_s_fields_come_first_and_in_order(struct: Any, fields: str) -> None:
    names = fields.split()
    assert list(struct.__struct_fields__[: len(names)]) == names


@pytest.mark.parametrize(
    ("message", "golden"),
    [
        (
            make_request(),
            "dc0015 a172 920102 c0 de0001aa6d61785f746f6b656e7303 c0 02 cb3ff8000000000000 c0c0c0"
            "c0 00 00 00 c0 c0 c2 c0 c0 c2 c0",
        ),
        (EngineCoreOutput("r", [7]), "9d a172 9107 c0c0c0 c0 c0c0c0 00 c0 00 c0"),
        (
            EngineCoreOutput("r", [7], finish_reason=FinishReason.LENGTH),
            "9d a172 9107 c0c0c0 01 c0c0c0 00 c0 00 c0",
        ),
        (EngineCoreOutputs(timestamp=1.5), "99 00 90 c0 cb3ff8000000000000 c0c0c0c0c0"),
        (UtilityOutput(3, "no"), "9303a26e6fc0"),
        (SchedulerStats(steps=7), "9f" + "00" * 12 + "07 c0 c2"),
        (SchedulerStats(draining=True), "9f" + "00" * 13 + "c0 c3"),
        (["a", "b"], "92a161a162"),
    ],
)
def test_golden_bytes(message: object, golden: str) -> None:
    assert wire.encoder.encode(message)[0].hex() == golden.replace(" ", "")


def test_an_older_reader_s_message_decodes_with_defaults() -> None:
    old = msgspec.msgpack.encode(["r", [1], None, None, None, None, 0.0, None, None, None])
    request = wire.request_decoder.decode([old])
    assert request.generated_token_ids is None
    assert request.priority == 0


def test_fields_that_a_newer_writer_appended_are_ignored() -> None:
    new = [*msgspec.to_builtins(EngineCoreOutput("r", [1], error="x")), "of the future"]
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=EngineCoreOutput)
    assert decoded.error == "x"


def test_outputs_are_stamped_when_made() -> None:
    assert EngineCoreOutputs().timestamp > 0


def test_logprobs_survive_the_wire() -> None:
    output = EngineCoreOutput("r", [1], LogprobsLists([[1, 5]], [[-0.5, -1.5]], [1]))
    message = wire.encoder.encode(EngineCoreOutputs(outputs=[output]))
    assert wire.outputs_decoder.decode(message).outputs[0] == output


@pytest.mark.parametrize(
    ("reason", "text"), list(zip(FinishReason, FINISH_REASON_STRINGS, strict=True))
)
def test_finish_reasons_are_their_index(reason: FinishReason, text: str) -> None:
    assert str(reason) == text
    assert FINISH_REASON_STRINGS[reason] == text


def test_request_types_are_single_bytes() -> None:
    assert [t.value for t in EngineCoreRequestType] == [bytes([i]) for i in range(5)]


def test_the_contract_needs_neither_torch_nor_zmq() -> None:
    code = "import diptych_protocol, sys; sys.exit(bool({'torch', 'zmq'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
