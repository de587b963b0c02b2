"""What is read here of a pod's spec, whatever a podTemplate has put there. It performs no I/O."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from diptych_operator.api.base import Raw
from diptych_operator.api.names import ROLE_LABEL

_NO_TEXT: Final = tuple(f"Expected `str`, got `{kind}`" for kind in ("int", "float", "bool"))
_ENTRY: Final = re.compile(r"\.(\w+)\[(\d+)\]")
T = TypeVar("T")


class UnsupportedPodError(ValueError):
    """A podTemplate requires something that only a cluster has, or that Kubernetes does not take
    either."""


class _Part(msgspec.Struct, rename="camel"):
    """Fields that are not read here may be anything."""


class FieldRef(_Part):
    field_path: str = ""


class ValueSource(_Part):
    field_ref: FieldRef = msgspec.field(default_factory=FieldRef)


class Variable(_Part):
    name: str
    value: str = ""
    value_from: ValueSource | None = None


class Mount(_Part):
    name: str
    mount_path: str


class Port(_Part):
    container_port: int
    name: str = ""


class HttpGet(_Part):
    port: int | str
    path: str = "/"
    scheme: Literal["HTTP", "HTTPS"] = "HTTP"


Seconds = Annotated[float, Meta(gt=0)]


class Probe(_Part):
    http_get: HttpGet | None = None
    period_seconds: Seconds = 10.0
    timeout_seconds: Seconds = 1.0
    failure_threshold: Annotated[int, Meta(ge=1)] = 3


class Container(_Part):
    command: list[str] = []
    args: list[str] = []
    env: list[Variable] = []
    ports: list[Port] = []
    volume_mounts: list[Mount] = []
    startup_probe: Probe | None = None
    readiness_probe: Probe | None = None

    @property
    def port_names(self) -> dict[str, int]:
        """The number of each port by its name, or by itself."""
        return {port.name or str(port.container_port): port.container_port for port in self.ports}


class ConfigMap(_Part):
    name: str


class Secret(_Part):
    secret_name: str


class Volume(_Part):
    name: str
    config_map: ConfigMap | None = None
    secret: Secret | None = None


class PodSpec(_Part):
    volumes: list[Volume] = []
    termination_grace_period_seconds: int = 30


def container_of(deployment: Raw) -> Container:
    """Return the container that runs here. Raises `UnsupportedPodError`, naming the field."""
    first = deployment["spec"]["template"]["spec"]["containers"][0]
    return _read(deployment, first, f".containers[{first['name']}]", Container)


def spec_of(deployment: Raw) -> PodSpec:
    """Return the rest of the pods' spec. Raises `UnsupportedPodError`, naming the field."""
    return _read(deployment, deployment["spec"]["template"]["spec"], "", PodSpec)


def _read(deployment: Raw, value: dict[str, Any], field: str, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as exc:
        problem, _, path = str(exc).partition(" - at `$")
        path = _ENTRY.sub(lambda entry: _by_name(value, entry), path.removesuffix("`"), count=1)
        role = deployment["spec"]["template"]["metadata"]["labels"][ROLE_LABEL]
        remedy = "put it in quotes" if problem.startswith(_NO_TEXT) else "correct it"
        raise UnsupportedPodError(
            f"spec.{role}.podTemplate.spec{field}{path}: {problem}; {remedy}"
        ) from exc


def _by_name(value: dict[str, Any], entry: re.Match[str]) -> str:
    """The step to an entry of a list by its name: in the user's list it may have another place."""
    found = value[entry[1]][int(entry[2])]
    return f".{entry[1]}[{found.get('name', entry[2])}]" if isinstance(found, dict) else entry[0]
