"""Adapters as users meet them: by name in API requests, loaded and unloaded by HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from engine_kit.core import generate, make_core
from model_kit.checkpoints import merged, random_tensors, save_adapter, save_model
from waits import PATIENCE_S

from diptych_frontend.admin.calls import build_admin_app
from diptych_frontend.admin.control import WeightRoutes
from diptych_frontend.app import build_app
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import EngineConfig, LoRARequest, SamplingParams, UtilityError

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
TOKEN = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, adapters 1 to 3, the model with adapter 1 merged in, and an admin token."""
    root = tmp_path_factory.mktemp("lora")
    save_model(root / "base", random_tensors(0))
    for number in (1, 2, 3):
        save_adapter(root / str(number), number)
    save_model(root / "merged", merged(random_tensors(0), str(root / "1")))
    (root / "admin-token").write_text("secret")
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncIterator[AsyncLLM]:
    """It has room for one adapter, so what is loaded tells what was used last."""
    config = EngineConfig(
        model=str(folder / "base"), served_name="base", num_blocks=64, num_threads=1,
        max_loras=1, lora_modules={"first": str(folder / "1"), "second": str(folder / "2")},
    )  # fmt: skip
    engine = await AsyncLLM.start(config)
    yield engine
    engine.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(engine: AsyncLLM, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """The API, and below /admin the admin port."""
    mounts = {
        "http://api": httpx.ASGITransport(build_app(engine)),
        "http://admin": httpx.ASGITransport(build_admin_app(folder, WeightRoutes(engine).routes())),
    }
    async with httpx.AsyncClient(mounts=mounts, timeout=PATIENCE_S) as client:
        yield client


async def complete(http: httpx.AsyncClient, model: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    return await http.post("http://api/v1/completions", json=body)


async def admin(http: httpx.AsyncClient, route: str, **body: Any) -> httpx.Response:
    return await http.post(f"http://admin/admin/{route}_lora_adapter", json=body, headers=TOKEN)


async def generated(engine: AsyncLLM, adapter: LoRARequest | None) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = engine.generate(PROMPT, params, "r", lora_request=adapter)
    return [list(o.outputs[0].token_ids) async for o in outputs][-1]


async def test_contract_C19_a_request_may_bring_its_adapter(engine: AsyncLLM, folder: Path) -> None:
    own = await generated(engine, LoRARequest("first", 1, str(folder / "1")))
    assert own == generate(make_core(str(folder / "merged")), PROMPT, max_tokens=8)
    assert own != await generated(engine, None)


async def test_contract_C19_models_and_their_adapters_are_listed(http: httpx.AsyncClient) -> None:
    cards = (await http.get("http://api/v1/models")).json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("base", None), ("first", "base"), ("second", "base"),
    ]  # fmt: skip
    assert (await http.get("http://api/v1/models/second")).status_code == 200


async def test_contract_C19_an_adapters_name_is_a_models(
    http: httpx.AsyncClient, engine: AsyncLLM
) -> None:
    first, second = ({engine.adapters[name].lora_int_id} for name in ("first", "second"))
    for name, loaded in (("second", second), ("first", first), ("base", first)):
        answer = await complete(http, name)
        assert (answer.status_code, answer.json()["model"]) == (200, name)
        assert await engine.list_loras() == loaded
    answer = await complete(http, "third")
    assert answer.status_code == 404
    assert "first, second" in answer.json()["error"]["message"]


async def test_contract_C19_adapters_come_and_go_by_http(
    http: httpx.AsyncClient, engine: AsyncLLM, folder: Path
) -> None:
    third = {"lora_name": "third", "lora_path": str(folder / "3")}
    answer = await admin(http, "load", **third)
    assert [adapter[0] for adapter in answer.json()["adapters"]] == ["first", "second", "third"]
    assert await engine.list_loras() == {1}
    assert (await complete(http, "third")).status_code == 200
    assert (await admin(http, "load", **third)).status_code == 400, "the name is taken"
    assert (await admin(http, "unload", lora_name="third")).status_code == 200
    assert await engine.list_loras() == set()
    assert (await complete(http, "third")).status_code == 404
    assert (await admin(http, "unload", lora_name="third")).status_code == 404


async def test_contract_C19_an_adapter_in_use_is_replaced(
    http: httpx.AsyncClient, engine: AsyncLLM, folder: Path
) -> None:
    assert (await admin(http, "load", lora_name="hot", lora_path=str(folder / "3"))).is_success
    old = engine.adapters["hot"]
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    under_way = engine.generate(PROMPT, params, "long", lora_request=old)
    await anext(under_way)
    assert (await admin(http, "unload", lora_name="hot")).is_success
    async for _ in under_way:
        pass
    assert (await admin(http, "load", lora_name="hot", lora_path=str(folder / "1"))).is_success
    assert engine.adapters["hot"].lora_int_id > old.lora_int_id, "the old one may be in use"
    assert (await admin(http, "unload", lora_name="hot")).is_success


async def test_contract_C19_adapters_that_come_at_once_have_ids_of_their_own(
    http: httpx.AsyncClient, engine: AsyncLLM, folder: Path
) -> None:
    names = ("one", "two", "two")
    loads = [admin(http, "load", lora_name=x, lora_path=str(folder / "3")) for x in names]
    assert sorted(answer.status_code for answer in await asyncio.gather(*loads)) == [200, 200, 400]
    assert len({adapter.lora_int_id for adapter in engine.adapters.values()}) == 4
    for name in ("one", "two"):
        assert (await admin(http, "unload", lora_name=name)).is_success
    assert await engine.list_loras() == set(), "nothing is loaded that has no name"


async def test_contract_C19_a_configured_id_is_not_given_to_another_adapter(
    http: httpx.AsyncClient, engine: AsyncLLM, folder: Path
) -> None:
    """Routers go on naming the configured adapter by it."""
    routers = engine.adapters["second"]
    assert (await admin(http, "unload", lora_name="second")).is_success
    assert (await admin(http, "load", lora_name="new", lora_path=str(folder / "3"))).is_success
    expected = await generated(engine, LoRARequest("x", 77, routers.lora_path))
    assert await generated(engine, routers) == expected
    assert (await admin(http, "unload", lora_name="new")).is_success
    body = {"lora_name": "second", "lora_path": routers.lora_path}
    assert (await admin(http, "load", **body)).is_success


async def test_contract_C19_what_cannot_be_loaded_is_the_callers_error(
    http: httpx.AsyncClient, engine: AsyncLLM
) -> None:
    for body, message in (
        ({"lora_name": "bad", "lora_path": "/nowhere"}, "No such file"),
        ({"lora_name": "base", "lora_path": "/nowhere"}, "the model's own name"),
        ({"lora_name": "bad"}, "lora_path"),
        ({"lora_name": "bad", "lora_path": 3}, "lora_path"),
    ):
        answer = await admin(http, "load", **body)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True)
    assert set(engine.adapters) == {"first", "second"}
    assert (await complete(http, "first")).status_code == 200, "the engine is alive"
    unauthorised = await http.post("http://admin/admin/load_lora_adapter", json={})
    assert unauthorised.status_code == 401


async def test_contract_A07_the_clients_view_of_adapters(engine: AsyncLLM, folder: Path) -> None:
    adapter = LoRARequest("mine", 9, str(folder / "3"))
    assert await engine.add_lora(adapter) is True
    assert await engine.list_loras() == {9}
    assert await engine.pin_lora(4) is False
    with pytest.raises(UtilityError, match="at most 0 of 1"):
        await engine.pin_lora(9)
    with pytest.raises(UtilityError, match="take another id"):
        await engine.add_lora(LoRARequest("other", 9, str(folder / "2")))
    assert await engine.remove_lora(9) is True
    assert await engine.remove_lora(9) is False
    assert "mine" not in engine.adapters
