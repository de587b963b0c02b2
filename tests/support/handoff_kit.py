"""Real engines in this process, joined by UCX, and a router between them without sockets.

The model is small, and what it says depends on every token before. On the import path of the tests
(pytest's `pythonpath`).
"""

from __future__ import annotations

import itertools
import json
import select
import string
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from checkpoint_kit import SIZES, random_tensors, save_model
from core_kit import CLIENT, core_request, make_core
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from diptych_frontend.collector import Collector
from diptych_frontend.output_processor import OutputProcessor, fan_out
from diptych_frontend.tokenizer import Tokenizer
from diptych_protocol import (
    EngineCoreOutput,
    EngineCoreRequest,
    KVTransferConfig,
    KVTransferStats,
    RequestOutput,
)
from diptych_router.routed_request import RoutedRequest, Stage

BLOCK = 4
DEADLINE_S = 30.0
EOS = 0
_COUNT = itertools.count()
LETTERS = [*string.ascii_lowercase, *string.ascii_uppercase[:14], *string.digits, *'Ġ{}[]":,.-_+?']
"""Tokens 1 to 63; Ġ is how byte-level tokenizers write a blank."""


def save_toy(folder: Path) -> str:
    """A checkpoint whose tokens are single letters; returns its path."""
    path = save_model(folder, random_tensors(0))
    config = {"model_type": "llama", "eos_token_id": EOS, **SIZES}
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {letter: index for index, letter in enumerate(["<end>", *LETTERS])}
    assert len(vocabulary) == SIZES["vocab_size"]
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    return path


class Engine:
    """An engine core of this process."""

    def __init__(self, model: str, name: str, **options: Any) -> None:
        hinge = KVTransferConfig(lease_seconds=options.pop("lease_seconds", 30.0))
        fields = {"block_size": BLOCK, "max_model_len": 96, "max_loras": 2, **options}
        self.name = name
        self.core = make_core(model, engine_id=name, kv_transfer=hinge, **fields)

    def turn(self) -> list[EngineCoreOutput]:
        """Hear what the hinge has to say, and take a step."""
        core = self.core
        core.handle_transfer_events()
        if core.has_work:
            core.finish_step(*core.start_step())
        core.deferred.settle()
        return core.take_outputs().get(CLIENT, [])

    @property
    def at_rest(self) -> bool:
        """It holds nothing of anybody."""
        scheduler = self.core.scheduler
        scheduler.pool.check_integrity()
        held = (scheduler.requests, scheduler.loading, scheduler.leased, self.hinge.leases_held)
        return scheduler.pool.num_free == scheduler.pool.num_blocks and not any(held)

    @property
    def hinge(self) -> KVTransferStats:
        stats = self.core.stats().kv_transfer
        assert stats is not None
        return stats

    @property
    def prompt_tokens_computed(self) -> int:
        return self.core.stats().prompt_tokens_computed

    def forget_prefixes(self) -> None:
        assert self.core.call("reset_prefix_cache", []) is True


@contextmanager
def engines(model: str, **options: dict[str, Any]) -> Iterator[list[Engine]]:
    """Engines by name, with their options."""
    made: list[Engine] = []
    try:
        for name, fields in options.items():
            made.append(Engine(model, name, **fields))
        yield made
    finally:
        for engine in made:
            engine.core.close()


@dataclass
class Route:
    """A router's client of some engines: the real state of each request, and no policy.

    The first decode engine takes over from prefill; the others from those before them.
    """

    tokenizer: Tokenizer | None
    prefill: Engine | None
    decode: Sequence[Engine]
    move_after: int | None = None
    """A decode engine is asked to hand a stream on after so many tokens, if one comes after it."""
    outputs: OutputProcessor = field(init=False)
    routed: dict[str, RoutedRequest] = field(default_factory=dict)
    """By the name that the engine in charge has for it."""

    def __post_init__(self) -> None:
        self.outputs = OutputProcessor(self.tokenizer)
        self.by_name = {e.name: e for e in (self.prefill, *self.decode) if e is not None}

    def send(self, request: EngineCoreRequest) -> Collector[RequestOutput]:
        """Begin to have a request answered, under a name that no engine has heard before."""
        name = f"{request.request_id}-{next(_COUNT)}"
        request = msgspec.structs.replace(request, request_id=name)
        parent, parts = fan_out(request)
        collector = Collector[RequestOutput]([part.request_id for part in parts])
        for index, part in enumerate(parts):
            self.outputs.add(part, None, collector, parent, index)
            routed = RoutedRequest(part, max_model_len=96)
            if self.prefill is None:
                self._place(routed, self.decode[0], Stage.DECODE, routed.aggregated_request)
            else:
                self._place(routed, self.prefill, Stage.PREFILL, routed.prefill_request)
        return collector

    def _place(
        self,
        routed: RoutedRequest,
        engine: Engine,
        stage: Stage,
        message: Callable[[], EngineCoreRequest],
    ) -> None:
        self.routed.pop(routed.core_id, None)
        routed.place(engine.name, stage)
        self.routed[routed.core_id] = routed
        engine.core.add(message(), CLIENT)

    def turn(self) -> None:
        """Let every engine do a step, and pass on what came of it."""
        made = [(engine, engine.turn()) for engine in self.by_name.values()]
        if not any(outputs for _, outputs in made):
            self._wait()
        for engine, outputs in made:
            self._hear(engine, outputs)

    def _wait(self) -> None:
        if not any(engine.core.has_work for engine in self.by_name.values()):
            hinges = [e.core.connector.wake_fd for e in self.by_name.values() if e.core.connector]
            grammars = [engine.core.grammars.wake_fd for engine in self.by_name.values()]
            select.select([*hinges, *grammars], [], [], 0.05)
            for engine in self.by_name.values():
                engine.core.take_grammars()

    def _hear(self, engine: Engine, outputs: list[EngineCoreOutput]) -> None:
        deliver, turns = [], []
        for output in outputs:
            routed = self.routed.get(output.request_id)
            if routed is None:
                continue
            if routed.absorb(output):
                turns.append(routed)
            elif output.finished:
                del self.routed[routed.core_id]
            deliver.append(output)
        for name in self.outputs.process(deliver):
            self._withdraw(name)
        for routed in turns:
            if routed.core_id in self.routed:
                successor = self._after(engine)
                self._place(routed, successor, Stage.DECODE, routed.decode_request)
            elif routed.lease is not None:
                engine.core.call("reject_kv_transfer", [routed.core_id, routed.lease])
        for routed in list(self.routed.values()):
            self._move(routed)

    def _withdraw(self, name: str) -> None:
        """A stop string has ended it."""
        for routed in list(self.routed.values()):
            if routed.request_id == name:
                del self.routed[routed.core_id]
                self.by_name[routed.engine].core.abort([routed.core_id])

    def _after(self, engine: Engine) -> Engine:
        return self.decode[self.decode.index(engine) + 1 if engine in self.decode else 0]

    def _move(self, routed: RoutedRequest) -> None:
        engine = self.by_name[routed.engine]
        wanted = self.move_after is not None and len(routed.generated) >= self.move_after
        if wanted and routed.stage is Stage.DECODE and engine is not self.decode[-1]:
            routed.moving = engine.core.hand_off(routed.core_id)

    def run(self, *requests: EngineCoreRequest) -> list[list[RequestOutput]]:
        """What the consumer of each request reads, one output after the other."""
        collectors = [self.send(request) for request in requests]
        read: list[list[RequestOutput]] = [[] for _ in requests]
        deadline = time.monotonic() + DEADLINE_S
        while not all(collector.finished for collector in collectors):
            assert time.monotonic() < deadline, "it does not come to an end"
            self.turn()
            for outputs, collector in zip(read, collectors, strict=True):
                output = collector.take()
                if output is not None:
                    outputs.append(output)
        self.settle()
        return read

    def settle(self) -> None:
        """Until nobody holds anything."""
        self.until(lambda: all(engine.at_rest for engine in self.by_name.values()))

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "it does not come"
            self.turn()


def request(name: str, prompt: list[int], **fields: Any) -> EngineCoreRequest:
    """As `core_request`, for a model whose answers end with `EOS`."""
    return core_request(name, prompt, **{"eos_token_id": EOS, **fields})


def prompt_of(seed: int, length: int) -> list[int]:
    """Letters, none of which is the end."""
    return [1 + (7 * seed + 3 * i * i + 5 * i) % 63 for i in range(length)]
