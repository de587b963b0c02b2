"""The model of the chaos tests notices every change of what is cached."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from engine_kit.core import CLIENT, core_request, generate, make_core, run, step, tokens
from model_kit.sensitive_model import (
    ANSWER_TOKENS,
    VOCABULARY,
    Question,
    questions,
    save_sensitive_model,
)

from diptych_engine.control.core import EngineCore

BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_sensitive_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def asked(model: str) -> list[Question]:
    return questions(model, 24)


@pytest.fixture
def core(model: str) -> Iterator[EngineCore]:
    core = make_core(model, num_blocks=512, max_num_seqs=64, max_num_batched_tokens=4096)
    yield core
    core.close()


def answer(core: EngineCore, prompt: list[int], salt: str) -> list[int]:
    return generate(core, prompt, cache_salt=salt, max_tokens=ANSWER_TOKENS, ignore_eos=True)


def test_prompts_that_end_alike_have_different_answers(asked: list[Question]) -> None:
    assert len({question.prompt[-1] for question in asked}) == 1
    assert len({tuple(question.answer) for question in asked}) == len(asked)


def test_no_answer_hangs_on_how_the_work_is_split(model: str, asked: list[Question]) -> None:
    """Alone, together, in small chunks, and after a preemption."""
    for options in (
        {"max_num_batched_tokens": 4096, "num_blocks": 512},
        {"max_num_batched_tokens": 9, "num_blocks": 512},
        {"max_num_batched_tokens": 64, "num_blocks": 24},
    ):
        core = make_core(model, max_num_seqs=8, **options)  # type: ignore[arg-type]
        requests = [
            core_request(str(i), q.prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)
            for i, q in enumerate(asked)
        ]
        for name, outputs in run(core, *requests).items():
            assert tokens(outputs) == asked[int(name)].answer
        core.close()


def test_another_token_anywhere_changes_the_answer(core: EngineCore, asked: list[Question]) -> None:
    rng = random.Random(2)
    tries = same = 0
    for question in asked[:4]:
        changed = []
        for position in range(len(question.prompt) - 1):
            prompt = list(question.prompt)
            prompt[position] = (prompt[position] + rng.randrange(1, VOCABULARY)) % VOCABULARY
            changed.append(
                core_request(str(position), prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)
            )
        for outputs in run(core, *changed).values():
            tries += 1
            same += tokens(outputs) == question.answer
    assert same <= 0.01 * tries, f"{same} of {tries} changes went unnoticed"


@pytest.mark.parametrize("damage", ["another position's", "another prompt's"])
def test_foreign_kv_at_any_one_position_changes_the_answer(
    core: EngineCore, asked: list[Question], damage: str
) -> None:
    """The prompt is found in the prefix cache, where one position is not its own any more."""
    cache = core.runner.kv_cache.movedim(3, 1)  # type: ignore[attr-defined]
    assert cache.shape[1] == BLOCK_SIZE, "[block, position, ...]"
    foreign_blocks = blocks_after_prefill(core, asked[1].prompt, "foreign")
    tries = same = 0
    for question in (asked[0], asked[2]):
        blocks = blocks_after_prefill(core, question.prompt, "own")
        num_cached = (len(question.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert answer(core, question.prompt, "own") == question.answer
        for position in range(num_cached):
            here = cache[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE]
            other = (position + 5) % BLOCK_SIZE
            source = blocks if damage == "another position's" else foreign_blocks
            own = here.clone()
            here.copy_(cache[source[0], other])
            tries += 1
            same += answer(core, question.prompt, "own") == question.answer
            here.copy_(own)
        assert answer(core, question.prompt, "own") == question.answer
    assert same <= 0.01 * tries, f"{same} of {tries} changes went unnoticed"


def blocks_after_prefill(core: EngineCore, prompt: list[int], salt: str) -> list[int]:
    """Where the KV of a prompt is remembered."""
    core.add(core_request("prefill", prompt, max_tokens=2, cache_salt=salt), CLIENT)
    step(core)
    blocks = list(core.scheduler.requests["prefill"].block_ids)
    while core.has_work:
        step(core)
    return blocks
