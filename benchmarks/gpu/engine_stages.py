"""Whole engines on models of random weights, which need no hub."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.place import Place
from engine_kit.control import Owner
from engine_kit.core import core_request, make_core, run, tokens
from engine_kit.geometry import Engines
from model_kit.checkpoints import random_tensors, save_adapter, save_model

from diptych_engine.control.core import EngineCore
from diptych_kernels.block_copy.copies import BlockCopies, Bus
from diptych_protocol import EngineCoreOutput, KVTransferConfig, LoRARequest, SpeculativeConfig

Sizes = dict[str, Any]
SMALL: Sizes = {
    "vocab_size": 700, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
}  # fmt: skip
REAL: Sizes = {
    "vocab_size": 32000, "hidden_size": 1024, "num_hidden_layers": 12, "intermediate_size": 2816,
    "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
WIDE: Sizes = {
    "vocab_size": 16000, "hidden_size": 2048, "num_hidden_layers": 4, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
"""Some of the layers of Llama 3.2 1B: the host draws them in some seconds."""
EXPERTS: Sizes = {
    "architecture": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
}  # fmt: skip
FEW_EXPERTS: Sizes = EXPERTS | {"num_experts": 8, "moe_intermediate_size": 32}


def dummy(place: Place, real: Sizes = REAL, small: Sizes = SMALL) -> str:
    sizes = place.either(real, small)
    return "dummy://?" + "&".join(f"{name}={value}" for name, value in sizes.items())


def options(place: Place, **more: Any) -> dict[str, Any]:
    """Options of an engine; a rehearsal's is in float32, which its kernels know."""
    real = {"num_blocks": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
    small = {"num_blocks": 64, "max_num_seqs": 2, "dtype": "float32", "max_num_batched_tokens": 32}
    return {**place.either(real, small), **more}


def prompts(place: Place, count: int) -> list[list[int]]:
    length = place.either(500, 20)
    return [[(7 * at + 13 * row + 3) % 600 + 3 for at in range(length)] for row in range(count)]


def served(place: Place, core: EngineCore, what: str, rows: int, **params: Any) -> list[list[int]]:
    """Tokens of some requests together, and a line with tokens a second."""
    length = place.either(64, 3)
    asked = [
        core_request(f"{what} {i}", prompt, max_tokens=length, ignore_eos=True, **params)
        for i, prompt in enumerate(prompts(place, rows))
    ]
    started = time.perf_counter()
    made = run(core, *asked)
    seconds = time.perf_counter() - started
    answers = [answer(made[each.request_id]) for each in asked]
    place.tell(what, rows=rows, tokens_per_s=rows * length / seconds, seconds=seconds)
    return answers


def answer(outputs: list[EngineCoreOutput]) -> list[int]:
    """Raises `RuntimeError` for one that is an error."""
    if outputs[-1].error is not None:
        raise RuntimeError(outputs[-1].error)
    return tokens(outputs)


def compare(place: Place, what: str, one: object, other: object) -> None:
    """A line that says whether they are equal; an error if not."""
    if one == other:
        place.tell(what, equal=True)
    else:
        print(f"{what}: {one} and {other}")  # in stages.log
        place.tell(what, error="not equal")


def graphs_and_sleep(place: Place) -> None:
    """Record, replay, forget, record again; sleep at level 1, wake."""
    core = make_core(dummy(place), enable_prefix_caching=False, **options(place))
    try:
        first = served(place, core, "recorded", 2, temperature=0.0)
        compare(place, "replayed", first, served(place, core, "again", 2, temperature=0.0))
        graphs = core.runner._graphs  # type: ignore[attr-defined]
        graphs.forget()
        compare(place, "recorded anew", first, served(place, core, "anew", 2, temperature=0.0))
        used = memory_gb(place)
        for call in ("_put_weights_aside", "_drop_kv_cache"):
            core.runner.collective_rpc(call)
        place.tell("asleep", awake_gb=used, asleep_gb=memory_gb(place))
        started = time.perf_counter()
        for call in ("_restore_weights", "_restore_kv_cache"):
            core.runner.collective_rpc(call)
        place.wait()
        place.tell("awake", seconds=time.perf_counter() - started)
        compare(place, "after sleep", first, served(place, core, "awake", 2, temperature=0.0))
    finally:
        core.close()


def memory_gb(place: Place) -> float:
    """What is in use of the device, by anybody."""
    if place.dry:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def whole_engine(place: Place) -> None:
    """Greedy and top-p, with steps ahead and without: the same tokens."""
    made: dict[bool, list[list[list[int]]]] = {}
    sizes = place.either((1, 33, 64), (2,))
    for ahead in (True, False):
        started = time.perf_counter()
        core = make_core(dummy(place), async_scheduling=ahead, **options(place))
        name = "steps ahead" if ahead else "step by step"
        place.tell(f"start, {name}", seconds=time.perf_counter() - started)
        try:
            # What is compiled and recorded for each size belongs to the start.
            for rows in sizes:
                served(place, core, f"first, {name}", rows, temperature=0.8, top_p=0.9)
            made[ahead] = [
                served(place, core, f"{kind}, {name}", rows, **params)
                for kind, params in (
                    ("greedy", {"temperature": 0.0}),
                    ("top-p", {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "seed": 7}),
                )
                for rows in sizes
            ]
        finally:
            core.close()
    compare(place, "steps ahead and step by step", made[True], made[False])


def packed_engine(place: Place) -> None:
    """What rounded weights save beside plain ones: memory, and time for few and many rows."""
    for packing in ("none", "q4"):
        started = time.perf_counter()
        core = make_core(
            dummy(place, WIDE), weight_packing=packing, enable_prefix_caching=False,
            **options(place),
        )  # fmt: skip
        runner: Any = core.runner
        memory = (tensor.untyped_storage() for tensor in runner.model.weight_memory)
        num_bytes = sum({each.data_ptr(): each.nbytes() for each in memory}.values())
        took = time.perf_counter() - started
        place.tell(f"start, {packing}", seconds=took, gb_of_weights=num_bytes / 1e9)
        try:
            for rows in place.either((1, 8, 64), (2,)):
                first = served(place, core, f"{packing}, recorded", rows, temperature=0.0)
                again = served(place, core, f"{packing}, replayed", rows, temperature=0.0)
                compare(place, f"{packing}, twice, {rows} rows", first, again)
        finally:
            core.close()


def guesses(place: Place) -> None:
    """What guessed tokens gain, and that they are those of an engine that does not guess.

    In bfloat16 a product of more rows may round otherwise, and random weights lead by little.
    """
    sizes = place.either((1, 8, 48), (2,))
    for dtype in place.either(("float32", "bfloat16"), ("float32",)):
        made: list[list[int]] = []
        for config in (None, SpeculativeConfig(prompt_lookup_min=1)):
            core = make_core(dummy(place), speculative_config=config, **options(place, dtype=dtype))
            name = f"{'guesses' if config else 'no guesses'}, {dtype}"
            try:
                answers: list[list[int]] = []
                for rows in sizes:
                    served(place, core, f"{name}, recorded", rows, temperature=0.0)
                    answers += served(place, core, f"{name}, replayed", rows, temperature=0.0)
                made.append(flat(answers, None))
                stats = core.stats()
                place.tell(name, proposed=stats.draft_tokens, right=stats.draft_tokens_accepted)
            finally:
                core.close()
        if dtype == "float32":
            compare(place, "with and without guesses", *made)
        else:
            place.tell("equal tokens", share=equal_share(*made))


def kv_in_eight_bits(place: Place) -> None:
    """The same prompts with a KV cache in the model's dtype and in eight bits."""
    made: dict[str, list[list[int]]] = {}
    rows = place.either(64, 2)
    for kept in ("auto", "fp8"):
        started = time.perf_counter()
        core = make_core(
            dummy(place), kv_cache_dtype=kept, enable_prefix_caching=False, **options(place)
        )
        place.tell(f"start, {kept}", seconds=time.perf_counter() - started, gb=memory_gb(place))
        try:
            made[kept] = served(place, core, f"{kept}, recorded", rows, temperature=0.0)
            again = served(place, core, f"{kept}, replayed", rows, temperature=0.0)
            compare(place, f"{kept}, twice", made[kept], again)
        finally:
            core.close()
    for what, count in (("equal tokens", None), ("equal first tokens", 1)):
        place.tell(what, share=equal_share(*(flat(made[kept], count) for kept in made)))


def flat(answers: list[list[int]], count: int | None) -> list[int]:
    return [token for answer in answers for token in answer[:count]]


def equal_share(one: list[int], other: list[int]) -> float:
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


@torch.inference_mode()
def block_copies(place: Place) -> None:
    """Both ways, while the device rests and while a prefill is under way."""
    model = place.workload.model
    shape = (model.layers, 2, model.block_size, model.kv_heads, model.head_dim)
    count = place.either(256, 2)
    blocks = place.workload.random(2 * count, *shape)
    bus = Bus(place.device)
    copies = BlockCopies(blocks, bus)
    room = copies.host_room(count * copies.block_bytes)
    ids = list(range(0, 2 * count, 2))
    factor = place.workload.random(*place.either((8192, 8192), (4, 4)))
    complete = bus.mark()
    complete()
    for busy in (False, True):
        for name, copy in (("gather", copies.gather), ("scatter", None)):
            worker = threading.Thread(
                target=copy or copies.scatter, args=(ids, room) if copy else (room, ids)
            )
            place.wait()
            if busy:
                for _ in range(place.either(100, 1)):
                    factor @ factor
            started = time.perf_counter()
            worker.start()
            worker.join()
            seconds = time.perf_counter() - started
            under = "under products" if busy else "idle"
            place.tell(f"{name}, {under}", bytes_per_s=len(room) / seconds, ms=seconds * 1e3)


def experts_and_adapters(place: Place) -> None:
    """A mixture of experts, and adapters beside rows without one."""
    mixture = dummy(place, REAL | EXPERTS, SMALL | FEW_EXPERTS)
    core = make_core(mixture, **options(place))
    try:
        made = [
            served(place, core, what, place.either(32, 2), temperature=0.0)
            for what in ("experts, recorded", "experts, replayed")
        ]
        compare(place, "experts", *made)
    finally:
        core.close()
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model", random_tensors(0))
        adapter = save_adapter(Path(folder) / "adapter", 1)
        core = make_core(model, **options(place, num_blocks=64, max_loras=2))
        try:
            asked = [core_request(f"plain {i}", [1 + i, 5, 9], max_tokens=4) for i in range(2)]
            lora = LoRARequest("a", 1, adapter)
            asked += [core_request("adapted", [1, 5, 9], max_tokens=4, lora_request=lora)]
            outputs = run(core, *asked)
            place.tell("adapters", answers=[answer(outputs[each.request_id]) for each in asked])
        finally:
            core.close()


def hand_off(place: Place) -> None:
    """One prefill and one decode engine on one device; the tokens are those of one engine alone."""
    for kept in ("auto", "fp8"):
        hand_off_in(place, kept)


def hand_off_in(place: Place, kept: str) -> None:
    model, hinge = dummy(place), KVTransferConfig()
    # In bfloat16 the last token of a prompt may differ by how many are computed with it.
    exact = options(place, dtype="float32", kv_cache_dtype=kept)
    both, started = Engines(model), time.perf_counter()
    try:
        prefill, decode = (
            both.adopt(Owner(model=model, engine_id=role, kv_transfer=hinge, **exact))
            for role in ("prefill", "decode")
        )
        place.tell(f"start, {kept}", seconds=time.perf_counter() - started)
        for i, prompt in enumerate(prompts(place, 2)):
            alone = both.alone(prefill, prompt, max_tokens=6)
            started = time.perf_counter()
            passed = both.pass_on(prefill, decode, prompt, max_tokens=6)
            place.tell(f"hand-off {i}, {kept}", seconds=time.perf_counter() - started)
            compare(place, f"hand-off {i}, {kept}, tokens", passed, alone)
    finally:
        started = time.perf_counter()
        both.close()
        place.tell(f"end, {kept}", seconds=time.perf_counter() - started)
