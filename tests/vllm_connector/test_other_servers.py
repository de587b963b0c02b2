"""Two real vLLM servers with other options than those of `test_in_vllm.py`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from free_ports import first_of_free_ports
from model_kit.sensitive_model import ANSWER_TOKENS, Question, questions
from vllm_kit.environment import needs_vllm
from vllm_server import VllmServer, connector_config, save_model_for_vllm
from waits import wait_until

PATIENT = {"lease_seconds": 900, "load_timeout_s": 900}
"""With two ranks, a step takes minutes on a machine that has no processor for each of them."""
pytestmark = [*needs_vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


def hand_off(p: VllmServer, d: VllmServer, question: Question) -> list[int] | None:
    """D's answer to a prompt that P has computed."""
    params = p.prefill(question.prompt)
    return d.answer(question.prompt, ANSWER_TOKENS, kv_transfer_params=params)


@pytest.mark.parametrize(
    ("options", "ranks", "staging"),
    [
        (("--no-enable-prefix-caching",), (1, 1), "auto"),
        ((), (2, 2), "auto"),
        ((), (2, 1), "auto"),
        ((), (1, 2), "auto"),
        ((), (1, 1), "always"),
        ((), (2, 1), "always"),
    ],
    ids=[
        "no prefix cache",
        "two ranks",
        "two ranks to one",
        "one rank to two",
        "copies",
        "copies of two ranks to one",
    ],
)
def test_they_answer_as_one_engine_does_and_free_what_nobody_wants(
    tmp_path: Path, options: tuple[str, ...], ranks: tuple[int, int], staging: str
) -> None:
    model = save_model_for_vllm(tmp_path / "model")
    first, *asked = questions(model, 201, shortest=24, longest=600)
    servers = [
        VllmServer(
            model,
            tmp_path / name,
            connector_config(
                listen_port=first_of_free_ports(num_ranks), staging=staging, **PATIENT
            ),
            *options,
            "--tensor-parallel-size",
            str(num_ranks),
        )
        for name, num_ranks in zip(("p", "d"), ranks, strict=True)
    ]
    p, d = servers
    try:
        for server in servers:
            server.wait_until_ready()
        # On a busy machine, ranks may be too slow for the time that a new connection has.
        wait_until(lambda: hand_off(p, d, first) == first.answer)
        wait_until(lambda: p.holds_nothing() and d.holds_nothing())
        before = p.figures(), d.figures()
        with ThreadPoolExecutor(4) as users:
            answers = list(users.map(partial(hand_off, p, d), asked))
        assert answers == [question.answer for question in asked]
        lent, read = (
            {name: figures[name] - earlier[name] for name in figures}
            for figures, earlier in zip((p.figures(), d.figures()), before, strict=True)
        )
        assert lent["leases_granted"] == read["loads_completed"] == max(ranks) * len(asked)
        assert lent["bytes_sent"] == read["bytes_received"]

        for server in servers:
            params = p.prefill(asked[0].prompt)
            assert not p.holds_nothing()
            assert server.post([1], 1, model="none", kv_transfer_params=params).status_code == 404
            wait_until(p.holds_nothing)
        assert p.figures()["leases_expired"] == 0
        assert d.answer(asked[0].prompt, 1, kv_transfer_params=params) is None
        wait_until(d.holds_nothing)
    finally:
        for server in servers:
            server.kill()
