"""What the page asks of a router, whichever process of it answers."""

from __future__ import annotations

from typing import Protocol

from diptych_protocol.admin import Explanation
from diptych_router.engine_link import EngineLink
from diptych_router.page.panels import Panels, figures_of, panels_of
from diptych_router.pool_client import PoolClient


class RouterView(Protocol):
    """The whole router, with all of its processes."""

    async def panels(self) -> Panels:
        """Both pools at this moment."""

    async def explained(self, request_id: str) -> Explanation:
        """All that is remembered under an id; no requests if there are none."""


class OwnView:
    """A router of one process, or what one of its processes sees."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client

    async def panels(self) -> Panels:
        """See `RouterView.panels`."""
        return own_panels(self._client)

    async def explained(self, request_id: str) -> Explanation:
        """See `RouterView.explained`."""
        return self._client.explanations.explanation(request_id, self._client.name_of)


def own_panels(client: PoolClient) -> Panels:
    """What this process knows. No engine is asked: they tell their figures by themselves."""
    links = client.pools.links.values()
    figures = [figures_of(link, _state(client, link)) for link in links]
    return panels_of(figures, client.output_processor.num_unfinished, client.num_held)


def _state(client: PoolClient, link: EngineLink) -> str:
    """The first of these words that is true of an engine."""
    if not link.up:
        return "away"
    if link.silent:
        return "silent"
    if link.kept_out:
        return "failing"
    if link.stats.draining or not link.listed:
        return "draining"
    if link.stats.paused:
        return "paused"
    return "ok" if client.pools.usable(link) else "new"
