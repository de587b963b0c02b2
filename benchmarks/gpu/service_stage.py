"""A service as users have it: processes of engines, and a router that passes requests on."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine_stages import dummy, options, prompts
from benchmarks.gpu.place import Place
from service_kit import all_usable, engine_config, make_router, start_engine

from diptych_frontend.core_client.curve import new_keys
from diptych_protocol import RequestOutputKind, SamplingParams
from diptych_router.requests.pool_client import PoolClient


def service_of_processes(place: Place) -> None:
    """Two engine processes on one device behind a router, at a growing number of users."""
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(serve(place, Path(folder)))


async def serve(place: Place, folder: Path) -> None:
    keys = new_keys()
    (folder / "curve-public").write_text(keys.public)
    (folder / "curve-secret").write_text(keys.secret)
    model = dummy(place)
    started = time.perf_counter()
    prefill, decode = await asyncio.gather(
        *(
            start_engine(engine_config(role, model, **options(place)), folder)
            for role in ("prefill", "decode")
        )
    )
    place.tell("start of both", seconds=time.perf_counter() - started)
    router = make_router(model, prefill[1], decode[1], lambda: [keys])
    router.start()
    try:
        await all_usable(router, 2)
        # The first of each size records graphs and compiles kernels.
        for users in place.either((1, 1, 16, 16, 64, 64), (1, 1)):
            place.tell("users", count=users, **await asked_by(place, router, users))
        hinge = (await decode[0].refresh_stats()).kv_transfer
        place.tell("hand-off", blocks_received=hinge.blocks_received if hinge else 0)
    finally:
        router.shutdown()
        prefill[0].shutdown()
        decode[0].shutdown()


async def asked_by(place: Place, router: PoolClient, users: int) -> dict[str, Any]:
    """One request of each user, all at once: tokens a second, and medians in milliseconds."""
    started = time.perf_counter()
    # A prefix that nobody has had yet: every prompt is computed, and every block handed over.
    fresh = int(started * 1e6) % 500
    asked = [[fresh + 3, *prompt[1:]] for prompt in prompts(place, users)]
    times = await asyncio.gather(*(times_of(place, router, each) for each in asked))
    seconds = time.perf_counter() - started
    gaps = [later - earlier for each in times for earlier, later in itertools.pairwise(each)]
    return {
        "tokens_per_s": sum(map(len, times)) / seconds,
        "first_ms": statistics.median(each[0] - started for each in times) * 1e3,
        "next_ms": statistics.median(gaps) * 1e3,
    }


async def times_of(place: Place, router: PoolClient, prompt: list[int]) -> list[float]:
    """When each token came."""
    params = SamplingParams(
        temperature=0.0,
        max_tokens=place.either(64, 3),
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    times: list[float] = []
    name = f"{time.perf_counter_ns()} {prompt[1]}"
    async for output in router.generate({"prompt_token_ids": prompt}, params, name):
        now = time.perf_counter()
        times += [now] * len(output.outputs[0].token_ids)
    return times
