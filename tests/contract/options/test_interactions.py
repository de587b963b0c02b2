"""Features that meet: sleep and adapters, pauses and what was kept, sessions and lack of room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_kit.control import LONG, Owner, undisturbed
from engine_kit.core import CLIENT, core_request, generate, make_core
from model_kit.checkpoints import random_tensors, save_adapter, save_model

from diptych_protocol import FinishReason, InvalidRequestError, LoRARequest


@pytest.mark.parametrize("level", [1, 2])
def test_contract_C19_a_sleeping_engine_takes_requests_with_adapters(
    tmp_path: Path, level: int
) -> None:
    model = save_model(tmp_path / "model", random_tensors(0))
    adapters = [
        LoRARequest(f"a{seed}", seed, save_adapter(tmp_path / f"a{seed}", seed)) for seed in (1, 2)
    ]
    expected = generate(make_core(model, max_loras=2), [3, 1, 4], lora_request=adapters[0], **LONG)
    owner = Owner(model=model, max_loras=2)
    owner.call("sleep", level)
    owner.add("early", [3, 1, 4], lora_request=adapters[0])
    assert owner.call("add_lora", ["a2", 2, adapters[1].lora_path])
    owner.call("wake_up")
    owner.finish("early")
    assert owner.tokens("early") == expected


@pytest.mark.parametrize("call", [("pause_generation", "wait"), ("sleep", 2, "wait")], ids=str)
def test_contract_C16_what_sleep_keeps_cannot_be_waited_for(call: tuple[Any, ...]) -> None:
    """There are no weights to compute it with; it goes on when they are back."""
    owner = Owner()
    owner.add("kept")
    owner.turn(3)
    owner.call("sleep", 1, "keep")
    with pytest.raises(InvalidRequestError, match="asleep"):
        owner.call(*call)
    owner.turn(3)
    owner.call("wake_up")
    owner.finish("kept")
    assert owner.tokens("kept") == undisturbed()


def test_contract_C26_what_a_pause_keeps_is_not_computed_with_half_replaced_weights() -> None:
    owner = Owner()
    owner.add("kept")
    owner.turn(3)
    owner.call("pause_generation", "keep")
    owner.call("start_weight_update")
    with pytest.raises(InvalidRequestError, match="weight update"):
        owner.call("pause_generation", "wait")
    told = owner.tokens("kept")
    owner.turn(3)
    assert owner.tokens("kept") == told
    owner.call("pause_generation", "abort")
    assert owner.ended("kept") is FinishReason.ABORT


def test_contract_C26_an_update_ends_only_where_the_weights_are() -> None:
    owner = Owner()
    owner.call("pause_generation")
    owner.call("start_weight_update")
    owner.call("sleep", 1)
    with pytest.raises(InvalidRequestError, match="asleep"):
        owner.call("finish_weight_update")


def test_contract_C20_a_parked_session_gives_its_blocks_to_what_a_pause_waits_for() -> None:
    """Else neither could go on: the session waits for the pause, the pause for the request, and
    the request for the session's blocks."""
    owner = Owner(num_blocks=4, max_model_len=60)
    piece = {"max_tokens": 1, "resumable": True}
    prompt = [number % 61 for number in range(30)]
    owner.add("session", prompt, **piece)
    owner.until(lambda: owner.outputs["session"])
    owner.add("long", prompt[:10])
    owner.turn(2)
    owner.core.call("pause_generation", ["wait", False])
    owner.core.add(core_request("session", prompt[:5], **piece), CLIENT)
    owner.finish("long")
    assert owner.tokens("long") == generate(make_core(), prompt[:10], **LONG)
    owner.call("resume_generation")
    owner.until(lambda: len(owner.outputs["session"]) == 2)
    owner.core.abort(["session"])
    owner.turn()
    assert owner.all_blocks_free
