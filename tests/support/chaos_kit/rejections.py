"""How long a prefill engine holds blocks that nobody will read, after it was to be told so.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from chaos_kit.service import MAX_RUNNING, MAX_WAITING, Engine, environment
from engine_kit.wire import Client
from model_kit.sensitive_model import VOCABULARY
from waits import PATIENCE_S

from diptych_frontend.core_client.curve import read_keys
from diptych_kv_transfer import open_connector
from diptych_kv_transfer.memory.shard import Shard
from diptych_protocol import EngineCoreOutput, KVTransferConfig, KVTransferParams

PROMPT_TOKENS = 60
UNSERVABLE = {"temperature": -1.0}
Params = dict[str, Any]


class Pair:
    """A line to a prefill engine and one to a decode engine, past any router."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = (
            Client(prefill.process.endpoint),
            Client(decode.process.endpoint),
        )
        self._prefill = prefill
        self._rng = random.Random(1)
        self._names = (f"rejection-{number}" for number in itertools.count())
        self._fillers: list[str] = []

    def close(self) -> None:
        self.prefill.socket.close()
        self.decode.socket.close()

    def leases_revoked(self) -> int:
        hinge = self.prefill.stats().kv_transfer
        assert hinge is not None
        return hinge.leases_revoked

    def lend(self) -> tuple[list[int], Params]:
        """Prefill something; the prefill engine holds its blocks for a decode engine."""
        name = next(self._names)
        prompt = [self._rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        remote = {"kv_transfer_params": {"do_remote_decode": True}}
        self.prefill.add(name, prompt=prompt, max_tokens=1, extra_args=remote)
        params = last_output(self.prefill, name).kv_transfer_params
        if params is None:
            raise RuntimeError("prefill lent nothing")
        return prompt, params

    def fill(self) -> None:
        """Let the decode engine have as many requests as it takes."""
        while not self._is_full():
            self._fillers.append(next(self._names))
            self.decode.add(self._fillers[-1], max_tokens=900, ignore_eos=True)

    def _is_full(self) -> bool:
        stats = self.decode.stats()
        return (stats.num_running, stats.num_waiting) == (MAX_RUNNING, MAX_WAITING)

    def empty(self) -> None:
        self.decode.abort(self._fillers)

    # --- seconds from a refusal until the blocks are free ----------------------------------------

    def refused(self, **request: Any) -> float:
        """The decode engine refuses a request."""
        prompt, params = self.lend()
        name = next(self._names)
        extra = {"kv_transfer_params": params}
        self.decode.add(name, prompt=prompt, extra_args=extra, **request)
        if not last_output(self.decode, name).error:
            raise RuntimeError("the decode engine took it")
        return self._until_free()

    def refused_when_full(self) -> float:
        self.fill()
        return self.refused()

    def told_to_decode(self) -> float:
        """Somebody before the decode engine has refused, and tells it."""
        _, params = self.lend()
        self._call(self.decode, "reject_kv_transfer", "r", params)
        return self._until_free()

    def told_to_prefill(self) -> float:
        """A router has lost the decode engine, and tells the prefill engine."""
        _, params = self.lend()
        self._call(self.prefill, "reject_kv_transfer", "r", params)
        return self._until_free()

    def refused_by_a_stranger(self) -> float:
        """A decode engine that never met the prefill engine has to connect first: it is a hinge of
        this process."""
        _, params = self.lend()
        with environment(self._prefill.ucx_settings(0)):
            connector = open_connector(
                KVTransferConfig(), engine_id="d", epoch="1", compat={},
                kv_memory=[Shard.of(np.zeros((1, 64), np.uint8))],
                keys=read_keys(self._prefill.keys_dir),
            )  # fmt: skip
        try:
            connector.reject(KVTransferParams.parse(params))
            return self._until_free()
        finally:
            connector.close()

    def _call(self, client: Client, *call: Any) -> None:
        failure = client.call(*call)
        if failure is not None:
            raise RuntimeError(failure)

    def _until_free(self) -> float:
        begin = time.monotonic()
        while (stats := self.prefill.stats()).blocks_free < stats.blocks_total:
            if time.monotonic() > begin + PATIENCE_S:
                raise TimeoutError("the blocks stay held")
        return time.monotonic() - begin


def last_output(client: Client, name: str) -> EngineCoreOutput:
    """Read on until a request has ended; others' outputs are dropped."""
    while True:
        for output in client.receive().outputs:
            if output.request_id == name and output.finished:
                return output


def rejected(pair: Pair, what: str, once: Callable[[], float], count: int) -> None:
    """Do it so many times, and show how long it took. The aim is 50 ms for 99 of 100.

    Raises `AssertionError` if the blocks became free because the leases were over: a rejection
    revokes them. On a busy machine a few may be over before they are rejected."""
    before = pair.leases_revoked()
    times = sorted(once() for _ in range(count))
    revoked = pair.leases_revoked() - before
    assert revoked > count / 2, f"{what}: {revoked} of {count} leases were revoked"
    p50, p99 = (times[int(share * (count - 1))] * 1e3 for share in (0.5, 0.99))
    print(f"\n{what}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, worst {times[-1] * 1e3:.1f} ms")
