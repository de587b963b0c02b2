"""/openapi.json, and /docs: the same as an HTML page without scripts or external resources."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Iterator
from functools import cache
from html import escape
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from diptych_frontend.api_docs.document import openapi_document
from diptych_frontend.api_docs.narrowing import Schema
from diptych_frontend.openai.responses import encode

STYLE: Final = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, .path { font-family: ui-monospace, monospace; }
h2 { margin-top: 2.5rem; border-top: 1px solid #8886; padding-top: 1rem; font-size: 1.1rem; }
table { border-collapse: collapse; width: 100%; }
td { border-bottom: 1px solid #8883; padding: .25rem .75rem .25rem 0; vertical-align: top; }
"""
POLICY: Final = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; style-src "
    f"'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'"
)
"""The page's Content-Security-Policy."""


def page_of(document: Schema) -> str:
    """Return the page of an OpenAPI document."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    schemas = document["components"]["schemas"]
    body = "\n".join((*_operations(document["paths"]), *_schemas(schemas)))
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>'
        f"\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n<p>For programs: "
        f'<a href="openapi.json">openapi.json</a></p>\n{body}\n</body>\n</html>\n'
    )


def _operations(paths: dict[str, Schema]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            yield f'<h2 class="path">{method.upper()} {escape(path)}</h2>'
            yield f"<p>{escape(operation['summary'])}</p>"
            yield "<table>"
            if "requestBody" in operation:
                yield _row("takes", _contents(operation["requestBody"]["content"]))
            answer = operation["responses"]["200"]
            if "content" in answer:
                yield _row("answers", _contents(answer["content"]))
            yield _row("fails with", _contents(operation["responses"]["default"]["content"]))
            yield "</table>"


def _contents(contents: dict[str, Schema]) -> str:
    return "<br>".join(
        f"{type_text(content['schema'])} <code>{escape(kind)}</code>"
        for kind, content in contents.items()
    )


def _schemas(schemas: dict[str, Schema]) -> Iterator[str]:
    for name, schema in sorted(schemas.items()):
        yield f'<h2 id="{escape(name)}">{escape(_short(name))}</h2>'
        if "description" in schema:
            yield f"<p>{escape(schema['description'])}</p>"
        required = schema.get("required", ())
        yield "<table>"
        for field, of_field in schema.get("properties", {}).items():
            text = type_text(of_field)
            if field in required:
                text += ", required"
            if "description" in of_field:
                text += f"<br>{escape(of_field['description'])}"
            yield _row(f"<code>{escape(field)}</code>", text)
        yield "</table>"


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _short(name: str) -> str:
    """Names that several APIs have are written with the module that each is from."""
    module, _, kind = name.rpartition(".")
    return f"{kind} ({module.split('.')[1]})" if module else kind


def type_text(schema: Schema) -> str:
    """Describe a schema in words, as HTML."""
    match schema:
        case {"contentSchema": data}:
            return f"events of {type_text(data)}"
        case {"$ref": ref}:
            name = ref.rpartition("/")[2]
            return f'<a href="#{escape(name)}">{escape(_short(name))}</a>'
        case {"anyOf": kinds}:
            shown = [type_text(kind) for kind in kinds if kind != {"type": "null"}]
            return " or ".join(dict.fromkeys(shown)) or "null"
        case {"enum": values}:
            return ", ".join(f"<code>{escape(_value(value))}</code>" for value in values)
        case {"type": "array"}:
            return f"list of {type_text(schema.get('items', {}))}"
        case {"type": kind}:
            return escape(str(kind)) + escape(_limits(schema))
        case _:
            return "any"


def _value(value: object) -> str:
    return "null" if value is None else str(value)


LIMITS: Final = {
    "minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "minLength": "at least",
    "maxLength": "at most", "pattern": "like",
}  # fmt: skip


def _limits(schema: Schema) -> str:
    said = [f"{word} {schema[limit]}" for limit, word in LIMITS.items() if limit in schema]
    return f" ({' '.join(said)})" if said else ""


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
