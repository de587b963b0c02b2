"""Adapters across the hinge: prefill and decode use the same one, or nothing crosses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine_kit.core import generate as generate_alone
from engine_kit.core import make_core
from model_kit.checkpoints import merged, random_tensors, save_adapter, save_model
from service_kit import engine_config, healthy, make_router, start_engine

from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_frontend.core_client.curve import read_keys
from diptych_protocol import DiptychError, RequestOutput, SamplingParams
from diptych_router.engines.engine_table import LoadedAdapters
from diptych_router.requests.pool_client import PoolClient

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [1 + token % 60 for token in range(100)]
LENGTH = 12


@dataclass
class Service:
    prefill: AsyncLLM
    decode: AsyncLLM
    pools: PoolClient
    folder: Path
    at: tuple[str, str]
    """The addresses of the engines."""

    async def answer(self, adapter: str | None, prompt: list[int] = PROMPT) -> RequestOutput:
        params = SamplingParams(temperature=0.0, max_tokens=LENGTH)
        request = None if adapter is None else self.pools.adapters[adapter]
        outputs = self.pools.generate(prompt, params, "r", lora_request=request)
        return [output async for output in outputs][-1]

    async def received(self) -> int:
        """Prompt tokens that crossed the hinge, up to now."""
        await self.decode.refresh_stats()
        [stats] = self.decode.stats_by_engine().values()
        return stats.remote_kv_tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(
    tmp_path_factory: pytest.TempPathFactory, keys_dir: Path
) -> AsyncIterator[Service]:
    """A model with the adapters `one` and `two`, in a prefill and a decode engine."""
    folder = tmp_path_factory.mktemp("adapters")
    model = save_model(folder / "base", random_tensors(0))
    adapters = {name: save_adapter(folder / name, i) for i, name in enumerate(("one", "two"), 1)}
    config = engine_config("", model, lora_modules=adapters)
    (prefill, at_p), (decode, at_d) = await asyncio.gather(
        start_engine(config, keys_dir), start_engine(config, keys_dir)
    )
    keys = read_keys(keys_dir)
    pools = make_router(model, at_p, at_d, lambda: [keys], lora_modules=adapters)
    pools.start()
    try:
        await healthy(pools)
        yield Service(prefill, decode, pools, folder, (at_p, at_d))
    finally:
        pools.shutdown()
        prefill.shutdown()
        decode.shutdown()


async def test_contract_B10_adapters_cross_the_hinge_and_do_not_mix(service: Service) -> None:
    """The same prompt with each adapter: its KV comes from prefill, under the adapter's name."""
    for name in ("one", None, "two"):
        tensors = random_tensors(0)
        if name is not None:
            tensors = merged(tensors, str(service.folder / name))
        alone = make_core(save_model(service.folder / f"alone-{name}", tensors))
        before = await service.received()
        answer = await service.answer(name)
        made = list(answer.outputs[0].token_ids)
        assert made == generate_alone(alone, PROMPT, max_tokens=LENGTH), name
        assert await service.received() - before >= len(PROMPT) - 16, name


async def test_routers_learn_which_adapters_are_loaded(service: Service, eventually: Any) -> None:
    """From the engines, not only from what they have sent there themselves."""
    rows = [link.row for link in service.pools.pools.links.values()]
    for row in rows:
        row.adapters = LoadedAdapters()
    for engine in (service.prefill, service.decode):
        await engine.add_lora(service.pools.adapters["two"])
    await eventually(lambda: all(row.adapters.has("two", time.monotonic()) for row in rows))
    for engine in (service.prefill, service.decode):
        assert await engine.remove_lora(service.pools.adapters["two"].lora_int_id)
    await eventually(lambda: not any(row.adapters.has("two", time.monotonic()) for row in rows))
    for engine in (service.prefill, service.decode):
        stats = await engine.refresh_stats()
        assert stats.adapters_loaded > 0
        assert stats.seconds_loading_adapters > 0


async def test_a_router_of_another_configuration_means_the_same_adapters(
    service: Service, keys_dir: Path
) -> None:
    """As in a rollout that removes `one`: engines and the other router still have it."""
    expected = (await service.answer("two")).outputs[0].token_ids
    model, keys = str(service.folder / "base"), read_keys(keys_dir)
    two = {"two": str(service.folder / "two")}
    newer = make_router(model, *service.at, lambda: [keys], lora_modules=two)
    newer.start()
    try:
        await healthy(newer)
        answer = await replace(service, pools=newer).answer("two")
        assert answer.outputs[0].token_ids == expected
    finally:
        newer.shutdown()


async def test_contract_B10_other_files_under_one_name_exchange_no_kv(service: Service) -> None:
    """Prefill has loaded the adapter before its files changed; decode reads the new ones."""
    one = service.pools.adapters["one"]
    await service.prefill.remove_lora(one.lora_int_id)
    await service.decode.remove_lora(one.lora_int_id)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    assert [o async for o in service.prefill.generate([1], params, "warm", lora_request=one)]
    save_adapter(service.folder / "one", 3)
    before = await service.received()
    with pytest.raises(DiptychError, match="another prompt, adapter or salt"):
        await service.answer("one", PROMPT[::-1])
    assert await service.received() == before
