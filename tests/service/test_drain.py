"""Engines leave without anybody noticing: real programs and cores, signals, leases, hand-offs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import pytest_asyncio
from engine_kit.executor import PACED
from free_ports import free_port
from service_kit import LIGHT, SUPPORT, engine_config, generate, importing_support, start_engine
from waits import FOR_EVER_S, PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.client import PATIENCE_S as SILENCE_S
from diptych_frontend.core_client.client import CoreClient
from diptych_frontend.core_client.curve import read_keys
from diptych_frontend.core_client.member import CAUSE_GRACE_S
from diptych_protocol import (
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    KVTransferConfig,
    SamplingParams,
    SchedulerStats,
)

SLOW = "dummy://?num_hidden_layers=8&hidden_size=256&intermediate_size=1024"
"""A few milliseconds a token."""
HEAVY = (
    "dummy://?num_hidden_layers=4&hidden_size=512&intermediate_size=2048"
    "&max_position_embeddings=4096"
)
"""More than half a second for a step of `STEP_TOKENS`."""
STEP_TOKENS = 1500
NUM_TOKENS = 100
"""Tokens of a request that moves: enough that it does not end before anybody has looked."""
STALL_LIMIT_S = 4.5
"""Longer than a step, shorter than many of them."""
TOKEN = "the operator's token"
Json = dict[str, Any]


class Pod:
    """The engine pod's program, and clients of all its ports."""

    def __init__(self, folder: Path, keys_dir: Path, **changes: Any) -> None:
        config = engine_config("pod-0", "dummy://", num_blocks=512, executor_class=PACED, **changes)
        (folder / "engine.json").write_bytes(msgspec.json.encode(config))
        path = os.pathsep.join((str(SUPPORT), os.environ.get("PYTHONPATH", "")))
        http_port, api_port, self.core_port, kv_port, admin_port = (free_port() for _ in range(5))
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "diptych_engine", "--config", str(folder / "engine.json")),
                *("--port", str(http_port), "--api-port", str(api_port)),
                *("--core-port", str(self.core_port), "--kv-port", str(kv_port)),
                *("--admin-port", str(admin_port)),
                *("--keys", str(keys_dir)),
            ],
            env={**os.environ, "PYTHONPATH": path},
        )
        self.http, self.api = (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)
            for port in (http_port, api_port)
        )
        self.admin = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{admin_port}",
            timeout=PATIENCE_S,
            headers={"authorization": f"Bearer {TOKEN}"},
        )
        self.router = Core(f"127.0.0.1:{self.core_port}", keys_dir)

    async def status(self, path: str) -> int:
        with contextlib.suppress(httpx.TransportError):
            return (await self.http.get(path)).status_code
        return 0

    async def complete(self, **body: Any) -> Json:
        wanted = {"model": "smollm2", "prompt": [5] * 40, "ignore_eos": True, **body}
        answer = await self.api.post("/v1/completions", json=wanted)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    @contextlib.asynccontextmanager
    async def stream(self, max_tokens: int) -> AsyncIterator[AsyncIterator[str]]:
        """The events of an answer that has begun."""
        body = {"model": "smollm2", "prompt": [5] * 40, "ignore_eos": True, "stream": True}
        async with self.api.stream(
            "POST", "/v1/completions", json={**body, "max_tokens": max_tokens}
        ) as answer:
            events = answer.aiter_lines()
            await anext(events)
            yield events

    async def state(self) -> Json:
        return dict((await self.admin.get("/admin/state")).json())

    async def exit_code(self, within_s: float = PATIENCE_S) -> int:
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), within_s)

    async def close(self) -> None:
        self.router.client.close()
        await self.http.aclose()
        await self.api.aclose()
        await self.admin.aclose()
        self.process.kill()
        self.process.wait()


class Core:
    """A router's connection to a core: what it is told, and the outputs of each request."""

    def __init__(self, target: str, keys_dir: Path) -> None:
        self.told: list[SchedulerStats] = []
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, tuple[FinishReason, Json | None]] = {}
        self.client = CoreClient(
            f"tcp://{target}",
            read_keys(keys_dir),
            on_outputs=self._on_outputs,
            on_lost=lambda cause: None,
        )

    def _on_outputs(self, message: EngineCoreOutputs) -> None:
        if message.scheduler_stats is not None:
            self.told.append(message.scheduler_stats)
        for output in message.outputs:
            assert output.error is None
            assert output.request_id not in self.ends, "the last output is the last"
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id] = (output.finish_reason, output.kv_transfer_params)

    def add(
        self, name: str, prompt: list[int], generated: list[int], lease: Json | None, **params: Any
    ) -> None:
        extra = None if lease is None else {"kv_transfer_params": lease}
        sampling = SamplingParams(
            **{"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params},
            extra_args=extra,
        )
        self.client.add(
            EngineCoreRequest(
                name, prompt, None, sampling, None, None, time.time(), None, None, None,
                generated_token_ids=generated or None,
            )
        )  # fmt: skip

    async def end_of(self, name: str, eventually: Any) -> tuple[FinishReason, Json | None]:
        end: tuple[FinishReason, Json | None] = await eventually(lambda: self.ends.get(name))
        return end


async def _answers_or_ended(pod: Pod) -> bool:
    return pod.process.poll() is not None or bool(await pod.status("/health"))


StartPod = Callable[..., Any]


@pytest.fixture
async def start_pod(
    tmp_path: Path, keys_dir: Path, eventually: Any
) -> AsyncIterator[Callable[..., Any]]:
    """`await start_pod(**config)`: a pod that is ready, and known to one router."""
    (keys_dir / "admin-token").write_text(TOKEN)
    pods: list[Pod] = []

    async def start(**changes: Any) -> Pod:
        pods.append(Pod(tmp_path, keys_dir, **changes))
        await eventually(lambda: _answers_or_ended(pods[-1]))
        assert pods[-1].process.poll() is None, "it ended at once"
        await pods[-1].router.client.describe()
        return pods[-1]

    yield start
    for pod in pods:
        await pod.close()


# --- the program ----------------------------------------------------------------------------------


async def test_an_idle_engine_leaves_at_once(start_pod: StartPod, eventually: Any) -> None:
    pod = await start_pod(drain_seconds=FOR_EVER_S)
    pod.process.terminate()
    assert await pod.exit_code() == 0
    await eventually(lambda: pod.router.told and pod.router.told[-1].draining)


async def test_a_stream_under_way_ends_complete(start_pod: StartPod, eventually: Any) -> None:
    pod = await start_pod()
    async with pod.stream(max_tokens=400) as events:
        pod.process.terminate()
        await eventually(lambda: pod.router.told and pod.router.told[-1].draining)
        sick = await pod.http.get("/health")
        assert (sick.status_code, sick.json()["reason"]) == (503, "draining")
        assert await pod.status("/live") == 200
        late = await pod.complete(max_tokens=3)
        assert late["usage"]["completion_tokens"] == 3, "nothing that arrives is refused"
        state = await pod.state()
        assert (state["draining"], state["drained"], state["num_running"]) == (True, False, 1)
        lines = [line async for line in events if line]
    assert lines[-1] == "data: [DONE]"
    assert msgspec.json.decode(lines[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert await pod.exit_code() == 0


async def test_prefill_waits_for_the_reader_of_its_lease(
    start_pod: StartPod, eventually: Any
) -> None:
    pod = await start_pod(kv_transfer=KVTransferConfig(lease_seconds=60))
    prefilled = await pod.complete(max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    params = prefilled["kv_transfer_params"]
    await eventually(lambda: holds_a_lease(pod))
    pod.process.terminate()
    await eventually(lambda: pod.router.told and pod.router.told[-1].draining)
    with pytest.raises(TimeoutError):
        await pod.exit_code(1.0)
    state = await pod.state()
    assert (state["num_running"], state["leases_held"], state["drained"]) == (0, 1, False)
    await pod.router.client.call("reject_kv_transfer", "r", params)
    assert await pod.exit_code() == 0


async def holds_a_lease(pod: Pod) -> bool:
    return bool((await pod.state())["leases_held"])


async def test_time_runs_out_for_a_stream_that_never_ends(start_pod: StartPod) -> None:
    pod = await start_pod(drain_seconds=0.7)
    started = time.monotonic()
    async with pod.stream(max_tokens=7000) as events:
        pod.process.terminate()
        lines = [line async for line in events if line]
    assert "shutting_down" in lines[-1]
    assert await pod.exit_code() == 0
    assert time.monotonic() - started >= 0.7


@pytest.mark.parametrize(
    "second", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
async def test_a_second_signal_does_not_wait(start_pod: StartPod, second: signal.Signals) -> None:
    pod = await start_pod(drain_seconds=FOR_EVER_S)
    async with pod.stream(max_tokens=7000) as events:
        pod.process.terminate()
        with pytest.raises(TimeoutError):
            await pod.exit_code(0.5)
        pod.process.send_signal(second)
        lines = [line async for line in events if line]
        assert "shutting_down" in lines[-1]
    assert await pod.exit_code() == 0


async def test_an_operator_drains_over_the_admin_port(
    start_pod: StartPod, keys_dir: Path, eventually: Any
) -> None:
    pod = await start_pod()
    idle = {
        "draining": False, "drained": False, "num_running": 0, "num_waiting": 0, "leases_held": 0,
    }  # fmt: skip
    assert await pod.state() == idle
    previous = keys_dir / "previous-admin-token"
    wrong = {"authorization": "Bearer previous"}
    for path in ("/admin/state", "/admin/drain"):
        assert (await pod.admin.request("POST", path, headers=wrong)).status_code == 401
    assert (await pod.http.get("/admin/state")).status_code == 404, "not on the public port"
    asking = await pod.http.post("/v1/completions", json={"model": "smollm2", "prompt": "a"})
    assert asking.status_code == 404, "requests come from routers, or at the port asked for"
    assert (await pod.admin.get("/admin/is_paused")).json()["is_paused"] is False
    previous.write_text("previous")
    assert (await pod.admin.get("/admin/state", headers=wrong)).status_code == 200
    previous.unlink()
    async with pod.stream(max_tokens=400) as events:
        impatient = await pod.admin.post("/admin/drain", params={"timeout_s": 0})
        assert impatient.json() == {**idle, "draining": True, "num_running": 1}
        await eventually(lambda: pod.router.told and pod.router.told[-1].draining)
        assert await pod.status("/health") == 503
        answer = asyncio.create_task(
            pod.admin.post("/admin/drain", params={"timeout_s": PATIENCE_S})
        )
        assert [line async for line in events if line][-1] == "data: [DONE]"
        assert (await answer).json() == {**idle, "draining": True, "drained": True}
    assert await pod.status("/live") == 200
    assert pod.process.poll() is None, "it is the operator who ends the pod"


# --- liveness -------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def asked_if_alive(
    config: EngineConfig, stall_limit_s: float
) -> AsyncIterator[tuple[AsyncLLM, Callable[[], Any], httpx.AsyncClient]]:
    """An engine, what `/live` says of it, and a client of its front-end."""
    engine = await AsyncLLM.start(config, stall_limit_s=stall_limit_s)
    app = httpx.ASGITransport(build_app(engine))
    try:
        async with httpx.AsyncClient(
            transport=app, base_url="http://engine", timeout=PATIENCE_S
        ) as http:

            async def live() -> Json:
                answer = await http.get("/live")
                return {"status_code": answer.status_code, **answer.json()}

            yield engine, live, http
    finally:
        engine.shutdown()


@pytest.mark.slow
async def test_a_busy_core_is_alive() -> None:
    config = engine_config("busy", HEAVY, max_num_batched_tokens=STEP_TOKENS)
    async with asked_if_alive(config, STALL_LIMIT_S) as (engine, live, _):
        work = [
            asyncio.create_task(generate(engine, [index] * STEP_TOKENS, max_tokens=1))
            for index in range(8)
        ]
        asked = ended = 0
        last_step = time.monotonic()
        while not all(task.done() for task in work):
            well = (await live())["status_code"] == 200
            silent = time.monotonic() - last_step
            assert well or silent > STALL_LIMIT_S - 0.5, "many long steps are not a stall"
            asked += 1
            await asyncio.sleep(0.1)  # it answers at once, from what is known
            if sum(task.done() for task in work) > ended:
                ended, last_step = sum(task.done() for task in work), time.monotonic()
        assert asked > 5


async def test_a_stopped_core_with_work_is_stalled(eventually: Any) -> None:
    limit_s = 2.0
    async with asked_if_alive(engine_config("stopped", SLOW), limit_s) as (engine, live, http):
        endless = asyncio.create_task(generate(engine, [7] * 8, max_tokens=4000, ignore_eos=True))
        await eventually(lambda: engine.stats_by_engine()["stopped"].num_running == 1)
        os.kill(engine.description.pid, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            reason = await eventually(lambda: _reason_if_sick(live))
            waited = time.monotonic() - stopped
        finally:
            os.kill(engine.description.pid, signal.SIGCONT)
        assert "stalled" in reason
        assert waited > limit_s
        await eventually(lambda: _is_well(live))
        assert (await http.get("/health")).status_code == 200
        endless.cancel()
        await asyncio.gather(endless, return_exceptions=True)


async def _reason_if_sick(live: Callable[[], Any]) -> str:
    answer = await live()
    return "" if answer["status_code"] == 200 else str(answer["reason"])


async def _is_well(live: Callable[[], Any]) -> bool:
    return bool((await live())["status_code"] == 200)


async def test_a_dead_core_is_not_alive(eventually: Any) -> None:
    engine = await AsyncLLM.start(engine_config("dead", "dummy://"))
    app = httpx.ASGITransport(build_app(engine))
    async with httpx.AsyncClient(transport=app, base_url="http://engine") as http:
        assert (await http.get("/live")).status_code == 200
        os.kill(engine.description.pid, signal.SIGKILL)
        await eventually(lambda: engine.errored)
        answer = await http.get("/live")
        assert answer.status_code == 503
        assert "killed by signal 9" in answer.json()["reason"]
    engine.shutdown()


# --- hand-off between decode engines --------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cores(keys_dir: Path) -> AsyncIterator[tuple[Core, Core]]:
    """Two engines of one revision, as a router is connected to them.

    One request at a time runs in them, and none of it is computed twice.
    """
    configs = [engine_config(f"decode-{i}", LIGHT, executor_class=PACED) for i in range(2)]
    with importing_support():
        engines = await asyncio.gather(*(start_engine(config, keys_dir) for config in configs))
    first, second = (Core(endpoint, keys_dir) for _, endpoint in engines)
    try:
        for core in (first, second):
            await core.client.describe()
        yield first, second
    finally:
        for core in (first, second):
            core.client.close()
        for engine, _ in engines:
            engine.shutdown()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[int]]:
    """Answers of requests that stayed where they were, by their parameters."""
    return {}


PROMPT = [int(token) for token in b"An engine that leaves hands over what it has computed so far."]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("params", "cuts"),
    [
        ({}, [1]),
        ({}, [2, 3, 17]),
        ({"temperature": 0.9, "seed": 7, "top_p": 0.9}, [2, 3, 17]),
        ({"temperature": 1.2, "seed": 1, "top_k": 20, "frequency_penalty": 0.5}, [2, 3, 17]),
    ],
    ids=["greedy, once", "greedy", "seeded top-p", "seeded top-k with penalty"],
)
async def test_a_request_that_moves_generates_what_it_would_have(
    cores: tuple[Core, Core],
    undisturbed: dict[str, list[int]],
    params: Json,
    cuts: list[int],
    eventually: Any,
) -> None:
    """From engine to engine and back, each time after some more tokens."""
    name = f"{params}{cuts}"
    if str(params) not in undisturbed:
        cores[0].add(f"undisturbed {name}", PROMPT, [], None, **params)
        await cores[0].end_of(f"undisturbed {name}", eventually)
        undisturbed[str(params)] = cores[0].tokens[f"undisturbed {name}"]
    expected = undisturbed[str(params)]
    assert len(expected) == NUM_TOKENS

    tokens: list[int] = []
    lease = None
    for move, cut in enumerate(cuts):
        here = cores[move % 2]
        part = f"{name} part {move}"
        here.add(part, PROMPT, tokens, lease, **params)
        await eventually(lambda: here.tokens[part] and len(tokens + here.tokens[part]) >= cut)  # noqa: B023
        assert await here.client.call("hand_off", part) is True
        reason, lease = await here.end_of(part, eventually)
        assert reason is FinishReason.ABORT
        assert lease is not None
        tokens += here.tokens[part]
        assert lease["first_token_ids"] == tokens[-1:]
        assert lease["remote_num_tokens"] == len(PROMPT) + len(tokens) - 1
        assert await here.client.call("hand_off", part) is False, "it is not here any more"
    last = cores[len(cuts) % 2]
    before = await last.client.fetch_stats()
    last.add(name, PROMPT, tokens, lease, **params)
    assert (await last.end_of(name, eventually))[0] is FinishReason.LENGTH
    after = await last.client.fetch_stats()
    assert tokens + last.tokens[name] == expected
    assert after.prompt_tokens_computed == before.prompt_tokens_computed
    await eventually(lambda: nothing_is_held(cores))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_request_that_is_not_decoding_stays(
    cores: tuple[Core, Core], eventually: Any
) -> None:
    core = cores[0]
    long = [token % 500 for token in range(800)]  # several steps of prefill
    core.add("prefilling", long, [], None, max_tokens=2)
    assert await core.client.call("hand_off", "prefilling") is False
    core.add("remote", PROMPT, [], {"do_remote_decode": True}, max_tokens=1)
    assert await core.client.call("hand_off", "remote") is False
    assert await core.end_of("prefilling", eventually) == (FinishReason.LENGTH, None)
    assert len(core.tokens["prefilling"]) == 2
    _, lease = await core.end_of("remote", eventually)
    assert lease is not None
    await core.client.call("reject_kv_transfer", "remote", lease)
    await eventually(lambda: nothing_is_held(cores))


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_revisions_exchange_nothing(smollm2: str, keys_dir: Path, eventually: Any) -> None:
    config = engine_config("old", "dummy://", revision="00c0ffee")
    old, at_old = await start_engine(config, keys_dir)
    new, _ = await start_engine(
        msgspec.structs.replace(config, engine_id="new", revision="deadbeef"), keys_dir
    )
    try:
        assert old.description.revision == "00c0ffee"
        assert old.description.compat | {"revision": "deadbeef"} == new.description.compat
        source = Core(at_old, keys_dir)
        await source.client.describe()
        source.add("moves", [1, 2, 3], [], None, max_tokens=200)
        await eventually(lambda: source.tokens["moves"])
        assert await source.client.call("hand_off", "moves") is True
        _, lease = await source.end_of("moves", eventually)
        extra = {"kv_transfer_params": lease}
        with pytest.raises(Exception, match="hand-off failed"):
            await generate(new, [1, 2, 3, *source.tokens["moves"]], extra_args=extra)
        source.client.close()
    finally:
        old.shutdown()
        new.shutdown()


async def nothing_is_held(cores: tuple[Core, Core]) -> bool:
    stats = [await core.client.fetch_stats() for core in cores]
    return all(s.blocks_free == s.blocks_total for s in stats)


async def test_seconds_in_which_an_engine_stood_still_itself_are_not_held_against_its_core(
    eventually: Any,
) -> None:
    limit_s = 2.0
    async with asked_if_alive(engine_config("excused", SLOW), limit_s) as (engine, live, _):
        endless = asyncio.create_task(generate(engine, [7] * 8, max_tokens=4000, ignore_eos=True))
        await eventually(lambda: engine.stats_by_engine()["excused"].num_running == 1)
        os.kill(engine.description.pid, signal.SIGSTOP)
        try:
            await eventually(lambda: engine._cores.doubtful_s() > 0.0)
            time.sleep(limit_s + 1.0)  # the core is silent, and its client does not listen
            assert (await live())["status_code"] == 200
            await eventually(lambda: _reason_if_sick(live))
        finally:
            os.kill(engine.description.pid, signal.SIGCONT)
        endless.cancel()
        await asyncio.gather(endless, return_exceptions=True)


async def test_an_engine_that_was_stopped_as_a_whole_goes_on_with_its_requests_and_its_kv(
    start_pod: StartPod,
) -> None:
    """As when a machine is paused, for longer than a peer on a network may be silent."""
    pod = await start_pod()
    await pod.complete(max_tokens=1)
    front = psutil.Process(pod.process.pid)
    processes = [*front.children(recursive=True), front]
    async with pod.stream(max_tokens=200) as events:
        for process in processes:
            process.suspend()
            await asyncio.sleep(SILENCE_S / 2)  # the first may be asked for what it cannot answer
        await asyncio.sleep(SILENCE_S / 2)
        for process in reversed(processes):
            process.resume()
        assert "data: [DONE]" in [event async for event in events]
    await asyncio.sleep(2 * CAUSE_GRACE_S)  # within it the program ends after a lost core
    assert pod.process.poll() is None
    usage = (await pod.complete(max_tokens=1))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0
