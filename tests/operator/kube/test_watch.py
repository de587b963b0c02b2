"""The operator knows all objects of its services before it acts, and which of them changed."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

import pytest
from cluster_kit.reconciling import KEY
from cluster_kit.small_api import serving_api
from hypothesis import given
from hypothesis import strategies as st
from waits import PATIENCE_S

from diptych_operator.__main__ import watch
from diptych_operator.api.names import MANAGED_BY, MANAGED_BY_LABEL, SERVICE_LABEL
from diptych_operator.kube.cluster import Cluster
from diptych_operator.kube.indexed import PODS, SERVICES, Indexed
from diptych_operator.kube.watch import CHUNK, registry, settings, watched_paths

Key = tuple[str, str]
LIST = "/api/v1/pods"


def pod(uid: str) -> dict[str, Any]:
    return {"kind": "Pod", "metadata": {"uid": uid}}


def uids(indexed: Indexed, key: Key) -> set[str]:
    return {raw["metadata"]["uid"] for raw in indexed.pods(key)}


KEYS = [("a", "one"), ("a", "two"), ("b", "one")]
UIDS = st.sampled_from("uvwxyz")
OBJECTS = st.dictionaries(UIDS, st.sampled_from(KEYS))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("keep"), UIDS, st.sampled_from(KEYS)),
            st.tuples(st.just("drop"), UIDS),
            st.tuples(st.just("list"), st.sampled_from(["", "a", "b"]), OBJECTS, st.integers(1, 4)),
        )
    )
)
def test_it_has_what_events_and_whole_lists_told_last(told: list[tuple[Any, ...]]) -> None:
    indexed, expected = Indexed([LIST]), dict[str, Key]()
    for what, *rest in told:
        before, concerned = dict(expected), set[Key]()
        if what == "keep":
            uid, key = rest
            expected[uid] = key
            concerned = indexed.keep(PODS, key, pod(uid)) - {key}
        elif what == "drop":
            expected.pop(rest[0], None)
            concerned = indexed.drop(PODS, rest[0])
        else:
            namespace, objects, page = rest
            there = [(k, pod(u)) for u, k in objects.items() if namespace in ("", k[0])]
            pages = [there[at : at + page] for at in range(0, len(there), page)] or [[]]
            for number, found in enumerate(pages):
                concerned |= indexed.list_page(
                    LIST, PODS, namespace, found, is_first=not number,
                    is_last=number == len(pages) - 1,
                )  # fmt: skip
            kept = {u: k for u, k in expected.items() if namespace not in ("", k[0])}
            expected = kept | {raw["metadata"]["uid"]: key for key, raw in there}
        lost = {key for uid, key in before.items() if expected.get(uid) != key}
        assert lost <= concerned
        for key in KEYS:
            assert uids(indexed, key) == {uid for uid, k in expected.items() if k == key}


def test_it_is_whole_once_the_last_page_of_each_list_has_come() -> None:
    indexed = Indexed([LIST, "services"])
    indexed.list_page(LIST, PODS, "", [], is_first=True, is_last=False)
    indexed.list_page("services", SERVICES, "", [], is_first=True, is_last=True)
    assert not indexed.is_whole.is_set()
    indexed.list_page(LIST, PODS, "", [], is_first=False, is_last=True)
    assert indexed.is_whole.is_set()


async def test_pages_of_lists_are_put_together_before_the_operator_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {MANAGED_BY_LABEL: MANAGED_BY, SERVICE_LABEL: KEY[1]}
    number = 2 * CHUNK + 1
    cluster = Cluster(has_gateways=False, has_sets=False)
    indexed, woken = Indexed(watched_paths(cluster, ["ns"])), asyncio.Event()
    async with serving_api(tmp_path) as (api, kubeconfig), asyncio.timeout(PATIENCE_S):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        api.serves_crd = True
        api.add_service()
        for at in range(number):
            meta = {"name": f"c{at}", "namespace": "ns", "uid": f"c{at}", "resourceVersion": "1"}
            ours = labels if at else {}
            raw = {"data": {"much": "text"}, "metadata": {**meta, "labels": ours}}
            api.store.objects[f"/api/v1/namespaces/ns/configmaps/c{at}"] = raw
        handlers = registry(cluster, ["ns"], indexed, lambda _: woken.set(), lambda *_: None)
        args = argparse.Namespace(identity="a-0", namespaces=["ns"])
        watching = asyncio.create_task(watch(handlers, settings(cluster), args, asyncio.Event()))
        await indexed.is_whole.wait()
        assert indexed.service_keys() == {KEY}
        children = indexed.children(KEY)
        assert {child["metadata"]["name"] for child in children} == {
            f"c{at}" for at in range(1, number)
        }, "one has lost its labels"
        assert {child["kind"] for child in children} == {"configmaps"}
        assert not any("data" in child for child in children)
        await woken.wait()
        watching.cancel()
        await asyncio.wait([watching])
