"""What engines of a runtime lack is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from vllm_kit.sent import request

from diptych_protocol import EngineCoreRequest, InvalidRequestError, LoRARequest, PoolingParams
from diptych_router.features import FEATURES, check_features, check_pools, lacking


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


@pytest.mark.parametrize(("runtime", "prefill"), [("vllm", True), ("diptych", False)])
def test_pools_that_a_runtime_does_not_have_are_refused(runtime: Any, prefill: bool) -> None:
    with pytest.raises(InvalidRequestError, match=f"--prefill: .*{runtime}"):
        check_pools(FEATURES[runtime], prefill=prefill)
    check_pools(FEATURES[runtime], prefill=not prefill)
