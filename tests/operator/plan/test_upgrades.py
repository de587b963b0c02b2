"""An upgrade of the operator replaces pods in turns only, those of the smallest service first."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import msgspec
import pytest
from aiohttp import web
from cluster_kit.reconciling import KEY, Object, Store, StoresRouters, serving
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest

from diptych_operator.api.images import Images
from diptych_operator.api.names import RENDERED_ANNOTATION, UPGRADE_ANNOTATION
from diptych_operator.kube.cluster import Cluster
from diptych_operator.kube.rivals import Rivals
from diptych_operator.metrics import OperatorMetrics
from diptych_operator.reconcile import REST_INTERVAL_S, Reconciler
from diptych_operator.upgrades import Place, Rendered, RolloutWindow, Standing, Upgrades, turns
from diptych_protocol.admin import RouterReport, TrialReport

NOW = datetime(2026, 12, 4, 12, tzinfo=UTC)
"""A Friday, noon."""
OLD, NEW = (Images(engine=f"engine:{tag}", router=f"router:{tag}") for tag in ("old", "new"))
keys = st.tuples(st.just("ns"), st.text("abc", min_size=1, max_size=3))
fleets = st.dictionaries(
    keys, st.builds(Place, st.sampled_from(Standing), st.integers(0, 5), st.booleans())
)


def router_report(serving: list[str], trial: TrialReport | None = None) -> RouterReport:
    return RouterReport(
        ready=True, reason="", open_requests=0, held_requests=0, serving_revisions=serving,
        engines=[], canaries=[], trial=trial,
    )  # fmt: skip


# --- whose turn it is -------------------------------------------------------------------------


@given(fleets, st.integers(0, 4))
def test_no_more_than_allowed_roll_and_the_smallest_are_first(
    places: dict[tuple[str, str], Place], most: int
) -> None:
    begun = turns(places, most)
    rolling = [key for key, place in places.items() if place.standing is Standing.Rolls]
    assert not begun or len(begun) + len(rolling) <= most
    left = {key for key, place in places.items() if place.standing is Standing.Waits} - set(begun)
    assert all(places[key].standing is Standing.Waits for key in begun)
    assert all(places[a].pods <= places[b].pods for a in begun for b in left)
    if any(place.standing is Standing.Failed for place in places.values()):
        assert not begun
    elif left:
        assert len(begun) == max(0, most - len(rolling))


@given(st.dictionaries(keys, st.integers(1, 5), min_size=1), st.integers(1, 3), st.data())
def test_whoever_asks_first_all_upgrade_in_order_of_size(
    sizes: dict[tuple[str, str], int], most: int, data: st.DataObject
) -> None:
    upgrades, done = Upgrades(most), list[int]()
    while len(done) < len(sizes):
        waiting = [key for key in sizes if upgrades.places.get(key) != Place()]
        for key in data.draw(st.permutations(waiting)):
            upgrades.take(key, sizes[key], sizes, NOW)
        rolling = [k for k, place in upgrades.places.items() if place.standing is Standing.Rolls]
        assert len(rolling) <= most
        if rolling:
            ended = data.draw(st.sampled_from(sorted(rolling)))
            done.append(sizes[ended])
            upgrades.places[ended] = Place()
    for place, size in enumerate(done):
        assert sum(other < size for other in done[place + 1 :]) < most


def test_nobody_begins_before_all_have_been_looked_at() -> None:
    upgrades = Upgrades(1)
    small, large = ("ns", "small"), ("ns", "large")
    assert not upgrades.take(large, 9, {small, large}, NOW)
    upgrades.places[small] = Place()
    assert upgrades.take(large, 9, {small, large}, NOW)


def test_outside_of_its_windows_nobody_begins_and_who_has_begun_goes_on() -> None:
    upgrades = Upgrades(9, [RolloutWindow.read("Fri 12:00-13:00 UTC")])
    early, late = ("ns", "early"), ("ns", "late")
    both = {early, late}
    assert not upgrades.take(early, 1, {early}, NOW - timedelta(seconds=1))
    assert upgrades.places[early].opens == NOW
    assert upgrades.take(early, 1, {early}, NOW)
    after = NOW + timedelta(hours=1)
    assert upgrades.take(early, 1, both, after)
    assert not upgrades.take(late, 1, both, after)
    assert upgrades.places[late].opens == NOW + timedelta(days=7)


@pytest.mark.parametrize("under_way", [True, False])
def test_what_is_noted_is_read_back(under_way: bool) -> None:
    note = Rendered("a", "b", "c", under_way)
    assert Rendered.read(str(note)) == note
    assert Rendered.read("") is None


# --- what a pass does -------------------------------------------------------------------------


class Life:
    """An operator with default images of its own, from its start to its end."""

    def __init__(self, store: Store, images: Images, most: int, *windows: str) -> None:
        self.store, self.images = store, images
        self.upgrades = Upgrades(most, [RolloutWindow.read(each) for each in windows])
        self.metrics = OperatorMetrics()

    @asynccontextmanager
    async def begun(self) -> AsyncIterator[Reconciler]:
        async with serving(self.store) as self.kube, StoresRouters(self.store) as routers:
            yield Reconciler(
                self.kube,
                self.store,  # type: ignore[arg-type]
                Cluster(),
                routers,
                self.metrics,
                self.images,
                Rivals(self.kube, serves_cluster=False),
                upgrades=self.upgrades,
            )

    async def passes(self, number: int = 1) -> None:
        async with self.begun() as reconciler:
            for _ in range(number):
                await reconciler.reconcile(KEY)

    async def until(self, time: datetime) -> None:
        """Let time pass at the API server, which tells it in its answers."""
        assert isinstance(self.store, Clocked)
        self.store.time = time
        await self.kube.exists("v1", "ConfigMap", "ns", "none")

    @property
    def pending(self) -> bool:
        text = generate_latest(self.metrics.registry).decode()
        return 'pending_changes{diptych_dev_service="svc",namespace="ns"} 1.0' in text


def images(store: Store) -> set[str]:
    templates = [deployment["spec"]["template"] for deployment in store.deployments()]
    return {template["spec"]["containers"][0]["image"] for template in templates}


@pytest.fixture
async def store() -> Store:
    """A service that an older operator made, and that runs."""
    store = Store()
    await Life(store, OLD, 1).passes()
    store.start_pods()
    assert images(store) == {"engine:old", "router:old"}
    return store


async def test_an_upgrade_that_may_not_roll_changes_no_pods_and_says_so(store: Store) -> None:
    templates = [deployment["spec"] for deployment in store.deployments()]
    config = {
        name: o for name, o in store.objects.items() if name.endswith("configmaps/svc-router")
    }
    life = Life(store, NEW, 0)
    await life.passes(3)
    assert [deployment["spec"] for deployment in store.deployments()] == templates
    assert config.items() <= store.objects.items()
    assert life.pending
    assert store.events().count("UpgradeWaits") == 1
    assert store.service(KEY)["status"]["images"] == {
        "engine": "engine:old",
        "router": "router:old",
    }


async def test_routers_that_somebody_deletes_come_back_and_the_engines_wait_on(
    store: Store,
) -> None:
    life = Life(store, NEW, 0)
    await life.passes(2)
    (router,) = (path for path in store.objects if path.endswith("/deployments/svc-router"))
    del store.objects[router]
    await life.passes(2)
    assert images(store) == {"engine:old", "router:new"}
    assert store.service(KEY)["status"]["images"] == {
        "engine": "engine:old",
        "router": "router:new",
    }
    assert life.pending
    await Life(store, NEW, 1).passes(2)
    assert images(store) == {"engine:old", "engine:new", "router:new"}, "its turn"


@pytest.mark.parametrize("part", ["svc-router", "svc-decode-"])
async def test_a_file_that_is_gone_and_that_pods_wait_for_is_not_held(
    store: Store, part: str
) -> None:
    life = Life(store, NEW, 0)
    await life.passes()
    (gone,) = (path for path in store.objects if f"/configmaps/{part}" in path)
    del store.objects[gone]
    await life.passes()
    assert images(store) >= {"engine:new", "router:new"}
    assert not life.pending


async def test_an_operator_that_renders_the_same_has_nothing_pending(store: Store) -> None:
    life = Life(store, OLD, 0)
    await life.passes()
    assert not life.pending
    assert "UpgradeWaits" not in store.events()


async def test_in_its_turn_a_service_takes_the_upgrade(store: Store) -> None:
    life = Life(store, NEW, 1)
    await life.passes()
    assert {"engine:new", "router:new"} <= images(store)
    assert note(store).under_way
    assert not life.pending


async def test_an_upgrade_ends_with_the_old_pods() -> None:
    """And then only is it the next service's turn."""
    store = Store()
    store.spec = {"transfer": {"verify": "Off"}}
    for _ in range(2):
        await Life(store, OLD, 1).passes()
        store.settle()
    life = Life(store, NEW, 1)
    async with life.begun() as reconciler:
        for _ in range(10):
            await reconciler.reconcile(KEY)
            assert note(store).under_way == (len(store.deployments()) > 3)
            if not note(store).under_way:
                break
            store.settle()
        assert not note(store).under_way
        assert life.upgrades.places[KEY].standing is Standing.Settled


async def test_a_canary_without_requests_keeps_no_other_service_waiting() -> None:
    store = Store()
    canary = {"steps": [{"weight": 10, "pauseSeconds": 0}]}
    store.spec = {"transfer": {"verify": "Off"}, "rollout": {"type": "Canary", "canary": canary}}
    store.reports = [router_report([])]
    for _ in range(2):
        await Life(store, OLD, 1).passes()
        store.settle()
    life, other = Life(store, NEW, 1), ("ns", "other")
    known = {KEY, other}
    async with life.begun() as reconciler:
        for _ in range(10):
            await reconciler.reconcile(KEY)
            store.settle()
            told = next(o for p, o in store.objects.items() if p.endswith("configmaps/svc-serving"))
            said = msgspec.json.decode(told["data"]["serving.json"])
            name = said.get("canary", "")
            trial = TrialReport(revision=name, weight=said.get("weight", 0)) if name else None
            store.reports = [router_report(said["revisions"], trial)]
            life.upgrades.places[other] = Place()
            if life.upgrades.take(other, 1, known, NOW):
                break
        assert store.service(KEY)["status"]["rollout"]["canary"]["weight"] == "10"
        assert life.upgrades.places[KEY].standing is Standing.Unjudged


async def test_the_word_of_the_user_takes_what_is_pending(store: Store) -> None:
    await Life(store, NEW, 0).passes()
    store.annotations = {UPGRADE_ANNOTATION: "now"}
    await Life(store, NEW, 0).passes()
    assert {"engine:new", "router:new"} <= images(store)
    assert not note(store).under_way


async def test_a_held_pool_can_be_stopped(store: Store) -> None:
    await Life(store, NEW, 0).passes()
    store.spec["suspend"] = True
    await Life(store, NEW, 0).passes()
    assert {deployment["spec"]["replicas"] for deployment in store.deployments()} == {0}


class Clocked(Store):
    """It says what time it is."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.generation = NOW, 1

    async def answer(self, request: web.Request) -> web.Response:
        found = await super().answer(request)
        found.headers["Date"] = format_datetime(self.time, usegmt=True)
        return found

    def service(self, key: tuple[str, str]) -> Object:
        found = super().service(key)
        return found | {"metadata": found["metadata"] | {"generation": self.generation}}

    def told(self) -> list[str]:
        """What was said of waits."""
        events = [each for each in self.objects.values() if each["kind"] == "Event"]
        return [each["message"] for each in events if each["reason"] == "UpgradeWaits"]


@pytest.fixture
async def clocked() -> Clocked:
    """A service that rests, on a Friday at noon."""
    store = Clocked()
    store.spec = {"transfer": {"verify": "Off"}}
    store.reports = [router_report([])]
    for _ in range(2):
        await Life(store, OLD, 1).passes()
        store.settle()
    return store


NIGHTS = "Sat,Sun 01:00-05:00 UTC"


async def test_an_upgrade_waits_for_a_window_says_until_when_and_looks_again_then(
    clocked: Clocked,
) -> None:
    life = Life(clocked, NEW, 1, NIGHTS)
    async with life.begun() as operator:
        for _ in range(3):
            assert await operator.reconcile(KEY) == REST_INTERVAL_S, "a look as at rest"
        assert images(clocked) == {"engine:old", "router:old"}
        assert life.pending
        (told,) = clocked.told()
        assert "wait for a rollout window, until 2026-12-05T01:00:00Z" in told
        await life.until(datetime(2026, 12, 5, 0, 59, 30, tzinfo=UTC))
        again = await operator.reconcile(KEY)
        assert again is not None
        assert again <= 30
        await life.until(datetime(2026, 12, 5, 1, tzinfo=UTC))
        await operator.reconcile(KEY)
        assert {"engine:new", "router:new"} <= images(clocked)
        assert not life.pending
        assert len(clocked.told()) == 1


async def test_an_upgrade_that_has_begun_goes_on_when_its_window_ends(clocked: Clocked) -> None:
    clocked.time = datetime(2026, 12, 5, 4, 59, 50, tzinfo=UTC)
    await Life(clocked, NEW, 1, NIGHTS).passes()
    assert note(clocked).under_way
    clocked.time += timedelta(seconds=20)
    for _ in range(10):  # each by an operator that has just started
        clocked.settle()
        await Life(clocked, NEW, 1, NIGHTS).passes(2)
    assert images(clocked) == {"engine:new", "router:new"}
    assert not note(clocked).under_way


async def test_each_window_that_ends_without_a_turn_is_told(clocked: Clocked) -> None:
    life = Life(clocked, NEW, 0, NIGHTS)
    async with life.begun() as operator:
        for hour in (0, 3, 6, 7):
            await life.until(datetime(2026, 12, 5, hour, tzinfo=UTC))
            await operator.reconcile(KEY)
    assert [words.partition("until ")[2][:20] for words in clocked.told()] == [
        "2026-12-05T01:00:00Z", "2026-12-06T01:00:00Z",
    ]  # fmt: skip


async def test_what_the_user_changes_waits_for_no_window(clocked: Clocked) -> None:
    await Life(clocked, NEW, 1, NIGHTS).passes()
    assert images(clocked) == {"engine:old", "router:old"}
    clocked.generation += 1
    await Life(clocked, NEW, 1, NIGHTS).passes()
    assert {"engine:new", "router:new"} <= images(clocked)
    assert not note(clocked).under_way


def note(store: Store) -> Rendered:
    (router,) = (d for d in store.deployments() if d["metadata"]["name"] == "svc-router")
    found: Object = router["metadata"]["annotations"]
    read = Rendered.read(found[RENDERED_ANNOTATION])
    assert read is not None
    return read
