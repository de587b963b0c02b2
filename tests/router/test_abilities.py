"""What engines say that they cannot do is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from engine_kit.fake_core import FakeCore, description
from free_ports import free_port
from service_kit import make_router
from vllm_kit.sent import request

from diptych_protocol import (
    EngineCoreRequest,
    EngineDescription,
    InvalidRequestError,
    LoRARequest,
    PoolingParams,
    SamplingParams,
)
from diptych_protocol.abilities import check_abilities, lacks_of
from diptych_protocol.wire import Abilities


def with_(**fields: Any) -> EngineCoreRequest:
    return msgspec.structs.replace(request(), **fields)


ASKED = {
    "input": with_(sampling_params=None, pooling_params=PoolingParams()),
    "prompt_embeds": with_(prompt_embeds=np.zeros((8, 4), np.float32)),
    "image_url": with_(mm_features=[object()]),
    "model": with_(lora_request=LoRARequest("sql", 1, "/adapters/sql")),
    "prompt_logprobs": request(prompt_logprobs=0),
    "logits_processors": request(logits_processors=["m:f"]),
}
NOTHING = Abilities(**dict.fromkeys(Abilities.__struct_fields__, False))


def engine(**said: Any) -> EngineDescription:
    return msgspec.structs.replace(description("m"), **said)


ABLE = engine(tasks=("generate", "embed", "token_embed"))
UNABLE = engine(runtime="vllm", abilities=NOTHING)


@pytest.mark.parametrize("field", ASKED)
def test_what_an_engine_lacks_is_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: .* runtime vllm.*; ") as refused:
        check_abilities(lacks_of([ABLE, UNABLE]), ASKED[field])
    assert refused.value.param == field
    assert refused.value.code == "unsupported_by_runtime"
    assert lacks_of([ABLE]) == ()


def test_what_every_engine_can_do_is_not_refused() -> None:
    plain = request(logprobs=3, seed=1, stop=["x"], logit_bias={1: 1.0}, bad_words=["no"])
    check_abilities(lacks_of([ABLE, UNABLE]), plain)


def test_an_engine_that_says_nothing_of_its_abilities_can_do_what_ours_can() -> None:
    said = msgspec.to_builtins(ABLE)
    assert not {"runtime", "abilities"} & said.keys()
    older = msgspec.convert(said, EngineDescription)
    assert (older.runtime, older.abilities) == ("diptych", Abilities())
    assert lacks_of([older]) == ()


async def test_a_router_refuses_what_its_engines_say_they_cannot_do(
    smollm2: str, eventually: Any
) -> None:
    ports = [free_port(), free_port()]
    unable = engine(runtime="vllm", abilities=Abilities(prompt_logprobs=False, images=False))
    fakes = [
        FakeCore(f"tcp://127.0.0.1:{port}", describe=msgspec.to_builtins(said))
        for port, said in zip(ports, (ABLE, unable), strict=True)
    ]
    prefill, decode = (f"127.0.0.1:{port}" for port in ports)
    router = make_router(smollm2, prefill, decode, None, verify="Off")
    try:
        router.start()
        await eventually(lambda: len(router.pools.usable_engines()) == 2)
        with pytest.raises(InvalidRequestError, match=r"^prompt_logprobs: .* runtime vllm"):
            async for _ in router.generate([1, 2], SamplingParams(prompt_logprobs=1), "r"):
                pass
        assert not router.takes_images
    finally:
        router.shutdown()
        for fake in fakes:
            await fake.close()
