"""The bytes of the wire: they may grow at the end, and never change otherwise."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest

from diptych_protocol import (
    FINISH_REASON_STRINGS,
    Array,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    KVTransferParams,
    LogprobsLists,
    LoRARequest,
    PoolingParams,
    ReconfigureDistributedRequest,
    ReconfigureRankType,
    SamplingParams,
    UtilityCall,
    UtilityOutput,
    wire,
)
from diptych_protocol.engine_stats import KVTransferStats, SchedulerStats

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


def make_request(**kwargs: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        "r", [1, 2], None, SamplingParams(max_tokens=3), None, 2, 1.5, None, None, None, **kwargs
    )


STATS_FIELDS = """
    num_running num_waiting num_waiting_for_remote_kv blocks_total blocks_free queued_prompt_tokens
    prompt_tokens_computed tokens_generated prefix_cache_queries prefix_cache_hits remote_kv_tokens
    num_preemptions steps kv_transfer draining paused sleep_level num_waiting_for_input dummy_steps
    cpu_level cpu_kernels_set_aside malformed_messages images_encoded encoder_cache_hits
    encoder_cache_tokens seconds_stepping adapters_loaded seconds_loading_adapters queued_tokens_of
    blocks_remembered blocks_arriving holders
"""
KV_STATS_FIELDS = """
    leases_held leases_granted leases_released leases_revoked leases_expired blocks_held
    loads_in_flight loads_completed loads_failed blocks_received bytes_received seconds_receiving
    blocks_sent bytes_sent stale_reads_refused transport leases_promised leases_withdrawn
    leases_promised_now leases_draining leases_rejected loads_started leases_refused_here
    early_loads early_loads_adopted early_loads_dropped early_loads_now hand_off_counts
    loads_waiting_for_room staging_bytes prefix_fetches prefix_fetches_completed
    prefix_fetches_failed prefix_fetches_now prefix_tokens_fetched prefix_seconds prefixes_lent
    prefixes_refused newest_moves rejections_ignored late_reads
"""


FIELDS = {
    SchedulerStats: STATS_FIELDS,
    KVTransferStats: KV_STATS_FIELDS,
    EngineCoreRequest: REQUEST_FIELDS,
    EngineCoreOutput: OUTPUT_FIELDS,
    EngineCoreOutputs: OUTPUTS_FIELDS,
}


def check_fields(struct: Any) -> None:
    names = FIELDS[struct].split()
    assert list(struct.__struct_fields__[: len(names)]) == names


def check_bytes(message: object, golden: str, *arrays: str) -> None:
    """The message's bytes begin with `golden`, in hexadecimal with spaces for the eye, and its
    arrays follow. How many fields there are, which an array begins with, may grow."""
    first, *others = [bytes(frame).hex() for frame in wire.encoder.encode(message)]
    wanted = golden.replace(" ", "")
    assert first[header_digits(first) :].startswith(wanted[header_digits(wanted) :])
    assert others == list(arrays)


def header_digits(message: str) -> int:
    """Length of an array's header."""
    return 6 if message.startswith("dc") else 2


def test_contract_M03_the_contract_s_fields_come_first_and_in_order() -> None:
    check_fields(EngineCoreRequest)


def test_contract_M04_the_contract_s_fields_come_first_and_in_order() -> None:
    check_fields(EngineCoreOutput)


def test_contract_M05_the_contract_s_fields_come_first_and_in_order() -> None:
    check_fields(EngineCoreOutputs)


@pytest.mark.parametrize("stats", [SchedulerStats, KVTransferStats])
def test_figures_of_engines_keep_their_places(stats: Any) -> None:
    check_fields(stats)


def test_contract_M03_golden_bytes() -> None:
    check_bytes(
        make_request(),
        "dc0015 a172 920102 c0 de0001aa6d61785f746f6b656e7303 c0 02 cb3ff8000000000000 c0c0c0"
        "c0 00 00 00 c0 c0 c2 c0 c0 c2 c0",
    )


def test_contract_M03_golden_bytes_end_with_the_tenant_and_the_prefix_source() -> None:
    first, *_ = wire.encoder.encode(make_request(tenant="alice"))
    end = "c0c0c2c0c0c2c0" + "a5616c696365" + "c0c0a0" + "00" + "a0" + "c2c2"
    assert bytes(first).hex().endswith(end)
    source = KVTransferParams(remote_engine_id="p")
    sourced, *_ = wire.encoder.encode(make_request(prefix_source=source))
    name = b"remote_engine_id".hex()
    assert (
        bytes(sourced)
        .hex()
        .endswith("c0c0c2c0c0c2c0" + "a0de0001b0" + name + "a170" + "c0a000a0c2c2")
    )
    assert wire.request_decoder.decode([sourced]).prefix_source == source
    assert wire.request_decoder.decode([first]).tenant == "alice"
    older = make_request()
    assert wire.request_decoder.decode(wire.encoder.encode(older)).tenant == ""


def test_contract_M03_golden_bytes_end_with_the_deadline_the_name_and_the_pins() -> None:
    sent = make_request(
        tenant="alice", deadline_ms=7, kept_as="n", pin_s=5, session="s", leaves_disk=True,
        prefetches=True,
    )  # fmt: skip
    first, *_ = wire.encoder.encode(sent)
    end = "c0c0c2c0c0c2c0a5616c696365" + "c0" + "07" + "a16e" + "05" + "a173" + "c3c3"
    assert bytes(first).hex().endswith(end)
    read = wire.request_decoder.decode([first])
    assert (read.deadline_ms, read.kept_as, read.pin_s, read.session) == (7, "n", 5, "s")
    assert read.leaves_disk
    assert read.prefetches
    older = wire.request_decoder.decode(wire.encoder.encode(make_request()))
    assert (older.deadline_ms, older.kept_as, older.pin_s, older.session) == (None, "", 0, "")
    assert not older.leaves_disk
    assert not older.prefetches


def test_contract_M03_golden_bytes_of_pooling_adapter_and_embeddings() -> None:
    embeddings = Array("float32", (64, 1), bytes(256))
    request = EngineCoreRequest(
        "r", [0], None, None, PoolingParams("embed"), None, 0.0, LoRARequest("a", 1), None, None,
        embeddings,
    )  # fmt: skip
    check_bytes(
        request,
        "dc0015 a172 9100 c0 c0 80 c0 cb0000000000000000 93a16101a0 c0 c0"
        "93 a7666c6f61743332 924001 01 00 00 00 c0 c0 c2 c0 c0 c2 c0",
        "00" * 256,
    )


def test_contract_M03_params_are_the_sampling_s_or_else_the_pooling_s() -> None:
    sampling, pooling = SamplingParams(), PoolingParams()
    assert make_request().params == SamplingParams(max_tokens=3)
    request = EngineCoreRequest("r", [1], None, None, pooling, None, 0.0, None, None, None)

    def params() -> SamplingParams | PoolingParams:
        return request.params

    assert params() is pooling
    request.sampling_params = sampling
    assert params() is sampling
    request.sampling_params = request.pooling_params = None
    with pytest.raises(ValueError, match="neither"):
        _ = request.params


def test_contract_M04_golden_bytes() -> None:
    check_bytes(EngineCoreOutput("r", [7]), "9d a172 9107 c0c0c0 c0 c0c0c0 00 c0 00 c0")
    length = EngineCoreOutput("r", [7], finish_reason=FinishReason.LENGTH)
    check_bytes(length, "9d a172 9107 c0c0c0 01 c0c0c0 00 c0 00 c0")
    pooled = EngineCoreOutput("r", [], pooling_output=Array("float32", (1,), b"\0\0\x80\x3f"))
    check_bytes(
        pooled, "9d a172 90 c0c0 93 a7666c6f61743332 9101 d6030000803f c0 c0c0c0 00 c0 00 c0"
    )


def test_contract_M04_an_output_is_finished_when_it_has_a_reason() -> None:
    assert not EngineCoreOutput("r", [7]).finished
    assert all(EngineCoreOutput("r", [], finish_reason=r).finished for r in FinishReason)


def test_contract_M05_golden_bytes() -> None:
    check_bytes(EngineCoreOutputs(timestamp=1.5), "99 00 90 c0 cb3ff8000000000000 c0c0c0c0c0")


def test_contract_M05_an_empty_message_is_tiny() -> None:
    (frame,) = wire.encoder.encode(EngineCoreOutputs())
    timestamp = 9
    assert len(frame) - timestamp < 16


def test_contract_M08_golden_bytes() -> None:
    check_bytes(UtilityOutput(3, failure_message="no"), "9303a26e6fc0")
    check_bytes(UtilityCall(0, 3, "stats", [1]), "940003a57374617473 9101")


def test_contract_M09_golden_bytes() -> None:
    message = ReconfigureDistributedRequest(2, -1, -1, "h", 1)
    (frame,) = wire.encoder.encode(message)
    assert frame[0] == 0x85, "a map of five"
    assert msgspec.msgpack.decode(frame) == {
        "new_data_parallel_size": 2,
        "new_data_parallel_rank": -1,
        "new_data_parallel_rank_local": -1,
        "new_data_parallel_master_ip": "h",
        "new_data_parallel_master_port": 1,
    }
    assert msgspec.msgpack.decode(frame, type=ReconfigureDistributedRequest) == message


def test_contract_M10_the_special_ranks() -> None:
    keep: int = ReconfigureRankType.KEEP_CURRENT_RANK
    shutdown: int = ReconfigureRankType.SHUTDOWN_CURRENT_RANK
    assert keep == -1
    assert shutdown == -2


def test_contract_M03_an_older_writer_s_message_decodes_with_defaults() -> None:
    old = msgspec.msgpack.encode(["r", [1], None, None, None, None, 0.0, None, None, None])
    request = wire.request_decoder.decode([old])
    assert request.generated_token_ids is None
    assert request.priority == 0


def test_contract_M04_fields_that_a_newer_writer_appended_are_ignored() -> None:
    new = [*msgspec.to_builtins(EngineCoreOutput("r", [1], error="x")), "of the future"]
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=EngineCoreOutput)
    assert decoded.error == "x"


def test_contract_M05_outputs_are_stamped_when_made() -> None:
    before = time.monotonic()
    assert before <= EngineCoreOutputs().timestamp <= time.monotonic()


def test_logprobs_survive_the_wire() -> None:
    output = EngineCoreOutput("r", [1], LogprobsLists([[1, 5]], [[-0.5, -1.5]], [1]))
    message = wire.encoder.encode(EngineCoreOutputs(outputs=[output]))
    assert wire.outputs_decoder.decode(message).outputs[0] == output


@pytest.mark.parametrize(
    ("reason", "text"), list(zip(FinishReason, ("stop", "length", "abort", "error"), strict=True))
)
def test_contract_M01_finish_reasons_are_their_index(reason: FinishReason, text: str) -> None:
    assert str(reason) == text
    assert FINISH_REASON_STRINGS[reason] == text


def test_contract_M07_request_types_are_single_bytes() -> None:
    assert [t.value for t in EngineCoreRequestType] == [bytes([i]) for i in range(5)]


def test_the_contract_needs_neither_torch_nor_zmq() -> None:
    code = "import diptych_protocol, sys; sys.exit(bool({'torch', 'zmq'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
