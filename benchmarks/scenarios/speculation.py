"""What guessed tokens gain: the answer to one request, with and without speculation."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing

from benchmarks.figures import Record
from benchmarks.scenario import Column, Options, Reporter, Scenario, rotated
from benchmarks.scenarios.overhead import prefill

from diptych.demo import QUESTION
from diptych.known_models import DEFAULT, KNOWN
from diptych_engine.control.core import EngineCore
from diptych_engine.serving.build_core import build_core
from diptych_frontend.text.input_processor import InputProcessor
from diptych_protocol import EngineConfig, EngineCoreRequest, SamplingParams, SpeculativeConfig

TOKENS = 240
CODE = """```python
class Basket:
    def __init__(self, owner):
        self.owner = owner
        self.items = {}

    def add(self, name, price, count=1):
        if count < 1:
            raise ValueError("count must be at least 1")
        old_price, old_count = self.items.get(name, (price, 0))
        self.items[name] = (price, old_count + count)

    def remove(self, name):
        if name not in self.items:
            raise KeyError(name)
        del self.items[name]

    def total(self):
        return sum(price * count for price, count in self.items.values())

    def __len__(self):
        return sum(count for price, count in self.items.values())
```"""
WORDS = {
    "edit": f"{CODE}\n\nCopy the code above. Only change the name of the class to Cart.",
    "chat": "Tell me a story of a lighthouse keeper who finds a map.",
    "question": QUESTION,
}
MODEL = KNOWN[DEFAULT].uri
CONFIG = EngineConfig(model=MODEL, num_blocks=512)
SYSTEMS = {
    "alone": CONFIG,
    "with guesses": EngineConfig(
        model=MODEL, num_blocks=512, speculative_config=SpeculativeConfig()
    ),
}  # fmt: skip


def measure(core: EngineCore, prompt: list[int], eos: int | None, name: str) -> dict[str, float]:
    """Tokens per second of a greedy answer after its first token, and tokens a step."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    core.add(EngineCoreRequest(name, prompt, None, params, None, eos, 0.0, None, None, None), b"b")
    prefill(core, [name])
    stats = core.scheduler.stats
    steps, tokens, started = stats.steps, stats.tokens_generated, time.perf_counter()
    while core.has_work:
        core.finish_step(*core.start_step())
        core.take_outputs()
    seconds, made = time.perf_counter() - started, stats.tokens_generated - tokens
    return {"tokens_per_s": made / seconds, "tokens_a_step": made / (stats.steps - steps)}


def run(options: Options, reporter: Reporter) -> list[Record]:
    renderer = InputProcessor.of(CONFIG).renderer
    eos = min(renderer.get_tokenizer().eos_token_ids)
    records = []
    with ExitStack() as stack:
        cores = [
            (system, stack.enter_context(closing(build_core(config))))
            for system, config in SYSTEMS.items()
        ]
        for case in filter(options.wants, WORDS):
            chat = [{"role": "user", "content": WORDS[case]}]
            prompt = renderer.render_chat(chat)["prompt_token_ids"]
            for repetition in range(options.times):
                for system, core in rotated(cores, repetition):
                    figures = measure(core, prompt, eos, f"{case} {repetition}")
                    records.append(Record(case, system, repetition, figures))
                    reporter.done(records[-1], ("tokens_per_s", "tokens_a_step"))
    return records


SCENARIO = Scenario(
    "speculation",
    "Speculation: one answer, with guessed tokens and without",
    f"Greedy answers of the demo's model to one caller, up to {TOKENS} tokens: an edit of 20 "
    "lines of code, a story, and a question with a short answer. The two take turns.",
    (Column("tokens_per_s", "output tokens/s"), Column("tokens_a_step", "tokens a step", 2)),
    run,
    versus=("tokens_per_s",),
    first_is_baseline=True,
)
