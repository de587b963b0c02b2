"""Control calls of an AsyncLLM, and the same over the admin port of an engine pod."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from engine_kit.executor import PACED
from service_kit import importing_support
from waits import FOR_EVER_S, PATIENCE_S

from diptych_frontend.admin.calls import build_admin_app
from diptych_frontend.admin.control import ControlRoutes
from diptych_frontend.app import build_app
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.heartbeat_timer import Pulse
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_protocol import (
    EngineConfig,
    EngineDeadError,
    InvalidRequestError,
    KVTransferConfig,
    KVTransferParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    SchedulerStats,
    UtilityError,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "dummy://?num_hidden_layers=6&hidden_size=512&intermediate_size=2048"
"""80 MB of weights, and a few milliseconds a token, beside the rests."""
STALL_LIMIT_S = 4.0
TOKEN = "sesame"
Json = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def _paced() -> Iterator[None]:
    """Engines rest after each step."""
    with importing_support():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncLLM]:
    engine = await AsyncLLM.start(
        EngineConfig(
            model=MODEL,
            num_threads=1,
            num_blocks=512,
            max_num_batched_tokens=1024,
            executor_class=PACED,
            profile_dir=str(tmp_path_factory.mktemp("profiles")),
            kv_transfer=KVTransferConfig(),
        ),
        stall_limit_s=STALL_LIMIT_S,
    )
    yield engine
    engine.shutdown(timeout=FOR_EVER_S)  # with nothing to finish it does not wait


@pytest_asyncio.fixture(loop_scope="module")
async def admin(engine: AsyncLLM, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    (tmp_path / "admin-token").write_text(TOKEN)
    app = httpx.ASGITransport(build_admin_app(tmp_path, ControlRoutes(engine).routes()))
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=app, base_url="http://pod", headers=headers) as client:
        yield client


class Reading:
    """A request that is read in the background."""

    def __init__(self, engine: AsyncLLM, max_tokens: int = 30) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        self.begun = asyncio.Event()
        self.last: RequestOutput | None = None
        self.task = asyncio.create_task(self._read(engine.generate([1, 2, 3], params, "r")))

    async def _read(self, outputs: AsyncIterator[RequestOutput]) -> tuple[list[int], str | None]:
        async for output in outputs:
            self.last = output
            self.begun.set()
        assert self.last is not None
        choice = self.last.outputs[0]
        return list(choice.token_ids), choice.finish_reason

    async def end(self) -> tuple[list[int], str | None]:
        return await asyncio.wait_for(self.task, PATIENCE_S)


def resident_bytes(engine: AsyncLLM) -> int:
    return int(psutil.Process(engine.description.pid).memory_info().rss)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_contract_C20_each_mode_over_the_wire(engine: AsyncLLM, mode: Any) -> None:
    alone, _ = await Reading(engine).end()
    under_way = Reading(engine, max_tokens=900 if mode == "abort" else 30)
    await under_way.begun.wait()
    await engine.pause_generation(mode=mode)
    late = Reading(engine)
    if mode == "abort":
        tokens, reason = await under_way.end()
        assert reason == "abort"
        assert tokens[: len(alone)] == alone[: len(tokens)] != []
    elif mode == "wait":
        assert under_way.task.done() or (await under_way.end())[1] == "length"
    assert await engine.is_paused()
    await engine.check_health()
    assert not late.begun.is_set()
    await engine.resume_generation()
    assert await late.end() == (alone, "length")
    if mode != "abort":
        assert await under_way.end() == (alone, "length")
    assert not await engine.is_paused()


async def test_contract_C20_the_old_name_of_the_mode_wait_still_waits(engine: AsyncLLM) -> None:
    under_way = Reading(engine)
    await under_way.begun.wait()
    await engine.pause_generation(wait_for_inflight_requests=True)
    assert (await under_way.end())[1] == "length"
    await engine.resume_generation()
    with pytest.raises(InvalidRequestError, match="mode"):
        await engine.pause_generation(mode="later")  # type: ignore[arg-type]


async def test_contract_C16_sleep_gives_memory_back_and_wakes_up_with_the_same_tokens(
    engine: AsyncLLM,
) -> None:
    alone, _ = await Reading(engine).end()
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for index in range(2):  # so that the KV cache has pages at all
        async for _ in engine.generate([index + 2] * 1000, params, "fill"):
            pass
    awake = resident_bytes(engine)
    weights = kv_cache = 0
    for level in (1, 2):
        await engine.sleep(level)
        asleep = resident_bytes(engine)
        assert awake - asleep > 70e6, f"level {level} frees weights and KV cache"
        queued = Reading(engine)
        assert await engine.is_sleeping()
        await engine.wake_up(["weights"])
        assert await engine.is_sleeping()
        weights = resident_bytes(engine) - asleep
        await engine.wake_up(["kv_cache"])
        assert not await engine.is_sleeping()
        assert await queued.end() == (alone, "length")
    kv_cache = awake - asleep - weights
    assert weights > 60e6
    assert kv_cache > 0


async def test_contract_C11_a_stopped_core_with_work_is_unhealthy_after_the_stall_limit(
    engine: AsyncLLM,
) -> None:
    reading = Reading(engine, max_tokens=100)
    await reading.begun.wait()
    os.kill(engine.description.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        with pytest.raises(EngineDeadError, match="stalled"):
            await _healthy_for(engine, PATIENCE_S)
        # Its last sign of life was before it was stopped: on a busy machine a while before.
        assert time.monotonic() - stopped > STALL_LIMIT_S / 2
    finally:
        os.kill(engine.description.pid, signal.SIGCONT)
    assert (await reading.end())[1] == "length"
    await engine.check_health()


async def _healthy_for(engine: AsyncLLM, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        await engine.check_health()
        await asyncio.sleep(0.1)  # it answers at once, from what is known


async def test_contract_C11_a_pause_is_no_stall() -> None:
    pulse = Pulse()
    for paused, doubtful in ((True, 0.0), (False, 100.0)):
        pulse.heard(SchedulerStats(num_waiting=3, steps=7, paused=paused))
        pulse.asked(100.0)
        pulse.heard(SchedulerStats(num_waiting=3, steps=7, paused=paused))
        assert pulse.doubtful_s(200.0) == doubtful
    pulse.excuse()
    assert pulse.doubtful_s(200.0) == 0.0


async def test_contract_C13_C14_C15_resets_of_an_idle_engine(engine: AsyncLLM) -> None:
    assert await engine.reset_mm_cache() is None  # type: ignore[func-returns-value]
    assert await engine.reset_encoder_cache() is None  # type: ignore[func-returns-value]
    assert await engine.reset_prefix_cache() is True
    reading = Reading(engine, max_tokens=100)
    await reading.begun.wait()
    assert await engine.reset_prefix_cache() is False
    assert await engine.reset_prefix_cache(True, True) is True
    assert (await reading.end())[1] == "length"


async def test_contract_C12_profiles_over_the_wire(engine: AsyncLLM) -> None:
    await engine.stop_profile()
    await engine.start_profile()
    with pytest.raises(UtilityError, match="running already"):
        await engine.start_profile()
    await Reading(engine, max_tokens=2).end()
    await engine.stop_profile()
    directory = Path(engine.vllm_config.profile_dir)
    [trace] = directory.glob("*.pt.trace.json")
    assert "execute_model" in trace.read_text()
    trace.unlink()


# --- over HTTP ------------------------------------------------------------------------------------


async def test_the_admin_port_pauses_sleeps_and_wakes(admin: httpx.AsyncClient) -> None:
    async def post(path: str, body: Json | None = None) -> Json:
        answer = await admin.post(f"/admin/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    awake = {"is_paused": False, "is_sleeping": False, "sleep_level": 0}
    paused = {"is_paused": True, "is_sleeping": True, "sleep_level": 0}
    assert (await admin.get("/admin/is_paused")).json() == awake
    assert await post("pause", {"mode": "keep"}) == paused
    assert await post("resume") == awake
    assert await post("sleep", {"level": 2, "mode": "wait"}) == {**paused, "sleep_level": 2}
    refused = await admin.post("/admin/resume")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "refused")
    wrong = await admin.post("/admin/wake_up", json={"tags": ["all"]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tags")
    assert await post("wake_up", {"tags": ["kv_cache"]}) == {**paused, "sleep_level": 2}
    assert await post("wake_up") == awake
    assert (await admin.get("/admin/is_sleeping")).json() == awake


async def test_the_admin_port_resets_profiles_and_rejects(admin: httpx.AsyncClient) -> None:
    async def post(path: str, body: Json | None = None) -> Json:
        return dict((await admin.post(f"/admin/{path}", json=body)).json())

    assert await post("reset_prefix_cache", {"reset_connector": True}) == {"done": True}
    for cache in ("mm", "encoder"):
        answer = await post(f"reset_{cache}_cache")
        assert answer["done"] is True
        assert "no multimodal model" in answer["note"]
    assert await post("stop_profile") == {"files": []}
    assert await post("start_profile") == {"done": True}
    assert (await admin.post("/admin/start_profile")).status_code == 409
    [file] = (await post("stop_profile"))["files"]
    assert json.loads(Path(file).read_text())["traceEvents"]
    Path(file).unlink()
    lease: dict[str, Any] = {
        "do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [[1, 2]],
        "remote_host": "127.0.0.1", "remote_port": 1, "remote_num_tokens": 20,
        "remote_request_id": "r", "lease_id": "ab" * 16, "epoch": "e", "compat": "c",
    }  # fmt: skip
    signed = References(PUBLIC_KEY).sign(KVTransferParams(**lease), 30.0).to_dict()
    body = {"request_id": "r", "kv_transfer_params": signed}
    assert await post("reject_kv_transfer", body) == {"done": True}
    body["kv_transfer_params"] = {**signed, "proof": "0" * 64}
    assert (await post("reject_kv_transfer", body))["error"]["param"] == "kv_transfer_params"


@pytest.mark.parametrize(
    ("path", "body", "complaint"),
    [
        ("sleep", b'{"level": 3}', "level"),
        ("sleep", b'{"mode": "nap"}', "mode"),
        ("sleep", b'{"depth": 1}', "depth"),
        ("sleep", b"[]", "object"),
        ("sleep", b"{", "JSON"),
        ("wake_up", b'{"tags": ["coffee"]}', "tags"),
        ("pause", b'{"clear_cache": "yes"}', "clear_cache"),
        ("reject_kv_transfer", b"{}", "request_id"),
        (
            "reject_kv_transfer",
            b'{"request_id": "r", "kv_transfer_params": {"remote_port": 1.5}}',
            "kv_tra",
        ),
    ],
)
async def test_a_wrong_body_is_refused_by_its_field_and_changes_nothing(
    admin: httpx.AsyncClient, path: str, body: bytes, complaint: str
) -> None:
    answer = await admin.post(f"/admin/{path}", content=body)
    assert answer.status_code == 400, answer.text
    assert complaint in answer.json()["error"]["message"]
    assert (await admin.get("/admin/is_sleeping")).json()["is_sleeping"] is False


async def test_control_needs_the_token_and_is_not_on_the_public_port(
    admin: httpx.AsyncClient, engine: AsyncLLM
) -> None:
    paths = [route.path for route in ControlRoutes(engine).routes()]
    assert len(paths) == 16
    public = httpx.AsyncClient(
        transport=httpx.ASGITransport(build_app(engine)), base_url="http://pod"
    )
    async with public:
        for path in paths:
            wrong = {"authorization": "Bearer guess"}
            assert (await admin.post(path, headers=wrong)).status_code == 401
            assert (await public.post(path)).status_code == 404
            assert (await public.get(path)).status_code == 404
    assert not await engine.is_sleeping()


# --- the end --------------------------------------------------------------------------------------


async def test_contract_C22_a_shutdown_with_a_timeout_drains_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    engine = await AsyncLLM.start(EngineConfig(model=MODEL, num_threads=1, num_blocks=64))
    pid = engine.description.pid
    short, endless = Reading(engine, max_tokens=5), Reading(engine, max_tokens=900)
    await asyncio.gather(short.begun.wait(), endless.begun.wait())
    engine.shutdown(timeout=1.2)
    tokens, reason = await short.end()
    assert (len(tokens), reason) == (5, "length"), "what could end, ended"
    with pytest.raises(EngineDeadError):
        await endless.end()
    engine.shutdown()
    # The server that forks engines, which this one may be the first of, has one thread.
    left = [x for x in psutil.Process().children(recursive=True) if x.num_threads() > 1]
    assert {child.pid for child in left} <= before
    assert not psutil.pid_exists(pid)
    assert not list(tmp_path.rglob("*")), "no socket is left behind"


async def test_contract_B17_a_killed_core_ends_every_wait() -> None:
    engine = await AsyncLLM.start(EngineConfig(model=MODEL, num_threads=1, num_blocks=64))
    try:
        reading = Reading(engine, max_tokens=900)
        await reading.begun.wait()
        # Nothing ends before its time, however long this process has to wait for its turn.
        os.kill(engine.description.pid, signal.SIGSTOP)
        pause = asyncio.create_task(engine.pause_generation(mode="wait"))
        await asyncio.sleep(0)
        assert not pause.done()
        os.kill(engine.description.pid, signal.SIGKILL)
        for waiting in (pause, reading.task):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(waiting, PATIENCE_S)
        assert engine.errored
        assert "signal 9" in str(engine.dead_error)
        with pytest.raises(EngineDeadError):
            await engine.is_sleeping()
    finally:
        engine.shutdown()
