"""/openapi.json and /docs."""

from __future__ import annotations

import asyncio
from functools import cache

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych_frontend.api_docs.document import openapi_document
from diptych_frontend.api_docs.page import POLICY, page_of
from diptych_frontend.openai.responses import encode


@cache
def _document() -> bytes:
    return encode(openapi_document())


@cache
def _page() -> bytes:
    return page_of(openapi_document()).encode()


async def document(request: Request) -> Response:
    """Return the OpenAPI document."""
    # To make it takes some 0.1 s, once.
    return Response(await asyncio.to_thread(_document), media_type="application/json")


async def page(request: Request) -> Response:
    """Return the document as a page."""
    headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
    body = await asyncio.to_thread(_page)
    return Response(body, headers=headers, media_type="text/html")


def docs_routes() -> list[Route]:
    """Return the routes. They are the same for all servers of a version, so they need no key."""
    return [Route("/openapi.json", document), Route("/docs", page)]
