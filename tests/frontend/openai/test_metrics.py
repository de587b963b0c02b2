"""What Prometheus scrapes after some requests."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from diptych_frontend.observability.metrics import RequestProgress, ServerMetrics
from diptych_frontend.openai.completions import CompletionApi
from diptych_frontend.openai.exchange import EXCHANGE_KEY, Exchange
from diptych_frontend.openai.generation import GenerationRoute
from diptych_frontend.openai.request_workers import RequestWorkers
from diptych_protocol import CompletionOutput, KVTransferStats, RequestOutput, SchedulerStats


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels other than model_name) -> value."""
    return {
        (s.name, tuple(sorted((k, v) for k, v in s.labels.items() if k != "model_name"))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_tokens_that_come_together_share_the_time_since_those_before() -> None:
    """As guessed ones do; each would else count as quick as a whole step, or not at all."""
    metrics = ServerMetrics("m")
    with RequestProgress(metrics, 3, "") as progress:
        for token_ids in ([1], [2, 3, 4, 5], [6]):
            answer = CompletionOutput(0, "", token_ids)
            progress.saw(RequestOutput("r", None, [], [answer], finished=False))
    found = samples(metrics.exposition("")[0].decode())
    assert found["diptych:inter_token_latency_seconds_count", ()] == 5
    total = found["diptych:e2e_request_latency_seconds_sum", ()]
    assert 0 < found["diptych:inter_token_latency_seconds_sum", ()] <= total


def test_all_answers_that_a_client_left_unfinished_are_counted() -> None:
    metrics = ServerMetrics("m")
    progress = RequestProgress(metrics, 3, answers=4)
    ended = CompletionOutput(2, "", [1], finish_reason="stop")
    progress.saw(RequestOutput("r", None, [], [ended], finished=False))
    progress.__exit__(GeneratorExit)
    found = samples(metrics.exposition("")[0].decode())
    reasons = ("stop", "abort")
    name = "diptych:request_success_total"
    assert [found[name, (("finished_reason", reason),)] for reason in reasons] == [1, 3]


async def test_requests_are_counted_and_timed(http: httpx.AsyncClient, engine: Any) -> None:
    body = {"model": "echo", "prompt": "abcd", "max_tokens": 5}
    await http.post("/v1/completions", json=body)
    await http.post("/v1/completions", json=body | {"stream": True, "n": 2})
    await http.post("/v1/completions", json=body | {"stop": "c"})
    await http.post("/v1/completions", json=body | {"n": 0})
    await http.get("/nowhere/at/all")
    engine.failure = "error"
    await http.post("/v1/completions", json=body)
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = samples(answer.text)

    def value(name: str, **labels: str) -> float | None:
        return found.get((f"diptych:{name}", tuple(sorted(labels.items()))))

    assert value("request_success_total", finished_reason="length") == 3
    assert value("request_success_total", finished_reason="stop") == 1
    assert value("request_success_total", finished_reason="error") == 1
    assert value("http_requests_total", route="/v1/completions", status="200") == 3
    assert value("http_requests_total", route="/v1/completions", status="400") == 1
    assert value("http_requests_total", route="/v1/completions", status="500") == 1
    assert value("http_requests_total", route="other", status="404") == 1
    assert value("prompt_tokens_total") == 3 * 4
    assert value("prompt_tokens_cached_total") == 3 * 2
    assert value("generation_tokens_total") == 5 + 2 * 5 + 3
    assert value("time_to_first_token_seconds_count") == 1
    assert value("inter_token_latency_seconds_count") == 2 * 4
    assert value("e2e_request_latency_seconds_count") == 3
    assert value("num_requests_running", engine="engine-0") == 3
    assert value("kv_cache_usage_perc", engine="engine-0") == 0.6
    assert value("engine_steps_total", engine="engine-0") == 7


async def test_tokens_are_counted_by_the_key_they_were_asked_for_with(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the engine is told whose request it is."""
    told: list[tuple[str, str]] = []
    generate, check_admission = engine.generate, engine.check_admission

    def generating(*args: Any, **kwargs: Any) -> Any:
        told.append(("generate", kwargs["tenant"]))
        return generate(*args, **kwargs)

    def checking(*args: Any, **kwargs: Any) -> None:
        told.append(("check_admission", kwargs["tenant"]))
        check_admission(*args, **kwargs)

    monkeypatch.setattr(engine, "generate", generating)
    monkeypatch.setattr(engine, "check_admission", checking)
    metrics = ServerMetrics("echo")
    route = GenerationRoute(CompletionApi(), engine, frozenset({"echo"}), metrics, RequestWorkers())
    for tenant in ("alice", "alice", "bob", ""):
        exchange = Exchange("r", tenant=tenant)
        exchange.body = b'{"model": "echo", "prompt": "abcd", "max_tokens": 5}'
        await route({"headers": JSON, EXCHANGE_KEY: exchange}, _for_ever, _nowhere)
    found = samples(metrics.exposition("")[0].decode())
    served = {
        labels: value for (name, labels), value in found.items() if "tenant_tokens_total" in name
    }
    assert {tuple(dict(labels).values()): value for labels, value in served.items()} == {
        ("prompt", "alice"): 8, ("generation", "alice"): 10,
        ("prompt", "bob"): 4, ("generation", "bob"): 5,
    }  # fmt: skip
    asked = [call for call, tenant in told if tenant == "alice"]
    assert asked == ["check_admission", "generate"] * 2


JSON = [(b"content-type", b"application/json")]


async def _for_ever() -> Any:
    await asyncio.Event().wait()


async def _nowhere(message: Any) -> None:
    """Nobody reads the answers."""


def test_guesses_have_the_names_that_vllm_gives_them() -> None:
    stats = SchedulerStats(drafts=3, draft_tokens=9, draft_tokens_accepted=5, accepted_at=[3, 2])
    text = ServerMetrics("m", lambda: {"d": stats}).exposition("")[0].decode()
    found = samples(text)
    for name, labels, value in (
        ("drafts", {}, 3),
        ("draft_tokens", {}, 9),
        ("accepted_tokens", {}, 5),
        ("accepted_tokens_per_pos", {"position": "0"}, 3),
        ("accepted_tokens_per_pos", {"position": "1"}, 2),
    ):
        key = (f"diptych:spec_decode_num_{name}_total", tuple({"engine": "d", **labels}.items()))
        assert found[key] == value


def test_the_hinge_of_each_engine_is_reported() -> None:
    transfer = KVTransferStats(
        leases_held=1,
        leases_expired=2,
        loads_failed=3,
        blocks_received=4,
        bytes_sent=5,
        seconds_receiving=0.5,
        stale_reads_refused=6,
        transport="tcp",
        leases_withdrawn=7,
        leases_rejected=8,
        early_loads_adopted=9,
        hand_off_counts=[2, 0, 1, *[0] * 12],
        loads_waiting_for_room=10,
        staging_bytes=11,
        prefix_fetches=12,
        prefix_fetches_completed=13,
        prefix_fetches_failed=14,
        prefix_tokens_fetched=15,
        prefixes_lent=16,
        prefixes_refused=17,
        prefix_seconds=0.25,
        prefix_fetches_now=18,
    )
    snapshots = {"p": SchedulerStats(kv_transfer=transfer), "d": SchedulerStats()}
    text = ServerMetrics("m", lambda: snapshots).exposition("")[0].decode()
    found = samples(text)
    for name, labels, value in (
        ("leases_held", {}, 1),
        ("leases_total", {"state": "expired"}, 2),
        ("loads_total", {"outcome": "failed"}, 3),
        ("blocks_received_total", {}, 4),
        ("bytes_sent_total", {}, 5),
        ("receive_seconds_total", {}, 0.5),
        ("stale_reads_refused_total", {}, 6),
        ("transport_info", {"transport": "tcp"}, 1),
        ("leases_total", {"state": "withdrawn"}, 7),
        ("rejections_received_total", {}, 8),
        ("early_loads_total", {"state": "adopted"}, 9),
        ("hand_off_seconds_bucket", {"le": "0.0025"}, 2),
        ("hand_off_seconds_bucket", {"le": "0.005"}, 3),
        ("hand_off_seconds_count", {}, 3),
        ("hand_off_seconds_sum", {}, 0.5),
        ("loads_waiting_for_room", {}, 10),
        ("staging_bytes", {}, 11),
        ("prefix_fetches_total", {"state": "asked"}, 12),
        ("prefix_fetches_total", {"state": "fetched"}, 13),
        ("prefix_fetches_total", {"state": "computed"}, 14),
        ("prefix_tokens_fetched_total", {}, 15),
        ("prefixes_total", {"answer": "lent"}, 16),
        ("prefixes_total", {"answer": "refused"}, 17),
        ("prefix_seconds_total", {}, 0.25),
        ("prefix_fetches_now", {}, 18),
    ):
        key = (f"diptych:kv_transfer_{name}", tuple(sorted({"engine": "p", **labels}.items())))
        assert found[key] == value
    assert not any("kv_transfer" in name and ("engine", "d") in labels for name, labels in found)
    assert found[("diptych:kv_cache_usage_perc", (("engine", "d"),))] == 0


def test_engines_tell_which_instructions_they_use_and_what_is_wrong_with_them() -> None:
    stats = SchedulerStats(cpu_level="avx2", cpu_kernels_set_aside=2)
    snapshots = {"cpu": stats, "gpu": SchedulerStats()}
    found = samples(ServerMetrics("m", lambda: snapshots).exposition("")[0].decode())
    assert found[("diptych:cpu_level_info", (("engine", "cpu"), ("level", "avx2")))] == 1
    assert not any(name == "diptych:cpu_level_info" and ("engine", "gpu") in x for name, x in found)
    assert found[("diptych:cpu_kernels_set_aside", (("engine", "cpu"),))] == 2
    assert found[("diptych:cpu_kernels_set_aside", (("engine", "gpu"),))] == 0


def test_servers_do_not_share_a_registry() -> None:
    first, second = ServerMetrics("a"), ServerMetrics("a")
    first.count_end("stop")
    assert b"request_success_total{" not in second.exposition("")[0]
