"""What the chart allows: the least that the operator needs, and where."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_kit.charts import CLUSTER_SCOPED, NAMESPACE, Helm, Object, of_kind, only, permissions

MANAGED = ("get", "list", "watch", "create", "patch", "delete")
OPERATOR_MAY: dict[tuple[str, str], tuple[str, ...]] = {
    ("diptych.dev", "inferenceservices"): ("get", "list", "watch"),
    ("diptych.dev", "inferenceservices/status"): ("patch",),
    ("diptych.dev", "inferenceservices/finalizers"): ("update",),
    ("diptych.dev", "modelroutes"): ("get", "list", "watch"),
    ("diptych.dev", "modelroutes/status"): ("patch",),
    ("diptych.dev", "modelroutes/finalizers"): ("update",),
    ("diptych.dev", "poolscalers"): ("get", "list", "watch", "create", "delete"),
    ("diptych.dev", "poolscalers/status"): ("patch",),
    ("apps", "deployments"): MANAGED,
    ("apps", "daemonsets"): MANAGED,
    ("", "services"): MANAGED,
    ("", "configmaps"): MANAGED,
    ("", "serviceaccounts"): MANAGED,
    ("policy", "poddisruptionbudgets"): MANAGED,
    ("networking.k8s.io", "networkpolicies"): MANAGED,
    ("gateway.networking.k8s.io", "httproutes"): MANAGED,
    ("inference.networking.k8s.io", "inferencepools"): MANAGED,
    ("disaggregatedset.x-k8s.io", "disaggregatedsets"): MANAGED,
    ("", "secrets"): ("get", "create", "patch", "delete"),
    ("", "pods"): ("get", "list", "watch", "patch"),
    ("", "events"): ("create",),
    ("coordination.k8s.io", "leases"): ("get",),
}
EXPECTED = {(group, what, verb) for (group, what), verbs in OPERATOR_MAY.items() for verb in verbs}
NAMESPACED: dict[str, Any] = {"scope": "namespaced", "namespaces": ["team-a", "team-b"]}


def roles(objects: list[Object]) -> list[Object]:
    return of_kind(objects, "Role") + of_kind(objects, "ClusterRole")


def is_for_users(role: Object) -> bool:
    return any("aggregate-to-" in label for label in role["metadata"]["labels"])


def test_a_cluster_wide_operator_may_do_exactly_this(helm: Helm) -> None:
    (role,) = (r for r in of_kind(helm.render(), "ClusterRole") if not is_for_users(r))
    assert permissions(role["rules"]) == EXPECTED


def test_in_namespaced_mode_each_namespace_grants_the_same_and_the_cluster_nothing(
    helm: Helm,
) -> None:
    objects = helm.render(NAMESPACED)
    granted = {
        role["metadata"]["namespace"]: permissions(role["rules"])
        for role in of_kind(objects, "Role")
        if not role["metadata"]["name"].endswith("-leader")
    }
    assert granted == {"team-a": EXPECTED, "team-b": EXPECTED}
    assert not of_kind(objects, "ClusterRoleBinding")
    assert all(is_for_users(role) for role in of_kind(objects, "ClusterRole"))


def test_namespaced_mode_needs_nobody_who_may_change_the_cluster(helm: Helm) -> None:
    """With the CRD in place and the user roles off, a namespace's admin can install it."""
    objects = helm.render(
        NAMESPACED | {"crds": {"install": False}, "rbac": {"aggregateUserRoles": False}}
    )
    assert not CLUSTER_SCOPED & {item["kind"] for item in objects}


@pytest.mark.parametrize("values", [{}, NAMESPACED], ids=["cluster", "namespaced"])
def test_nothing_is_a_wildcard_and_secrets_are_never_listed(
    helm: Helm, values: dict[str, Any]
) -> None:
    for role in roles(helm.render(values)):
        for group, resource, verb in permissions(role["rules"]):
            assert "*" not in group + resource + verb
            assert not (resource == "secrets" and verb in ("list", "watch", "deletecollection"))
            assert verb not in ("escalate", "bind", "impersonate")


@pytest.mark.parametrize(
    ("values", "lease", "places"),
    [
        ({}, "diptych-operator-cluster", {"default"}),
        (NAMESPACED, "diptych-operator", {"team-a", "team-b"}),
    ],
    ids=["cluster", "namespaced"],
)
def test_leases_are_the_operators_own_where_all_installations_look(
    helm: Helm, values: dict[str, Any], lease: str, places: set[str]
) -> None:
    granting = [r for r in roles(helm.render(values)) if r["metadata"]["name"].endswith("-leader")]
    assert {role["metadata"]["namespace"] for role in granting} == places
    for role in granting:
        named, unnamed = role["rules"]
        assert (named["resourceNames"], named["verbs"]) == ([lease], ["get", "update"])
        assert unnamed["verbs"] == ["create"]


@pytest.mark.parametrize("values", [{}, NAMESPACED], ids=["cluster", "namespaced"])
def test_only_the_operators_account_is_bound(helm: Helm, values: dict[str, Any]) -> None:
    objects = helm.render(values)
    account = only(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
    by_name = {
        (r["kind"], r["metadata"].get("namespace"), r["metadata"]["name"]) for r in roles(objects)
    }
    bindings = of_kind(objects, "RoleBinding") + of_kind(objects, "ClusterRoleBinding")
    assert len(bindings) == len([r for r in roles(objects) if not is_for_users(r)])
    for binding in bindings:
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
        ]
        reference = binding["roleRef"]
        assert (
            reference["kind"],
            binding["metadata"].get("namespace"),
            reference["name"],
        ) in by_name


def test_viewers_see_and_editors_change(helm: Helm) -> None:
    view, edit = sorted(
        filter(is_for_users, of_kind(helm.render(), "ClusterRole")),
        key=lambda role: str(role["metadata"]["name"]),
        reverse=True,
    )
    group, owners, scale = "diptych.dev", ("inferenceservices", "modelroutes"), "poolscalers/scale"
    assert permissions(view["rules"]) == {
        (group, kind, v) for kind in (*owners, "poolscalers") for v in ("get", "list", "watch")
    } | {(group, scale, "get")}
    assert permissions(edit["rules"]) == {
        (group, kind, v)
        for kind in owners
        for v in ("create", "update", "patch", "delete", "deletecollection")
    } | {(group, scale, v) for v in ("update", "patch")}
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    assert {k for k in view["metadata"]["labels"] if k.startswith(prefix)} == {
        prefix + role for role in ("view", "edit", "admin")
    }
    assert {k for k in edit["metadata"]["labels"] if k.startswith(prefix)} == {
        prefix + role for role in ("edit", "admin")
    }


def test_own_roles_and_accounts_are_left_alone(helm: Helm) -> None:
    objects = helm.render(
        {"serviceAccount": {"create": False, "name": "mine"}, "rbac": {"create": False}}
    )
    assert not roles(objects)
    assert only(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    # The test pod's own account has no rights.
    assert [a["metadata"]["name"] for a in of_kind(objects, "ServiceAccount")] == ["diptych-test"]
