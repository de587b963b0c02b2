"""What a test needs on a cluster older than the oldest that is promised, such as a development one.

The chart and the tests name only what every promised Kubernetes serves. This module is the one
place that knows of others. On the import path of the tests (pytest's `pythonpath`).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from cluster_kit.charts import CHART, OLDEST_MINOR

Kubectl = Callable[..., str]
"""Runs kubectl with arguments; what it prints."""


def newest(group: str, served: Iterable[str]) -> str:
    """The group and version to use among those that a cluster serves: the highest number first,
    and of one number what is stable before beta, and beta before alpha."""
    found = {
        (int(m[1]), {None: 3, "beta": 2, "alpha": 1}[m[2]], int(m[3] or 0)): version
        for version in served
        if (m := re.fullmatch(rf"{re.escape(group)}/v(\d+)(?:(alpha|beta)(\d+))?", version))
    }
    return found[max(found)]


def without_rules(value: Any) -> Any:
    """A schema, or a part of one, as API servers older than CEL take it."""
    if isinstance(value, list):
        return [without_rules(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_rules(item) for key, item in value.items() if key != "x-kubernetes-validations"
    }


def has_rules(kubectl: Kubectl) -> bool:
    """The cluster is promised, and so checks the rules of a CRD itself."""
    server = json.loads(kubectl("version", "--output", "json"))["serverVersion"]
    return int(re.findall(r"\d+", server["minor"])[0]) >= OLDEST_MINOR


def chart_for(kubectl: Kubectl, folder: Path) -> Path:
    """The chart, or for a cluster that is older than promised a copy of it that fits, in `folder`:
    any Kubernetes, CRDs without rules, and the newest API that the cluster has for a budget."""
    if has_rules(kubectl):
        return CHART
    copy = Path(shutil.copytree(CHART, folder / CHART.name))
    budget = newest("policy", kubectl("api-versions").split())
    for path, text in {
        copy / "Chart.yaml": re.sub("kubeVersion: .*", "", (CHART / "Chart.yaml").read_text()),
        copy / "templates/pdb.yaml": (CHART / "templates/pdb.yaml")
        .read_text()
        .replace("policy/v1", budget),
        **{
            crd: yaml.safe_dump(without_rules(yaml.safe_load(crd.read_text())))
            for crd in (copy / "files/crds").iterdir()
        },
    }.items():
        path.write_text(text)
    return copy
