"""What an engine keeps of answers that somebody may take over, and for how long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_kit.core import CLIENT, core_request, make_core, run, step, tokens

from diptych_engine.control.core import EngineCore
from diptych_engine.control.kept_answers import KEEP_S, LEAST_TOKENS, MOST_TOKENS, KeptAnswers
from diptych_protocol import EngineCoreRequest, FinishReason, KeptAnswer
from diptych_protocol.wire import ErrorKind

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def core() -> Iterator[EngineCore]:
    made = make_core()
    yield made
    made.close()


def asking(name: str) -> EngineCoreRequest:
    fields = {"max_tokens": 6, "ignore_eos": True, "kept_as": name, "tenant": "ann"}
    return core_request(name or "r", PROMPT, **fields)


def test_what_a_lost_client_had_asked_to_keep_is_ended_and_kept(core: EngineCore) -> None:
    core.add(asking("kept"), CLIENT)
    core.add(asking(""), CLIENT)
    made = [output for _ in range(3) for output in step(core)]
    core.client_lost(CLIENT)
    assert not core.scheduler.unfinished
    known = tokens([output for output in made if output.request_id == "kept"])
    assert known
    assert core.take_kept("kept", "ann") == KeptAnswer(known, is_unpaid=True)
    assert core.take_kept("kept", "bob") is None
    assert core.take_kept("", "ann") is None
    assert list(core.kept.by_name) == ["kept"]


def test_what_ended_before_its_client_was_lost_may_not_be_paid(core: EngineCore) -> None:
    whole = tokens(run(core, asking("whole"))["whole"])
    core.client_lost(b"another")
    assert core.take_kept("whole", "ann") == KeptAnswer(whole, FinishReason.LENGTH)
    core.client_lost(CLIENT)
    kept = KeptAnswer(whole, FinishReason.LENGTH, is_unpaid=True)
    assert core.take_kept("whole", "ann") == kept


def test_a_running_answer_is_taken_from_who_had_it(core: EngineCore) -> None:
    core.add(asking("kept"), CLIENT)
    known = tokens(step(core))
    assert core.take_kept("kept", "bob") is None
    assert core.take_kept("kept", "ann") == KeptAnswer(known)
    assert not core.scheduler.unfinished
    [last] = core.take_outputs()[CLIENT]
    assert (last.finish_reason, last.error_kind) == (FinishReason.ERROR, ErrorKind.REFUSED)


def test_who_goes_on_gets_what_an_undisturbed_answer_has(core: EngineCore) -> None:
    whole = tokens(run(core, asking("whole"))["whole"])
    assert core.take_kept("whole", "ann") == KeptAnswer(whole, FinishReason.LENGTH)
    core.add(asking("kept"), CLIENT)
    step(core)
    kept = core.take_kept("kept", "ann")
    assert kept is not None
    core.take_outputs()
    again = asking("kept")
    again.request_id, again.generated_token_ids = "again", kept.token_ids
    assert kept.token_ids + tokens(run(core, again)["again"]) == whole
    assert core.take_kept("kept", "ann") == KeptAnswer(whole, FinishReason.LENGTH)


def test_what_is_kept_is_bounded_in_time_and_number(core: EngineCore) -> None:
    now = 0.0
    kept = KeptAnswers(lambda: now)
    core.add(asking("a"), CLIENT)
    step(core)
    [request] = core.scheduler.unfinished
    for number in range(MOST_TOKENS // LEAST_TOKENS + 1):
        request.kept_as = str(number)
        kept.keep(request)
    assert kept.find("0", "ann") is None
    assert kept.find("1", "ann") is not None
    now = KEEP_S
    kept.forget_old()
    assert not kept.by_name
