"""Two real vLLM servers over our connector, whose model keeps its KV in several groups, or as
latent vectors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from model_kit.sensitive_model import ANSWER_TOKENS, MIN_MARGIN, VOCABULARY, Question
from vllm_kit.environment import needs_vllm
from vllm_kit.sensitive_models import WINDOW, save_latent_model, save_model_of_windows
from vllm_server import VllmServer, connector_config
from waits import wait_until

from diptych_kv_transfer.memory.layout import KVGroup
from diptych_vllm.kv_groups import VllmKVGroups

pytestmark = [*needs_vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
COUNT = 200
BLOCK, LATENT_BLOCK = 32, 16
"""vLLM computes latent attention on a CPU with blocks of one size only, and without a prefix
cache."""
WINDOWS = VllmKVGroups((KVGroup(BLOCK, WINDOW), KVGroup(BLOCK, WINDOW), KVGroup(BLOCK)))
LATENT = VllmKVGroups((KVGroup(LATENT_BLOCK),))


@dataclass(frozen=True)
class Pair:
    """Two servers of one model."""

    p: VllmServer
    d: VllmServer
    groups: VllmKVGroups
    remembers: bool
    """Whether they have prefix caches."""

    def hand_over(self, question: Question, *, with_token: bool) -> list[int] | None:
        """The tokens of an answer whose prompt P computes; D is sent its token, too, or computes it
        again."""
        first, params = self.p.begin(question.prompt)
        if not with_token:
            return self.d.answer(question.prompt, ANSWER_TOKENS, kv_transfer_params=params)
        prompt = question.prompt + first
        rest = self.d.answer(prompt, ANSWER_TOKENS - 1, kv_transfer_params=params)
        return None if rest is None else first + rest


@pytest.fixture(
    scope="module",
    params=["windows", "windows without a prefix cache", "latent"],
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("servers")
    is_latent, remembers = request.param == "latent", request.param == "windows"
    save = save_latent_model if is_latent else save_model_of_windows
    model = save(folder / "model")
    options = [] if remembers or is_latent else ["--no-enable-prefix-caching"]
    config = connector_config(lease_seconds=60, load_timeout_s=60)
    servers = [VllmServer(model, folder / name, config, *options) for name in ("p", "d")]
    try:
        for server in servers:
            server.wait_until_ready()
        p, d = servers
        yield Pair(p, d, LATENT if is_latent else WINDOWS, remembers)
    finally:
        for server in servers:
            server.kill()


@pytest.fixture(scope="module")
def asked(pair: Pair) -> list[Question]:
    """Prompts of one to twenty blocks, with what one server answers that was handed nothing."""
    rng = random.Random(1)
    return questions(pair.p, [rng.randint(24, 600) for _ in range(2 * COUNT)])[:COUNT]


def questions(server: VllmServer, lengths: list[int]) -> list[Question]:
    """Prompts of these lengths, but those whose answers hang on rounding."""
    rng = random.Random(len(lengths))
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    with ThreadPoolExecutor(8) as users:
        found = users.map(lambda prompt: _question(server, prompt), prompts)
        return [question for question in found if question is not None]


def _question(server: VllmServer, prompt: list[int]) -> Question | None:
    response = server.post(
        prompt, ANSWER_TOKENS, logprobs=2, return_tokens_as_token_ids=True, cache_salt="reference"
    )
    [choice] = response.json()["choices"]
    for of_token in choice["logprobs"]["top_logprobs"]:
        best, second = sorted(of_token.values(), reverse=True)[:2]
        if best - second < MIN_MARGIN:
            return None
    return Question(prompt, choice["token_ids"])


def test_they_answer_as_one_server_does_and_free_what_they_held(
    pair: Pair, asked: list[Question]
) -> None:
    """Every second time P's token goes on at D. Some prompts come twice: the second time both have
    a part of them in their prefix caches."""
    before = pair.d.figures()
    with_token = [number % 2 == 1 for number in range(len(asked))]

    def answer(number: int) -> list[int] | None:
        return pair.hand_over(asked[number], with_token=with_token[number])

    with ThreadPoolExecutor(4) as users:
        answers = list(users.map(answer, range(len(asked))))
        assert answers == [question.answer for question in asked]
        fetched = [
            len(question.prompt)
            for question, with_ in zip(asked, with_token, strict=True)
            if with_ or pair.groups.serves_last(len(question.prompt))
        ]
        after = pair.d.figures()
        assert after["loads_completed"] - before["loads_completed"] == len(fetched)
        assert after["blocks_received"] - before["blocks_received"] == sum(
            map(pair.groups.num_blocks, fetched)
        )
        assert list(users.map(answer, range(0, len(asked), 5))) == answers[::5]
    wait_until(pair.p.holds_nothing)
    wait_until(pair.d.holds_nothing)
    assert pair.p.figures()["leases_expired"] == 0


@pytest.mark.parametrize("with_token", [False, True], ids=["computed again", "P's token"])
def test_windows_that_begin_anywhere_in_a_block_answer_as_one_server_does(
    pair: Pair, with_token: bool
) -> None:
    lengths = [*range(WINDOW - 2, WINDOW + 3), *range(WINDOW + BLOCK - 3, WINDOW + BLOCK + 3)]
    for question in questions(pair.p, lengths):
        assert pair.hand_over(question, with_token=with_token) == question.answer
        computed_again = not with_token and not pair.groups.serves_last(len(question.prompt))
        assert ("its prompt is computed here" in pair.d.log) >= computed_again
    wait_until(pair.p.holds_nothing)
    wait_until(pair.d.holds_nothing)


def test_what_d_remembers_is_not_fetched(pair: Pair, asked: list[Question]) -> None:
    if not pair.remembers:
        pytest.skip("these servers remember nothing")
    for question in [found for found in asked if len(found.prompt) > 10 * BLOCK][:4]:
        for num_blocks in (1, 2, 3, 8):
            fields: dict[str, Any] = {"cache_salt": f"remembers {num_blocks}"}
            assert pair.d.answer(question.prompt[: num_blocks * BLOCK + 1], 1, **fields)
            before = pair.d.figures()["blocks_received"]
            first, params = pair.p.begin(question.prompt, **fields)
            prompt = question.prompt + first
            rest = pair.d.answer(prompt, ANSWER_TOKENS - 1, kv_transfer_params=params, **fields)
            assert first + (rest or []) == question.answer
            received = pair.d.figures()["blocks_received"] - before
            assert received == pair.groups.num_blocks(len(question.prompt)) - num_blocks
            alone = pair.d.answer(question.prompt, ANSWER_TOKENS, **fields)
            assert alone == question.answer, "what was fetched is remembered, and right"


def test_a_prompt_may_go_on_behind_what_p_has_computed(pair: Pair, asked: list[Question]) -> None:
    for question in asked[:4]:
        first, params = pair.p.begin(question.prompt)
        prompt = [*question.prompt, *first, *range(10, 10 + BLOCK)]
        alone = pair.p.answer(prompt, 8, cache_salt="reference")
        assert pair.d.answer(prompt, 8, kv_transfer_params=params) == alone
    wait_until(pair.p.holds_nothing)
    wait_until(pair.d.holds_nothing)


def test_a_forged_or_used_reference_is_an_error_and_poisons_nothing(
    pair: Pair, asked: list[Question]
) -> None:
    victim, forger = asked[0], asked[1]
    params = pair.p.prefill(victim.prompt)
    for forged in (params | {"remote_num_tokens": 33}, params | {"lease_id": "0" * 32}):
        for question in (victim, forger):
            assert pair.d.answer(question.prompt, 1, kv_transfer_params=forged) is None
    params = pair.p.prefill(victim.prompt)
    prompt = [*victim.prompt, victim.answer[0]]
    assert pair.d.answer(prompt, 1, kv_transfer_params=params) == victim.answer[1:2]
    assert pair.d.answer(prompt, 1, kv_transfer_params=params) is None
    for question in (victim, forger):
        assert pair.d.answer(question.prompt, ANSWER_TOKENS) == question.answer
    wait_until(pair.p.holds_nothing)
    wait_until(pair.d.holds_nothing)
