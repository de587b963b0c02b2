"""What a router knows of its pools, for the page."""

from __future__ import annotations

from diptych_router.engine_link import EngineLink
from diptych_router.page.panels import Panels, figures_of, panels_of
from diptych_router.pool_client import PoolClient


def panels_now(client: PoolClient) -> Panels:
    """Both pools. No engine is asked: they report their figures by themselves."""
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
