"""What each type of file costs in accuracy at each level, beside llama.cpp with the same file.

`make llamacpp`, then `python -m benchmarks.accuracy [--tokens 256] [--types Q4_K_M]`. llama.cpp's
quantiser writes the default model anew in each type. The text is read as a prompt, and token by
token as if it were generated, by the model as the file says it, dequantised to float32; by ours at
each level; and by llama.cpp: with its own kernels, and with the file dequantised and a cache in
float32. Results go to benchmarks/results/accuracy.{json,md}; types that were not asked for keep
their figures.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.gguf_files import mixture, requantised
from benchmarks.machine import RESULTS, by_machine, machine
from benchmarks.peers.llamacpp import MISSING, LlamaCpp, python
from benchmarks.quality import DATA, MODEL, divergence, load, log_probabilities, source_of
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from diptych_engine.models import build_model, load_weights
from diptych_engine.models.loader import is_quantised
from diptych_frontend.model_files.model_source import ModelSource, resolve_model
from diptych_kernels.cpu_level import CpuLevel, forced, machine_level
from diptych_kernels.native.tile_layout import BYTE, WORD_BITS

LAYERS: Final = 30
MIXTURES: Final = {
    "Q4_K_M": Kind.Q4_K,
    "Q5_K_M": Kind.Q5_K,
    "Q6_K": Kind.Q6_K,
    "IQ4_XS": Kind.IQ4_XS,
}
TYPES: Final = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", *MIXTURES, "F16", "BF16",
)  # fmt: skip
ROUNDED: Final = {"BF16, q8": 8, "BF16, q4": 4}
"""Asked for by name, with the bits that weights are rounded to."""
BUDGET: Final = 1e-4
"""The mean KL that what is on by default may cost."""
KERNELS, FLOATS = "llama.cpp", "llama.cpp, float32"
Figures = dict[str, float]


def figures(token_ids: list[int], exact: Tensor, found: dict[str, Tensor]) -> Figures:
    """Those of a reader, from [tokens - 1, vocabulary] log probabilities."""
    following = torch.tensor(token_ids[1:])[:, None]
    told = {
        f"{what}_{how}": value
        for how, rows in found.items()
        for what, value in (
            ("kl", float(divergence(exact, rows).mean())),
            ("others", int((exact.argmax(-1) != rows.argmax(-1)).sum())),
        )
    }
    prompt = found["prompt"]
    return told | {"perplexity": math.exp(-float(prompt.gather(1, following).mean()))}


def both_ways(tokens: int, read: Callable[[int], Tensor]) -> dict[str, Tensor]:
    """As a prompt, and as generated tokens but for the first."""
    return {"prompt": read(tokens), "generated": read(1)}


def ours(
    source: ModelSource, token_ids: list[int], bits: int | None = None
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """What each level says, and with activations of 8 bits."""
    quantised = bits is not None or is_quantised(source)
    kv_dtype = torch.bfloat16 if quantised else torch.float32
    for level in CpuLevel:
        if level > machine_level():
            return
        with forced(level):
            roundings = {level.word: WORD_BITS}
            if quantised and level >= CpuLevel.VNNI:
                roundings[f"{level.word}, activations q8"] = BYTE
            for name, input_bits in roundings.items():
                model = load(source, len(token_ids), bits, input_bits)
                read = partial(log_probabilities, model, source, token_ids, kv_dtype)
                yield name, both_ways(len(token_ids), read)


def theirs(peer: LlamaCpp, path: str, token_ids: list[int], *, exact: bool) -> dict[str, Tensor]:
    peer.call("load", path, 1, len(token_ids), exact)
    return both_ways(
        len(token_ids),
        lambda prompt: torch.from_numpy(peer.logits(token_ids, prompt)[:-1]).log_softmax(-1),
    )


def measured(name: str, tokens: int, interpreter: str, folder: Path) -> dict[str, Figures]:
    """The readers' figures of one type; rounded floats have those of the file that is rounded."""
    original = resolve_model(MODEL).path
    if original is None:
        raise SystemExit(f"{MODEL} is not installed")
    stored = name.split(",")[0]
    kind_of = mixture(MIXTURES[stored], LAYERS) if stored in MIXTURES else lambda _: Kind[stored]
    with LlamaCpp(interpreter) as peer:
        path = requantised(original, folder / "model.gguf", kind_of, peer.quantise)
        source, tokenizer = source_of(path)
        token_ids = tokenizer.encode((DATA / "alice.txt").read_text())[:tokens]
        plain = build_model(source.config, tokens, torch.float32, torch.device("cpu"))
        load_weights(plain.slots, source)
        exact = log_probabilities(plain, source, token_ids, torch.float32, tokens)
        told = {"float32": figures(token_ids, exact, {"prompt": exact})}
        for level, found in ours(source, token_ids, ROUNDED.get(name)):
            told[level] = figures(token_ids, exact, found)
        if name not in ROUNDED:
            found = theirs(peer, path, token_ids, exact=False)
            told[KERNELS] = figures(token_ids, exact, found)
            floats = requantised(
                Path(path), folder / "floats.gguf", lambda _: Kind.F32, peer.quantise
            )
            found = theirs(peer, floats, token_ids, exact=True)
            told[FLOATS] = figures(token_ids, exact, found)
    return told


def page(results: dict[str, Any]) -> str:
    """benchmarks/results/accuracy.md."""
    share = 100 / (results["tokens"] - 1)
    lines = [
        "# Accuracy by type and level", "",
        "SmolLM2-135M, which is published in Q4_1, written in each type by llama.cpp's quantiser; "
        f"{results['tokens']} tokens of alice.txt (`python -m benchmarks.accuracy`). "
        "Mean KL is in units of 1e-4, from the dequantised model in float32; other greedy tokens "
        "are a share of all. The text is read as a prompt / token by token.", "",
        by_machine(results["machines"]), "",
        f"llama.cpp's kernels: {results['peer'].strip(' |')}.", "",
        "| type | read by | mean KL | other greedy tokens, % | perplexity |", "|---" * 5 + "|",
    ]  # fmt: skip
    for kind, readers in results["types"].items():
        for reader, told in readers.items():
            ways = [how for how in ("prompt", "generated") if f"kl_{how}" in told]
            cells = [
                kind,
                reader,
                " / ".join(f"{abs(told[f'kl_{how}']) * 1e4:.2f}" for how in ways),
                " / ".join(f"{told[f'others_{how}'] * share:.1f}" for how in ways),
                f"{told['perplexity']:.3f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument(
        "--types", nargs="*", choices=[*TYPES, *ROUNDED], default=[*TYPES, *ROUNDED]
    )
    args = parser.parse_args()
    interpreter = python()
    if interpreter is None:
        raise SystemExit(MISSING)
    torch.set_num_threads(1)
    record = RESULTS / "accuracy.json"
    results = json.loads(record.read_text()) if record.exists() else {"types": {}, "machines": {}}
    with LlamaCpp(interpreter) as peer:
        results |= {"tokens": args.tokens, "peer": peer.call("about")}
    for name in args.types:
        with tempfile.TemporaryDirectory() as folder:
            results["types"][name] = measured(name, args.tokens, interpreter, Path(folder))
        results["machines"][name] = machine()
        print(name, json.dumps(results["types"][name]), flush=True)
        record.write_text(json.dumps(results, indent=1) + "\n")
        record.with_suffix(".md").write_text(page(results))


if __name__ == "__main__":
    main()
