"""What engines of a runtime lack is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from vllm_kit.sent import request

from diptych_protocol import (
    EngineCoreRequest,
    InvalidRequestError,
    LoRARequest,
    PoolingParams,
    RouterConfig,
)
from diptych_router.engines.features import FEATURES, check_features, check_pools, lacking


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


@pytest.mark.parametrize("field", ASKED)
def test_vllm_engines_refuse_what_they_lack(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}: .* runtime vllm.*; ") as refused:
        check_features("vllm", lacking(FEATURES["vllm"]), ASKED[field])
    assert refused.value.param == field
    assert lacking(FEATURES["diptych"]) == ()


def test_what_every_runtime_has_is_not_refused() -> None:
    plain = request(logprobs=3, seed=1, stop=["x"], logit_bias={1: 1.0}, bad_words=["no"])
    for runtime, features in FEATURES.items():
        check_features(runtime, lacking(features), plain)


@pytest.mark.parametrize(
    ("runtime", "connector", "prefill", "refused"),
    [
        ("diptych", "diptych", True, ""),
        ("diptych", "diptych", False, "--prefill"),
        ("diptych", "nixl", True, "connector"),
        ("diptych", "none", True, "--prefill"),
        ("vllm", "diptych", True, ""),
        ("vllm", "diptych", False, ""),
        ("vllm", "nixl", True, ""),
        ("vllm", "nixl", False, ""),
        ("vllm", "none", False, ""),
        ("vllm", "none", True, "--prefill"),
    ],
)
def test_pools_and_connectors_that_do_not_fit_are_refused(
    runtime: Any, connector: Any, prefill: bool, refused: str
) -> None:
    config = RouterConfig(model="m", runtime=runtime, connector=connector)
    if not refused:
        check_pools(config, prefill=prefill)
        return
    with pytest.raises(InvalidRequestError, match=f"^{refused}: ") as raised:
        check_pools(config, prefill=prefill)
    assert raised.value.param == refused


def test_a_lease_that_nixl_cannot_renew_in_time_is_refused() -> None:
    config = RouterConfig(model="m", runtime="vllm", connector="nixl", lease_seconds=5.9)
    with pytest.raises(InvalidRequestError, match=r"^lease_seconds: "):
        check_pools(config, prefill=True)
