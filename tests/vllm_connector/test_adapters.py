"""The adapters of a vLLM, without vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm_kit.sent import request
from waits import PATIENCE_S

from diptych_protocol import EngineCoreRequest, InvalidRequestError, LoRARequest
from diptych_vllm.serve.adapters import FIRST_ID, VllmAdapters
from diptych_vllm.serve.load import VllmLoad


class DeadError(Exception):
    """vLLM's core has ended."""


class Engine:
    """Keeps what it is told to load, by id."""

    adapter_places = (2, 2)

    def __init__(self) -> None:
        self.load = VllmLoad(64, "", 4)
        self.here: dict[int, LoRARequest] = {}
        self.failure: Exception | None = None
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.pinned: list[int] = []

    @property
    def llm(self) -> Any:
        return SimpleNamespace(remove_lora=self._remove, pin_lora=self._pin)

    async def add_lora(self, adapter: LoRARequest) -> bool:
        await asyncio.sleep(0)
        await self.may_load.wait()
        if self.failure is not None:
            raise self.failure
        assert adapter.lora_int_id not in self.here
        self.here[adapter.lora_int_id] = adapter
        return True

    async def _remove(self, lora_id: int) -> bool:
        return self.here.pop(lora_id, None) is not None

    async def _pin(self, lora_id: int) -> bool:
        self.pinned.append(lora_id)
        return True

    def has_died(self, error: Exception) -> bool:
        return isinstance(error, DeadError)


def made() -> tuple[Engine, VllmAdapters]:
    engine = Engine()
    served: Any = engine
    return engine, VllmAdapters(served)


def adapter(folder: Path, number: int, content: bytes = b"") -> LoRARequest:
    name = f"a{number}"
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "adapter_config.json").write_text("{}")
    (folder / name / "adapter_model.safetensors").write_bytes(content)
    return LoRARequest(name, number, str(folder / name))


def asked(wanted: LoRARequest) -> EngineCoreRequest:
    return msgspec.structs.replace(request(), lora_request=wanted)


async def test_who_uses_a_loaded_adapter_does_not_wait_for_another_to_load(tmp_path: Path) -> None:
    engine, adapters = made()
    await adapters.add(adapter(tmp_path, 1))
    engine.may_load.clear()
    other = asyncio.create_task(adapters.add(adapter(tmp_path, 2)))
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S), adapters.using(asked(adapter(tmp_path, 1))):
        assert not other.done()
    engine.may_load.set()
    assert await other


async def test_requests_that_come_at_once_load_an_adapter_once(tmp_path: Path) -> None:
    engine, adapters = made()
    wanted = adapter(tmp_path, 1)

    async def use() -> LoRARequest | None:
        async with adapters.using(asked(wanted)) as own:
            return own.lora_request

    first, second = await asyncio.gather(use(), use())
    assert first is second
    assert first is not None
    assert first.lora_int_id >= FIRST_ID
    assert first.lora_name == f"a1@{adapters.digests()['a1']}"
    assert engine.load.stats.adapters_loaded == 1


async def test_a_request_without_an_adapter_stays_as_it_is() -> None:
    _, adapters = made()
    plain = request()
    async with adapters.using(plain) as own:
        assert own is plain


async def test_the_least_recently_used_one_goes_that_nobody_uses_or_has_pinned(
    tmp_path: Path,
) -> None:
    engine, adapters = made()
    one, two, three, four = (adapter(tmp_path, number) for number in range(1, 5))
    async with adapters.using(asked(one)):
        await adapters.add(two)
        await adapters.add(three)
        assert adapters.listed() == [1, 3]
        assert await adapters.pin(3)
        await adapters.add(four)
        assert adapters.listed() == [1, 3, 4], "vLLM makes room, if anybody does"
    await adapters.add(two)
    assert adapters.listed() == [2, 3]
    assert sorted(x.lora_name[:2] for x in engine.here.values()) == ["a2", "a3"]


async def test_the_last_place_of_a_step_cannot_be_pinned(tmp_path: Path) -> None:
    _, adapters = made()
    assert not await adapters.pin(1)
    for number in (1, 2):
        await adapters.add(adapter(tmp_path, number))
    assert await adapters.pin(1)
    assert await adapters.pin(1)
    with pytest.raises(InvalidRequestError, match="at most 1 of 2 adapters can be pinned"):
        await adapters.pin(2)


async def test_a_removed_one_leaves_with_its_last_request(tmp_path: Path) -> None:
    engine, adapters = made()
    wanted = adapter(tmp_path, 1)
    async with adapters.using(asked(wanted)) as old:
        assert await adapters.remove(1)
        assert adapters.digests() == {}
        assert len(engine.here) == 1
        adapter(tmp_path, 1, b"other")
        async with adapters.using(asked(wanted)) as new:
            assert old.lora_request != new.lora_request
        assert len(engine.here) == 2
    assert len(engine.here) == 1
    assert not await adapters.remove(9)


async def test_an_id_is_one_adapter_s(tmp_path: Path) -> None:
    _, adapters = made()
    await adapters.add(adapter(tmp_path, 1))
    other = LoRARequest("other", 1, "/other")
    with pytest.raises(InvalidRequestError, match=r"adapter 1 is 'a1' from .*take another id"):
        await adapters.add(other)


async def test_what_cannot_be_loaded_is_refused_with_its_path(tmp_path: Path) -> None:
    engine, adapters = made()
    with pytest.raises(InvalidRequestError, match="adapter /none: ") as caught:
        await adapters.add(LoRARequest("x", 1, "/none"))
    assert caught.value.param == "lora_path"
    engine.failure = RuntimeError("its rank is too high")
    with pytest.raises(InvalidRequestError, match="a1: its rank is too high"):
        await adapters.add(adapter(tmp_path, 1))
    engine.failure = DeadError()
    with pytest.raises(DeadError):
        await adapters.add(adapter(tmp_path, 1))
    assert adapters.listed() == []
