"""Merges a user's `podTemplate` over the rendered pod template.

It implements a small part of Kubernetes' strategic merge. Objects merge field by field. Containers
and init containers merge by name, and new ones are appended. `env`, `volumes`, `volumeMounts`,
`ports` and `imagePullSecrets` replace the entry with the same name (mounts: the same path; ports:
the same number) and append the others. Every other list is replaced.

What is to be removed is named by its path (`removed`). Null removes nothing: `kubectl apply` drops
nulls before it sends, so the meaning would depend on how a service is applied.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

from diptych_operator.api.base import SpecError

_MERGED_BY = {"containers": "name", "initContainers": "name"}
_REPLACED_BY = {
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
}

_STEP = re.compile(r"\.?([^.\[\]]+)|\[([^\[\]]+)\]")
"""A field, or in brackets a name: of an entry of a list, or of a field that has dots in it."""


def removed(base: dict[str, Any], paths: Iterable[str], field: str) -> dict[str, Any]:
    """Return a copy of `base` without what the paths name.

    A path is written as in errors: `spec.securityContext.runAsUser`, `spec.containers[engine].env`,
    `metadata.annotations[example.org/team]`. Raises `SpecError` for a path that names nothing.
    field: path of the list of paths in the object.
    """
    result = copy.deepcopy(base)
    for path in dict.fromkeys(paths):
        *way, last = (name or quoted for name, quoted in _STEP.findall(path))
        holder: Any = result
        is_entry = False
        for step in way:
            place = _place(holder, step)
            is_entry = isinstance(holder, list)
            holder = None if place is None else holder[place]
        place = _place(holder, last)
        if place is None:
            raise SpecError(field, f"{path!r} names nothing that the pods have; correct it")
        if is_entry and last in (*_MERGED_BY.values(), *_REPLACED_BY.values()):
            raise SpecError(field, f"{path!r} is what its entry is known by; name the entry itself")
        del holder[place]
    return result


def _place(holder: Any, step: str) -> str | int | None:
    """The key, or the index of the entry of that name; None if there is none."""
    if isinstance(holder, list):
        names = [entry.get("name") if isinstance(entry, dict) else entry for entry in holder]
        return names.index(step) if step in names else None
    return step if isinstance(holder, dict) and step in holder else None


def merge(base: dict[str, Any], overlay: dict[str, Any], field: str) -> dict[str, Any]:
    """Return a copy of `base` with `overlay` merged over it.

    `field` is the overlay's path in the object. Raises `SpecError` where the shapes do not match.
    """
    result = copy.deepcopy(base)
    for key, value in overlay.items():
        here = f"{field}.{key}"
        present = result.get(key)
        if value is None:
            raise SpecError(
                here,
                "is null, which kubectl apply does not send; to remove the field, name its path in "
                "podTemplateRemove",
            )
        known = key in _MERGED_BY or key in _REPLACED_BY
        # A label or an annotation may have the name of one of these lists.
        if known and isinstance(value, list) and not isinstance(present, dict):
            entries = present if isinstance(present, list) else []
            result[key] = _merge_named(entries, value, key, here)
        elif isinstance(value, dict) and (present is None or isinstance(present, dict)):
            result[key] = merge(present or {}, value, here)
        elif isinstance(present, dict):
            raise SpecError(here, f"must be an object, not {value!r}")
        elif isinstance(present, list) and not isinstance(value, list):
            raise SpecError(here, f"must be a list, not {value!r}")
        else:
            result[key] = copy.deepcopy(value)
    return result


def _merge_named(base: list[Any], overlay: list[Any], kind: str, field: str) -> list[Any]:
    key = _MERGED_BY.get(kind) or _REPLACED_BY[kind]
    result = {entry[key]: entry for entry in base}
    for index, entry in enumerate(overlay):
        here = f"{field}[{index}]"
        if not isinstance(entry, dict) or not isinstance(entry.get(key), (str, int)):
            raise SpecError(f"{here}.{key}", "is missing; entries are merged by it")
        identity = entry[key]
        present = result.get(identity, {}) if kind in _MERGED_BY else {}
        result[identity] = merge(present, entry, here)
    return list(result.values())
