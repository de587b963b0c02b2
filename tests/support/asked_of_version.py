"""What is asked of a version of the code, which is on the path of the process that runs this file:
`python FILE QUESTION`, with JSON on both sides."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec


def render(keys: list[str], services: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Revision and objects of each service, or why the operator refuses it."""
    from diptych_operator.api.images import Images

    # The error is each version's own, somewhere else.
    from diptych_operator.api.parse import SpecError, parse_object  # type: ignore[attr-defined]
    from diptych_operator.render import ServiceSecrets
    from diptych_operator.render import render as objects_of
    from diptych_operator.revision import revision
    from diptych_protocol import CurveKeys

    def rendered(raw: dict[str, Any]) -> dict[str, Any]:
        try:
            service = parse_object(raw, Images("engine:1", "router:1", "connector:1"))
        except SpecError as exc:
            return {"refused": str(exc)}
        secrets = ServiceSecrets(CurveKeys(*keys), "token")
        return {"revision": revision(service), "objects": objects_of(service, secrets)}

    return list(map(rendered, services))


def read_reports(*texts: str) -> list[Any]:
    """What the operator reads in the reports of routers."""
    from diptych_protocol.admin import RouterReport

    return [msgspec.json.decode(text, type=RouterReport) for text in texts]


def fields() -> dict[str, Any]:
    """Whether the fields of each struct that travels go by their places, and which of them have to
    be there."""
    import diptych_protocol
    from diptych_kv_transfer.tables import messages
    from diptych_kv_transfer.transports.ucx import frames

    for room in pkgutil.iter_modules(diptych_protocol.__path__):
        importlib.import_module(f"diptych_protocol.{room.name}")
    travelling = ("diptych_protocol", messages.__name__, frames.__name__)
    return {
        kind.__name__: [
            kind.__struct_config__.array_like,
            {field.name: field.required for field in msgspec.structs.fields(kind)},
        ]
        for kind in _kinds(msgspec.Struct)
        # The arguments of a control call travel as a list, without names.
        if kind.__module__.startswith(travelling) and not hasattr(kind, "METHOD")
    }


def _kinds(of: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for kind in of.__subclasses__():
        yield kind
        yield from _kinds(kind)


QUESTIONS: dict[str, Callable[..., Any]] = {
    "render": render,
    "read_reports": read_reports,
    "fields": fields,
}

if __name__ == "__main__":
    answer = QUESTIONS[sys.argv[1]](*json.load(sys.stdin))
    sys.stdout.buffer.write(msgspec.json.encode(answer))
