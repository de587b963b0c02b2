"""From the cores' tokens to what consumers read: text, n > 1, stops, aborts, errors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_frontend.text.output_processor import Collector, OutputProcessor, ParentRequest
from diptych_frontend.text.tokenizer import Tokenizer
from diptych_protocol import (
    CompletionOutput,
    EngineCoreOutput,
    EngineCoreRequest,
    EngineDeadError,
    EngineGenerateError,
    FinishReason,
    LogprobsLists,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
PROMPT = [19556]
"""Hello"""


@pytest.fixture
def processor(tokenizer: Tokenizer) -> OutputProcessor:
    return OutputProcessor(tokenizer)


def request(name: str = "r-1", user_id: str = "r", **params: Any) -> EngineCoreRequest:
    params.setdefault("output_kind", DELTA)
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=PROMPT,
        mm_features=None,
        sampling_params=SamplingParams(**params),
        pooling_params=None,
        eos_token_id=2,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=user_id,
    )


def opened(processor: OutputProcessor, made: EngineCoreRequest) -> Collector[RequestOutput]:
    collector = Collector()
    processor.add(made, "Hello", collector)
    return collector


def opened_family(
    processor: OutputProcessor, made: EngineCoreRequest
) -> tuple[Collector[RequestOutput], list[str]]:
    """Collector and internal ids of all n children."""
    collector, parent = Collector(), ParentRequest(made)
    children = [parent.child(index) for index in range(made.sampling.n)]
    for index, child in enumerate(children):
        processor.add(child, "Hello", collector, parent, index)
    return collector, [child.request_id for child in children]


def step(name: str, ids: list[int], **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(name, ids, **fields)


def taken(collector: Collector[RequestOutput]) -> RequestOutput:
    output = collector.take()
    assert output is not None
    return output


# --- one answer -----------------------------------------------------------------------------------


def test_deltas(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    collector = opened(processor, request())
    one, two = tokenizer.encode(" one two")
    assert processor.process([step("r-1", [one], num_cached_tokens=1)]) == []
    first = CompletionOutput(0, " one", [one])
    assert taken(collector) == RequestOutput("r", "Hello", PROMPT, [first], False, 1)
    end = step("r-1", [two], finish_reason=FinishReason.LENGTH, kv_transfer_params={"epoch": "e"})
    assert processor.process([end]) == []
    last = taken(collector)
    assert (last.outputs[0].text, last.outputs[0].token_ids) == (" two", [two])
    assert (last.outputs[0].finish_reason, last.finished) == ("length", True)
    assert (last.num_cached_tokens, last.kv_transfer_params) == (1, {"epoch": "e"})
    assert len(processor.answers) == 0


def test_cumulative_and_final_only(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" one two three")
    whole = opened(processor, request("c-1", "c", output_kind=CUMULATIVE))
    final = opened(processor, request("f-1", "f", output_kind=FINAL_ONLY))
    seen = []
    for at, token_id in enumerate(ids):
        finish = FinishReason.LENGTH if at == 2 else None
        processor.process([step(n, [token_id], finish_reason=finish) for n in ("c-1", "f-1")])
        seen.append(taken(whole))
        if at < 2:
            assert final.take() is None
    assert [o.outputs[0].text for o in seen] == [" one", " one two", " one two three"]
    assert [o.outputs[0].token_ids for o in seen] == [ids[:1], ids[:2], ids]
    last = taken(final)
    assert (last.outputs[0].text, last.outputs[0].token_ids) == (" one two three", ids)
    assert last.finished


@given(
    text=st.text(st.sampled_from("ab 😀\n.你STOP"), max_size=40),
    stop=st.sampled_from([[], ["STOP"], [" a", "b"], ["😀"]]),
    data=st.data(),
)
def test_a_slow_consumer_reads_the_same(
    tokenizer: Tokenizer, text: str, stop: list[str], data: st.DataObject
) -> None:
    ids = tokenizer.encode(text)
    seen: list[tuple[str, list[int], str | None, Any, int]] = []
    for slow in (False, True):
        processor = OutputProcessor(tokenizer)
        collector = opened(processor, request(stop=stop, logprobs=0, max_tokens=99))
        read: list[RequestOutput] = []
        for at, token_id in enumerate([*ids, 2]):
            finish = FinishReason.STOP if at == len(ids) else None
            logprobs = LogprobsLists([[token_id]], [[-1.0]], [1])
            processor.process(
                [step("r-1", [token_id], finish_reason=finish, new_logprobs=logprobs)]
            )
            if not slow or data.draw(st.booleans()):
                output = collector.take()
                read += [output] if output else []
        output = collector.take()
        read += [output] if output else []
        answers = [message.outputs[0] for message in read]
        seen.append(
            (
                "".join(a.text for a in answers),
                [token_id for a in answers for token_id in a.token_ids],
                answers[-1].finish_reason,
                answers[-1].stop_reason,
                sum(len(a.logprobs or []) for a in answers),
            )
        )
    assert seen[0] == seen[1]
    assert len(seen[0][1]) == seen[0][4]


async def test_what_comes_to_a_waiting_consumer_is_offered_before_it_wakes(
    processor: OutputProcessor, tokenizer: Tokenizer
) -> None:
    collector = opened(processor, request())
    offered: list[RequestOutput] = []

    def take(output: RequestOutput) -> bool:
        offered.append(output)
        return not output.finished

    collector.take_at_once = take
    first, *others = tokenizer.encode(" one two three")
    processor.process([step("r-1", [first])])
    assert not offered, "nobody waits"
    assert taken(collector).outputs[0].token_ids == [first]
    woken = collector.ready()
    for token in others:
        processor.process([step("r-1", [token])])
    assert [output.outputs[0].token_ids for output in offered] == [[token] for token in others]
    assert not woken.done(), "it was taken"
    processor.process([step("r-1", [], finish_reason=FinishReason.LENGTH)])
    assert woken.done()
    assert taken(collector) is offered[-1]


@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
@pytest.mark.parametrize(
    ("interval", "sizes"), [(1, [1] * 7), (3, [1, 3, 3]), (4, [1, 4, 2]), (100, [1, 6])]
)
def test_a_stream_comes_at_its_interval_and_reads_the_same(
    tokenizer: Tokenizer, kind: RequestOutputKind, interval: int, sizes: list[int]
) -> None:
    """The first token comes at once, and the end with all that is left."""
    ids = tokenizer.encode("one two three four five six seven")[:7]
    processor = OutputProcessor(tokenizer, stream_interval=interval)
    collector = opened(processor, request(output_kind=kind, logprobs=0))
    seen = []
    for place, token_id in enumerate(ids):
        finish = FinishReason.LENGTH if place == len(ids) - 1 else None
        logprobs = LogprobsLists([[token_id]], [[-1.0]], [1])
        processor.process([step("r-1", [token_id], new_logprobs=logprobs, finish_reason=finish)])
        output = collector.take()
        if output is not None:
            seen.append(output.outputs[0])
    counts = [len(answer.token_ids) for answer in seen]
    whole = tokenizer.decode(ids)
    if kind is DELTA:
        assert counts == sizes
        assert "".join(answer.text for answer in seen) == whole
        assert [x for answer in seen for x in answer.token_ids] == ids
        assert [len(answer.logprobs or []) for answer in seen] == sizes
    else:
        assert counts == list(itertools.accumulate(sizes))
        assert seen[-1].text == whole
        assert len(seen[-1].logprobs or []) == len(ids)
    assert [answer.finish_reason for answer in seen] == [None] * (len(seen) - 1) + ["length"]


def test_without_a_tokenizer_there_are_token_ids_only() -> None:
    processor = OutputProcessor(None)
    collector = opened(processor, request(logprobs=0))
    logprobs = LogprobsLists([[7]], [[-0.5]], [3])
    processor.process([step("r-1", [7], new_logprobs=logprobs)])
    answer = taken(collector).outputs[0]
    assert (answer.text, answer.token_ids) == ("", [7])
    assert answer.logprobs is not None
    assert answer.logprobs[0][7].decoded_token is None


def test_detokenize_false_makes_no_text(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    collector = opened(processor, request(detokenize=False))
    processor.process([step("r-1", tokenizer.encode(" one"))])
    assert taken(collector).outputs[0].text == ""


def test_tokens_made_elsewhere_count_and_set_the_context(
    processor: OutputProcessor, tokenizer: Tokenizer
) -> None:
    one, two, three = tokenizer.encode(" one two three")
    made = request(stop=["two"], min_tokens=2, max_tokens=9)
    made.generated_token_ids = [one]
    collector = opened(processor, made)
    assert processor.process([step("r-1", [two])]) == []
    assert processor.process([step("r-1", [two, three])]) == ["r-1"]
    answer = taken(collector).outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == (" two ", [two, two], "two")


# --- logprobs -------------------------------------------------------------------------------------


def test_logprobs(processor: OutputProcessor, tokenizer: Tokenizer) -> None:
    one, two = tokenizer.encode(" one two")
    collector = opened(processor, request(logprobs=2))
    lists = LogprobsLists([[two, one, two], [one, two, 5]], [[-2.0, -0.5, -2.0], [-0.25, -1, -3]],
                          [2, 7])  # fmt: skip
    processor.process([step("r-1", [two, one], new_logprobs=lists)])
    answer = taken(collector).outputs[0]
    assert answer.cumulative_logprob == -2.25
    first, second = answer.logprobs or []
    assert [(i, x.rank, x.logprob, x.decoded_token) for i, x in first.items()] == [
        (two, 2, -2.0, " two"),
        (one, 1, -0.5, " one"),
    ]
    assert [(i, x.rank) for i, x in second.items()] == [(one, 7), (two, 1), (5, 2)]


def test_logprobs_of_surplus_tokens_are_cut_with_them(
    processor: OutputProcessor, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(" one two three")
    collector = opened(processor, request(logprobs=0, stop=["two"]))
    lists = LogprobsLists([[i] for i in ids], [[-1.0]] * 3, [1, 1, 1])
    assert processor.process([step("r-1", ids, new_logprobs=lists)]) == ["r-1"]
    answer = taken(collector).outputs[0]
    assert answer.token_ids == ids[:2]
    assert len(answer.logprobs or []) == 2
    assert answer.cumulative_logprob == -2.0


# --- stop strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_stop_string_ends_the_request_here_and_in_the_core(
    processor: OutputProcessor, tokenizer: Tokenizer, kind: RequestOutputKind
) -> None:
    collector = opened(processor, request(stop=["three"], output_kind=kind, max_tokens=99))
    other = opened(processor, request("o-1", "o"))
    text, aborted = "", []
    for token_id in tokenizer.encode(" one two three four"):
        aborted += processor.process([step("r-1", [token_id]), step("o-1", [token_id])])
        output = collector.take()
        if output is not None:
            answer = output.outputs[0]
            text = text + answer.text if kind is DELTA else answer.text
    assert aborted == ["r-1"]
    assert (text, answer.finish_reason, answer.stop_reason) == (" one two ", "stop", "three")
    assert taken(other).outputs[0].text == " one two three four"


def test_a_stop_string_in_the_last_step_needs_no_abort(
    processor: OutputProcessor, tokenizer: Tokenizer
) -> None:
    opened(processor, request(stop=["two"]))
    end = step("r-1", tokenizer.encode(" one two"), finish_reason=FinishReason.LENGTH)
    assert processor.process([end]) == []
    assert len(processor.answers) == 0


def test_the_stop_token_id_is_reported(processor: OutputProcessor) -> None:
    collector = opened(processor, request())
    processor.process([step("r-1", [2], finish_reason=FinishReason.STOP, stop_reason=2)])
    answer = taken(collector).outputs[0]
    assert (answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason) == (
        "", [2], "stop", 2,
    )  # fmt: skip


# --- n > 1 ----------------------------------------------------------------------------------------


def test_children_have_their_own_ids_and_seeds() -> None:
    made = request(n=3, seed=40)
    children = [ParentRequest(made).child(index) for index in range(3)]
    assert [child.request_id for child in children] == ["0_r-1", "1_r-1", "2_r-1"]
    assert [child.sampling.seed for child in children] == [40, 41, 42]
    assert {(child.sampling.n, child.external_req_id) for child in children} == {(1, "r")}
    assert (made.sampling.n, made.sampling.seed) == (3, 40)
    assert ParentRequest(request(n=2)).child(1).sampling.seed is None
    assert ParentRequest(request(n=2, seed=2**63 - 1)).child(1).sampling.seed == -(2**63)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_final_only_gathers_all_answers_and_emits_once(
    processor: OutputProcessor, tokenizer: Tokenizer, order: tuple[int, ...]
) -> None:
    collector, names = opened_family(processor, request(n=3, output_kind=FINAL_ONLY))
    ids = tokenizer.encode(" a b c")
    for count, index in enumerate(order, start=1):
        end = step(names[index], [ids[index]], finish_reason=FinishReason.LENGTH)
        processor.process([end])
        if count < 3:
            assert collector.take() is None
    output = taken(collector)
    assert output.finished
    assert [(a.index, a.text) for a in output.outputs] == [(0, " a"), (1, " b"), (2, " c")]
    assert len(processor.answers) == 0


def test_streamed_answers_keep_their_index_and_the_last_one_finishes_the_request(
    processor: OutputProcessor, tokenizer: Tokenizer
) -> None:
    collector, names = opened_family(processor, request(n=2))
    one, two = tokenizer.encode(" one two")
    processor.process([step(names[1], [one])])
    assert [(a.index, a.text) for a in taken(collector).outputs] == [(1, " one")]
    processor.process([step(names[0], [one]), step(names[1], [two])])
    assert {a.index: a.text for a in taken(collector).outputs} == {0: " one", 1: " two"}
    processor.process([step(names[1], [2], finish_reason=FinishReason.STOP)])
    first_end = taken(collector)
    assert (first_end.outputs[0].finish_reason, first_end.finished) == ("stop", False)
    processor.process([step(names[0], [2], finish_reason=FinishReason.STOP)])
    assert taken(collector).finished


# --- aborts ---------------------------------------------------------------------------------------


def test_abort_tells_the_consumer_and_flushes_held_text(
    processor: OutputProcessor, tokenizer: Tokenizer
) -> None:
    collector = opened(processor, request(stop=["never seen"]))
    processor.process([step("r-1", tokenizer.encode(" one"))])
    assert taken(collector).outputs[0].text == ""
    assert processor.abort(["r"]) == ["r-1"]
    output = taken(collector)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (" one", "abort")
    assert output.finished
    assert processor.abort(["r"]) == []
    processor.process([step("r-1", [5])])
    assert collector.take() is None


def test_contract_C07_a_users_id_stands_for_every_request_that_carries_it(
    processor: OutputProcessor,
) -> None:
    for name in ("r-1", "r-2"):
        opened(processor, request(name, "r"))
    opened_family(processor, request("r-3", "r", n=2))
    opened(processor, request("s-1", "s"))
    assert processor.abort(["r", "unknown"]) == ["0_r-3", "1_r-3", "r-1", "r-2"]
    assert len(processor.answers) == 1


def test_internal_ids_are_not_users_ids(processor: OutputProcessor) -> None:
    opened(processor, request())
    _, names = opened_family(processor, request("p-1", "p", n=3))
    assert processor.abort(["r-1", "p-1"]) == []
    assert processor.abort(["r", "p", "nobody"], internal=True) == []
    assert processor.abort([names[1]], internal=True) == [names[1]]
    assert processor.abort(["r-1", "p-1"], internal=True) == ["r-1", names[0], names[2]]
    assert len(processor.answers) == 0


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_aborting_a_family_ends_it_with_all_answers(
    processor: OutputProcessor, tokenizer: Tokenizer, kind: RequestOutputKind
) -> None:
    collector, names = opened_family(processor, request(n=2, output_kind=kind))
    processor.process([step(name, tokenizer.encode(" one")) for name in names])
    processor.abort(["r"])
    output = taken(collector)
    assert output.finished
    assert [(a.index, a.text, a.finish_reason) for a in output.outputs] == [
        (0, " one", "abort"),
        (1, " one", "abort"),
    ]


# --- errors ---------------------------------------------------------------------------------------


def test_an_error_of_one_request_reaches_its_consumer_only(processor: OutputProcessor) -> None:
    broken, well = opened(processor, request()), opened(processor, request("w-1", "w"))
    failed = step("r-1", [], finish_reason=FinishReason.ERROR, error="lost its blocks")
    assert processor.process([failed, step("w-1", [5])]) == []
    with pytest.raises(EngineGenerateError, match="lost its blocks"):
        broken.take()
    assert taken(well).outputs[0].token_ids == [5]
    assert len(processor.answers) == 1


def test_after_a_childs_error_the_parent_can_still_be_aborted(processor: OutputProcessor) -> None:
    collector, names = opened_family(processor, request("p-1", "p", n=3))
    processor.process([step(names[1], [], finish_reason=FinishReason.ERROR)])
    with pytest.raises(EngineGenerateError, match="no reason"):
        collector.take()
    assert processor.abort(["p-1"], internal=True) == [names[0], names[2]]
    assert len(processor.answers) == 0


@pytest.mark.parametrize("bad_id", [-1, 2**33])
def test_tokens_that_cannot_be_processed_fail_their_own_request_only(
    processor: OutputProcessor, bad_id: int
) -> None:
    broken, well = opened(processor, request()), opened(processor, request("w-1", "w"))
    assert processor.process([step("r-1", [bad_id]), step("w-1", [5])]) == ["r-1"]
    with pytest.raises(EngineGenerateError, match="cannot be processed"):
        broken.take()
    assert taken(well).outputs[0].token_ids == [5]


def test_fail_and_fail_all(processor: OutputProcessor) -> None:
    collectors = [opened(processor, request(f"{i}-x", str(i))) for i in range(3)]
    processor.fail("1-x", EngineGenerateError("only this"))
    processor.fail("unknown", EngineGenerateError("nobody"))
    assert len(processor.answers) == 2
    cause = EngineDeadError("the core died")
    processor.fail_all(cause)
    processor.fail_all(EngineDeadError("too late"))
    assert len(processor.answers) == 0
    for collector, kind, message in zip(
        collectors,
        (EngineDeadError, EngineGenerateError, EngineDeadError),
        ("the core died", "only this", "the core died"),
        strict=True,
    ):
        with pytest.raises(kind, match=message):
            collector.take()


def test_outputs_for_unknown_requests_are_dropped(processor: OutputProcessor) -> None:
    assert processor.process([step("nobody", [1]), step("", [])]) == []


def test_an_internal_id_can_be_open_only_once(processor: OutputProcessor) -> None:
    opened(processor, request())
    with pytest.raises(ValueError, match="running already"):
        opened(processor, request())


@settings(max_examples=50)
@given(data=st.data())
def test_no_request_leaves_anything_behind(tokenizer: Tokenizer, data: st.DataObject) -> None:
    processor = OutputProcessor(tokenizer)
    names: list[str] = []
    for at in range(data.draw(st.integers(1, 6))):
        made = request(f"i-{at}", f"u{at % 2}", n=data.draw(st.integers(1, 3)), stop=["one"])
        if made.sampling.n == 1:
            opened(processor, made)
            names.append(made.request_id)
        else:
            names += opened_family(processor, made)[1]
    one = tokenizer.encode(" one")
    for name in data.draw(st.permutations(names)):
        match data.draw(st.integers(0, 4)):
            case 0:
                processor.process([step(name, one)])
            case 1:
                processor.process([step(name, [5], finish_reason=FinishReason.LENGTH)])
            case 2:
                processor.process([step(name, [], finish_reason=FinishReason.ERROR)])
            case 3:
                processor.abort([name], internal=True)
            case 4:
                processor.fail(name, EngineGenerateError("x"))
    assert len(processor.answers) == 0
    assert not any(vars(processor)[table] for table in ("answers", "_by_external_id", "_parents"))
