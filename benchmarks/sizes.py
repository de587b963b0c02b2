"""Models of the sizes that people run, beside llama.cpp with the same file.

`make llamacpp`, then `python -m benchmarks.sizes [--shapes 1B 4B] [--levels avx2 vnni vnni/q8]`,
where q8 stands for activations of 8 bits. Weights
are random, in Q4_K_M by llama.cpp's own quantiser. Both have one thread and take turns: the
processor's seconds for a prompt and for the tokens after it are compared within a repetition.
Results go to benchmarks/results/sizes.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import gguf
import numpy as np
from benchmarks.gguf_files import Quantise, fitting, mixture
from benchmarks.machine import RESULTS, by_machine, machine
from benchmarks.peers.llamacpp import MISSING, LlamaCpp, python
from benchmarks.quality import MODEL
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from diptych_engine.serving.llm_engine import LLMEngine
from diptych_frontend.core_client.engine_args import EngineArgs
from diptych_frontend.model_files.gguf_header import read_header
from diptych_frontend.model_files.model_source import resolve_model
from diptych_kernels.cpu_level import CpuLevel, forced, machine_level
from diptych_protocol import SamplingParams

ROWS: Final = 16384
"""How many rows of a vocabulary's matrix are made at once."""
PROMPT, ANSWER = 512, 32
CONTEXT: Final = 1024


@dataclass(frozen=True, slots=True)
class Shape:
    """A published model's sizes."""

    architecture: str
    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Shapes of a layer's matrices, [rows, columns]."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "attn_q": (queries, self.hidden),
            "attn_k": (keys, self.hidden),
            "attn_v": (keys, self.hidden),
            "attn_output": (self.hidden, queries),
            "ffn_gate": (self.inner, self.hidden),
            "ffn_up": (self.inner, self.hidden),
            "ffn_down": (self.hidden, self.inner),
        }

    @property
    def norms(self) -> dict[str, int]:
        """The lengths of a layer's norms."""
        own = {"attn_norm": self.hidden, "ffn_norm": self.hidden}
        of_heads = {"attn_q_norm": self.head_dim, "attn_k_norm": self.head_dim}
        return own | of_heads if self.architecture == "qwen3" else own

    def kv_bytes(self, tokens: int) -> int:
        """In bfloat16."""
        return tokens * self.layers * 2 * self.kv_heads * self.head_dim * 2


SHAPES: Final = {
    "1B": Shape("llama", 128256, 2048, 8192, 16, 32, 8, 64, 500000.0),  # Llama-3.2-1B
    "4B": Shape("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, 1000000.0),  # Qwen3-4B
}
Tensors = Iterator[tuple[str, tuple[int, ...], Kind, Callable[[], NDArray[Any]]]]


def save_shape(path: Path, shape: Shape, quantise: Quantise) -> str:
    """Write a model with random weights in Q4_K_M; its path.

    The matrices of one layer are made; the other layers have the same rows in another order.
    """
    writer = gguf.GGUFWriter(path, shape.architecture)
    _add_metadata(writer, shape)
    tensors = list(_tensors(shape, quantise))
    for name, size, kind, _ in tensors:
        rows, columns = math.prod(size[:-1]), size[-1]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        nbytes = rows * columns // block * block_bytes
        writer.add_tensor_info(name, size, np.dtype(np.float32), nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for *_, made in tensors:
        writer.write_tensor_data(made())
    writer.close()
    return str(path)


def _tensors(shape: Shape, quantise: Quantise) -> Tensors:
    """Name, size, type, and how the data is made."""
    kind_of = mixture(Kind.Q4_K, shape.layers)
    rng = np.random.default_rng(0)
    made: dict[tuple[str, Kind], NDArray[np.uint8]] = {}

    def randn(rows: int, columns: int) -> NDArray[np.float32]:
        values = rng.standard_normal((rows, columns), np.float32)
        values /= columns**0.5
        return values

    def norm(size: int) -> NDArray[np.float32]:
        return 1 + rng.standard_normal(size, np.float32) / np.float32(10)

    def of_vocabulary(kind: Kind) -> NDArray[np.uint8]:
        starts = range(0, shape.vocabulary, ROWS)
        parts = [
            quantise(randn(min(ROWS, shape.vocabulary - start), shape.hidden), kind)
            for start in starts
        ]
        return np.concatenate(parts)

    def of_layer(layer: int, name: str, kind: Kind) -> NDArray[np.uint8]:
        if (name, kind) not in made:
            made[name, kind] = quantise(randn(*shape.matrices[name]), kind)
        return np.roll(made[name, kind], layer, axis=0)

    size = (shape.vocabulary, shape.hidden)
    kind = fitting(kind_of("token_embd.weight"), shape.hidden)
    yield "token_embd.weight", size, kind, partial(of_vocabulary, kind)
    yield "output_norm.weight", (shape.hidden,), Kind.F32, partial(norm, shape.hidden)
    if shape.architecture == "llama":
        half = shape.head_dim // 2
        yield "rope_freqs.weight", (half,), Kind.F32, partial(_divisors, shape)
    for layer in range(shape.layers):
        for name, length in shape.norms.items():
            yield f"blk.{layer}.{name}.weight", (length,), Kind.F32, partial(norm, length)
        for name, matrix in shape.matrices.items():
            whole = f"blk.{layer}.{name}.weight"
            own = fitting(kind_of(whole), matrix[1])
            yield whole, matrix, own, partial(of_layer, layer, name, own)


def _divisors(shape: Shape) -> NDArray[np.float32]:
    """Llama 3.2's rule for RoPE: long waves are 32 times as long."""
    half = np.arange(shape.head_dim // 2)
    waves = 2 * np.pi * shape.rope_theta ** (2 * half / shape.head_dim)
    share = np.clip((8192 / waves - 1) / 3, 0, 1)
    divisors: NDArray[np.float32] = (1 / (share + (1 - share) / 32)).astype(np.float32)
    return divisors


def _add_metadata(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_block_count(shape.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_vocab_size(shape.vocabulary)
    path = resolve_model(MODEL).path
    if path is None:
        raise SystemExit(f"{MODEL} is not installed")
    vocabulary = read_header(path).metadata
    known = vocabulary["tokenizer.ggml.tokens"]
    unused = range(len(known), shape.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary["tokenizer.ggml.pre"])
    writer.add_token_list([*known, *(f"<unused {at}>" for at in unused)])
    kinds = vocabulary["tokenizer.ggml.token_type"]
    writer.add_token_types([*kinds, *(gguf.TokenType.UNUSED for _ in unused)])
    writer.add_token_merges(vocabulary["tokenizer.ggml.merges"])
    writer.add_eos_token_id(vocabulary["tokenizer.ggml.eos_token_id"])


def seconds(engine: LLMEngine, token_ids: list[int], answer: int) -> list[float]:
    """The processor's seconds for a prompt, and for `answer` greedy tokens after it."""
    params = SamplingParams(temperature=0.0, max_tokens=answer + 1, ignore_eos=True)
    engine.add_request("one", token_ids, params)
    start = time.process_time()
    first = 0.0
    while engine.has_unfinished_requests():
        if engine.step() and not first:
            first = time.process_time()
    return [first - start, time.process_time() - first]


def compared(
    file: str, level: CpuLevel, activations: str, peer: LlamaCpp, repetitions: int
) -> dict[str, list[list[float]]]:
    """[prompt, tokens] of each repetition, in seconds."""
    rng = np.random.default_rng(0)
    found: dict[str, list[list[float]]] = {"ours": [], "theirs": []}
    with forced(level):
        args = EngineArgs(
            file, num_threads=1, max_model_len=CONTEXT, num_blocks=CONTEXT // 16 * 2,
            max_num_batched_tokens=PROMPT, cpu_level=cast(Any, level.word),
            activations=cast(Any, activations),
        )  # fmt: skip
        engine = LLMEngine.from_engine_args(args)
        try:
            seconds(engine, list(range(100, 164)), 2)
            for _ in range(repetitions):
                token_ids = rng.integers(100, 40000, PROMPT).tolist()
                found["ours"].append(seconds(engine, token_ids, ANSWER))
                found["theirs"].append(peer.call("seconds", token_ids, ANSWER))
        finally:
            engine.shutdown()
    return found


def page(results: dict[str, Any]) -> str:
    """benchmarks/results/sizes.md."""
    lines = [
        "# Sizes that people run, beside llama.cpp", "",
        f"Random weights in Q4_K_M, by llama.cpp's quantiser. One thread each, in turn; tokens a "
        f"second of processor time, medians; a prompt of {PROMPT} tokens, {ANSWER} tokens after it "
        "(`python -m benchmarks.sizes`). The ratios are medians of those of each repetition, with "
        "the lowest and the highest.", "",
        by_machine(results["machines"]), "",
        f"llama.cpp's kernels: {results['peer'].strip(' |')}.", "",
        "| shape | level | tokens/s, ours | llama.cpp | ratio "
        "| prompt tokens/s, ours | llama.cpp | ratio |",
        "|---" * 8 + "|",
    ]  # fmt: skip
    for name, found in results["found"].items():
        cells = [*name.split()]
        for index, tokens in ((1, ANSWER), (0, PROMPT)):
            ours, theirs = ([tokens / x[index] for x in found[who]] for who in ("ours", "theirs"))
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
            cells += [f"{statistics.median(rates):.1f}" for rates in (ours, theirs)]
            low, high = min(ratios), max(ratios)
            cells.append(f"{statistics.median(ratios):.2f} ({low:.2f}-{high:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines + _in_memory(results["memory"])) + "\n"


def _in_memory(found: dict[str, Any]) -> list[str]:
    """What the slow test printed."""
    return [
        "", "## In memory", "",
        "An engine after an answer, and the mean KL of its logits from llama.cpp's; 1.15 times the "
        "file, its KV and 300 MiB are asked (`pytest -n 0 -s -m slow "
        "tests/engine/models/test_sizes.py`).", "",
        by_machine({name: each["machine"] for name, each in found.items()}), "",
        "| shape | file, MiB | in memory | asked | mean KL |", "|---" * 5 + "|",
        *(
            f"| {name} | {own['file']:,} | {own['taken']:,} | {own['asked']:,} | {own['kl']:.1e} |"
            for name, own in found.items()
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    levels = [level.word for level in CpuLevel if level <= machine_level()]
    levels += [f"{word}/q8" for word in levels[CpuLevel.VNNI :]]
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--levels", nargs="*", choices=levels, default=levels[1:])
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    interpreter = python()
    if interpreter is None:
        raise SystemExit(MISSING)
    record = RESULTS / "sizes.json"
    results: dict[str, Any] = {"found": {}, "machines": {}, "memory": {}}
    if record.exists():
        results |= json.loads(record.read_text())
    for name in args.shapes:
        with tempfile.TemporaryDirectory() as folder, LlamaCpp(interpreter) as peer:
            file = save_shape(Path(folder) / "model.gguf", SHAPES[name], peer.quantise)
            results["peer"] = peer.call("about")
            results.setdefault("shapes", {})[name] = asdict(SHAPES[name])
            peer.call("load", file, 1, CONTEXT, False)
            for level in args.levels:
                word, _, activations = level.partition("/")
                found = compared(
                    file, CpuLevel[word.upper()], activations or "auto", peer, args.repetitions
                )
                results["found"][f"{name} {level}"] = found
                results["machines"][f"{name} {level}"] = machine()
                print(name, level, json.dumps(found), flush=True)
                record.write_text(json.dumps(results, indent=1) + "\n")
                record.with_suffix(".md").write_text(page(results))


if __name__ == "__main__":
    main()
