"""The Helm chart as tests see it: rendered by real helm, parsed, and asked about.

On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "diptych"
OLDEST_MINOR = int(re.findall(r"kubeVersion: .*1\.(\d+)\.0", (CHART / "Chart.yaml").read_text())[0])
"""The second number of the oldest Kubernetes that is promised."""
RELEASE, NAMESPACE = "diptych", "diptych-system"
TIMEOUT_S = 120

Object = dict[str, Any]
Values = Mapping[str, Any]

CLUSTER_SCOPED = {"CustomResourceDefinition", "ClusterRole", "ClusterRoleBinding", "Namespace"}
"""Those among the kinds that the chart could come to render."""


@dataclass(frozen=True)
class Helm:
    """A helm binary."""

    path: Path

    def __call__(
        self, *arguments: str, values: Values | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run it, with values from its standard input; the caller looks at the exit status."""
        return subprocess.run(
            [str(self.path), *arguments, *(("-f", "-") if values is not None else ())],
            input=None if values is None else json.dumps(values),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    def template(self, values: Values | None = None, *arguments: str) -> str:
        """The rendered text. Fails the test if helm refuses."""
        return _rendered(self, None if values is None else json.dumps(values), arguments)

    def render(self, values: Values | None = None, *arguments: str) -> list[Object]:
        """The rendered objects."""
        return [o for o in read_yaml(self.template(values, *arguments)) if o]

    def refusal(self, values: Values) -> str:
        """What helm says against these values. Fails the test if it has nothing against them."""
        done = self("template", RELEASE, str(CHART), "-n", NAMESPACE, values=values)
        assert done.returncode != 0, "helm rendered it"
        return done.stderr


@cache
def _rendered(helm: Helm, values: str | None, arguments: tuple[str, ...]) -> str:
    """Many tests look at what the same values render."""
    given = None if values is None else json.loads(values)
    done = helm("template", RELEASE, str(CHART), "-n", NAMESPACE, *arguments, values=given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read_yaml(text: str) -> Iterator[Object]:
    """The objects of a text, by libyaml: the CRD takes it a tenth of the other reader's time."""
    return yaml.load_all(text, Loader=yaml.CSafeLoader)


def of_kind(objects: Iterable[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def only(objects: Iterable[Object], kind: str) -> Object:
    (item,) = of_kind(objects, kind)
    return item


def permissions(rules: Iterable[Mapping[str, Any]]) -> set[tuple[str, str, str]]:
    """(API group, resource, verb) of everything that rules of a Role allow."""
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def load_script(path: Path) -> Any:
    """A Python file that is in no package, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
