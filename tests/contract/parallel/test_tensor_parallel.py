"""Two processes as one engine, over gloo: the same tokens, and nobody hangs when one dies."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import select
import signal
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import psutil
import pytest
import torch
from waits import PATIENCE_S

from diptych_engine.control.core import EngineCore
from diptych_engine.models import StepInputs
from diptych_engine.parallel.lead import check_hinge
from diptych_engine.serving.build_core import build_core
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import (
    Array,
    EngineConfig,
    EngineCoreRequest,
    EngineDeadError,
    InvalidRequestError,
    KVTransferConfig,
    PoolingParams,
    SamplingParams,
    UtilityError,
)

CONFIG = EngineConfig(
    model="dummy://?num_hidden_layers=2&num_attention_heads=4&num_key_value_heads=2",
    dtype="float32",
    num_blocks=64,
    num_threads=1,
    max_num_seqs=8,
    max_num_batched_tokens=24,
)
MIXTURE = "dummy://?architecture=qwen3_moe&num_experts=4&num_experts_per_tok=2"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[7], list(range(40)), [1, 2, 3], [5] * 17]


def request(name: str, prompt: list[int], params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(name, prompt, None, params, None, None, time.time(), None, None, None)


def answers(core: EngineCore, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Chunked prefills and decodes of several requests, mixed in the same steps."""
    for index, prompt in enumerate(PROMPTS):
        core.add(request(str(index), prompt, params), b"me")
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        core.finish_step(*core.start_step())
        for output in core.take_outputs().get(b"me", []):
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return [tokens[str(index)] for index in range(len(PROMPTS))]


def changed(**changes: Any) -> EngineConfig:
    return msgspec.structs.replace(CONFIG, **changes)


@pytest.fixture(scope="module")
def alone() -> EngineCore:
    return build_core(CONFIG)


@pytest.fixture(scope="module")
def pair() -> Iterator[EngineCore]:
    core = build_core(changed(tensor_parallel_size=2))
    yield core
    core.close()


def vectors(core: EngineCore) -> list[Any]:
    """The vectors of a prompt of tokens and of one of embeddings, both in chunks."""
    hidden = core.description.hidden_size
    values = torch.linspace(-1, 1, 40 * hidden).sin().reshape(40, hidden)
    embeds = Array("float32", (40, hidden), values.numpy().tobytes())
    for name, given in (("tokens", None), ("embeds", embeds)):
        message = request(name, list(range(40)) if given is None else [0] * 40, GREEDY)
        message.sampling_params, message.pooling_params = None, PoolingParams(task="token_embed")
        message.prompt_embeds = given
        core.add(message, b"me")
    made: dict[str, Any] = {}
    while core.has_work:
        core.finish_step(*core.start_step())
        for output in core.take_outputs().get(b"me", []):
            assert output.pooling_output is not None, output.error
            made[output.request_id] = torch.tensor(output.pooling_output.tolist())
    return [made["tokens"], made["embeds"]]


def test_tensor_parallel_pools_what_one_rank_pools(alone: EngineCore, pair: EngineCore) -> None:
    for shared_out, whole in zip(vectors(pair), vectors(alone), strict=True):
        torch.testing.assert_close(shared_out, whole, rtol=1e-4, atol=1e-5)


def test_tensor_parallel_gives_the_tokens_of_one_rank(alone: EngineCore, pair: EngineCore) -> None:
    assert answers(pair) == answers(alone)
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    assert answers(pair, seeded) == answers(alone, seeded)
    assert pair.scheduler.pool.forget_all(), "no block is held"


def workers() -> set[int]:
    """The process ids of all ranks but the first. The server that forks them has one thread."""
    return {child.pid for child in psutil.Process().children() if child.num_threads() > 1}


def test_key_value_heads_fewer_than_ranks_are_held_by_several() -> None:
    others = workers()
    one_head = changed(model="dummy://?num_hidden_layers=2&num_key_value_heads=1")
    alone = build_core(one_head)
    pair = build_core(msgspec.structs.replace(one_head, tensor_parallel_size=2))
    try:
        assert answers(pair) == answers(alone)
        assert len(workers() - others) == 1
    finally:
        pair.close()
    assert workers() == others, "a core that is closed ends its workers, and nobody else's"


def test_contract_C24_a_call_reaches_every_rank_in_order(pair: EngineCore) -> None:
    pair.runner.worker_methods["local_only"] = os.getpid  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError, match="no worker method"):
        pair.runner.collective_rpc("nonsense")
    with pytest.raises((InvalidRequestError, UtilityError), match="rank 1: no worker method"):
        pair.runner.collective_rpc("local_only")
    del pair.runner.worker_methods["local_only"]  # type: ignore[attr-defined]
    assert pair.runner.collective_rpc("rank") == [0, 1]
    assert pair.runner.collective_rpc("execute_dummy_batch") == [None, None]
    assert answers(pair), "the group is still in step"


def test_every_rank_sleeps_and_wakes(alone: EngineCore, pair: EngineCore) -> None:
    for call in ("_put_weights_aside", "_drop_kv_cache", "_restore_weights", "_restore_kv_cache"):
        pair.runner.collective_rpc(call)
    pair.scheduler.pool.forget_all()
    assert answers(pair) == answers(alone)


def test_given_embeddings_reach_every_rank(alone: EngineCore, pair: EngineCore) -> None:
    values = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    embeds = Array("float32", (6, 64), values.view(torch.uint8).numpy().data)

    def answer(core: EngineCore) -> list[int]:
        given = request("given", [0] * 6, GREEDY)
        given.prompt_embeds = embeds
        core.add(given, b"me")
        tokens: list[int] = []
        while core.has_work:
            core.finish_step(*core.start_step())
            for output in core.take_outputs().get(b"me", []):
                tokens += output.new_token_ids
        return tokens

    assert answer(pair) == answer(alone)


def test_a_killed_worker_is_the_death_of_the_core_and_its_cause() -> None:
    others = workers()
    core = build_core(changed(tensor_parallel_size=2))
    try:
        core.add(request("doomed", [1, 2, 3], GREEDY), b"me")
        core.finish_step(*core.start_step())
        [victim] = workers() - others
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"rank 1 \(pid {victim}\) was killed by sig"):
            core.start_step()
        [(descriptor, react)] = core.runner.watched.items()  # type: ignore[attr-defined]
        assert select.select([descriptor], [], [], PATIENCE_S)[0], "an idle core notices too"
        with pytest.raises(EngineDeadError, match="rank 1"):
            react()
    finally:
        core.close()
    assert workers() == others


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tensor_parallel_size": 3}, "4 heads"),
        ({"tensor_parallel_size": 0}, "between 1 and 64"),
        (
            {"model": "dummy://?num_attention_heads=9&num_key_value_heads=3&hidden_size=72"},
            "9 heads",
        ),
        ({"model": "dummy://?intermediate_size=129"}, "intermediate_size 129"),
        ({"model": f"{MIXTURE}&moe_intermediate_size=33"}, "moe_intermediate_size 33"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint) as refusal:
        build_core(changed(**{"tensor_parallel_size": 2, **changes}))
    assert refusal.value.param == "tensor_parallel_size"


def test_ranks_on_gpus_take_no_part_in_hand_offs() -> None:
    hinged = changed(tensor_parallel_size=2, kv_transfer=KVTransferConfig())
    check_hinge(hinged, torch.device("cpu"))
    check_hinge(changed(tensor_parallel_size=2), torch.device("cuda", 0))
    with pytest.raises(InvalidRequestError, match="on CPUs only") as refusal:
        check_hinge(hinged, torch.device("cuda", 0))
    assert refusal.value.param == "kv_transfer"


def test_every_field_of_a_step_travels() -> None:
    assert {field.name for field in dataclasses.fields(StepInputs)} == {
        "token_ids", "positions", "slot_blocks", "slot_offsets", "attention",
        "given",
        "adapters",  # refused with several ranks
        "routed",  # all ranks choose alike; the lead keeps it
    }  # fmt: skip


@pytest.mark.parametrize("busy_s", [0.0, 1.0])
async def test_a_client_learns_which_rank_died(busy_s: float) -> None:
    """Even one that has no time to listen while that happens."""
    engine = await AsyncLLM.start(changed(tensor_parallel_size=2))
    try:
        assert await engine.collective_rpc("rank") == [0, 1]
        [victim] = psutil.Process(engine.description.pid).children()
        victim.kill()
        time.sleep(busy_s)
        async with asyncio.timeout(PATIENCE_S):
            cause = await engine.died()
        for known in (cause, engine.dead_error):
            assert f"rank 1 (pid {victim.pid}) was killed by signal 9" in str(known)
    finally:
        engine.shutdown()
