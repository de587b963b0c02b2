"""The kinds of the Gateway API that the operator makes, for clusters that lack them: as other
projects' CRDs, but without their schemas. On the import path of the tests.
"""

from __future__ import annotations

from typing import Any

from diptych_operator.kube.client import PLURALS
from diptych_operator.kube.cluster import HTTP_ROUTE_API, HTTP_ROUTE_KIND, POOL_API, POOL_KIND


def gateway_kinds() -> dict[str, dict[str, Any]]:
    """Their CRDs, by name."""
    made = (_definition(POOL_API, POOL_KIND), _definition(HTTP_ROUTE_API, HTTP_ROUTE_KIND))
    return {each["metadata"]["name"]: each for each in made}


def _definition(api: str, kind: str) -> dict[str, Any]:
    group, version = api.split("/")
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    names = {"kind": kind, "plural": PLURALS[kind], "singular": kind.lower()}
    served = {"name": version, "served": True, "storage": True, "subresources": {"status": {}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{PLURALS[kind]}.{group}",
            # Without it the API server takes no kind of such a group.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": names,
            "versions": [served | {"schema": {"openAPIV3Schema": schema}}],
        },
    }
