"""SmolLM2-135M from its GGUF file computes what transformers computes with the same weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers  # its classes are imported when they are used
from engine_kit.core import core_request, make_core, run
from gguf.quants import dequantize

from diptych_engine.execution.runner import ModelRunner
from diptych_engine.models.loader import published_name
from diptych_engine.scheduling.block_pool import BlockPool
from diptych_engine.scheduling.request import Request
from diptych_engine.scheduling.scheduler import Scheduler
from diptych_frontend.model_files.families import FAMILIES
from diptych_frontend.model_files.model_source import ModelSource, resolve_model
from diptych_frontend.text.tokenizer_files import load_tokenizer
from diptych_kernels.packed_product import is_available
from diptych_protocol import EngineConfig, FinishReason, SamplingParams

NUM_PROMPTS, NUM_OUTPUT = 20, 64
TEXT = Path(__file__).parents[3] / "benchmarks" / "data" / "alice.txt"
TIE = 1e-3
"""Logits closer than this may come out in either order."""


@pytest.fixture(scope="module")
def source(smollm2: str) -> ModelSource:
    return resolve_model(smollm2)


@pytest.fixture(scope="module")
def reference(source: ModelSource) -> Any:
    """The Hugging Face model with the file's weights, de-quantised and renamed here."""
    config = source.config
    hf_config = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(hf_config)
    model.load_state_dict(state_dict(source), assign=True)
    model.tie_weights()
    # Buffers are not part of the state: build RoPE's again, off the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(hf_config)
    return model.eval()


def state_dict(source: ModelSource) -> dict[str, torch.Tensor]:
    assert source.path is not None
    file = np.memmap(source.path, np.uint8, "r")
    state = {}
    for name, tensor in source.tensors().items():
        raw = file[tensor.offset : tensor.offset + tensor.nbytes].reshape(*tensor.shape[:-1], -1)
        values = np.array(dequantize(raw, tensor.type))
        if "attn_q." in name or "attn_k." in name:  # undo the converter's order of rows
            pairs = values.reshape(-1, source.config.head_dim // 2, 2, values.shape[1])
            values = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
        state[published_name(name, FAMILIES["llama"])] = torch.from_numpy(values)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    return state


def hf_logits(reference: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([token_ids])).logits[0]
    return logits


def prompts(vocab_size: int) -> list[list[int]]:
    """Prompts of 1 to 96 tokens; several begin alike, so that prefixes are shared."""
    generator = np.random.default_rng(0)
    common = generator.integers(0, vocab_size, 48).tolist()
    lengths = np.linspace(1, 48, NUM_PROMPTS).astype(int)
    return [
        (common if index % 3 == 0 else []) + generator.integers(0, vocab_size, length).tolist()
        for index, length in enumerate(lengths)
    ]


def test_logits_equal_transformers(
    source: ModelSource, reference: Any, lone_sequence: Callable[..., Any]
) -> None:
    """For a whole prefill, for one in chunks, and for decodes behind a cached prefix."""
    token_ids = max(prompts(source.config.vocab_size), key=len)
    expected = hf_logits(reference, token_ids)
    scale = float(expected.abs().max())
    sequence = lone_sequence(source, 112)
    total = len(token_ids)
    for sizes in ([total], [7, 20, total - 27], [total - 3, 1, 1, 1]):
        actual = sequence.logits_in_chunks(token_ids, sizes)
        assert float((actual - expected).abs().max()) < 1e-3 * scale
        sequence.cache.fill_(1e3)  # the next round must not live on this one's keys


@pytest.mark.skipif(not is_available(), reason="nothing is packed here")
def test_packed_weights_keep_the_quality_of_the_file(
    source: ModelSource, reference: Any, lone_sequence: Callable[..., Any]
) -> None:
    """For a text in chunks of several sizes."""
    tokenizer = load_tokenizer(source)
    assert tokenizer is not None
    token_ids = tokenizer.encode(TEXT.read_text())[:402]
    sequence = lone_sequence(source, 416, packs=True)
    assert all(packable.linear.packed for packable in sequence.model.packables)
    actual = sequence.logits_in_chunks(token_ids, [64] * 6 + [16, 1, 1])
    expected = hf_logits(reference, token_ids)

    assert float((actual - expected).norm() / expected.norm()) < 0.05
    following = torch.tensor(token_ids[1:])[:, None]
    lost = [
        -float(logits[:-1].log_softmax(-1).gather(1, following).mean())
        for logits in (actual, expected)
    ]
    assert abs(math.exp(lost[0] - lost[1]) - 1) < 0.01  # perplexities
    assert float((actual.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.95


@pytest.mark.slow
def test_greedy_output_equals_transformers(source: ModelSource, reference: Any) -> None:
    """20 prompts x 64 tokens, batched continuously in chunks, under preemption and prefix hits.

    The reference reads each finished output once; its choice at every position must be ours.
    """
    config = EngineConfig(
        model=source.uri, max_num_seqs=NUM_PROMPTS, max_num_batched_tokens=64, num_threads=1,
        max_model_len=256, num_blocks=110, weight_packing="none",
    )  # fmt: skip
    runner = ModelRunner(config, source)
    scheduler = Scheduler(
        BlockPool(runner.num_blocks), config.block_size, config.max_num_seqs,
        config.max_num_batched_tokens, config.max_num_waiting,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    requests = [
        Request(
            request_id=str(index), client=b"", params=params, token_ids=list(prompt),
            num_prompt_tokens=len(prompt), eos_token_id=None,
            max_total_tokens=len(prompt) + NUM_OUTPUT, seed=0,
        )
        for index, prompt in enumerate(prompts(source.config.vocab_size))
    ]  # fmt: skip
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.schedule()
        for output in scheduler.update(plan, runner.execute(plan)):
            if output.request.finish_reason is not None:
                scheduler.finish(output.request, FinishReason.LENGTH)
    assert scheduler.stats.num_preemptions > 0
    assert scheduler.stats.prefix_cache_hits > 0

    exact = 0
    for request in requests:
        logits = hf_logits(reference, request.token_ids)[request.num_prompt_tokens - 1 : -1]
        ours = torch.tensor(request.token_ids[request.num_prompt_tokens :])
        best = logits.max(-1)
        lost = best.values - logits.gather(1, ours[:, None]).squeeze(1)
        assert len(ours) == NUM_OUTPUT
        assert float(lost.max()) < TIE
        exact += int((best.indices == ours).sum())
    assert exact >= 0.99 * NUM_PROMPTS * NUM_OUTPUT


def test_contract_B06_prompt_logprobs_equal_log_softmax_of_transformers(
    source: ModelSource, reference: Any
) -> None:
    """In three chunks, with the whole prompt in the prefix cache: it is computed all the same."""
    core = make_core(source.uri, max_num_batched_tokens=32, max_model_len=256)
    prompt = np.random.default_rng(1).integers(0, source.config.vocab_size, 80).tolist()
    warm_up, again = (core_request(name, prompt, max_tokens=1) for name in ("first", "again"))
    run(core, warm_up)
    [cached] = run(core, again)["again"]
    assert cached.num_cached_tokens == 64
    steps_before = core.scheduler.stats.steps

    outputs = run(core, core_request("r", prompt, max_tokens=3, prompt_logprobs=5))["r"]

    assert core.scheduler.stats.steps - steps_before == 3 + 2
    first, *later = outputs
    assert first.num_cached_tokens == 0
    assert [o.new_prompt_logprobs_tensors for o in later] == [None, None]
    tensors = first.new_prompt_logprobs_tensors
    assert tensors is not None
    expected = hf_logits(reference, prompt)[:-1].log_softmax(-1)
    token_ids = torch.tensor(tensors.logprob_token_ids.tolist())
    assert token_ids[:, 0].tolist() == prompt[1:]
    actual = torch.tensor(tensors.logprobs.tolist())
    assert actual.shape == (79, 6)
    torch.testing.assert_close(actual, expected.gather(1, token_ids), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(actual[:, 1:], expected.topk(5).values, atol=1e-3, rtol=1e-3)
    ranks = (expected > expected.gather(1, token_ids[:, :1])).sum(-1) + 1
    assert (
        float((torch.tensor(tensors.selected_token_ranks.tolist()) == ranks).float().mean()) > 0.9
    )
