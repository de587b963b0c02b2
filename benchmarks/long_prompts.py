"""What long prompts cost a router, in front of engines that compute nothing.

    python -m benchmarks.long_prompts --tokens 100000 --known 0.95

Prompts are texts of this repository, as one message of a chat. Each is asked twice: as a prompt of
which nothing is known, and as one that begins like the one before and ends otherwise. Processor
time is that of all of the router's processes and threads; that of the thread of its event loop is
the part during which small requests wait. Beside that, the parts of the way are timed alone.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
from benchmarks.instant_core import NUM_BLOCKS
from benchmarks.scenarios.router import engines, our_router
from benchmarks.servers import MODEL, Running, free_port, running

from diptych_frontend.confined.json_cost import check_json_cost
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.openai.api_types import ChatCompletionRequest
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import EngineCoreRequest, SamplingParams, wire
from diptych_protocol.block_hashes import extend_block_hashes

ROOT = Path(__file__).parents[1]
BLOCK_SIZE = 16
TIMEOUT_S = 120.0
SMALL = "What is the capital of France?"


class Cost(NamedTuple):
    """Processor milliseconds."""

    all: float
    loop: float

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.all - other.all, self.loop - other.loop)


def cost_until_now(router: Running) -> Cost:
    pid = router.process.pid
    loop = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e6
    return Cost(router.cpu_seconds() * 1e3, loop)


def long_context(folder: Path) -> TextRenderer:
    """Write the usual model's tokenizer into the folder, as one of a model with a long context."""
    source = resolve_model(MODEL, weights=False)
    renderer = TextRenderer(source)
    tokenizer = renderer.get_tokenizer()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    template = {"chat_template": tokenizer.chat_template, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": renderer.vocab_size, "eos_token_id": 2,
        "max_position_embeddings": NUM_BLOCKS * BLOCK_SIZE, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return TextRenderer(resolve_model(str(folder), weights=False))


def prompts(renderer: TextRenderer, tokens: int, known: float) -> Iterator[tuple[str, str]]:
    """Yield pairs of texts of about so many tokens. They share a part of this size, and nothing
    with the other pairs."""
    files = sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("frontend/**/*.py")])
    text = "\n".join(path.read_text() for path in files)
    length = len(renderer.get_tokenizer().decode(renderer.tokenize(text[: 6 * tokens])[:tokens]))
    lines = [match.end() for match in re.finditer("\n", text[:-length])]
    for number in range(1_000_000):
        first = lines[number * 997 % len(lines)]
        shared = f"Prompt {number}. {text[first : first + int(length * known)]}"
        new = length - len(shared)
        ends = [text[at : at + new] for at in (first // 2, first // 3)]
        yield f"{shared} first {ends[0]}", f"{shared} second {ends[1]}"


def body(text: str) -> bytes:
    message = {"role": "user", "content": text}
    return json.dumps({"model": "smollm2", "max_tokens": 2, "messages": [message]}).encode()


def ask(client: httpx.Client, text: str) -> None:
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/chat/completions", content=body(text), headers=headers)
    if answer.status_code != 200:
        raise RuntimeError(answer.text)


def measure(router: Running, pairs: Iterator[tuple[str, str]], rounds: int) -> dict[str, Cost]:
    """Return the cost of an average request of each kind; medians of rounds."""
    found: dict[str, list[Cost]] = {"not known": [], "known": [], "small": []}
    with httpx.Client(base_url=router.url, timeout=TIMEOUT_S) as client:
        for _ in range(rounds):
            some = [next(pairs) for _ in range(5)]
            asked = {
                "not known": [first for first, _ in some],
                "known": [second for _, second in some],
                "small": [SMALL] * 100,
            }
            for kind, texts in asked.items():
                before = cost_until_now(router)
                for text in texts:
                    ask(client, text)
                used = cost_until_now(router) - before
                found[kind].append(Cost(used.all / len(texts), used.loop / len(texts)))
    medians = {}
    for kind, costs in found.items():
        medians[kind] = Cost(*map(statistics.median, zip(*costs, strict=True)))
    return medians


def parts(renderer: TextRenderer, text: str, rounds: int) -> dict[str, float]:
    """Milliseconds of this process for each part of the way of a prompt, each alone."""
    tokenizer, sent = renderer.get_tokenizer(), body(text)
    messages = [{"role": "user", "content": text}]
    decoder = msgspec.json.Decoder(ChatCompletionRequest)
    prompt = tokenizer.render_chat(messages)
    ids = tokenizer.encode(prompt)
    request = EngineCoreRequest(
        "name", ids, None, SamplingParams(), None, None, 0.0, None, None, None
    )
    work: dict[str, Callable[[], object]] = {
        "judge the JSON": lambda: check_json_cost(sent),
        "decode the JSON": lambda: decoder.decode(sent),
        "ask for the template": lambda: tokenizer.render_chat(messages),
        "tokenise all": lambda: tokenizer.encode(prompt),
        "hash blocks": lambda: extend_block_hashes([], ids, BLOCK_SIZE, None),
        "encode a message to an engine": lambda: wire.encoder.encode(request),
    }
    return {name: _median_ms(one, rounds) for name, one in work.items()}


def _median_ms(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--known", type=float, default=0.95, help="part of a prompt")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        renderer = long_context(folder)
        pairs = prompts(renderer, args.tokens, args.known)
        ports = [free_port(), free_port()]
        stack.enter_context(engines("benchmarks.instant_core", ports))
        router = stack.enter_context(running(our_router(ports[:1], ports[1:], str(folder))))
        measure(router, pairs, 1)
        costs = measure(router, pairs, args.rounds)
        first, _ = next(pairs)
    print(f"{args.tokens} tokens, {args.known:.0%} known; processor ms: all, of the loop's thread")
    for kind, cost in costs.items():
        print(f"{kind:30} {cost.all:8.2f} {cost.loop:8.2f}")
    for name, ms in parts(renderer, first, args.rounds).items():
        print(f"{name:30} {ms:8.2f}")


if __name__ == "__main__":
    main()
