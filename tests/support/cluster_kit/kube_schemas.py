"""Kubernetes objects against the schemas of the oldest and the newest Kubernetes that is promised.

On the import path of the tests, and a program for `make lint`, which looks at the chart with all
values that its tests have, at what every example is rendered to, and at each API version that a
file of the repository names:

    PYTHONPATH=tests/support python -m cluster_kit.kube_schemas
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import jsonschema
import yaml
from cluster_kit.charts import OLDEST_MINOR, ROOT, Helm, load_script
from cluster_kit.crds import EXAMPLES, service_of
from cluster_kit.kube_tools import find_tool
from referencing import Registry

from diptych.manifest import rendered
from diptych_operator.api.parse import parse

_SCHEMAS: Final = Path(str(files("kubernetes_validate") / "kubernetes-json-schema"))
_MINORS: Final = [int(path.name.split(".")[1]) for path in _SCHEMAS.glob("v1.*-local-strict")]
VERSIONS: Final = tuple(f"1.{minor}.0" for minor in (OLDEST_MINOR, max(_MINORS)))
_OF_KUBERNETES: Final = re.compile(
    r"(?<![\w./-])((?:(?!gateway\.|inference\.)[a-z][a-z.-]*\.k8s\.io|apps|autoscaling|batch|extensions|policy)"
    r"/v\d+(?:(?:alpha|beta)\d+)?)(?!\w)"
)
"""An API version in a text. What else has a dot in its group belongs to somebody else, and so do
two groups of the Gateway API."""


@cache
def _schemas(version: str) -> Path:
    return _SCHEMAS / f"v{version}-local-strict"


@cache
def _definitions(version: str) -> Registry[Any]:
    contents = json.loads((_schemas(version) / "_definitions.json").read_text())
    # Crawled once, and not again by each validator.
    return Registry().with_contents([("_definitions.json", contents)]).crawl()


@cache
def _validator(version: str, kind: str, api: str) -> jsonschema.Draft202012Validator | None:
    path = _schemas(version) / f"{kind.lower()}-{_short(api)}.json"
    if not path.exists():
        return None
    schema = json.loads(path.read_text())
    return jsonschema.Draft202012Validator(schema, registry=_definitions(version))


def _short(api: str) -> str:
    """How the files of the schemas name an API version, such as `rbac-v1`."""
    return re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api)


def is_served(api: str) -> bool:
    """Every promised Kubernetes has something of this API version of its own."""
    return all(any(_schemas(v).glob(f"*-{_short(api)}.json")) for v in VERSIONS)


def complaints(obj: Mapping[str, Any]) -> Iterator[str]:
    """What the oldest and the newest Kubernetes have against an object of a kind of their own."""
    kind, api = obj["kind"], obj["apiVersion"]
    if "/" in api and not _OF_KUBERNETES.fullmatch(api):
        return
    for version in VERSIONS:
        if (validator := _validator(version, kind, api)) is None:
            yield f"{version}: no {kind} in {api}"
            continue
        for error in validator.iter_errors(obj):
            name = obj["metadata"].get("name")
            yield f"{version}: {kind} {name}: {error.json_path}: {error.message}"


def _rendered(helm: Helm) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where each object comes from, and the object."""
    for name, values in load_script(ROOT / "tests/charts/test_chart.py").MATRIX.items():
        # One look at the CRDs, which are long, is enough.
        values = values | {"crds": {"install": name == "default"}}
        yield from ((f"chart, {name}", obj) for obj in helm.render(values))
    for path in EXAMPLES:
        where = str(path.relative_to(ROOT))
        yield from ((where, obj) for obj in yaml.safe_load_all(path.read_text()))
        service = parse(yaml.safe_dump(service_of(path)))
        yield from ((f"{where}, rendered", obj) for obj in rendered(path, service))


def _named_in_files() -> Iterator[tuple[str, str]]:
    """Each file, and an API version of Kubernetes that it names."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".py", ".yaml", ".yml", ".md", ".tpl", ".txt", ".sh"} and path.exists():
            yield from ((name, api) for api in set(_OF_KUBERNETES.findall(path.read_text())))


def found() -> list[str]:
    """Everything that some promised Kubernetes would not take."""
    versions = [
        f"{name}: {api} is not in Kubernetes {' and '.join(VERSIONS)}"
        for name, api in _named_in_files()
        if not is_served(api)
    ]
    objects = _rendered(Helm(find_tool("helm")))
    return versions + [f"{where}: {told}" for where, obj in objects for told in complaints(obj)]


if __name__ == "__main__":
    sys.exit("\n".join(found()) or None)
