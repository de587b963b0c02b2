"""Engines of several geometries in the test's own process, and hand-offs between them over UCX.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

import msgspec
from engine_kit.control import Owner
from engine_kit.core import core_request
from waits import Deadline, source_of

from diptych_protocol import (
    FinishReason,
    KVTransferConfig,
    KVTransferParams,
    KVTransferStats,
    fingerprint,
)

Geometry = tuple[int, int]
"""Block size, tensor-parallel size."""


class Engines:
    """Engines of one model, started when they are first asked for."""

    def __init__(self, model: str, **hinge: Any) -> None:
        """With the settings of a KVTransferConfig."""
        self._model = model
        self._hinge = KVTransferConfig(**hinge)
        self._engines: dict[tuple[str, Geometry], Owner] = {}
        self._count = 0

    def of(self, role: str, geometry: Geometry) -> Owner:
        key = role, geometry
        if key not in self._engines:
            block_size, num_ranks = geometry
            self._engines[key] = Owner(
                model=self._model,
                engine_id=f"{role}, blocks of {block_size} on {num_ranks}",
                block_size=block_size,
                tensor_parallel_size=num_ranks,
                kv_transfer=self._hinge,
                dtype="float32",
            )
        return self._engines[key]

    def adopt(self, engine: Owner) -> Owner:
        """Have an engine of another make take part."""
        self._engines["adopted", (len(self._engines), 0)] = engine
        return engine

    def close(self) -> None:
        for engine in self._engines.values():
            engine.core.close()

    def until(self, condition: Callable[[], Any], *but: Owner) -> None:
        """Let all engines go on until it holds, but for those that are to stand still."""
        engines = [engine for engine in self._engines.values() if engine not in but]
        wakes = [engine.connector.wake_fd for engine in engines]
        deadline = Deadline(source_of(condition))
        while not condition():
            deadline.check()
            if not any(engine.core.has_work for engine in engines):
                select.select(wakes, [], [], 0.05)
            for engine in engines:
                engine.turn()

    def alone(self, engine: Owner, prompt: list[int], **params: Any) -> list[int]:
        """What an engine says that does everything itself."""
        name = self._name()
        engine.add(name, prompt, **params)
        self.until(lambda: engine.ended(name))
        assert engine.outputs[name][-1].error is None
        return engine.tokens(name)

    def lend(self, engine: Owner, prompt: list[int], **params: Any) -> dict[str, Any]:
        """The `kv_transfer_params` of a prompt that an engine has computed."""
        name = self._name()
        extra = {"kv_transfer_params": {"do_remote_decode": True}}
        engine.add(name, prompt, **{**params, "max_tokens": 1}, extra_args=extra)
        self.until(lambda: engine.ended(name))
        lent = engine.outputs[name][-1].kv_transfer_params
        assert lent is not None, engine.outputs[name]
        return lent

    def fetch(self, engine: Owner, prompt: list[int], lent: dict[str, Any], **params: Any) -> str:
        """The name of a request whose KV an engine fetches, when it has ended."""
        name = self.begin_to_fetch(engine, prompt, lent, **params)
        self.until(lambda: engine.ended(name))
        return name

    def begin_to_fetch(
        self, engine: Owner, prompt: list[int], lent: dict[str, Any], **params: Any
    ) -> str:
        """The name of a request whose KV an engine is to fetch."""
        name = self._name()
        engine.add(name, prompt, extra_args={"kv_transfer_params": lent}, **params)
        return name

    def pass_on(self, giver: Owner, taker: Owner, prompt: list[int], **params: Any) -> list[int]:
        """What `taker` says with the KV that `giver` has computed, and nothing computed again."""
        before = taker.core.stats().prompt_tokens_computed
        name = self.fetch(taker, prompt, self.lend(giver, prompt, **params), **params)
        assert taker.outputs[name][-1].error is None, taker.outputs[name][-1].error
        assert taker.core.stats().prompt_tokens_computed == before
        self.until(lambda: giver.all_blocks_free and taker.all_blocks_free)
        return taker.tokens(name)

    def fetch_prefix(
        self, holder: Owner, taker: Owner, prompt: list[int], **params: Any
    ) -> list[int]:
        """What `taker` says to a prompt whose beginning it is to fetch from `holder`."""
        name, about = self._name(), holder.core.description
        source = KVTransferParams(
            remote_engine_id=about.engine_id,
            remote_host=about.kv_transfer_host,
            remote_port=about.kv_transfer_port,
            epoch=about.epoch,
            compat=fingerprint(about.compat),
            remote_block_size=about.block_size,
            proof=about.kv_transfer_proof,
            remote_num_tokens=len(prompt),
        )
        taker.add(name, prompt, prefix_source=source, **params)
        self.until(lambda: taker.ended(name))
        assert taker.outputs[name][-1].error is None, taker.outputs[name][-1].error
        self.until(lambda: holder.all_blocks_free and taker.all_blocks_free)
        return taker.tokens(name)

    def announce(
        self, giver: Owner, taker: Owner, prompt: list[int], lease_id: str, **params: Any
    ) -> str:
        """The name of a request that `taker` is told of, and fetches for, before `giver` is."""
        name, about = self._name(), giver.core.description
        announced = {
            "do_remote_prefill": True,
            "remote_engine_id": about.engine_id,
            "remote_host": about.kv_transfer_host,
            "remote_port": about.kv_transfer_port,
            "epoch": about.epoch,
            "compat": fingerprint(about.compat),
            "proof": about.kv_transfer_proof,
            "lease_id": lease_id,
            "remote_num_tokens": len(prompt),
        }
        extra = {"kv_transfer_params": announced}
        request = core_request(name, prompt, extra_args=extra, ignore_eos=True, **params)
        assert taker.core.call("announce_kv_transfer", [request])
        return name

    def move(self, giver: Owner, taker: Owner, prompt: list[int], max_tokens: int) -> list[int]:
        """The answer to a request that changes engines in the middle of it."""
        name, params = self._name(), {"max_tokens": max_tokens, "ignore_eos": True}
        giver.add(name, prompt, **params)
        self.until(lambda: len(giver.tokens(name)) >= max_tokens // 2)
        assert giver.core.call("hand_off", [name])
        self.until(lambda: giver.ended(name) is FinishReason.ABORT)
        lent = giver.outputs[name][-1].kv_transfer_params
        assert lent is not None
        told = giver.tokens(name)
        follower = self._name()
        taker.add(
            follower,
            prompt,
            generated_token_ids=told,
            extra_args={"kv_transfer_params": lent},
            **params,
        )
        self.until(lambda: taker.ended(follower))
        assert taker.outputs[follower][-1].error is None
        self.until(lambda: giver.all_blocks_free and taker.all_blocks_free)
        return told + taker.tokens(follower)

    def _name(self) -> str:
        self._count += 1
        return f"r{self._count}"


def totals(engine: Owner) -> KVTransferStats:
    """What an engine's hinge has counted so far."""
    stats = engine.core.stats().kv_transfer
    assert stats is not None
    return msgspec.structs.replace(stats)
