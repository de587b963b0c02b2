"""Probes a local pod over HTTP, as a kubelet does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx

from diptych.laptop.pods import HttpProbe, LocalPod

QUICK_POLL_S = 0.1
"""The period until a pod is ready for the first time, short because somebody waits for it."""


async def answers(client: httpx.AsyncClient, probe: HttpProbe) -> bool:
    """Whether the pod reports within the probe's timeout that it is well."""
    try:
        response = await client.get(probe.url, timeout=probe.timeout_s)
    except httpx.HTTPError:
        return False
    return 200 <= response.status_code < 400


async def watch(client: httpx.AsyncClient, pod: LocalPod, probed: Callable[[bool], None]) -> None:
    """Ask the startup probe until it succeeds, then the readiness probe for ever.

    `probed` is called with each readiness answer. Returns only if the startup probe did not succeed
    in time: then the pod has to be killed.
    """
    if pod.startup is not None and not await _started(client, pod.startup):
        return
    if pod.readiness is None:
        probed(True)
        await asyncio.Event().wait()
    else:
        await _readiness(client, pod.readiness, probed)


async def _started(client: httpx.AsyncClient, probe: HttpProbe) -> bool:
    try:
        async with asyncio.timeout(probe.failure_threshold * probe.period_s):
            while not await answers(client, probe):
                await asyncio.sleep(QUICK_POLL_S)
    except TimeoutError:
        return False
    return True


async def _readiness(
    client: httpx.AsyncClient, probe: HttpProbe, probed: Callable[[bool], None]
) -> None:
    ever_ready = False
    while True:
        ok = await answers(client, probe)
        ever_ready = ever_ready or ok
        probed(ok)
        await asyncio.sleep(probe.period_s if ever_ready else QUICK_POLL_S)
