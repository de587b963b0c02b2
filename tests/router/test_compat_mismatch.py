"""A router says field by field why its pools do not fit together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from engine_kit.fake_core import FakeCore
from free_ports import free_port

from diptych_protocol import EngineDescription, RouterConfig
from diptych_router.engines.discovery import Target
from diptych_router.engines.engine_link import EngineLink, compat_mismatch
from diptych_router.engines.engine_table import Role
from diptych_router.requests.pools.pools import Pools

COMPAT = {"model": "m", "dtype": "float32", "head_dim": 64, "kv_heads": 4, "revision": "a"}


def engine(name: str, **changes: Any) -> EngineDescription:
    return EngineDescription(
        engine_id=name, epoch="e", model="m", max_model_len=64, vocab_size=64, block_size=16,
        num_blocks=4, dtype="float32", compat=COMPAT | changes, max_num_seqs=1, pid=1,
    )  # fmt: skip


def test_pools_that_fit_give_no_reason() -> None:
    wrong = engine("w", dtype="bfloat16")
    assert compat_mismatch([wrong, engine("p")], [engine("d"), wrong]) == ""
    assert compat_mismatch([], [engine("d")]) == ""
    assert compat_mismatch([engine("p")], []) == ""


def test_each_differing_field_is_named() -> None:
    said = compat_mismatch([engine("p")], [engine("d", dtype="bfloat16", head_dim=128)])
    assert said == (
        "p and d cannot exchange KV "
        "(dtype: 'float32' in prefill, 'bfloat16' in decode; "
        "head_dim: 64 in prefill, 128 in decode)"
    )


@pytest.mark.parametrize("swapped", [False, True])
def test_it_is_the_pair_that_differs_least_that_is_named(*, swapped: bool) -> None:
    far, near = engine("far", dtype="bfloat16", revision="b"), engine("near", revision="b")
    decode = [near, far] if swapped else [far, near]
    assert compat_mismatch([engine("p")], decode).startswith(
        "p and near cannot exchange KV (revision: 'a'"
    )


@asynccontextmanager
async def pools_of(
    prefill: EngineDescription, decode: EngineDescription, eventually: Any, vocabulary: str = ""
) -> AsyncIterator[Pools]:
    """The pools of a router, of one engine each, once both are up."""
    targets: dict[Role, list[Target]] = {
        role: [("127.0.0.1", free_port())] for role in ("prefill", "decode")
    }
    said = {"prefill": prefill, "decode": decode}
    fakes = [
        FakeCore(f"tcp://{host}:{port}", describe=msgspec.to_builtins(said[role]))
        for role, [(host, port)] in targets.items()
    ]
    connect = partial(
        EngineLink, read_keys=None, on_outputs=lambda *_: None, on_lost=lambda *_: None,
        on_hang=lambda _: None, vocabulary=vocabulary,
    )  # fmt: skip
    pools = Pools(RouterConfig(model="m", verify="Off"), targets, connect, None, lambda: None)
    pools.start()
    try:
        await eventually(lambda: pools.of("prefill") and pools.of("decode"))
        yield pools
    finally:
        pools.close()
        for fake in fakes:
            await fake.close()


async def test_pools_that_do_not_fit_are_why_a_router_is_not_ready(eventually: Any) -> None:
    async with pools_of(engine("p"), engine("d", dtype="bfloat16"), eventually) as pools:
        assert pools.why_not_ready() == (
            "no usable pair yet; p and d cannot exchange KV "
            "(dtype: 'float32' in prefill, 'bfloat16' in decode)"
        )


@pytest.mark.parametrize(
    ("ours", "theirs", "understood"),
    [("a", "a", True), ("a", "b", False), ("a", "", True), ("", "b", True)],
)
async def test_a_router_uses_no_engine_to_which_its_tokens_mean_something_else(
    ours: str, theirs: str, understood: bool, eventually: Any
) -> None:
    """While another model rolls out, routers of the one see the engines of the other."""
    p, d = (msgspec.structs.replace(engine(name), vocabulary=theirs) for name in ("p", "d"))
    async with pools_of(p, d, eventually, vocabulary=ours) as pools:
        assert bool(pools.usable_engines()) == understood
        if not understood:
            words = "no usable pair yet; p has a model of another tokenizer than this router's"
            assert pools.why_not_ready() == words
