"""A Secret that somebody deletes is not silently made anew with other keys."""

from __future__ import annotations

import base64

import pytest
from cluster_kit.reconciling import KEY, SECRETS, Object, Store, one_pass, operating, serving

from diptych_operator.api.images import Images
from diptych_operator.api.names import KEYS_LABEL, ROTATE_ANNOTATION
from diptych_operator.api.parse import parse_object
from diptych_operator.key_keeper import KeyKeeper, KeysLostError
from diptych_operator.render.keys import KeySets, keys_volume
from diptych_operator.status.references import key_secrets


@pytest.fixture
def store() -> Store:
    return Store()


def keys_of(secret: str) -> str:
    return secret.rpartition("-")[2]


async def test_keys_that_nobody_has_are_made(store: Store) -> None:
    await one_pass(store)
    (first,) = store.names("secrets")
    before = store.objects.pop(f"{SECRETS}/{first}")
    await one_pass(store)
    assert store.names("secrets") == {first}
    assert store.objects[f"{SECRETS}/{first}"]["data"] != before["data"]
    assert store.condition("Degraded")["status"] == "False"


async def test_keys_that_running_pods_have_are_reported_as_lost_until_they_are_back(
    store: Store,
) -> None:
    await one_pass(store)
    store.start_pods()
    (name,) = store.names("secrets")
    secret = store.objects.pop(f"{SECRETS}/{name}")
    await one_pass(store)
    assert store.names("secrets") == set()
    degraded = store.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "KeysLost")
    assert f"the Secret {name} is gone" in degraded["message"]
    assert (
        f'kubectl -n ns annotate infsvc svc {ROTATE_ANNOTATION}="$(date +%s)"'
        in (degraded["message"])
    )
    assert "KeysLost" in store.events()
    assert store.condition("PrefillReady")["reason"] != "KeysLost", "pods are judged as ever"
    store.objects[f"{SECRETS}/{name}"] = secret
    await one_pass(store)
    assert store.condition("Degraded")["reason"] != "KeysLost"


async def test_an_earlier_services_pods_are_waited_for_and_not_told_as_lost_keys(
    store: Store,
) -> None:
    """The service was deleted and made anew, and its Secret went before its Deployments."""
    await one_pass(store)
    store.start_pods()
    (name,) = store.names("secrets")
    del store.objects[f"{SECRETS}/{name}"]
    store.uid = "u2"
    await one_pass(store)
    degraded = store.condition("Degraded")
    assert degraded["reason"] == "OperatorProblem"
    assert f"pods have an earlier Secret {name}" in degraded["message"]


SPOILED: tuple[Object, ...] = (
    {},
    {"admin-token": ""},
    {"admin-token": base64.b64encode(b"\xff\xfe").decode()},
    {"admin-token": base64.b64encode(b"two\r\nlines").decode()},
    {"admin-token": "no base64"},
    {"admin-token": base64.b64encode(b"good").decode()},  # and no keys
)


@pytest.mark.parametrize("data", SPOILED)
async def test_a_secret_without_what_was_in_it_is_as_good_as_none(
    store: Store, data: Object
) -> None:
    """Whoever makes it by hand, or half of it: nothing else stands still, and a rotation heals."""
    await one_pass(store)
    (name,) = store.names("secrets")
    spoiled = store.objects[f"{SECRETS}/{name}"]
    spoiled["data"] = data
    await one_pass(store)
    assert len(store.objects[f"{SECRETS}/{name}"]["data"]) == 3, "nobody has it: made anew"
    store.start_pods()
    store.objects[f"{SECRETS}/{name}"]["data"] = data
    await one_pass(store)
    degraded = store.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "KeysLost")
    assert f"the Secret {name} is gone, or not as it was made" in degraded["message"]
    assert store.condition("PrefillReady")["reason"] != "KeysLost", "pods are judged as ever"
    store.annotations = {ROTATE_ANNOTATION: "1"}
    await one_pass(store)
    assert store.condition("Degraded")["reason"] != "KeysLost"


async def test_a_rotation_heals_it_and_waits_for_no_router_to_hold_what_is_gone(
    store: Store,
) -> None:
    await one_pass(store)
    store.start_pods()
    (lost,) = store.names("secrets")
    del store.objects[f"{SECRETS}/{lost}"]
    await one_pass(store)
    store.annotations = {ROTATE_ANNOTATION: "1"}
    await one_pass(store)
    (new,) = store.names("secrets")
    assert new != lost
    assert store.condition("Degraded")["reason"] != "KeysLost"
    held = {found["metadata"]["labels"].get(KEYS_LABEL) for found in store.deployments()}
    assert keys_of(new) in held, "engines with the new keys start at once"
    assert keys_of(lost) in held, "and those that serve stay"


@pytest.mark.parametrize("ready", [True, False])
async def test_a_service_made_anew_waits_until_no_pod_has_its_predecessors_keys(
    store: Store, ready: bool
) -> None:
    """A node would mount the keys that it knows, whatever the new Secret of that name holds."""
    await one_pass(store)
    condition = {"type": "Ready", "status": str(ready)}
    store.start_pods({"phase": "Running", "podIP": "127.0.0.9", "conditions": [condition]})
    (name,) = store.names("secrets")
    store.objects.clear()
    store.uid = "u2"
    await one_pass(store)
    assert not store.names("secrets")
    assert not store.deployments()
    degraded = store.condition("Degraded")
    assert degraded["reason"] == "OperatorProblem"
    assert f"earlier Secret {name}" in degraded["message"]
    assert ROTATE_ANNOTATION in degraded["message"]
    assert store.condition("Stalled")["status"] == "False", "they end by themselves"
    store.annotations = {ROTATE_ANNOTATION: "1"}
    await one_pass(store)
    assert store.names("secrets"), "another name, which no node knows"
    store.objects.clear()
    store.annotations, store.pods_here = {}, []
    await one_pass(store)
    assert store.names("secrets") == {name}


def test_routers_have_the_older_keys_too() -> None:
    service = parse_object(Store().service(KEY), Images())
    pod = {"volumes": [keys_volume(service, KeySets("new", "old"))]}
    assert key_secrets(pod) == {"svc-keys-new", "svc-keys-old"}


async def test_the_last_known_token_is_told_with_the_loss(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that routers, which have it still, can go on to report."""
    service = parse_object(store.service(KEY), Images())
    async with serving(store) as kube:
        keeper = KeyKeeper(kube)
        token = await keeper.ensure(service, "k1", in_use=False)
        store.objects.clear()
        assert await keeper.ensure(service, "k1", in_use=True) == token
        monkeypatch.setattr("diptych_operator.key_keeper.RECHECK_S", 0.0)
        with pytest.raises(KeysLostError) as caught:
            await keeper.ensure(service, "k1", in_use=True)
    assert caught.value.token == token
    assert token not in str(caught.value)


async def test_keys_for_which_a_node_waits_are_looked_for_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych_operator.key_keeper.REFUSAL_S", 0.0)
    async with operating(store) as reconciler:
        await reconciler.reconcile(KEY)
        store.start_pods()
        (name,) = store.names("secrets")
        del store.objects[f"{SECRETS}/{name}"]
        await reconciler.reconcile(KEY)
        assert store.condition("Degraded")["reason"] != "KeysLost", "believed for minutes"
        placed = {"type": "PodScheduled", "status": "True"}
        store.start_pods({"phase": "Pending", "conditions": [placed]})
        await reconciler.reconcile(KEY)
        assert store.condition("Degraded")["reason"] == "KeysLost"
