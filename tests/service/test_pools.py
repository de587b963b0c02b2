"""A prefill and a decode engine behind the router's client: real processes, model and UCX."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from service_kit import Pair, generate

from diptych_protocol import (
    InvalidRequestError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea, there lived an old fisherman who " * 6,
    "1 2 3 4 5 6 7",
    "Water boils at",
    "A list of colours: red, green,",
]


@pytest.mark.one_in(2, "params", "prompt")
@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.9, "seed": 7, "top_p": 0.9},
        {"temperature": 1.2, "seed": 1, "top_k": 20, "frequency_penalty": 0.5},
    ],
    ids=["greedy", "seeded top-p", "seeded top-k with penalty"],
)
async def test_the_pools_answer_like_one_engine_token_for_token(
    pair: Pair, prompt: str, params: dict[str, Any]
) -> None:
    through_pools = await generate(pair.pools, prompt, max_tokens=10, **params)
    alone = await generate(pair.decode, prompt, max_tokens=10, **params)
    assert through_pools.outputs[0].token_ids == alone.outputs[0].token_ids
    assert through_pools.outputs[0].text == alone.outputs[0].text


async def test_decode_computes_nothing_of_the_prompt(pair: Pair) -> None:
    before = await pair.decode.refresh_stats()
    prompt = "Every block of this prompt must come through the hinge and not be computed. " * 5
    output = await generate(pair.pools, prompt)
    after = await pair.decode.refresh_stats()
    assert after.prompt_tokens_computed == before.prompt_tokens_computed
    assert after.remote_kv_tokens - before.remote_kv_tokens == len(output.prompt_token_ids)
    assert before.kv_transfer is not None
    assert after.kv_transfer is not None
    blocks = after.kv_transfer.blocks_received - before.kv_transfer.blocks_received
    assert blocks == -(-len(output.prompt_token_ids) // 16)
    assert after.kv_transfer.transport


async def test_what_decode_remembers_does_not_travel_again(pair: Pair) -> None:
    prompt = "A prefix that is sent twice travels once. " * 8
    await generate(pair.pools, prompt)
    before = await pair.decode.refresh_stats()
    await generate(pair.pools, prompt)
    after = await pair.decode.refresh_stats()
    assert before.kv_transfer is not None
    assert after.kv_transfer is not None
    assert after.kv_transfer.blocks_received - before.kv_transfer.blocks_received <= 1


async def early_loads(pair: Pair) -> tuple[int, int, int]:
    """How many loads D began on an announcement, and how many came to something and to nothing."""
    transfer = (await pair.decode.refresh_stats()).kv_transfer
    assert transfer is not None
    return transfer.early_loads, transfer.early_loads_adopted, transfer.early_loads_dropped


async def test_decode_is_told_while_prefill_computes(pair: Pair, eventually: Any) -> None:
    begun, adopted, dropped = await early_loads(pair)
    await generate(pair.pools, "What is announced has a place before it comes. " * 60)
    assert await early_loads(pair) == (begun + 1, adopted + 1, dropped)
    await eventually(pair.all_blocks_free)


@pytest.mark.parametrize("end", ["the user leaves", "its first token ends it"])
async def test_what_was_announced_and_does_not_come_leaves_decode_empty(
    pair: Pair, end: str, eventually: Any
) -> None:
    begun, adopted, dropped = await early_loads(pair)
    if end == "the user leaves":
        task = asyncio.create_task(generate(pair.pools, "Nobody waits for the end of this. " * 250))
        await eventually(lambda: told(pair))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    else:
        prompt = "This ends as soon as it begins. " * 60
        whole = await generate(pair.prefill, prompt, max_tokens=1)
        await generate(pair.pools, prompt, stop_token_ids=whole.outputs[0].token_ids)

    async def is_dropped() -> bool:  # D may still have to hear of it
        return await early_loads(pair) == (begun + 1, adopted, dropped + 1)

    await eventually(is_dropped)
    await eventually(pair.all_blocks_free)


async def told(pair: Pair) -> bool:
    """D keeps room for something that is yet to come."""
    transfer = (await pair.decode.refresh_stats()).kv_transfer
    return transfer is not None and transfer.early_loads_now > 0


async def test_many_requests_at_once_finish_and_leave_no_block(pair: Pair, eventually: Any) -> None:
    outputs = await asyncio.gather(
        *(
            generate(pair.pools, f"Story number {i}: " + "so " * i, max_tokens=12, ignore_eos=True)
            for i in range(16)
        )
    )
    assert all(len(o.outputs[0].token_ids) == 12 for o in outputs)
    await eventually(pair.all_blocks_free)


async def test_n_answers_with_their_own_seeds(pair: Pair) -> None:
    output = await generate(pair.pools, "Tell me", n=3, temperature=1.0, seed=5)
    assert [o.index for o in output.outputs] == [0, 1, 2]
    second = await generate(pair.pools, "Tell me", temperature=1.0, seed=6)
    assert output.outputs[1].token_ids == second.outputs[0].token_ids


async def test_contract_C05_a_form_begun_by_prefill_is_finished_by_decode(pair: Pair) -> None:
    """The decode engine finds its place in the grammar from the token that it is handed."""
    form = StructuredOutputsParams(regex="[A-Z][a-z]{2,6} (is|has) [0-9]{2}")
    options: dict[str, Any] = {"structured_outputs": form, "max_tokens": 30, "seed": 3}
    for temperature in (0.0, 1.0):
        through_pools = await generate(
            pair.pools, PROMPTS[0], temperature=temperature, top_p=0.9, **options
        )
        [answer] = through_pools.outputs
        assert re.fullmatch(form.regex or "", answer.text)
        assert answer.finish_reason == "stop"
        alone = await generate(
            pair.decode, PROMPTS[0], temperature=temperature, top_p=0.9, **options
        )
        assert answer.token_ids == alone.outputs[0].token_ids


async def test_contract_C05_bad_words_begun_by_prefill_are_kept_out_by_decode(pair: Pair) -> None:
    plain = (await generate(pair.pools, PROMPTS[4], max_tokens=6)).outputs[0].token_ids
    output = await generate(pair.pools, PROMPTS[4], max_tokens=6, bad_words_token_ids=[plain[:2]])
    made = output.outputs[0].token_ids
    assert made[0] == plain[0]
    assert made[1] != plain[1]


LIST = "A list of colours: red, green, blue, red, green, blue, red,"


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": {28: -100.0, 2654: -5.0}},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"min_tokens": 6, "stop_token_ids": [28, 260]},
        {"logprobs": 3},
        {"n": 2, "structured_outputs": StructuredOutputsParams(regex="[a-z]{3,8}, [a-z]{3,8}")},
        {
            "structured_outputs": StructuredOutputsParams(choice=["crimson", "cobalt", "cyan"]),
            "logit_bias": {28: 5.0},
            "frequency_penalty": 1.0,
        },
    ],
    ids=["bias", "penalties", "min_tokens", "logprobs", "n answers of a form", "form and bias"],
)
async def test_contract_B06_options_hold_across_a_hand_off(
    pair: Pair, params: dict[str, Any]
) -> None:
    """Decode finds penalties and grammars where they stand, and computes nothing twice."""
    before = await pair.decode.refresh_stats()
    through_pools = await generate(pair.pools, LIST, max_tokens=10, **params)
    after = await pair.decode.refresh_stats()
    assert after.prompt_tokens_computed == before.prompt_tokens_computed
    alone = await generate(pair.decode, LIST, max_tokens=10, **params)
    plain = await generate(pair.decode, LIST, max_tokens=10)
    for ours, theirs in zip(through_pools.outputs, alone.outputs, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        assert ours.stop_reason == theirs.stop_reason
        assert len(ours.logprobs or ()) == len(theirs.logprobs or ())
    if "logprobs" not in params:
        assert through_pools.outputs[0].token_ids != plain.outputs[0].token_ids


async def test_contract_B06_prompt_logprobs_come_from_prefill(pair: Pair) -> None:
    """Computed there, cached or not, and told once; decode computes nothing of the prompt."""
    prompt = PROMPTS[2]
    await generate(pair.pools, prompt)
    before = await pair.decode.refresh_stats()
    output = await generate(pair.pools, prompt, max_tokens=4, prompt_logprobs=1)
    after = await pair.decode.refresh_stats()
    assert after.prompt_tokens_computed == before.prompt_tokens_computed
    alone = await generate(pair.decode, prompt, max_tokens=4, prompt_logprobs=1)
    assert output.prompt_logprobs is not None
    assert alone.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for ours, theirs in zip(output.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
        assert ours is not None
        assert theirs is not None
        assert {t: e.logprob for t, e in ours.items()} == pytest.approx(
            {t: e.logprob for t, e in theirs.items()}, abs=1e-3
        )


async def test_a_stop_string_ends_the_request_on_both_sides(pair: Pair, eventually: Any) -> None:
    alone = await generate(pair.decode, "One, two, three,", max_tokens=32)
    stop = alone.outputs[0].text[8:12]
    stopped = await generate(pair.pools, "One, two, three,", max_tokens=32, stop=[stop])
    assert stopped.outputs[0].finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == stop
    assert alone.outputs[0].text.startswith(stopped.outputs[0].text)
    assert stop not in stopped.outputs[0].text
    await eventually(pair.all_blocks_free)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_the_shortest_answers(pair: Pair, max_tokens: int, eventually: Any) -> None:
    output = await generate(pair.pools, "Short", max_tokens=max_tokens)
    assert len(output.outputs[0].token_ids) == max_tokens
    assert output.outputs[0].finish_reason == "length"
    await eventually(pair.all_blocks_free)


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_user_who_leaves_frees_everything(pair: Pair, after: int, eventually: Any) -> None:
    """Before the first token, right after it (during the hand-off), and while decoding."""
    params = SamplingParams(
        temperature=0, max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    stream = pair.pools.generate("A very long story about leaving. " * 20, params, "leaver")

    async def read() -> None:
        seen = 0
        async for _ in stream:
            seen += 1
            if seen >= after > 0:
                return

    reader = asyncio.create_task(read())
    if after == 0:
        await asyncio.sleep(0.05)
        reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await stream.aclose()
    assert len(pair.pools.output_processor.answers) == 0
    await eventually(pair.all_blocks_free)


NAMING_NO_LEASE: list[Any] = [
    {},
    {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [1],
     "remote_host": "10.0.0.1", "remote_port": 5600},
    None,
    {"lease_id": 3},
    {"lease_id": object()},
]  # fmt: skip
"""The second is all that vLLM's engines say."""


async def test_contract_C08_a_rejected_hand_off_frees_prefill_at_once(
    pair: Pair, eventually: Any
) -> None:
    """Another project's router prefilled, and its decode engine refused the request."""
    params = await prefill_only(pair, "This prompt is prefilled and then refused. " * 4)
    stats = await pair.prefill.refresh_stats()
    assert stats.blocks_free < stats.blocks_total
    with pytest.raises(InvalidRequestError, match="rank 1 is not one of the 1"):
        await pair.decode.reject_kv_transfer("r", params, data_parallel_rank=1)
    for told in NAMING_NO_LEASE:
        await pair.decode.notify_kv_transfer_request_rejected("r", told)
        await pair.pools.notify_kv_transfer_request_rejected("r", told)
    await pair.decode.notify_kv_transfer_request_rejected("r", params, data_parallel_rank=1)
    assert not await pair.all_blocks_free()
    counted = (await pair.decode.refresh_stats()).kv_transfer
    assert counted is not None
    assert counted.rejections_ignored == 3, "the others have another type, and nobody is asked"
    await pair.decode.notify_kv_transfer_request_rejected("r", params, data_parallel_rank=0)
    await eventually(pair.all_blocks_free)
    await pair.decode.notify_kv_transfer_request_rejected("r", params)  # harmless


async def test_a_lease_that_nobody_opens_expires(pair: Pair, eventually: Any) -> None:
    await prefill_only(pair, "Nobody will ever read this cache. " * 4)
    assert not await pair.all_blocks_free()
    await eventually(pair.all_blocks_free)
    stats = await pair.prefill.refresh_stats()
    assert stats.kv_transfer is not None
    assert stats.kv_transfer.leases_expired >= 1


async def test_another_router_may_drive_the_same_hand_off(pair: Pair) -> None:
    """Only the public vocabulary: prefill with do_remote_decode, decode with what came back."""
    prompt = "Any router may drive the two engines of a pair. " * 3
    params = await prefill_only(pair, prompt)
    before = await pair.decode.refresh_stats()
    output = await generate(pair.decode, prompt, extra_args={"kv_transfer_params": params})
    after = await pair.decode.refresh_stats()
    assert after.prompt_tokens_computed == before.prompt_tokens_computed
    alone = await generate(pair.prefill, prompt)
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids


async def test_a_lease_serves_no_other_prompt(pair: Pair, eventually: Any) -> None:
    victim = "The secret word of this conversation is swordfish, remember it. " * 3
    params = await prefill_only(pair, victim)
    other = [t + 1 for t in pair.pools.renderer.render_prompt(victim)["prompt_token_ids"]]
    with pytest.raises(Exception, match="another prompt"):
        await generate(pair.decode, other, extra_args={"kv_transfer_params": params})
    await give_back(pair, params, eventually)


async def test_a_forged_lease_is_an_error_not_an_answer(pair: Pair, eventually: Any) -> None:
    prompt = "Forgers guess block numbers, but not leases. " * 3
    params = await prefill_only(pair, prompt)
    forged = {**params, "lease_id": "0" * 32}
    with pytest.raises(Exception, match="has signed this"):
        await generate(pair.decode, prompt, extra_args={"kv_transfer_params": forged})
    await give_back(pair, params, eventually)


async def test_a_prompt_longer_than_the_model_is_refused(pair: Pair) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await generate(pair.pools, "far too long " * 5000)
    assert caught.value.code == "context_length_exceeded"


async def give_back(pair: Pair, params: dict[str, Any], eventually: Any) -> None:
    """End a lease that is still there, and nothing else holds a block."""
    assert not await pair.all_blocks_free()
    await pair.decode.notify_kv_transfer_request_rejected("r", params)
    await eventually(pair.all_blocks_free)


async def prefill_only(pair: Pair, prompt: str) -> dict[str, Any]:
    """What a prefill engine answers to somebody else's router."""
    output = await generate(
        pair.prefill,
        prompt,
        max_tokens=1,
        extra_args={"kv_transfer_params": {"do_remote_decode": True}},
    )
    params = output.kv_transfer_params
    assert params is not None
    assert params["do_remote_prefill"]
    return params
