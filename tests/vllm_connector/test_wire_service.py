"""What clients of a vLLM server's wire are answered, with an engine that does what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from free_ports import free_port
from vllm_kit.sent import request

from diptych_frontend.core_client.client import CoreClient, HandshakeFailedError
from diptych_frontend.core_client.curve import new_keys
from diptych_frontend.core_client.heartbeat_timer import CALL_S, WITHIN_S
from diptych_kv_transfer.signing.references import PUBLIC_KEY, References
from diptych_protocol import (
    CurveKeys,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineDescription,
    FinishReason,
    KVTransferParams,
    LoRARequest,
    PoolingParams,
    UtilityError,
)
from diptych_protocol.arrays import Array
from diptych_protocol.wire import (
    DOUBT_KV,
    FOLLOW_HEARTBEAT,
    FOLLOW_PREFIXES,
    Abilities,
    ErrorKind,
    Heartbeat,
)
from diptych_vllm.serve.hand_off import FETCHES, VllmHandOffs
from diptych_vllm.serve.kv_events import RememberedBlocks
from diptych_vllm.serve.load import VllmLoad
from diptych_vllm.serve.middleware import ServedWire
from diptych_vllm.serve.service import UNSEEN_STEP_S
from diptych_vllm.serve.translation import OURS
from diptych_vllm.settings import ServedPort

Eventually = Callable[[Callable[[], Any]], Awaitable[None]]
ABOUT = EngineDescription(
    engine_id="e", epoch="1", model="m", max_model_len=64, vocab_size=100, block_size=4,
    num_blocks=64, dtype="float32", compat={}, max_num_seqs=4, pid=0, runtime="vllm",
)  # fmt: skip
LONG = 12
"""Tokens of a prompt that is computed in several steps."""


class DeadError(Exception):
    """vLLM's core has ended."""


def made(tokens: list[int], finish: str | None = None, received: int = 0) -> Any:
    """vLLM's `EngineCoreOutput`. received: tokens of the prompt whose KV came from elsewhere."""
    prompt = SimpleNamespace(num_cached_tokens=received, num_external_cached_tokens=received)
    return SimpleNamespace(
        new_token_ids=tokens, finish_reason=finish, stop_reason=None, kv_transfer_params=None,
        new_logprobs=None, new_prompt_logprobs_tensors=None, prefill_stats=prompt,
    )  # fmt: skip


@dataclass
class Engine:
    """Answers each request with its first tokens, one by one, and ends it with the last."""

    load: VllmLoad = field(default_factory=lambda: VllmLoad(64, OURS, 4))
    received: int = 0
    """How many tokens of each prompt have KV that came from elsewhere."""
    announced_from: int | None = LONG
    abilities: Abilities = field(default_factory=lambda: Abilities(images=False))
    can_sleep: bool = False
    remembers: bool = True
    asked: list[EngineCoreRequest] = field(default_factory=list)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    failure: Exception | None = None
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set: each answer stops after its first token."""
    is_paused: bool = False
    death: Exception | None = None
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set: the core is in a step."""
    num_asked: int = 0
    """How often the core was asked whether it is paused."""
    calls_end: asyncio.Event = field(default_factory=asyncio.Event)
    """Not set: calls go on."""

    def __post_init__(self) -> None:
        self.answers.set()
        self.calls_end.set()

    @property
    def llm(self) -> Any:
        return SimpleNamespace(
            is_paused=self._paused,
            pause_generation=self._pause,
            resume_generation=lambda: self._pause(is_paused=False),
        )

    async def _paused(self) -> bool:
        self.num_asked += 1
        await self.answers.wait()
        if self.death is not None:
            raise self.death
        return self.is_paused

    async def _pause(self, *, is_paused: bool = True, **how: Any) -> None:
        await self.calls_end.wait()
        self.is_paused = is_paused

    async def generate(self, asked: EngineCoreRequest, take: Callable[[Any], None]) -> None:
        self.asked.append(asked)
        if self.failure is not None:
            raise self.failure
        try:
            most = asked.sampling.max_tokens or 1
            for number in range(len(asked.generated_token_ids or ()), most - 1):
                take(made([number], received=self.received))
                await self.goes_on.wait()
                await asyncio.sleep(0)  # vLLM's next step
            take(made([most - 1], "length", self.received))
        except asyncio.CancelledError:
            self.aborted.append(asked.request_id)
            raise

    async def pool(self, asked: EngineCoreRequest, params: PoolingParams) -> Array:
        return Array("float32", (1,), bytes(4))

    async def reject(self, params: dict[str, Any]) -> None:
        self.rejected.append(params)

    adapter_places: tuple[int, int] = (0, 0)

    async def add_lora(self, adapter: LoRARequest) -> bool:
        return True

    def error_of(self, error: Exception) -> tuple[ErrorKind, str | None]:
        return (
            (ErrorKind.REFUSED, "seed")
            if isinstance(error, ValueError)
            else (ErrorKind.FAULT, None)
        )

    def has_died(self, error: Exception) -> bool:
        return isinstance(error, DeadError)


class Router:
    """A client, and what it has heard."""

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        self.heard: list[EngineCoreOutputs] = []
        self.lost = ""
        self.endpoint = endpoint
        self.client = CoreClient(
            endpoint,
            keys,
            on_outputs=self.heard.append,
            on_lost=lambda e: setattr(self, "lost", str(e)),
        )

    def outputs(self, request_id: str) -> list[EngineCoreOutput]:
        return [x for message in self.heard for x in message.outputs if x.request_id == request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs(request_id) for token in output.new_token_ids]

    def has_ended(self, request_id: str) -> bool:
        return any(output.finished for output in self.outputs(request_id))


@dataclass
class Served:
    engine: Engine
    wire: ServedWire
    router: Router
    blocks: RememberedBlocks
    left: list[bool]


@contextlib.asynccontextmanager
async def serving(keys: CurveKeys | None = None) -> AsyncIterator[Served]:
    engine, left = Engine(), list[bool]()
    settings = ServedPort("127.0.0.1", free_port(), keys)
    hand_offs = VllmHandOffs(OURS, "c", 30.0, References(PUBLIC_KEY))
    wire = ServedWire(engine, ABOUT, hand_offs, None, settings, lambda: left.append(True))
    router = Router(settings.endpoint, keys)
    try:
        await router.client.describe()
        yield Served(engine, wire, router, RememberedBlocks(4, 64), left)
    finally:
        router.client.close()
        await wire.close()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as made:
        yield made


def sent(name: str, **fields: Any) -> EngineCoreRequest:
    return msgspec.structs.replace(request(**fields), request_id=name)


async def test_an_answer_is_streamed_to_its_client(served: Served, eventually: Eventually) -> None:
    served.router.client.add(sent("r", max_tokens=3))
    await eventually(lambda: served.router.tokens("r") == [0])
    served.engine.goes_on.set()
    await eventually(lambda: served.router.has_ended("r"))
    assert served.router.tokens("r") == [0, 1, 2]
    assert served.router.outputs("r")[-1].finish_reason is FinishReason.LENGTH
    assert served.router.heard[-1].finished_requests == {"r"}
    assert served.router.heard[-1].requests_received == 1


async def test_a_prefetch_is_not_computed(served: Served, eventually: Eventually) -> None:
    served.router.client.add(msgspec.structs.replace(sent("r"), prefetches=True))
    await eventually(lambda: served.router.has_ended("r"))
    assert served.router.tokens("r") == []
    assert served.engine.asked == []


async def test_an_aborted_request_says_nothing_more(served: Served, eventually: Eventually) -> None:
    served.router.client.add(sent("r", max_tokens=3))
    await eventually(lambda: served.router.tokens("r") == [0])
    served.router.client.abort(["r"])
    await eventually(lambda: served.engine.aborted == ["r"])
    served.engine.goes_on.set()
    await served.router.client.fetch_stats()
    assert served.router.tokens("r") == [0]


async def test_a_client_that_has_gone_wants_nothing_more(
    served: Served, eventually: Eventually
) -> None:
    other = Router(served.router.client.endpoint)
    await other.client.describe()
    other.client.add(sent("r", max_tokens=1 << 40))
    await eventually(lambda: other.tokens("r") == [0])
    other.client.close()
    served.engine.goes_on.set()
    await eventually(lambda: served.engine.aborted == ["r"])


async def test_what_vllm_refuses_and_fails_at_is_told_apart(
    served: Served, eventually: Eventually
) -> None:
    for name, error in (("bad", ValueError("no seed")), ("fault", RuntimeError("broken"))):
        served.engine.failure = error
        served.router.client.add(sent(name))
        await eventually(functools.partial(served.router.has_ended, name))
    [bad], [fault] = served.router.outputs("bad"), served.router.outputs("fault")
    assert (bad.error, bad.error_kind, bad.error_param) == (
        "vLLM: no seed", ErrorKind.REFUSED, "seed",
    )  # fmt: skip
    assert (fault.error, fault.error_kind) == ("vLLM: broken", ErrorKind.FAULT)


async def test_a_refused_request_gives_back_what_waits_for_it(
    served: Served, eventually: Eventually
) -> None:
    lent = References(PUBLIC_KEY).sign(
        msgspec.convert(
            {
                "do_remote_prefill": True, "remote_engine_id": "p", "remote_host": "127.0.0.1",
                "remote_port": 1, "lease_id": "a" * 32, "epoch": "1", "compat": "c",
                "remote_num_tokens": 8,
            },
            type=KVTransferParams,
        ),
        30.0,
    ).to_dict()  # fmt: skip
    served.engine.failure = ValueError("no")
    served.router.client.add(sent("r", extra_args={"kv_transfer_params": lent}))
    await eventually(lambda: served.router.has_ended("r"))
    assert [params["lease_id"] for params in served.engine.rejected] == ["a" * 32]


async def test_an_announced_prompt_is_fetched_before_its_request(
    served: Served, eventually: Eventually
) -> None:
    asked = {FETCHES: True, "remote_num_tokens": LONG, "lease_id": "a" * 32}
    coming = sent("r", prompt=LONG, max_tokens=3, extra_args={"kv_transfer_params": asked})
    served.engine.received = LONG
    served.router.client.tell("announce_kv_transfer", coming)
    await eventually(lambda: bool(served.engine.asked))
    served.engine.received = 0
    early = served.engine.asked[0]
    assert (early.request_id, early.sampling.max_tokens) == ("r/early", 1)
    coming.generated_token_ids = [50]
    served.engine.goes_on.set()
    served.router.client.add(coming)
    await eventually(lambda: served.router.has_ended("r"))
    assert served.engine.asked[1].sampling.extra_args is None, "its KV is here"
    assert served.router.outputs("r")[0].num_received_tokens == LONG


@pytest.mark.parametrize("failed", [True, False], ids=["failed", "short"])
async def test_what_did_not_come_early_is_fetched_with_the_reference(
    served: Served, eventually: Eventually, failed: bool
) -> None:
    num_tokens = LONG if failed else LONG - 1
    asked = {FETCHES: True, "remote_num_tokens": num_tokens, "lease_id": "a" * 32}
    coming = sent("r", prompt=num_tokens, max_tokens=2, extra_args={"kv_transfer_params": asked})
    if failed:
        served.engine.failure = RuntimeError("no blocks")
    served.router.client.tell("announce_kv_transfer", coming)
    await served.router.client.fetch_stats()
    await eventually(lambda: len(served.engine.asked) == failed)
    served.engine.failure = None
    served.engine.goes_on.set()
    served.router.client.add(coming)
    await eventually(lambda: served.router.has_ended("r"))
    assert served.engine.asked[-1].sampling.extra_args == {"kv_transfer_params": asked}


async def test_kv_that_may_be_wrong_fails_and_is_forgotten(
    served: Served, eventually: Eventually
) -> None:
    asked = {FETCHES: True, "remote_num_tokens": 3}
    served.router.client.add(sent("r", max_tokens=3, extra_args={"kv_transfer_params": asked}))
    await eventually(lambda: served.router.tokens("r") == [0])
    await served.router.client.call(DOUBT_KV, "blocks were read after their lease had ended")
    assert not served.router.has_ended("r"), "it had begun"
    served.router.client.add(sent("s", max_tokens=1))
    await eventually(lambda: served.router.has_ended("s"))
    salts = [asked.cache_salt for asked in served.engine.asked]
    assert salts[0] == "s"
    assert salts[1] is not None
    assert salts[1].startswith("s")
    assert len(salts[1]) > 8


async def test_calls_that_vllm_lacks_fail_by_name(served: Served) -> None:
    for method, args, why in (
        ("reload_weights", [], "engines of the runtime vllm do not offer this call"),
        ("nonsense", [], "there is no such call"),
        ("sleep", [1, "abort"], "--enable-sleep-mode"),
        ("pause_generation", ["never"], "mode"),
        ("pause_generation", [1, 2, 3], "2 arguments"),
    ):
        with pytest.raises(UtilityError, match=f"^{method}: .*{why}"):
            await served.router.client.call(method, *args)
    assert await served.router.client.call("hand_off", "r") is False


async def test_clients_learn_that_the_engine_pauses(served: Served, eventually: Eventually) -> None:
    await served.router.client.call("pause_generation", "keep", False)
    assert await served.router.client.call("is_paused")
    await eventually(lambda: [x.scheduler_stats.paused for x in told(served.router)] == [True])
    await served.router.client.call("resume_generation")
    await eventually(
        lambda: [x.scheduler_stats.paused for x in told(served.router)] == [True, False]
    )


def told(router: Router) -> list[Any]:
    """Statistics that came unasked."""
    return [x for x in router.heard if x.scheduler_stats is not None and x.heartbeat is None]


async def test_followers_hear_that_the_core_answers(served: Served, eventually: Eventually) -> None:
    served.router.client.tell(FOLLOW_HEARTBEAT)
    await eventually(lambda: len([x for x in served.router.heard if x.heartbeat]) >= 2)
    beat = next(x for x in served.router.heard if x.heartbeat)
    assert beat.scheduler_stats is not None


async def test_a_router_that_has_connected_again_is_one_follower(
    served: Served, eventually: Eventually
) -> None:
    again = Router(served.router.endpoint)
    await again.client.describe()  # it has connected
    for router in (served.router, again):
        router.client.tell(FOLLOW_HEARTBEAT, "x")
    await eventually(lambda: any(x.heartbeat for x in again.heard))
    for router in (served.router, again):
        router.heard.clear()
    await eventually(lambda: beats_of(served.router) and beats_of(again))
    for beat in beats_of(served.router) + beats_of(again):
        assert (beat.follower, beat.followers) == (0, 1)
    again.client.close()


def beats_of(router: Router) -> list[Heartbeat]:
    return [x.heartbeat for x in router.heard if x.heartbeat is not None]


async def test_a_core_in_a_long_step_is_promised_more_time(
    served: Served, eventually: Eventually
) -> None:
    served.router.client.tell(FOLLOW_HEARTBEAT)
    await eventually(lambda: any(x.heartbeat for x in served.router.heard))
    served.engine.answers.clear()
    await eventually(lambda: any(within(x) >= UNSEEN_STEP_S for x in served.router.heard))
    served.router.heard.clear()
    served.engine.answers.set()
    await eventually(lambda: any(within(x) == WITHIN_S for x in served.router.heard))


async def test_a_call_keeps_its_promise_while_the_core_answers(
    served: Served, eventually: Eventually
) -> None:
    served.router.client.tell(FOLLOW_HEARTBEAT)
    await eventually(lambda: any(x.heartbeat for x in served.router.heard))
    served.engine.calls_end.clear()
    call = asyncio.ensure_future(served.router.client.call("pause_generation", "keep", False))
    await eventually(lambda: promised(served) == CALL_S)
    asked = served.engine.num_asked
    await eventually(lambda: served.engine.num_asked >= asked + 3)
    assert promised(served) == CALL_S
    served.engine.calls_end.set()
    await call
    await eventually(lambda: promised(served) == WITHIN_S)


async def test_the_beats_go_on_after_a_question_that_failed(
    served: Served, eventually: Eventually
) -> None:
    served.router.client.tell(FOLLOW_HEARTBEAT)
    await eventually(lambda: any(x.heartbeat for x in served.router.heard))
    asked, served.engine.death = served.engine.num_asked, RuntimeError("no answer")
    await eventually(lambda: served.engine.num_asked > asked + 1)
    served.engine.death = None
    served.router.heard.clear()
    await eventually(lambda: any(within(x) == WITHIN_S for x in served.router.heard))


def promised(served: Served) -> float:
    """What the last beat promises."""
    return [within(message) for message in served.router.heard if message.heartbeat][-1]


def within(message: EngineCoreOutputs) -> float:
    """How soon a message promises the next one."""
    return 0.0 if message.heartbeat is None else message.heartbeat.within_s


async def test_kv_is_doubted_when_nothing_checks_it_and_the_core_stood_still(
    served: Served,
) -> None:
    answers, service = served.wire._service._answers, served.wire._service
    service._stood_still(3600.0)
    assert not answers._salt, "our connector checks what it reads"
    service._hand_offs = VllmHandOffs("NixlConnector", "c", 30.0, None)
    service._stood_still(9.0)
    assert not answers._salt
    service._stood_still(11.0)
    assert answers._salt


async def test_an_engine_without_events_tells_no_prefixes(served: Served) -> None:
    served.router.client.tell(FOLLOW_PREFIXES)
    await served.router.client.fetch_stats()
    assert not any(message.prefix_changes for message in served.router.heard)


async def test_a_message_that_cannot_be_read_is_answered(
    served: Served, eventually: Eventually
) -> None:
    kind = EngineCoreRequestType.ADD.value
    served.router.client.send((kind, msgspec.msgpack.encode(["r", 5])))
    await eventually(lambda: served.router.has_ended("r"))
    assert "cannot be read" in (served.router.outputs("r")[0].error or "")
    served.router.client.send((b"\x09", b""))
    assert (await served.router.client.fetch_stats()).malformed_messages == 2


async def test_the_engine_drains_before_it_leaves(served: Served, eventually: Eventually) -> None:
    served.router.client.add(sent("r", max_tokens=3))
    await eventually(lambda: served.router.tokens("r") == [0])
    served.wire.drain(3600.0)
    await eventually(lambda: any(x.scheduler_stats.draining for x in told(served.router)))
    assert not served.left
    served.engine.goes_on.set()
    await eventually(lambda: bool(served.left))
    assert served.router.tokens("r") == [0, 1, 2]
    await served.wire.close()
    await eventually(lambda: "has ended" in served.router.lost)


async def test_the_end_of_the_core_is_told_with_its_reason(
    served: Served, eventually: Eventually
) -> None:
    served.engine.failure = DeadError()
    served.router.client.add(sent("r"))
    await eventually(lambda: "engine core has died" in served.router.lost)


async def test_an_idle_core_that_has_died_is_found_out(
    served: Served, eventually: Eventually
) -> None:
    served.engine.death = DeadError()
    await eventually(lambda: "engine core has died" in served.router.lost)


async def test_curve_keeps_strangers_out() -> None:
    async with serving(new_keys()) as made:
        stranger = Router(made.router.client.endpoint, new_keys())
        try:
            with pytest.raises(HandshakeFailedError):
                await stranger.client.describe()
        finally:
            stranger.client.close()


async def test_an_address_that_is_taken_is_an_error(served: Served) -> None:
    port = int(served.router.client.endpoint.rpartition(":")[2])
    hand_offs = VllmHandOffs("", "c", 30.0, None)
    with pytest.raises(zmq.ZMQError):
        ServedWire(
            Engine(), ABOUT, hand_offs, None, ServedPort("127.0.0.1", port, None), lambda: None
        )
