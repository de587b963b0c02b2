"""An engine's owner reaches its workers: methods by name, and weights from a trainer's process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
import torch
from engine_kit import trainer_process
from engine_kit.core import DUMMY, generate, make_core
from free_ports import free_port
from model_kit.checkpoints import random_tensors, save_model
from waits import PATIENCE_S

from diptych_engine.weights.trainer import WeightSender, describe
from diptych_frontend.admin.calls import build_admin_app
from diptych_frontend.admin.control import ControlRoutes, WeightRoutes
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import (
    Array,
    EngineConfig,
    InvalidRequestError,
    SamplingParams,
    UtilityError,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

SUPPORT = str(Path(trainer_process.__file__).parents[1])
EXTENSION = "engine_kit.worker_extension:Extension"
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the seeds 0 and 1."""
    root = tmp_path_factory.mktemp("weights")
    for seed in (0, 1):
        save_model(root / str(seed), random_tensors(seed))
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[AsyncLLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SUPPORT + os.pathsep + os.environ.get("PYTHONPATH", ""))
        config = EngineConfig(
            model=str(folder / "0"), num_blocks=64, num_threads=1, worker_extension=EXTENSION
        )
        engine = await AsyncLLM.start(config)
    yield engine
    engine.shutdown()


async def generated(engine: AsyncLLM, max_tokens: int = 8) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [list(o.outputs[0].token_ids) async for o in engine.generate(PROMPT, params, "r")][-1]


# --- collective_rpc -------------------------------------------------------------------------------


async def test_contract_C24_a_method_runs_on_every_worker(engine: AsyncLLM) -> None:
    echoed = await engine.collective_rpc("echo", args=(1, "two", [3]), kwargs={"four": 4.0})
    assert echoed == [[[1, "two", [3]], {"four": 4.0}]]
    count = sum(tensor.numel() for tensor in random_tensors(0).values())
    assert await engine.collective_rpc("count_parameters") == [count]


async def test_contract_C24_what_a_worker_raises_its_caller_raises(engine: AsyncLLM) -> None:
    for method, args, message in (
        ("fail", ("out of luck",), "RuntimeError: out of luck"),
        ("echo", (object,), "cannot be sent"),
        ("unsendable", (), "cannot be sent"),
        ("count_parameters", (1, 2), "TypeError"),
        ("no_such_method", (), "no worker method 'no_such_method'"),
        ("_private", (), "not for clients"),
        ("_load_lora", (1, "/path", ""), "not for clients"),
        ("__init__", (), "not for clients"),
    ):
        with pytest.raises((UtilityError, InvalidRequestError), match=message):
            await engine.collective_rpc(method, args=args)
    assert await generated(engine), "the engine is alive"


async def test_contract_C24_the_callers_wait_has_its_deadline(engine: AsyncLLM) -> None:
    with pytest.raises(TimeoutError, match=r"collective_rpc: no answer within 0\.1 s"):
        await engine.collective_rpc("sleep", timeout=0.1, args=(0.4,))
    assert await engine.collective_rpc("sleep", timeout=5.0, args=(0.0,)) == ["slept"]
    assert await generated(engine)


@pytest.mark.parametrize(
    "spec",
    [
        "no_such_module:X",
        "engine_kit.worker_extension:Nobody",
        "worker_extension",
        "engine_kit.worker_extension:Unmakeable",
    ],
)
async def test_contract_C24_an_extension_that_is_none_is_an_error_at_the_start(spec: str) -> None:
    with pytest.raises(InvalidRequestError, match="worker_extension"):
        make_core(worker_extension=spec)


async def test_contract_C24_an_extension_replaces_no_method_of_ours() -> None:
    core = make_core(DUMMY, worker_extension=EXTENSION)
    assert core.runner.collective_rpc("rank") == [0]


# --- weights --------------------------------------------------------------------------------------


async def has_requests(engine: AsyncLLM) -> bool:
    await engine.refresh_stats()
    return any(s.num_running + s.num_waiting for s in engine.stats_by_engine().values())


async def test_contract_C26_a_trainers_process_pushes_weights(
    engine: AsyncLLM, folder: Path, eventually: Callable[..., Awaitable[Any]]
) -> None:
    """Logits and tokens are those of a fresh engine; a request that was kept goes on with them."""
    port = free_port()
    trainer = subprocess.Popen(
        [sys.executable, trainer_process.__file__, str(port), "1"],
        env={**os.environ, "PYTHONPATH": SUPPORT + os.pathsep + os.environ.get("PYTHONPATH", "")},
    )
    try:
        info = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
        await engine.init_weight_transfer_engine(WeightTransferInitRequest(info))
        before = await generated(engine)
        kept = asyncio.create_task(generated(engine, 400))
        await eventually(lambda: has_requests(engine))
        await engine.pause_generation(mode="keep")
        assert await has_requests(engine), "it stands still"
        await engine.start_weight_update()
        await engine.update_weights(describe(random_tensors(1)))
        await engine.finish_weight_update()
        await engine.resume_generation()
        assert len(await kept) == 400
        assert trainer.wait(PATIENCE_S) == 0
    finally:
        trainer.kill()
        trainer.wait()
    fresh = make_core(str(folder / "1"))
    assert await generated(engine) == generate(fresh, PROMPT, max_tokens=8) != before


async def test_contract_C26_a_trainer_elsewhere_does_it_by_http(
    engine: AsyncLLM, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "admin-token").write_text("secret")
    routes = [*ControlRoutes(engine).routes(), *WeightRoutes(engine).routes()]
    transport = httpx.ASGITransport(build_admin_app(tmp_path, routes))
    sender = WeightSender("127.0.0.1", num_workers=1, timeout_s=PATIENCE_S)
    tensors = random_tensors(2)
    http = httpx.AsyncClient(
        transport=transport, timeout=PATIENCE_S, headers={"authorization": "Bearer secret"}
    )

    async def post(route: str, body: object = None) -> tuple[int, str]:
        content = b"" if body is None else msgspec.json.encode(body)
        answer = await http.post(f"http://admin/admin/{route}", content=content)
        return answer.status_code, answer.text

    async with http:
        status, text = await post("start_weight_update")
        assert (status, "pause generation first" in text) == (409, True)
        nowhere = {"init_info": {"master_address": "127.0.0.1", "master_port": 0, "world_size": 2}}
        assert (await post("init_weight_transfer_engine", nowhere))[0] == 400
        joining = asyncio.create_task(asyncio.to_thread(sender.join))
        assert (await post("init_weight_transfer_engine", sender.address()))[0] == 200
        await joining
        assert (await post("pause", {"mode": "wait"}))[0] == 200
        assert (await post("start_weight_update"))[0] == 200
        sending = asyncio.create_task(asyncio.to_thread(sender.send, tensors))
        announced = describe(tensors)
        body = {"names": announced.names, "update_info": announced.update_info}
        assert (await post("update_weights", body))[0] == 200
        await sending
        assert (await post("finish_weight_update"))[0] == 200
        assert (await post("resume"))[0] == 200
        fresh = make_core(save_model(tmp_path / "2", tensors))
        assert await generated(engine) == generate(fresh, PROMPT, max_tokens=8)
        assert (await post("update_weights", {"names": "all"}))[0] == 400
        assert (await post("pause"))[0] == 200
        assert (await post("reload_weights"))[0] == 200
        assert (await post("resume"))[0] == 200
    fresh = make_core(str(folder / "0"))
    assert await generated(engine) == generate(fresh, PROMPT, max_tokens=8)


async def test_contract_C26_weights_may_come_inside_messages(
    engine: AsyncLLM, tmp_path: Path
) -> None:
    tensors = random_tensors(3)
    arrays = [
        Array("float32", tuple(t.shape), t.reshape(-1).view(torch.uint8).numpy().tobytes())
        for t in tensors.values()
    ]
    await engine.pause_generation(mode="wait")
    await engine.start_weight_update(is_checkpoint_format=True)
    with pytest.raises(UtilityError, match="no tensor model"):
        await engine.update_weights(WeightTransferUpdateRequest(["model.nose"], arrays[:1]))
    with pytest.raises(UtilityError, match="failed"):
        await engine.resume_generation()
    await engine.start_weight_update()
    await engine.update_weights(WeightTransferUpdateRequest(list(tensors), arrays))
    await engine.finish_weight_update()
    await engine.resume_generation()
    fresh = make_core(save_model(tmp_path, tensors))
    assert await generated(engine) == generate(fresh, PROMPT, max_tokens=8)
