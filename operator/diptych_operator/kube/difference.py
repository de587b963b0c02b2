"""Where an object in the cluster is not as it was rendered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Difference(NamedTuple):
    """One field of a rendering; `live` is None where the object has none."""

    path: str
    wanted: Any
    live: Any


def differences(wanted: Any, live: Any, path: str = "") -> Iterator[Difference]:
    """Yield the fields of `wanted` that `live` lacks or has otherwise.

    Fields that only `live` has are defaults, or other managers'. What is empty is not stored, and
    the API server makes texts of some numbers. A list of another length differs as a whole.
    """
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        for name, value in wanted.items():
            yield from differences(value, live.get(name), f"{path}.{name}".lstrip("."))
    elif isinstance(wanted, list) and isinstance(live, list) and len(wanted) == len(live):
        for index, (value, there) in enumerate(zip(wanted, live, strict=True)):
            name = value.get("name", index) if isinstance(value, Mapping) else index
            yield from differences(value, there, f"{path}[{name}]")
    elif (wanted or live) and str(wanted) != str(live):
        yield Difference(path, wanted, live)
