"""Requests to the API server: a limit, and who waits for it."""

from __future__ import annotations

import asyncio

from cluster_kit.reconciling import Object, Store, serving

from diptych_operator.kube.client import Pace

NEVER = 1e-9
"""Tokens a second: none comes while a test runs."""


async def turns(times: int = 20) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_children_wait_for_tokens_in_their_order_and_small_things_never() -> None:
    pace, begun = Pace(rate=NEVER, burst=3), list[int]()

    async def child(number: int) -> None:
        await pace.wait_and_take()
        begun.append(number)

    tasks = [asyncio.create_task(child(number)) for number in range(5)]
    await turns()
    assert begun == [0, 1, 2]
    for _ in range(10):
        pace.take()
    assert begun == [0, 1, 2]
    for task in tasks:
        task.cancel()


async def test_tokens_come_back_up_to_a_burst() -> None:
    pace = Pace(rate=1e9, burst=2)
    for _ in range(100):
        pace.take()
    for _ in range(100):
        await pace.wait_and_take()


async def test_a_status_is_written_while_children_wait() -> None:
    store = Store()
    meta: Object = {"name": "svc", "namespace": "ns"}
    child: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta}
    service: Object = {"apiVersion": "diptych.dev/v1alpha1", "kind": "InferenceService"}
    async with serving(store) as kube:
        kube.pace = Pace(rate=NEVER, burst=0)
        waiting = asyncio.create_task(kube.apply(child))
        await kube.apply_status(service | {"metadata": meta}, {})
        assert store.names("inferenceservices") == {"svc"}
        assert not store.names("configmaps")
        assert not waiting.done()
        waiting.cancel()
