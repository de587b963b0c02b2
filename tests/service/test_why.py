"""A request's choice of engines, explained by a router of real engines, and by the commands."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import msgspec
import pytest
import pytest_asyncio
from click.testing import CliRunner
from free_ports import free_port
from service_kit import LIGHT, all_usable, engine_config, healthy, make_router, start_engine

from diptych.laptop.rundir import PodState, RunDirectory, RunState, process_start_s
from diptych.main import main
from diptych_frontend.app import build_app
from diptych_frontend.core_client.curve import read_keys
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_frontend.openai.server import Site, listen, serve_sites
from diptych_protocol.admin import Explanation, LoadReport, RequestList, RequestReport
from diptych_router.choosing.policy import ALONE
from diptych_router.requests.pool_client import PoolClient
from diptych_router.requests.records import MOST_REQUESTS
from diptych_router.telling.admin_port import admin_app
from diptych_router.telling.explanations import Explanations
from diptych_router.telling.metrics import RouterMetrics

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIRST = "A lighthouse keeper writes a letter to the harbour master about the storms of May. " * 8
NEXT = FIRST + "The harbour master answers:"
PREFILL = {"prefill-0", "prefill-1"}
TOKEN = {"authorization": "Bearer sesame"}


@dataclass
class Service:
    router: PoolClient
    api: httpx.AsyncClient
    admin: httpx.AsyncClient
    admin_port: int
    token_file: Path
    metrics: ServerMetrics

    async def ask(self, prompt: str, **options: Any) -> httpx.Response:
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 4, **options}
        answer = await self.api.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer

    async def why(self, request_id: str) -> list[RequestReport]:
        answer = await self.admin.get(f"/admin/requests/{request_id}/why", headers=TOKEN)
        assert answer.status_code == 200, answer.text
        known = msgspec.json.decode(answer.content, type=Explanation)
        assert (known.policy, known.disaggregate) == ("prefix_aware", "always")
        return known.requests


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(smollm2: str, keys_dir: Path) -> AsyncIterator[Service]:
    names = (*sorted(PREFILL), "decode-0")
    started = await asyncio.gather(
        *(start_engine(engine_config(name, LIGHT, journey_events=True), keys_dir) for name in names)
    )
    [(_, at0), (_, at1), (_, at_d)] = started
    keys = read_keys(keys_dir)
    token_file = keys_dir / "admin-token"
    token_file.write_text("sesame")
    router = make_router(
        smollm2, f"{at0},{at1}", at_d, lambda: [keys], policy="prefix_aware", disaggregate="always"
    )
    router.start()
    metrics = ServerMetrics(router.model_name, router.stats_by_engine)
    metrics.registry.register(RouterMetrics(router))
    known = Explanations(
        router.table.records, router.name_of, policy="prefix_aware", disaggregate="always"
    )
    admin = admin_app(router, known, keys_dir, None)
    sites = [
        Site(app, listen("127.0.0.1", free_port()))
        for app in (build_app(router, metrics=metrics), admin)
    ]
    urls = [f"http://127.0.0.1:{site.listener.getsockname()[1]}" for site in sites]
    serving = asyncio.create_task(serve_sites(*sites))
    try:
        await healthy(router)
        await all_usable(router, len(names))
        async with (
            httpx.AsyncClient(base_url=urls[0], timeout=120) as api,
            httpx.AsyncClient(base_url=urls[1], timeout=120) as asking,
        ):
            port = int(urls[1].rpartition(":")[2])
            yield Service(router, api, asking, port, token_file, metrics)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        router.shutdown()
        for engine, _ in started:
            engine.shutdown()


async def test_both_candidates_are_named_and_the_terms_add_up(service: Service) -> None:
    answer = await service.ask(FIRST, ignore_eos=True)
    (request,) = await service.why(answer.headers["x-request-id"])
    assert [request] == await service.why(answer.json()["id"])
    assert (request.outcome, request.output_tokens) == ("length", 4)
    assert request.prompt_tokens == answer.json()["usage"]["prompt_tokens"]
    (attempt,) = request.attempts
    first, second = attempt.choices
    assert {x.engine for x in first.candidates} == PREFILL
    assert [x.engine for x in second.candidates] == ["decode-0"]
    assert first.num_able == 2
    for candidate in first.candidates + second.candidates:
        assert candidate.cost == pytest.approx(sum(candidate.terms.values()))
    (taken,) = [x for x in first.candidates if x.chosen]
    assert attempt.prefill == taken.engine
    assert taken.cost <= first.candidates[0].cost * 1.1  # nearly equal ones are drawn from
    assert attempt.terms == pytest.approx(taken.terms | second.candidates[0].terms)
    assert attempt.cached_tokens == 0
    # What came true: prefill brought the first token, decode received its KV and went on.
    assert attempt.decoded_by == [attempt.decode] == ["decode-0"]
    assert attempt.received_tokens > 0
    assert attempt.first_token_s is not None
    assert attempt.hand_off_s is not None
    assert request.seconds is not None
    assert 0 < attempt.first_token_s + attempt.hand_off_s <= request.seconds


@pytest.mark.parametrize(("remote_decode", "way"), [(False, ALONE), (True, "")])
async def test_a_client_chooses_between_one_engine_and_a_pair(
    service: Service, remote_decode: bool, way: str
) -> None:
    answer = await service.ask(FIRST, kv_transfer_params={"do_remote_decode": remote_decode})
    [request] = await service.why(answer.headers["x-request-id"])
    [attempt] = request.attempts
    assert bool(attempt.prefill) is remote_decode
    assert way in attempt.reason


async def test_a_next_turn_shows_what_the_cache_had(service: Service) -> None:
    await service.ask(FIRST)
    for _ in PREFILL:
        answer = await service.ask(NEXT)
        (request,) = await service.why(answer.headers["x-request-id"])
        (attempt,) = request.attempts
        (taken,) = [x for x in attempt.choices[0].candidates if x.chosen]
        if taken.cached_tokens:
            break  # otherwise the one that has it seemed slow, and now both have it
    assert attempt.cached_tokens == taken.cached_tokens
    assert taken.cached_tokens > 100
    assert attempt.to_compute == request.prompt_tokens - taken.cached_tokens


async def test_each_answer_to_a_prompt_has_its_own_report(service: Service) -> None:
    answer = await service.ask("Once upon a time", n=2, temperature=1.0)
    known = await service.why(answer.headers["x-request-id"])
    assert sorted(x.core_id[:2] for x in known) == ["0_", "1_"]
    assert {x.request_id for x in known} == {answer.headers["x-request-id"]}


async def test_nothing_of_the_prompt_is_told(service: Service) -> None:
    answer = await service.ask("zebra zebra zebra")
    name = answer.headers["x-request-id"]
    told = await service.admin.get(f"/admin/requests/{name}/why", headers=TOKEN)
    assert "zebra" not in told.text


async def test_the_newest_requests_are_listed(service: Service) -> None:
    names = [(await service.ask("Hello")).headers["x-request-id"] for _ in range(3)]
    answer = await service.admin.get("/admin/requests?limit=2", headers=TOKEN)
    known = msgspec.json.decode(answer.content, type=RequestList)
    assert [x.request_id for x in known.requests] == names[:0:-1]
    assert known.num_remembered >= 3
    assert all(x.prefill in PREFILL and x.decode == "decode-0" for x in known.requests)


async def test_what_the_service_was_asked_is_told_without_words(service: Service) -> None:
    await service.ask("zebra zebra zebra")
    answer = await service.admin.get("/admin/load", headers=TOKEN)
    known = msgspec.json.decode(answer.content, type=LoadReport)
    assert {pool.role: pool.engines for pool in known.pools} == {"prefill": 2, "decode": 1}
    assert all(0 < pool.step_s < 60 and pool.num_blocks > 0 for pool in known.pools)
    assert all(0 < pool.enough_prompt_tokens <= pool.max_num_batched_tokens for pool in known.pools)
    assert all(0 < pool.processors_part <= 1 for pool in known.pools)  # those of this machine
    newest = known.requests[0]
    assert newest.output_tokens == 4
    assert newest.first_token_s is not None
    assert 0 < newest.first_token_s < newest.seconds
    assert "zebra" not in answer.text


async def test_requests_that_begin_alike_are_told_as_such(service: Service) -> None:
    for words in ("zebra " * 40, "zebra " * 60, "apple " * 40):
        await service.ask(words)
    answer = await service.admin.get("/admin/load", headers=TOKEN)
    known = msgspec.json.decode(answer.content, type=LoadReport)
    other, longer, shorter = (dict(each.prefixes or ()) for each in known.requests[:3])
    assert shorter
    assert shorter.items() < longer.items()
    assert not set(other.values()) & set(longer.values())


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/admin/requests/stranger/why", 404, f"newest {MOST_REQUESTS} since its start"),
        (f"/admin/requests/{'x' * 10_000}/why", 400, "at most 256 characters, this one has 10000"),
        ("/admin/requests/a%2Fb/why", 404, "'a/b'"),
        ("/admin/requests?limit=0", 400, f"limit must be in 1..{MOST_REQUESTS}"),
        ("/admin/requests?limit=" + "9" * 10_000, 400, "limit must be in"),
        ("/admin/requests?limit=%C2%B2", 400, "limit must be in"),
    ],
)
async def test_a_question_that_cannot_be_answered(
    service: Service, path: str, status: int, says: str
) -> None:
    answer = await service.admin.get(path, headers=TOKEN)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/admin/requests", "/admin/requests/stranger/why"])
async def test_whoever_has_no_token_learns_nothing(service: Service, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer guess"}):
        answer = await service.admin.get(path, headers=headers)
        assert answer.status_code == 401
        assert "admin token" in answer.json()["error"]["message"]


async def test_predictions_are_counted(service: Service) -> None:
    def counted() -> dict[str, float]:
        lines = service.metrics.exposition("")[0].decode().splitlines()
        found = [line.rpartition(" ") for line in lines if "real_over_predicted_count" in line]
        return {name: float(value) for name, _, value in found}

    before = counted()
    await service.ask(FIRST, ignore_eos=True)
    after = counted()
    grown = {name.partition("{")[0] for name in after if after[name] == before[name] + 1}
    assert grown == {
        "diptych:first_token_real_over_predicted_count",
        "diptych:hand_off_real_over_predicted_count",
    }
    assert sum(after.values()) == sum(before.values()) + 2


async def run_command(*arguments: str, command: str = "why") -> Any:
    return await asyncio.to_thread(CliRunner().invoke, main, [command, *arguments])


async def test_a_timeline_shows_both_pools_part_by_part(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    answer = await service.ask("A new story. " + FIRST * 3, ignore_eos=True, max_tokens=20)
    name = answer.headers["x-request-id"]
    tokens = answer.json()["usage"]["prompt_tokens"]
    assert tokens > 256, "more than one part"
    picture = tmp_path / "trace.svg"
    with RunDirectory("svc") as directory:
        directory.save(state_of_this_process(service))
        shown = await run_command(name, command="trace")
        told = await run_command(name, "--json", "--svg", str(picture), command="trace")
        nowhere = await run_command(name, "--svg", "/nowhere/trace.svg", command="trace")
    assert shown.exit_code == 0, shown.output
    for word in (f"{tokens} + 20 tokens, length", "KV of", "first token", "tokens of the prompt"):
        assert word in shown.output
    (found,) = msgspec.json.decode(told.stdout)
    router, prefill, decode = found["lanes"]
    assert (router["name"], prefill["name"] in PREFILL, decode["name"]) == (
        "router", True, "decode-0",
    )  # fmt: skip
    assert sum(bar["kind"] == "prefill" for bar in prefill["bars"]) == -(-tokens // 256)
    told_of_kv = [part["label"] for part in (*decode["bars"], *decode["marks"])]
    assert sum(label.startswith(f"KV of {tokens} tokens") for label in told_of_kv) == 1
    assert decode["bars"][-1]["kind"] == "decode"
    assert len(decode["ticks_s"]) == 19
    times = [
        bar[end]
        for lane in found["lanes"]
        for bar in lane["bars"]
        for end in ("began_s", "ended_s")
    ]
    assert 0.0 <= min(times) <= max(times) <= found["seconds"]
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert (nowhere.exit_code, "No such file" in nowhere.output) == (1, True)


async def test_the_command_shows_it(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    missing = await run_command()
    assert missing.exit_code == 1
    assert "no service runs here" in missing.output
    answer = await service.ask(NEXT, ignore_eos=True)
    name = answer.headers["x-request-id"]
    with RunDirectory("svc") as directory:
        directory.save(state_of_this_process(service))
        shown = await run_command(name)
        assert shown.exit_code == 0, shown.output
        for word in (name, "svc-router-0", *PREFILL, "WAIT ms", "TOTAL", "first token", "hand-off"):
            assert word in shown.output
        (told,) = msgspec.json.decode((await run_command(name, "--json")).stdout)
        assert told["requests"][0]["request_id"] == name
        assert name in (await run_command()).stdout
        stranger = await run_command("stranger")
        assert stranger.exit_code == 1
        assert "remembers no request 'stranger'" in stranger.output
        service.token_file.write_text("another")
        try:
            refused = await run_command(name)
        finally:
            service.token_file.write_text("sesame")
        assert refused.exit_code == 0, "the file that the router reads is the one that is sent"


async def test_services_of_one_name_are_told_apart(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    name = (await service.ask(NEXT)).headers["x-request-id"]
    with RunDirectory("svc") as one, RunDirectory("svc") as other:
        one.save(state_of_this_process(service, port=8080))
        other.save(state_of_this_process(service, port=9000))
        for arguments in ([], [name]):
            shown = (await run_command(*arguments)).stdout
            assert "svc-router-0:8080" in shown
            assert "svc-router-0:9000" in shown


def state_of_this_process(service: Service, port: int = 1) -> RunState:
    ports = {"http": port, "admin": service.admin_port}
    pod = PodState("svc-router-0", "router", "ready", 1, 0, ports, "/l")
    return RunState(
        "svc", "svc", f"http://127.0.0.1:{port}/v1", True, 0.0, os.getpid(),
        process_start_s(os.getpid()), [pod], admin_token_file=str(service.token_file),
    )  # fmt: skip
