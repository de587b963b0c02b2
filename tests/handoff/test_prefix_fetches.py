"""An engine that lacks a prefix fetches it from another that remembers it, over real UCX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_kit.core import CLIENT, tokens
from engine_kit.handoff import (
    BLOCK,
    Engine,
    LocalRouter,
    drive,
    engines,
    prompt_of,
    request,
    save_toy,
)
from waits import Deadline

from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    KVTransferParams,
    PoolingParams,
)
from diptych_protocol.block_hashes import extend_block_hashes

PROMPT = prompt_of(3, 38)
NUM_CACHED = 36
"""Tokens in the full blocks of the prompt."""
ANSWER: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_toy(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(scope="module")
def pool(model: str) -> Iterator[list[Engine]]:
    """Two prefill engines, a decode engine, and one that serves as the measure."""
    small = {"max_num_batched_tokens": 16}
    with engines(model, p0=small, p1=small, d=small, alone=small) as made:
        yield made


@pytest.fixture(autouse=True)
def _forget(pool: list[Engine]) -> Iterator[None]:
    yield
    for engine in pool:
        engine.forget_prefixes()


class Change:
    """What an engine has done since."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._computed, self._hinge = engine.prompt_tokens_computed, self._now()

    def _now(self) -> Any:
        return msgspec.structs.replace(self._engine.hinge)

    @property
    def computed(self) -> int:
        return self._engine.prompt_tokens_computed - self._computed

    def __getattr__(self, name: str) -> int:
        change: int = getattr(self._now(), name) - getattr(self._hinge, name)
        return change

    @property
    def fetches(self) -> tuple[int, int, int, int]:
        """Asked, fetched, fallen back, tokens."""
        return (
            self.prefix_fetches,
            self.prefix_fetches_completed,
            self.prefix_fetches_failed,
            self.prefix_tokens_fetched,
        )


def source_of(holder: Engine, num_tokens: int, **changes: Any) -> KVTransferParams:
    """What a router tells of the engine that remembers a prefix."""
    [seat] = LocalRouter(None, decode=[holder]).fleet.of("decode")
    assert seat.lends is not None
    return msgspec.structs.replace(seat.lends, remote_num_tokens=num_tokens, **changes)


def fetching(name: str, holder: Engine, prompt: list[int], **fields: Any) -> EngineCoreRequest:
    source = fields.pop("source", None) or source_of(holder, len(prompt))
    message = request(name, prompt, **{**ANSWER, **fields})
    return msgspec.structs.replace(message, prefix_source=source)


def answer(engine: Engine, prompt: list[int] = PROMPT, **fields: Any) -> list[int]:
    """Have an engine compute a prompt, so that it remembers it."""
    return tokens(drive(engine, request(f"of {engine.name}", prompt, **{**ANSWER, **fields})))


def at_rest(*engines: Engine) -> None:
    LocalRouter(None, decode=engines).settle()


def test_a_fetched_prefix_is_not_computed_and_is_remembered(pool: list[Engine]) -> None:
    holder, taker, _, alone = pool
    expected = answer(alone)
    assert answer(holder) == expected
    done, lent = Change(taker), Change(holder)
    outputs = drive(taker, fetching("q", holder, PROMPT), holder)
    assert tokens(outputs) == expected
    assert outputs[0].num_cached_tokens == NUM_CACHED, "its user need not care who remembered it"
    assert done.computed == len(PROMPT) - NUM_CACHED
    assert done.fetches == (1, 1, 0, NUM_CACHED)
    assert (lent.prefixes_lent, lent.leases_released) == (1, 1)
    assert done.blocks_received == lent.blocks_sent == NUM_CACHED // BLOCK
    again = Change(taker)
    assert answer(taker) == expected
    assert again.computed == len(PROMPT) - NUM_CACHED, "it remembers what it has fetched"
    at_rest(holder, taker)


def test_a_prefetch_fetches_and_computes_nothing(pool: list[Engine]) -> None:
    holder, taker, *_ = pool
    answer(holder)
    done = Change(taker)
    ahead = msgspec.structs.replace(fetching("q", holder, PROMPT), prefetches=True)
    [output] = drive(taker, ahead, holder)
    assert (output.num_cached_tokens, output.new_token_ids) == (NUM_CACHED, [])
    assert (done.computed, done.fetches) == (0, (1, 1, 0, NUM_CACHED))
    answer(taker)
    assert done.computed == len(PROMPT) - NUM_CACHED, "it was here for the turn"
    at_rest(holder, taker)


@pytest.mark.parametrize("num_here", [4, 16, 36])
def test_only_what_is_lacked_is_fetched(pool: list[Engine], num_here: int) -> None:
    holder, taker, _, alone = pool
    expected = answer(alone)
    answer(holder)
    answer(taker, PROMPT[: num_here + 1], max_tokens=1)
    done = Change(taker)
    assert tokens(drive(taker, fetching("q", holder, PROMPT), holder)) == expected
    assert done.computed == len(PROMPT) - NUM_CACHED
    fetched = NUM_CACHED - num_here
    assert done.fetches == ((1, 1, 0, fetched) if fetched else (0, 0, 0, 0))
    at_rest(holder, taker)


@pytest.mark.parametrize("num_left", [0, 4, 20])
def test_a_holder_that_has_forgotten_a_part_lends_the_rest(
    pool: list[Engine], num_left: int
) -> None:
    holder, taker, _, alone = pool
    expected = answer(alone)
    if num_left:
        answer(holder, PROMPT[: num_left + 1], max_tokens=1)
    done = Change(taker)
    assert tokens(drive(taker, fetching("q", holder, PROMPT), holder)) == expected
    assert done.computed == len(PROMPT) - num_left
    assert done.fetches == ((1, 1, 0, num_left) if num_left else (1, 0, 1, 0))
    at_rest(holder, taker)


@pytest.mark.parametrize(
    "fields",
    [{"cache_salt": "mine"}, {"prompt_token_ids": [*prompt_of(4, 1), *PROMPT[1:]]}],
    ids=["another salt", "another first token"],
)
def test_kv_of_another_prefix_is_never_taken(pool: list[Engine], fields: dict[str, Any]) -> None:
    holder, taker, _, alone = pool
    answer(holder)
    expected = answer(alone, **fields)
    done = Change(taker)
    assert tokens(drive(taker, fetching("q", holder, PROMPT, **fields), holder)) == expected
    assert done.computed == len(PROMPT)
    assert done.fetches == (1, 0, 1, 0)


def test_prefill_fetches_from_prefill_and_hands_off(pool: list[Engine]) -> None:
    """A hot system prompt: the fetched blocks travel on, with those that P computes."""
    holder, taker, decode, alone = pool
    expected = answer(alone)
    answer(holder)
    router = LocalRouter(None, prefill=[taker], decode=[decode])
    router.fleet.fetch_from(holder)
    done, received = Change(taker), Change(decode)
    [outputs] = router.run(request("q", PROMPT, **ANSWER))
    assert outputs[-1].outputs[0].token_ids == expected
    assert done.computed == len(PROMPT) - NUM_CACHED
    assert done.fetches == (1, 1, 0, NUM_CACHED)
    assert (received.computed, received.early_loads_adopted) == (0, 1)


def test_prefill_fetches_the_conversation_so_far_from_decode(pool: list[Engine]) -> None:
    """The next turn goes to another prefill engine: decode has the prompt and the answer."""
    first, second, decode, alone = pool
    turns = LocalRouter(None, prefill=[first], decode=[decode])
    [outputs] = turns.run(request("turn 1", PROMPT, **ANSWER))
    so_far = [*PROMPT, *outputs[-1].outputs[0].token_ids]
    prompt = [*so_far, *prompt_of(5, 9)]
    expected = answer(alone, prompt)
    router = LocalRouter(None, prefill=[second], decode=[decode])
    router.fleet.fetch_from(decode)
    done, lent = Change(second), Change(decode)
    [outputs] = router.run(request("turn 2", prompt, **ANSWER))
    assert outputs[-1].outputs[0].token_ids == expected
    known = (len(so_far) - 1) // BLOCK * BLOCK
    assert done.fetches == (1, 1, 0, known)
    assert done.computed == len(prompt) - known
    assert lent.prefixes_lent == 1


def test_several_answers_share_what_was_fetched(pool: list[Engine]) -> None:
    holder, _, decode, alone = pool
    fields = {**ANSWER, "n": 3, "temperature": 1.0, "seed": 3}
    [expected] = LocalRouter(None, decode=[alone]).run(request("n", PROMPT, **fields))
    answer(holder)
    router = LocalRouter(None, decode=[decode])
    router.fleet.fetch_from(holder)
    done = Change(decode)
    [outputs] = router.run(request("n", PROMPT, **fields))
    assert words(outputs) == words(expected)
    assert done.fetches == (1, 1, 0, NUM_CACHED)
    assert done.computed == 3 * (len(PROMPT) - NUM_CACHED)


def words(outputs: Any) -> dict[int, list[int]]:
    return {answer.index: answer.token_ids for output in outputs for answer in output.outputs}


def test_log_probabilities_of_the_prompt_need_all_of_it_computed(pool: list[Engine]) -> None:
    holder, taker, _, alone = pool
    expected = answer(alone, prompt_logprobs=1)
    answer(holder)
    done = Change(taker)
    message = fetching("q", holder, PROMPT, prompt_logprobs=1)
    assert tokens(drive(taker, message, holder)) == expected
    assert (done.computed, done.prefix_fetches) == (len(PROMPT), 0)


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_holder_that_dies_costs_its_taker_nothing_but_the_prefix(
    model: str, pool: list[Engine]
) -> None:
    *_, taker, alone = pool
    expected = answer(alone)
    with engines(model, mortal={}) as [mortal]:
        answer(mortal)
        source = source_of(mortal, len(PROMPT))
    done = Change(taker)
    message = fetching("q", mortal, PROMPT, source=source)
    assert tokens(drive(taker, message)) == expected
    assert (done.computed, done.fetches) == (len(PROMPT), (1, 0, 1, 0))
    at_rest(taker)


def test_a_holder_that_is_silent_is_not_waited_for(pool: list[Engine]) -> None:
    """Its hinge takes the question, and its core never looks at it."""
    holder, taker, _, alone = pool
    expected = answer(alone)
    answer(holder)
    done, lent = Change(taker), Change(holder)
    assert tokens(drive(taker, fetching("q", holder, PROMPT))) == expected
    assert done.computed == len(PROMPT)
    router = LocalRouter(None, decode=[holder, taker])
    router.until(lambda: lent.leases_withdrawn > 0)  # it answers now, and nobody wants it any more
    router.settle()
    assert done.fetches == (1, 0, 1, 0)
    assert lent.prefixes_lent == 0


def test_an_aborted_request_gives_the_holder_its_blocks_back(pool: list[Engine]) -> None:
    holder, taker, _, _ = pool
    answer(holder)
    done, lent = Change(taker), Change(holder)
    taker.core.add(fetching("q", holder, PROMPT), CLIENT)
    deadline = Deadline("the holder lends")
    while not lent.prefixes_lent:
        deadline.check()
        if taker.core.has_work:
            taker.core.finish_step(*taker.core.start_step())
        holder.core.handle_transfer_events()  # and the taker does not hear of what it gets
    taker.core.abort(["q"])
    at_rest(holder, taker)
    assert lent.leases_revoked + lent.leases_released == 1, "nobody waited for its time to be over"
    assert done.prefix_fetches == done.prefix_fetches_completed + done.prefix_fetches_failed == 1
    assert done.computed == 0


@pytest.mark.parametrize(
    "changes",
    [{"proof": "0" * 32}, {"remote_port": 9}, {"epoch": "another"}, {"remote_host": "127.0.0.2"}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_source_that_no_engine_has_signed_is_not_even_connected_to(
    pool: list[Engine], changes: dict[str, Any]
) -> None:
    holder, taker, _, alone = pool
    expected = answer(alone)
    answer(holder)
    done, asked = Change(taker), Change(holder)
    forged = source_of(holder, len(PROMPT), **changes)
    message = fetching("q", holder, PROMPT, source=forged)
    assert tokens(drive(taker, message, holder)) == expected
    assert (done.computed, done.fetches) == (len(PROMPT), (1, 0, 1, 0))
    assert (asked.prefixes_lent, asked.prefixes_refused, done.loads_started) == (0, 0, 0)


@pytest.mark.parametrize(
    "missing", ["remote_engine_id", "remote_host", "remote_port", "epoch", "compat", "proof"]
)
def test_a_source_that_lacks_something_is_refused_by_the_field(
    pool: list[Engine], missing: str
) -> None:
    holder, taker, _, _ = pool
    source = source_of(holder, len(PROMPT), **{missing: None})
    [output] = drive(taker, fetching("q", holder, PROMPT, source=source))
    assert output.finish_reason is FinishReason.ERROR
    assert missing in (output.error or "")


def test_a_paused_holder_lends_nothing(pool: list[Engine]) -> None:
    """Its memory may be about to go."""
    holder, taker, _, alone = pool
    expected = answer(alone)
    answer(holder)
    holder.core.call("pause_generation", ["keep"])
    try:
        done = Change(taker)
        assert tokens(drive(taker, fetching("q", holder, PROMPT), holder)) == expected
        assert done.fetches == (1, 0, 1, 0)
    finally:
        holder.core.call("resume_generation", [])


def test_readers_of_prefixes_hold_half_of_the_holder_s_blocks_at_most(
    model: str, pool: list[Engine]
) -> None:
    """A second prefix that does not fit any more is lent in part; a shared one costs nothing."""
    *_, alone = pool
    other = prompt_of(5, 38)
    with engines(model, small={"num_blocks": 24, "max_model_len": 64}) as [small]:
        answer(small)
        answer(small, other)
        for name, prompt, num_blocks in (("a", PROMPT, 9), ("b", PROMPT, 9), ("c", other, 3)):
            names = names_of(small, prompt)
            assert len(small.core.scheduler.leased.lend_prefix(name, names, 0)) == num_blocks
        assert small.core.scheduler.leased.lend_prefix("d", names_of(small, other), 3) == []
        for name in "abc":
            small.core.scheduler.leased.end(name)
        assert small.at_rest
        assert answer(small) == answer(alone)


def names_of(engine: Engine, prompt: list[int]) -> list[bytes]:
    names: list[bytes] = []
    extend_block_hashes(names, prompt, BLOCK, None)
    return names


def test_a_prompt_that_is_pooled_fetches_too(pool: list[Engine]) -> None:
    """A request that is nothing but a prefill."""
    holder, taker, _, alone = pool

    def pooled(name: str, source: KVTransferParams | None = None) -> EngineCoreRequest:
        return msgspec.structs.replace(
            request(name, PROMPT),
            sampling_params=None,
            pooling_params=PoolingParams("embed"),
            prefix_source=source,
        )

    def vector(outputs: list[EngineCoreOutput]) -> list[float]:
        pooling = outputs[-1].pooling_output
        assert pooling is not None, outputs[-1].error
        values: list[float] = np.frombuffer(pooling.data, np.float32).tolist()
        return values

    expected = vector(drive(alone, pooled("alone")))
    answer(holder)
    done = Change(taker)
    made = vector(drive(taker, pooled("q", source_of(holder, len(PROMPT))), holder))
    assert made == pytest.approx(expected, abs=1e-5)
    assert (done.computed, done.fetches) == (len(PROMPT) - NUM_CACHED, (1, 1, 0, NUM_CACHED))
