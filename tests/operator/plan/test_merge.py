"""Each rule of the podTemplate merge."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from cases import each
from hypothesis import given
from hypothesis import strategies as st

from diptych_operator.api.base import SpecError
from diptych_operator.api.merge import merge, removed

BASE: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "containers": [
            {
                "name": "engine",
                "command": ["python"],
                "env": [{"name": "IP", "valueFrom": {"fieldRef": {}}}, {"name": "B", "value": "2"}],
                "ports": [{"name": "http", "containerPort": 8000}],
            }
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "grace": 30,
    },
}


def container(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


@each(
    ("overlay", "path", "expected"),
    [
        ({"metadata": {"labels": {"b": "2"}}}, ("metadata", "labels"), {"a": "1", "b": "2"}),
        (container(command=["x", "y"]), ("spec", "containers", 0, "command"), ["x", "y"]),
        (container(image="i"), ("spec", "containers", 0, "command"), ["python"]),
        ({"spec": {"containers": [{"name": "side"}]}}, ("spec", "containers", 1),
         {"name": "side"}),
        (container(env=[{"name": "IP", "value": "::1"}]), ("spec", "containers", 0, "env"),
         [{"name": "IP", "value": "::1"}, {"name": "B", "value": "2"}]),
        (container(ports=[{"containerPort": 1}]), ("spec", "containers", 0, "ports"),
         [{"name": "http", "containerPort": 8000}, {"containerPort": 1}]),
        ({"spec": {"volumes": [{"name": "tmp", "hostPath": {"path": "/x"}}]}},
         ("spec", "volumes"), [{"name": "tmp", "hostPath": {"path": "/x"}}]),
        ({"spec": {"nodeSelector": {"gpu": "yes"}}}, ("spec", "nodeSelector"), {"gpu": "yes"}),
        # What users name themselves may have the name of a list that is merged.
        ({"spec": {"nodeSelector": {"env": "prod"}}}, ("spec", "nodeSelector"), {"env": "prod"}),
        ({"metadata": {"labels": {"ports": "x"}}}, ("metadata", "labels", "ports"), "x"),
    ],
)  # fmt: skip
def test_the_overlay_wins_by_the_rules(
    overlay: dict[str, Any], path: tuple[str | int, ...], expected: Any
) -> None:
    node: Any = merge(BASE, overlay, "t")
    for step in path:
        node = node.get(step) if isinstance(step, str) else node[step]
    assert node == expected


@pytest.mark.parametrize(
    ("overlay", "field"),
    [
        ({"metadata": 1}, "t.metadata"),
        ({"spec": {"grace": None}}, "t.spec.grace"),
        ({"spec": {"containers": {}}}, "t.spec.containers"),
        ({"spec": {"containers": [{"name": "x", "env": {}}, {"name": "x", "env": []}]}},
         "t.spec.containers[1].env"),
        ({"spec": {"containers": [{"image": "x"}]}}, "t.spec.containers[0].name"),
        (container(command="python"), "t.spec.containers[0].command"),
        (container(env=[{"value": "x"}]), "t.spec.containers[0].env[0].name"),
    ],
)  # fmt: skip
def test_an_overlay_of_another_shape_is_named(overlay: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        merge(BASE, overlay, "t")
    assert caught.value.field == field


def test_an_empty_overlay_changes_nothing_and_shares_nothing() -> None:
    merged = merge(BASE, {}, "t")
    assert merged == BASE
    merged["spec"]["containers"][0]["env"].clear()
    assert BASE["spec"]["containers"][0]["env"]


@pytest.mark.parametrize(
    ("path", "holder", "gone"),
    [
        ("spec.grace", ("spec",), "grace"),
        ("metadata.labels[a]", ("metadata", "labels"), "a"),
        ("spec.containers[engine].command", ("spec", "containers", 0), "command"),
    ],
)
def test_a_path_removes_what_it_names_and_nothing_else(
    path: str, holder: tuple[str | int, ...], gone: str
) -> None:
    expected = copy.deepcopy(BASE)
    node: Any = expected
    for step in holder:
        node = node[step]
    del node[gone]
    assert removed(BASE, [path, path], "r") == expected != BASE


def test_an_entry_of_a_list_is_removed_by_its_name() -> None:
    assert removed(BASE, ["spec.volumes[tmp]"], "r")["spec"]["volumes"] == []
    (container,) = removed(BASE, ["spec.containers[engine].env[B]"], "r")["spec"]["containers"]
    assert [entry["name"] for entry in container["env"]] == ["IP"]


@pytest.mark.parametrize(
    "path", ["spec.grac", "spec.containers[x].env", "spec.grace.x", "spec.volumes.tmp.x", "spec[0]"]
)
def test_a_path_that_names_nothing_is_refused(path: str) -> None:
    with pytest.raises(SpecError, match=r"^r: .*names nothing that the pods have") as caught:
        removed(BASE, [path], "r")
    assert path in str(caught.value)


@pytest.mark.parametrize(
    "path", ["spec.containers[engine].name", "spec.containers[engine].ports[http].containerPort"]
)
def test_what_an_entry_is_known_by_is_not_removed_alone(path: str) -> None:
    with pytest.raises(SpecError, match=r"^r: .* is what its entry is known by"):
        removed(BASE, [path], "r")


keys = st.sampled_from(["metadata", "spec", "containers", "env", "name", "volumes", "x"])
trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(keys, inner, max_size=3) | st.lists(inner, max_size=2),
    max_leaves=8,
)


@given(overlay=st.dictionaries(keys, trees, max_size=3))
def test_any_overlay_merges_the_same_twice_or_is_refused(overlay: dict[str, Any]) -> None:
    try:
        once = merge(BASE, overlay, "t")
    except SpecError:
        return
    assert merge(once, overlay, "t") == once
