"""What guessed tokens gain or cost: answers with and without speculation."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from itertools import cycle

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
COPY = "Copy the code above. Only change the name of the class to"
STORY = "Tell me a story of a lighthouse keeper who finds a"
WORDS = {
    "edit": [f"{CODE}\n\n{COPY} {name}." for name in ("Cart", "Bag", "Box", "Shelf")],
    "story": [f"{STORY} {thing}." for thing in ("map", "key", "letter", "bell")],
    "question": [QUESTION],
    "drawn": [STORY],
}
SIX: dict[int, float] = dict.fromkeys(range(1000, 1006), 100.0)
DRAWN = SamplingParams(max_tokens=TOKENS, temperature=5.0, seed=1, ignore_eos=True, logit_bias=SIX)
"""Six tokens in a random order: what was drawn last was there before, and nearly always another one
followed."""
STREAMS = {"edit": (1, 8, 16), "story": (1, 8, 16), "question": (1,), "drawn": (1, 8, 16)}
MODEL = KNOWN[DEFAULT].uri
CONFIG = EngineConfig(model=MODEL, num_blocks=512)
SYSTEMS = {
    "alone": CONFIG,
    "with guesses": EngineConfig(
        model=MODEL, num_blocks=512, speculative_config=SpeculativeConfig()
    ),
}  # fmt: skip


def measure(core: EngineCore, prompts: list[list[int]], eos: int, name: str) -> dict[str, float]:
    """Tokens per second of answers after their first tokens, and tokens of a request a step."""
    params = DRAWN if "drawn" in name else SamplingParams(max_tokens=TOKENS, temperature=0.0)
    names = [f"{name} {index}" for index in range(len(prompts))]
    for each, prompt in zip(names, prompts, strict=True):
        request = EngineCoreRequest(each, prompt, None, params, None, eos, 0.0, None, None, None)
        core.add(request, b"b")
    prefill(core, names)
    stats = core.scheduler.stats
    tokens, rows, started = stats.tokens_generated, 0, time.perf_counter()
    while core.has_work:
        rows += len(core.scheduler.running)
        core.finish_step(*core.start_step())
        core.take_outputs()
    seconds, made = time.perf_counter() - started, stats.tokens_generated - tokens
    return {"tokens_per_s": made / seconds, "tokens_a_step": made / rows}


def run(options: Options, reporter: Reporter) -> list[Record]:
    renderer = InputProcessor.of(CONFIG).renderer
    eos = min(renderer.get_tokenizer().eos_token_ids)
    texts = {
        f"{kind}, {streams}": [each for each, _ in zip(cycle(words), range(streams), strict=False)]
        for kind, words in WORDS.items()
        for streams in STREAMS[kind]
    }
    records = []
    with ExitStack() as stack:
        cores = [
            (system, stack.enter_context(closing(build_core(config))))
            for system, config in SYSTEMS.items()
        ]
        for case in filter(options.wants, texts):
            chats = [[{"role": "user", "content": text}] for text in texts[case]]
            prompts = [renderer.render_chat(chat)["prompt_token_ids"] for chat in chats]
            for repetition in range(options.times):
                for system, core in rotated(cores, repetition):
                    figures = measure(core, prompts, eos, f"{case} {repetition}")
                    records.append(Record(case, system, repetition, figures))
                    reporter.done(records[-1], ("tokens_per_s", "tokens_a_step"))
    return records


SCENARIO = Scenario(
    "speculation",
    "Speculation: answers with guessed tokens and without",
    f"Answers of the demo's model, up to {TOKENS} tokens, one, 8 or 16 at once: edits of 20 lines "
    "of code, stories, a question with a short answer, and six tokens drawn at random, whose "
    "guesses are nearly always wrong. The two take turns.",
    (Column("tokens_per_s", "output tokens/s"), Column("tokens_a_step", "tokens a step", 2)),
    run,
    versus=("tokens_per_s",),
    first_is_baseline=True,
)
