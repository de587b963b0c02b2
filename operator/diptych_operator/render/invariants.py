"""Checks that a podTemplate keeps what drains and promises depend on, without I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from diptych_operator.api.base import SpecError


@dataclass(frozen=True, slots=True)
class Invariant:
    """One field of a pod, and what must hold for it after a podTemplate was merged over the pod."""

    holder: Literal["pod", "container"]
    """Whether the field is the pod's or that of the container in which our program runs."""
    field: str
    kept: Callable[[Any, Any], bool]
    """Whether it holds, given the field's value and the value that we render; None if absent."""
    message: str
    """What is wanted, phrased about the field. `{ours}` stands for the value that we render."""


def _at_least(value: Any, ours: Any) -> bool:
    return type(value) is int and value >= ours


def _stops_as_ours(value: Any, ours: Any) -> bool:
    """A hook after the start harms nothing. One before the end takes its time from the drain."""
    if value is None or isinstance(value, dict):
        rest = {key: hook for key, hook in (value or {}).items() if key != "postStart"}
        return bool(rest == (ours or {}))
    return False


INVARIANTS: Final = (
    Invariant(
        "pod",
        "terminationGracePeriodSeconds",
        _at_least,
        "must be at least {ours}, which is what a drain may take: a pod that is killed before "
        "breaks its streams. Leave it out, and set spec.availability.drainSeconds",
    ),
    Invariant(
        "pod",
        "restartPolicy",
        lambda value, _: value in (None, "Always"),
        "must be Always: a program that ends is started again. Leave it out",
    ),
    Invariant(
        "pod",
        "activeDeadlineSeconds",
        lambda value, _: value is None,
        "must stay out: pods would be killed in the midst of their work",
    ),
    Invariant(
        "pod",
        "shareProcessNamespace",
        lambda value, _: not value,
        "must not be true: other containers could stop our program and read its keys",
    ),
    Invariant(
        "container",
        "lifecycle",
        _stops_as_ours,
        "must be as it is, beside a postStart of yours: the rest of it belongs to the drain",
    ),
    Invariant(
        "container",
        "readinessProbe",
        lambda value, _: bool(value),
        "must stay: a rollout waits for it before it takes older pods away",
    ),
)


def check_invariants(
    template: Mapping[str, Any], ours: Mapping[str, Any], container: str, field: str
) -> None:
    """Raise `SpecError` for the first invariant that a pod template does not keep.

    template: the template after the user's podTemplate was merged over it. It has the container.

    ours: the template as we render it.

    field: path of the podTemplate in the service.
    """
    for invariant in INVARIANTS:
        value, expected = (
            _holder(each, invariant, container).get(invariant.field) for each in (template, ours)
        )
        if not invariant.kept(value, expected):
            where = f"{field}.spec"
            if invariant.holder == "container":
                where += f".containers[{container}]"
            raise SpecError(f"{where}.{invariant.field}", invariant.message.format(ours=expected))


def _holder(template: Mapping[str, Any], invariant: Invariant, container: str) -> dict[str, Any]:
    pod: dict[str, Any] = template["spec"]
    if invariant.holder == "pod":
        return pod
    found: dict[str, Any] = next(each for each in pod["containers"] if each["name"] == container)
    return found
