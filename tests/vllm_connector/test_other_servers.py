"""Two real vLLM servers with other options than those of `test_in_vllm.py`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from free_ports import first_of_free_ports
from model_kit.sensitive_model import ANSWER_TOKENS, questions
from vllm_kit.environment import needs_vllm
from vllm_server import VllmServer, connector_config, save_model_for_vllm
from waits import wait_until

PATIENT = {"lease_seconds": 900, "load_timeout_s": 900}
"""With two ranks, a step takes minutes on a machine that has no processor for each of them."""
pytestmark = [*needs_vllm, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (("--no-enable-prefix-caching",), (1, 1)),
        ((), (2, 2)),
        ((), (2, 1)),
        ((), (1, 2)),
    ],
    ids=["no prefix cache", "two ranks", "two ranks to one", "one rank to two"],
)
def test_they_answer_as_one_engine_does_and_free_what_nobody_wants(
    tmp_path: Path, options: tuple[str, ...], ranks: tuple[int, int]
) -> None:
    model = save_model_for_vllm(tmp_path / "model")
    asked = questions(model, 200, shortest=24, longest=600)
    servers = [
        VllmServer(
            model,
            tmp_path / name,
            connector_config(listen_port=first_of_free_ports(num_ranks), **PATIENT),
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
        with ThreadPoolExecutor(4) as users:
            answers = list(
                users.map(
                    lambda question: d.answer(
                        question.prompt,
                        ANSWER_TOKENS,
                        kv_transfer_params=p.prefill(question.prompt),
                    ),
                    asked,
                )
            )
        assert answers == [question.answer for question in asked]
        moved = max(ranks) * len(asked)
        assert p.figures()["leases_granted"] == d.figures()["loads_completed"] == moved
        assert p.figures()["bytes_sent"] == d.figures()["bytes_received"]

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
