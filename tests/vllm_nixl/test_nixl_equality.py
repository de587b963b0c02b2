"""1P1D over vLLM's NixlConnector computes the tokens of one server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from model_kit.sensitive_model import ANSWER_TOKENS, Question, questions
from vllm_kit.environment import START_S, needs_nixl
from vllm_nixl import NixlEngine, Pair
from vllm_server import save_model_for_vllm
from waits import wait_until

pytestmark = [*needs_nixl, pytest.mark.slow, pytest.mark.timeout(2 * START_S)]
LEASE_S = 120
PROMPTS = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model_for_vllm(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def asked(model: str) -> list[Question]:
    """Prompts of one to twenty blocks, with the answers that our own engine gives."""
    return questions(model, PROMPTS, shortest=24, longest=600)


@pytest.fixture(params=["--enable-prefix-caching", "--no-enable-prefix-caching"])
def pair(request: pytest.FixtureRequest, model: str, tmp_path: Path) -> Iterator[Pair]:
    producer = NixlEngine("kv_producer", LEASE_S, options=(request.param,))
    consumer = NixlEngine("kv_consumer", LEASE_S, options=(request.param,))
    started = Pair(producer.start(model, tmp_path / "p"), consumer.start(model, tmp_path / "d"))
    try:
        started.p.wait_until_ready()
        started.d.wait_until_ready()
        yield started
    finally:
        started.p.kill()
        started.d.kill()


def test_one_prefill_and_one_decode_answer_as_one_server_does(
    pair: Pair, asked: list[Question]
) -> None:
    """Our own engine is the third that says so."""

    def handed_over(question: Question) -> list[int] | None:
        params = pair.p.prefill(question.prompt)
        return pair.d.answer(question.prompt, ANSWER_TOKENS, kv_transfer_params=params)

    def aggregated(question: Question) -> list[int] | None:
        return pair.p.answer(question.prompt, ANSWER_TOKENS)

    before = pair.counters()
    with ThreadPoolExecutor(4) as users:
        over_nixl = list(users.map(handed_over, asked))
        of_one_server = list(users.map(aggregated, asked))
    counted = pair.counters() - before
    assert over_nixl == of_one_server == [question.answer for question in asked]
    assert (counted.transfers, counted.failed, counted.expired) == (PROMPTS, 0, 0)
    wait_until(pair.p.holds_nothing)
    wait_until(pair.d.holds_nothing)
