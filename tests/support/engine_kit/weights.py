"""The weights of an engine in the test's own process, and their replacement.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

from typing import Any

import torch
from engine_kit.control import Owner
from torch import Tensor

from diptych_engine.models import CausalLM
from diptych_protocol import Array, WeightTransferUpdateRequest


def model_of(owner: Owner) -> CausalLM:
    runner: Any = owner.core.runner
    own: CausalLM = runner.model
    return own


def parameters(owner: Owner) -> dict[str, Tensor]:
    return {name: own.clone() for name, own in model_of(owner).named_parameters()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def replace(owner: Owner, tensors: dict[str, Tensor], *, published: bool = True) -> None:
    """Give new weights as a trainer does. published: by the names of a checkpoint."""
    arrays = [
        Array("float32", tuple(t.shape), t.contiguous().numpy().tobytes()) for t in tensors.values()
    ]
    owner.call("pause_generation")
    owner.call("start_weight_update", published)
    owner.call("update_weights", WeightTransferUpdateRequest(list(tensors), arrays))
    owner.call("finish_weight_update")
    owner.call("resume_generation")
