"""A control call is said once: clients, core, HTTP route, page and refusal agree with its type."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import pytest

from diptych_engine.control.core import EngineCore
from diptych_engine.serving.build_core import build_core
from diptych_frontend.admin.control import ControlRoutes
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import EngineConfig, LoRARequest, UnsupportedFeatureError, WithoutControl
from diptych_protocol import WeightTransferInitRequest as Init
from diptych_protocol import WeightTransferUpdateRequest as Update
from diptych_protocol.control_calls import (
    CONTROL_CALLS,
    AwaitedCalls,
    BlockingCalls,
    ControlCall,
    ResetMmCache,
)

PAGE = Path(__file__).parents[3] / "docs" / "admin-api.md"
BY_NAME = {kind.METHOD: kind for kind in CONTROL_CALLS}
NEEDED: dict[str, Any] = {
    "lora_request": LoRARequest("sql", 1, "/sql"),
    "lora_id": 1,
    "init_request": Init({}),
    "request": Update([]),
}
"""Values for fields without a default."""
ANSWERS: dict[Any, tuple[Any, Any]] = {
    type(None): ("some words", None), bool: (True, True), int: (2, 2), set[int]: ([2, 3], {2, 3}),
}  # fmt: skip
"""What a core answers, and what the caller gets, by the type that a call promises."""


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return build_core(EngineConfig("dummy://?num_hidden_layers=1&hidden_size=16", num_blocks=4))


@pytest.fixture(params=sorted(BY_NAME))
def kind(request: pytest.FixtureRequest) -> type[ControlCall[Any]]:
    return BY_NAME[request.param]


def example(kind: type[ControlCall[Any]]) -> ControlCall[Any]:
    fields = msgspec.structs.fields(kind)
    return kind(*(NEEDED[field.name] for field in fields if field.required))


def test_the_core_takes_the_fields_of_a_call(
    core: EngineCore, kind: type[ControlCall[Any]]
) -> None:
    parameters = inspect.signature(core.utilities[kind.METHOD]).parameters.values()
    assert [(one.name, one.default) for one in parameters] == [
        (field.name, inspect.Parameter.empty if field.required else field.default)
        for field in msgspec.structs.fields(kind)
    ]


class Blocks(BlockingCalls):
    """Keeps the calls, and answers each of them alike."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[ControlCall[Any]] = []

    def control(self, call: ControlCall[Any]) -> Any:
        self.calls.append(call)
        return self.answer


class Waits(AwaitedCalls):
    def __init__(self, answer: Any) -> None:
        self.blocks = Blocks(answer)

    async def control(self, call: ControlCall[Any]) -> Any:
        return self.blocks.control(call)


async def test_both_kinds_of_clients_have_a_method_with_the_fields_of_a_call(
    kind: type[ControlCall[Any]],
) -> None:
    (wanted,) = get_args(kind.__orig_bases__[0])  # type: ignore[attr-defined]
    call, (answer, read) = example(kind), ANSWERS[wanted]
    blocks, waits = Blocks(answer), Waits(answer)
    arguments = {field: getattr(call, field) for field in kind.__struct_fields__}
    got = getattr(blocks, kind.METHOD)(**arguments)
    assert await getattr(waits, kind.METHOD)(**arguments) == got
    assert blocks.calls == waits.blocks.calls == [call]
    assert got == read
    for face in (Blocks, Waits):
        method = getattr(face, kind.METHOD)
        own, *fields = inspect.signature(method).parameters.values()
        assert own.name == "self"
        assert [field.name for field in fields] == list(kind.__struct_fields__)
        assert inspect.iscoroutinefunction(method) is (face is Waits)


def test_a_caller_who_is_promised_nothing_is_told_nothing() -> None:
    assert Blocks("2 images").reset_mm_cache() is None
    assert ResetMmCache().report("2 images").note == "2 images"


def test_the_admin_port_and_its_page_have_every_call_that_says_so(
    kind: type[ControlCall[Any]],
) -> None:
    routes = {route.path: route for route in ControlRoutes(cast(AsyncLLM, None)).routes()}
    if not kind.PATH:
        assert f"/admin/{kind.METHOD}" not in routes
        return
    method = "GET" if kind.READS else "POST"
    assert method in (routes[f"/admin/{kind.PATH}"].methods or ())
    assert f"| `{method} /admin/{kind.PATH}` |" in PAGE.read_text()


class Nobody(WithoutControl):
    """A client that owns no engine."""


Nobody.__abstractmethods__ = frozenset()


async def test_who_owns_no_engine_refuses_what_acts_on_one(kind: type[ControlCall[Any]]) -> None:
    call: Any = example(kind)
    client = Nobody()  # type: ignore[abstract]
    if kind.READS:
        assert await client.control(call) is False
        return
    with pytest.raises(UnsupportedFeatureError, match=f"{kind.METHOD} acts on one engine"):
        await client.control(call)
