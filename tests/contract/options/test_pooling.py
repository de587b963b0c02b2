"""Pooling in an engine core: what comes out equals pooling computed directly in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_kit.core import CLIENT, DUMMY, VOCABULARY, core_request, generate, make_core, run, step
from engine_kit.pooling import hidden_states, runner_of
from model_kit.checkpoints import MODULES, merged, random_tensors, save_adapter, save_model
from torch import Tensor

from diptych_engine.control.core import EngineCore
from diptych_engine.serving.llm import LLM
from diptych_protocol import (
    Array,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LoRARequest,
    PoolingParams,
    SamplingParams,
)

HIDDEN = 32
BLOCK = 4
CHUNK = 7
"""Tokens of a step: no multiple of a block, so that chunks end anywhere."""
PROMPT = [(7 * i * i + 3) % VOCABULARY for i in range(23)]


@pytest.fixture(scope="module", params=["last", "mean"])
def core(request: pytest.FixtureRequest) -> EngineCore:
    return make_small_core(pooling=request.param)


def make_small_core(**options: Any) -> EngineCore:
    fields = {"block_size": BLOCK, "max_num_seqs": 4, "max_num_batched_tokens": CHUNK}
    return make_core(**{**fields, **options})


def pooling_request(name: str, prompt: list[int], **fields: Any) -> EngineCoreRequest:
    """Fields of the message, or else of PoolingParams."""
    params = {k: fields.pop(k) for k in PoolingParams.__struct_fields__ if k in fields}
    message = core_request(name, prompt, pooling_params=PoolingParams(**params), **fields)
    message.sampling_params = None
    return message


def tensor(array: Array | None) -> Tensor:
    assert array is not None
    return torch.tensor(array.tolist())


def pooled(core: EngineCore, prompt: list[int], **fields: Any) -> Tensor:
    [[output]] = run(core, pooling_request("one", prompt, **fields)).values()
    assert (output.finish_reason, output.error, output.new_token_ids) == (
        FinishReason.STOP,
        None,
        [],
    )
    return tensor(output.pooling_output)


def embedding(core: EngineCore, prompt: list[int]) -> Tensor:
    """What `embed` is to be, before cutting and scaling."""
    hidden = hidden_states(core, prompt)
    return hidden.mean(0) if core.description.pooling == "mean" else hidden[-1]


@pytest.mark.parametrize("length", [1, BLOCK, CHUNK, CHUNK + 1, len(PROMPT)])
def test_contract_C06_an_embedding_is_pooled_as_torch_would(core: EngineCore, length: int) -> None:
    """In one chunk and in several."""
    prompt = PROMPT[:length]
    expected = embedding(core, prompt)
    torch.testing.assert_close(pooled(core, prompt), F.normalize(expected, dim=0))
    torch.testing.assert_close(pooled(core, prompt, normalize=False), expected)
    other = embedding(core, [1, *prompt[1:]])
    assert (expected - other).norm() > 0.01, "vectors that are all alike would prove nothing"


def test_contract_C06_a_vector_without_numbers_is_an_error() -> None:
    core = make_small_core()
    next(runner_of(core).model.named_parameters())[1].fill_(torch.nan)
    [[output]] = run(core, pooling_request("one", PROMPT[:CHUNK])).values()
    assert (output.finish_reason, output.pooling_output) == (FinishReason.ERROR, None)
    assert "NaN" in (output.error or "")


def test_contract_C06_dimensions_are_cut_before_the_length_is_made_one(core: EngineCore) -> None:
    short = pooled(core, PROMPT, dimensions=5)
    torch.testing.assert_close(short, F.normalize(embedding(core, PROMPT)[:5], dim=0))
    assert short.shape == (5,)
    assert torch.linalg.vector_norm(short).item() == pytest.approx(1.0)


def test_contract_C06_token_embed_gives_every_hidden_state(core: EngineCore) -> None:
    expected = hidden_states(core, PROMPT)
    raw = pooled(core, PROMPT, task="token_embed", normalize=False)
    torch.testing.assert_close(raw, expected)
    unit = pooled(core, PROMPT, task="token_embed", dimensions=8)
    torch.testing.assert_close(unit, F.normalize(expected[:, :8], dim=1))


def test_contract_C06_a_warm_prefix_cache_changes_no_vector(core: EngineCore) -> None:
    """Only the last token's embedding may skip what is cached."""
    prompt = [*PROMPT, 9, 8, 7]
    generate(core, prompt, max_tokens=2)
    torch.testing.assert_close(pooled(core, prompt), F.normalize(embedding(core, prompt), dim=0))
    rows = pooled(core, prompt, task="token_embed", normalize=False)
    torch.testing.assert_close(rows, hidden_states(core, prompt))
    [[output]] = run(core, pooling_request("again", prompt)).values()
    cached = (len(prompt) - 1) // BLOCK * BLOCK if core.description.pooling == "last" else 0
    assert output.num_cached_tokens == cached
    assert core.stats().queued_prompt_tokens == 0


def test_contract_C06_the_cache_is_filled_by_pooling_too(core: EngineCore) -> None:
    prompt = [11, *PROMPT]
    pooled(core, prompt, task="token_embed")
    [outputs] = run(core, core_request("warm", prompt, max_tokens=3)).values()
    assert outputs[0].num_cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
    alone = generate(make_small_core(pooling=core.description.pooling), prompt, max_tokens=3)
    assert [t for output in outputs for t in output.new_token_ids] == alone


def test_contract_C06_pooling_and_generation_share_steps(core: EngineCore) -> None:
    """Each gets what it gets alone."""
    prompts = [PROMPT[i : i + 9 + i] for i in range(4)]
    texts = {n: generate(core, prompts[n], max_tokens=6, temperature=1.0, seed=n) for n in (1, 3)}
    requests = [
        pooling_request("0", prompts[0]),
        core_request("1", prompts[1], max_tokens=6, temperature=1.0, seed=1),
        pooling_request("2", prompts[2], task="token_embed", normalize=False),
        core_request("3", prompts[3], max_tokens=6, temperature=1.0, seed=3),
    ]
    outputs = run(core, *requests)
    torch.testing.assert_close(
        tensor(outputs["0"][0].pooling_output), F.normalize(embedding(core, prompts[0]), dim=0)
    )
    torch.testing.assert_close(
        tensor(outputs["2"][0].pooling_output), hidden_states(core, prompts[2])
    )
    for n, expected in texts.items():
        assert [t for output in outputs[str(n)] for t in output.new_token_ids] == expected


def test_contract_C06_a_prompt_may_fill_the_whole_context() -> None:
    core = make_small_core(max_model_len=len(PROMPT), pooling="mean")
    expected = F.normalize(embedding(core, PROMPT), dim=0)
    torch.testing.assert_close(pooled(core, PROMPT), expected)
    [[refused]] = run(core, pooling_request("long", [*PROMPT, 1])).values()
    assert refused.finish_reason is FinishReason.ERROR
    assert "do not fit" in str(refused.error)


def test_contract_C06_an_abort_between_two_chunks_frees_everything(core: EngineCore) -> None:
    core.add(pooling_request("gone", PROMPT, cache_salt="cold"), CLIENT)
    assert step(core) == []
    assert core.scheduler.requests["gone"].num_computed_tokens in range(1, len(PROMPT))
    core.abort(["gone"])
    [output] = [o for made in core.take_outputs().values() for o in made]
    assert (output.finish_reason, output.pooling_output) == (FinishReason.ABORT, None)
    assert core.stats().blocks_free == core.stats().blocks_total
    prompt = PROMPT[::-1]
    torch.testing.assert_close(pooled(core, prompt), F.normalize(embedding(core, prompt), dim=0))


def test_contract_C06_a_preempted_prompt_accumulates_anew(core: EngineCore) -> None:
    requests = [
        pooling_request("a", PROMPT, cache_salt="x"),
        pooling_request("b", PROMPT, task="token_embed"),
    ]
    for request in requests:
        core.add(request, CLIENT)
    outputs: list[EngineCoreOutput] = []
    victims: set[str] = set()
    for _ in range(20):
        outputs += step(core)
        running = core.scheduler.running
        under_way = {one.request_id for one in running if one.num_computed_tokens > CHUNK}
        if under_way - victims:
            victims |= under_way
            core.scheduler.preempt_all()
    vectors = {output.request_id: tensor(output.pooling_output) for output in outputs}
    torch.testing.assert_close(vectors["a"], F.normalize(embedding(core, PROMPT), dim=0))
    torch.testing.assert_close(vectors["b"], F.normalize(hidden_states(core, PROMPT), dim=1))
    assert victims == {"a", "b"}


def test_contract_C06_what_is_preempted_while_a_step_runs_is_pooled_later(
    core: EngineCore,
) -> None:
    """Even if that step completed its prompt."""
    prompt = [4, *PROMPT[:4]]
    core.add(pooling_request("late", prompt, cache_salt="late"), CLIENT)
    plan, result = core.start_step()
    core.scheduler.preempt_all()
    core.finish_step(plan, result)
    assert core.take_outputs() == {}
    [output] = step(core)
    expected = F.normalize(embedding(core, prompt), dim=0)
    torch.testing.assert_close(tensor(output.pooling_output), expected)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"task": "classify"}, "embed, token_embed"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": HIDDEN + 1}, "at most 32"),
        ({"prompt_token_ids": []}, "prompt_token_ids or prompt_embeds"),
        ({"prompt_token_ids": [VOCABULARY]}, "token ids"),
        ({"generated_token_ids": [1]}, "generates nothing"),
    ],
)
def test_contract_C06_a_request_that_cannot_work_is_told_why(
    core: EngineCore, fields: dict[str, Any], complaint: str
) -> None:
    message = pooling_request("bad", [1, 2], **fields)
    [[output]] = run(core, message).values()
    assert output.finish_reason is FinishReason.ERROR
    assert complaint in str(output.error)


def test_contract_C06_a_hand_off_of_a_pooling_request_is_refused(core: EngineCore) -> None:
    message = pooling_request("pd", PROMPT)
    message.sampling_params = SamplingParams(
        extra_args={"kv_transfer_params": {"do_remote_decode": True}}
    )
    [[output]] = run(core, message).values()
    assert output.finish_reason is FinishReason.ERROR
    assert "kv_transfer_params" in str(output.error)


def test_contract_C06_an_adapter_s_embeddings_are_those_of_merged_weights(tmp_path: Path) -> None:
    base = random_tensors(0)
    save_model(tmp_path / "base", base)
    adapter = save_adapter(tmp_path / "adapter", 1, rank=2, modules=list(MODULES))
    save_model(tmp_path / "merged", merged(base, adapter))
    plain, whole = (make_small_core(model=str(tmp_path / name)) for name in ("base", "merged"))
    expected = pooled(whole, PROMPT)
    assert not torch.allclose(pooled(plain, PROMPT), expected, atol=0.01)
    request = LoRARequest("a", 1, str(tmp_path / "adapter"))
    made = pooled(plain, PROMPT, lora_request=request)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)


def test_contract_C06_embeddings_without_an_event_loop() -> None:
    """The synchronous engine has them too."""
    core = make_small_core()
    prompts = [PROMPT[:n] for n in (1, 9, 20)]
    with LLM(DUMMY, num_blocks=64, num_threads=1, max_num_seqs=4) as llm:
        outputs = llm.embed(prompts, PoolingParams(dimensions=6))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        torch.testing.assert_close(tensor(output.outputs.data), pooled(core, prompt, dimensions=6))


def test_contract_C25_a_core_names_what_it_can_do(core: EngineCore) -> None:
    assert core.description.tasks == ("generate", "embed", "token_embed")
