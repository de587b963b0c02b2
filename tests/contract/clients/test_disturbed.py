"""Every kind of request at once, in too little room, while an owner pauses, resets and sleeps:
each is answered as if it had been alone."""

from __future__ import annotations

import random
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_kit.block_checks import check_blocks
from engine_kit.core import CLIENT, core_request, make_core, run, step, tokens
from model_kit.checkpoints import SIZES, random_tensors, save_adapter, save_model

from diptych_engine.control.core import EngineCore
from diptych_protocol import (
    Array,
    DiptychError,
    EngineCoreOutput,
    EngineCoreRequest,
    LoRARequest,
    PoolingParams,
)

OPTIONS: dict[str, Any] = {"block_size": 4, "max_model_len": 52, "pooling": "mean"}
CALLS: list[tuple[str, list[Any]]] = [
    ("pause_generation", ["keep"]),
    ("pause_generation", ["wait"]),
    ("sleep", [1, "keep"]),
    ("sleep", [1, "wait"]),
    ("sleep", [2, "wait"]),
    ("wake_up", [["kv_cache"]]),
    ("reset_prefix_cache", [True]),
    ("remove_lora", [1]),
]
MOST_STEPS = 3000


def prompt(seed: int, length: int) -> list[int]:
    return [(7 * seed + 3 * i * i + 1) % SIZES["vocab_size"] for i in range(length)]


def pooling(name: str, token_ids: list[int], task: str, **fields: Any) -> EngineCoreRequest:
    message = core_request(name, token_ids, **fields)
    params = PoolingParams(task=task)
    return msgspec.structs.replace(message, sampling_params=None, pooling_params=params)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("disturbed")
    save_model(root / "model", random_tensors(0))
    for seed in (1, 2):
        save_adapter(root / f"a{seed}", seed, rank=2)
    return root


@pytest.fixture(scope="module")
def requests(model: Path) -> list[EngineCoreRequest]:
    first, second = (LoRARequest(f"a{i}", i, str(model / f"a{i}")) for i in (1, 2))
    values = torch.randn(20, SIZES["hidden_size"], generator=torch.Generator().manual_seed(3))
    embeds = Array("float32", tuple(values.shape), values.numpy().tobytes())
    long: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    changed = {"frequency_penalty": 1.5, "bad_words_token_ids": [[5, 6]], "logit_bias": {9: 2.0}}
    return [
        core_request("plain", prompt(1, 18), **long),
        core_request("adapter", prompt(1, 18), lora_request=first, **long),
        core_request("other adapter", prompt(2, 18), lora_request=second, priority=-1, **long),
        core_request("embeddings", [], prompt_embeds=embeds, priority=2, **long),
        core_request("logprobs of its prompt", prompt(3, 30), prompt_logprobs=2, **long),
        core_request("changed logits", prompt(4, 10), priority=1, **long, **changed),
        core_request("random", prompt(5, 10), temperature=1.0, seed=4, top_p=0.9, **long),
        pooling("mean", prompt(6, 40), "embed"),
        pooling("every token", prompt(7, 40), "token_embed", lora_request=first),
    ]


Answer = tuple[list[int], list[np.ndarray[Any, Any]], Any]


def answer(outputs: list[EngineCoreOutput]) -> Answer:
    """Tokens, all arrays of numbers, and how it ended."""
    tensors = [t for o in outputs if (t := o.new_prompt_logprobs_tensors) is not None]
    arrays = [t.logprobs for t in tensors]
    arrays += [o.pooling_output for o in outputs if o.pooling_output is not None]
    numbers = [np.frombuffer(array.data, np.float32) for array in arrays]
    return tokens(outputs), numbers, (outputs[-1].finish_reason, outputs[-1].error)


@pytest.fixture(scope="module")
def alone(model: Path, requests: list[EngineCoreRequest]) -> dict[str, Answer]:
    core = make_core(str(model / "model"), max_loras=2, **OPTIONS)
    return {r.request_id: answer(run(core, r)[r.request_id]) for r in requests}


def disturb(core: EngineCore, rng: random.Random) -> Future[Any] | None:
    """What an owner may ask at any time; a refusal changes nothing."""
    method, arguments = rng.choice(CALLS)
    try:
        result = core.call(method, arguments)
    except DiptychError:
        return None
    return result if isinstance(result, Future) else None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(16))
def test_contract_C15_a_disturbed_request_is_answered_as_if_it_were_alone(
    model: Path, requests: list[EngineCoreRequest], alone: dict[str, Answer], seed: int
) -> None:
    rng = random.Random(seed)
    core = make_core(
        str(model / "model"),
        num_blocks=rng.choice([14, 18, 30]),
        max_loras=rng.choice([1, 2]),
        max_num_seqs=rng.choice([2, 4, 8]),
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        async_scheduling=rng.choice([False, True]),
        **OPTIONS,
    )
    to_come = rng.sample(requests, len(requests))
    made: dict[str, list[EngineCoreOutput]] = {r.request_id: [] for r in requests}
    promised: list[Future[Any]] = []
    for _ in range(MOST_STEPS):
        if to_come and rng.random() < 0.3:
            core.add(to_come.pop(), CLIENT)
        if rng.random() < 0.06 and (future := disturb(core, rng)) is not None:
            promised.append(future)
        if rng.random() < 0.1:
            core.call("wake_up", [])
        started = core.start_step()
        if rng.random() < 0.05:  # messages are taken while the model computes, too
            core.call("reset_prefix_cache", [True])
        core.finish_step(*started)
        for output in core.take_outputs().get(CLIENT, []):
            made[output.request_id].append(output)
        core.deferred.settle()
        check_blocks(core.scheduler.pool)
        if all(outputs and outputs[-1].finished for outputs in made.values()):
            break
    else:
        pytest.fail("it does not come to an end")
    for name, (token_ids, numbers, end) in alone.items():
        made_tokens, made_numbers, made_end = answer(made[name])
        assert (name, made_tokens, made_end) == (name, token_ids, end)
        for ours, theirs in zip(made_numbers, numbers, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
    core.call("wake_up", [])
    step(core)
    core.deferred.settle()
    assert all(future.done() for future in promised)
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
    core.close()
