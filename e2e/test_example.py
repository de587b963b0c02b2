"""From an empty cluster to an answer: the chart, the example, a chat, and blocks that moved."""

from __future__ import annotations

import json
import time

import pytest
from e2e.chart import Chart
from e2e.figures import ARTIFACTS, Figures
from e2e.kubectl import Kubectl, KubectlError, Object, wait_for
from e2e.plugin import Plugin
from e2e.service import ENGINE_ROLES, ROLES, Service
from e2e.traffic import Client

QUESTION = "In a few words: what makes a bridge of two arches last for many hundreds of years?"
NEW_QUESTION = (
    "Please name three kinds of stone that a careful mason would choose for a lighthouse."
)
"""Nobody has asked it before, so its blocks have to move."""
SEEN_TIMEOUT_S = 180.0
"""Within this the plugin looks while both engines end a request, on a machine that is busy."""
KEYS = "clients"
"""A Secret of API keys."""
KEYS_TIMEOUT_S = 240.0
"""A kubelet looks after Secrets once in one or two minutes."""
ABOUT = "/ui/api/about"
"""What the page of a router asks first."""
FIND_TORCH = "import importlib.util; print(importlib.util.find_spec('torch') is not None)"


@pytest.fixture(scope="module")
def running(smollm2: Service, example: Object, figures: Figures) -> Service:
    """The example, applied as it is and settled."""
    started = time.monotonic()
    smollm2.apply(example)
    smollm2.settled()
    figures.add("apply the example", {"seconds": round(time.monotonic() - started, 1)})
    return smollm2


def test_the_chart_passes_its_own_tests(chart: Chart) -> None:
    chart.test()


@pytest.mark.parametrize(
    "condition", ["Available", "PrefillReady", "DecodeReady", "RouterReady", "KVTransferVerified"]
)
def test_every_condition_holds(running: Service, condition: str) -> None:
    assert running.condition(condition) == "True"


def test_a_chat_is_answered_and_its_blocks_moved(running: Service) -> None:
    before = running.blocks_moved()
    answer = running.chat(QUESTION)
    assert answer["choices"][0]["message"]["content"]
    prompt_tokens = answer["usage"]["prompt_tokens"]
    wait_for(
        "the blocks are counted",
        lambda: running.blocks_moved() - before >= prompt_tokens // 16,
        SEEN_TIMEOUT_S,
    )


def test_an_engine_takes_no_requests(running: Service, client: Client) -> None:
    for role in ENGINE_ROLES:
        for pod in running.pods(role):
            url = f"http://{pod['status']['podIP']}:8000"
            assert "diptych:engine_steps_total" in client.fetch(f"{url}/metrics")
            with pytest.raises(KubectlError, match="404"):
                client.fetch(f"{url}/v1/models")


def test_greedy_answers_repeat(running: Service) -> None:
    first, second = (running.chat(QUESTION)["choices"][0]["message"] for _ in range(2))
    assert first == second


def test_the_plugin_says_that_all_is_well(running: Service, kubectl: Kubectl) -> None:
    plugin = Plugin(kubectl.namespace)
    shown = plugin.ask("status").text
    assert [
        word for word in (running.name, "Serving", running.revision()) if word not in shown
    ] == []
    told = plugin.ask("status", running.name, "--json").json
    assert told["reported"]
    assert {role: told["status"][role]["summary"] for role in ROLES} == dict.fromkeys(ROLES, "1/1")
    why = plugin.ask("why", running.name)
    assert why.code == 0
    assert f"{running.name} is available" in why.text


def test_the_plugin_says_why_a_request_went_where_it_did(
    running: Service, kubectl: Kubectl
) -> None:
    answer = running.chat(NEW_QUESTION)
    plugin = Plugin(kubectl.namespace)
    (told,) = plugin.ask("why", running.name, answer["id"], "--json").json
    assert [told["router"]] == running.ready_pods("router")
    (request,) = told["requests"]
    assert request["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert request["output_tokens"] == answer["usage"]["completion_tokens"]
    (attempt,) = request["attempts"]
    weighed = {
        choice["duty"]: [candidate["engine"] for candidate in choice["candidates"]]
        for choice in attempt["choices"]
    }
    assert weighed == {role: running.ready_pods(role) for role in ENGINE_ROLES}
    # What came true: prefill brought the first token, and decode went on with its blocks.
    assert [attempt["prefill"]] == running.ready_pods("prefill")
    assert attempt["decoded_by"] == running.ready_pods("decode")
    assert attempt["received_tokens"] > 0
    assert 0 < attempt["first_token_s"] + attempt["hand_off_s"] <= request["seconds"]
    shown = plugin.ask("why", running.name, answer["id"]).text
    words = ("TOTAL", "first token", "hand-off", attempt["prefill"], attempt["decode"])
    assert [word for word in words if word not in shown] == []
    (drawn,) = plugin.ask("trace", running.name, answer["id"], "--json").json
    lanes = {lane["name"]: [bar["kind"] for bar in lane["bars"]] for lane in drawn["lanes"]}
    assert list(lanes) == ["router", attempt["prefill"], attempt["decode"]]
    # Engines in pods tell their stations: the prompt has waited there before it was computed.
    assert [kind in lanes[attempt["prefill"]] for kind in ("queue", "prefill")] == [True, True]
    assert lanes[attempt["decode"]][-1] == "decode"


def test_the_plugin_shows_what_engines_do(
    running: Service, client: Client, kubectl: Kubectl
) -> None:
    traffic = client.traffic(
        running.url, running.name, concurrency=1, max_tokens=8, record=ARTIFACTS / "top.jsonl"
    )
    plugin = Plugin(kubectl.namespace)

    def at_work() -> list[Object] | None:
        """What both engines do, once both did something while the plugin looked."""
        loads: list[Object] = plugin.ask("top", running.name, "--interval", "4", "--json").json
        return loads if all(load["tokens_per_s"] > 0 for load in loads) else None

    with traffic:
        loads = wait_for("both engines are seen at work", at_work, SEEN_TIMEOUT_S)
    assert [load["role"] for load in loads] == list(ENGINE_ROLES)
    assert [[load["name"]] for load in loads] == [running.ready_pods(role) for role in ENGINE_ROLES]


def test_a_key_lets_in_also_to_the_page_and_changes_without_a_restart(
    running: Service, client: Client, kubectl: Kubectl
) -> None:
    site = running.url.removesuffix("/v1")

    def store(**keys: str) -> None:
        meta = {"name": KEYS}
        kubectl.apply({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": keys})

    def refused(key: str = "", path: str = "/v1/models") -> bool:
        try:
            client.fetch(f"{site}{path}", key=key)
        except KubectlError as exc:
            if "401" not in str(exc):
                raise
            return True
        return False

    store(alice="old")
    running.patch_spec({"router": {"apiKeys": {"secretName": KEYS}, "ui": True}})
    running.settled()
    wait_for("the open router is gone", refused, SEEN_TIMEOUT_S)
    assert running.status()["access"] == f"API keys of Secret {KEYS}, no TLS"
    assert not refused("old")
    routers = running.ready_pods("router")
    store(alice="old", bob="new\ntokensPerMinute: 100")
    wait_for("the new key is good", lambda: not refused("new"), KEYS_TIMEOUT_S)
    assert not refused("old")
    kubectl.merge("secret", KEYS, {"data": {"alice": None}})
    wait_for("the old key is not", lambda: refused("old"), KEYS_TIMEOUT_S)
    assert not refused("new")
    assert running.ready_pods("router") == routers, "and no router was started anew"
    # A chat takes more than a half of what this key may use in a minute; the next asks for more
    # than comes back in half a minute.
    messages = [{"role": "user", "content": QUESTION}]
    chat = {"model": running.name, "messages": messages, "max_tokens": 24}
    assert client.fetch(f"{site}/v1/chat/completions", chat, key="new")
    with pytest.raises(KubectlError, match="429"):
        client.fetch(f"{site}/v1/chat/completions", chat | {"max_tokens": 45}, key="new")
    # The page is for everybody to load, and shows what it shows to who has a key.
    assert "<h2" in client.fetch(f"{site}/")
    assert refused("", ABOUT)
    about = json.loads(client.fetch(f"{site}{ABOUT}", key="new"))
    assert (about["model"], about["control"]) == (running.name, None)
    running.patch_spec({"router": {"apiKeys": None, "ui": None}})
    running.settled()
    wait_for("the API is open again", lambda: not refused(), SEEN_TIMEOUT_S)


def test_only_engines_carry_torch(running: Service, chart: Chart, kubectl: Kubectl) -> None:
    carriers = {
        role: kubectl.exec(running.ready_pods(role)[0], "python", "-c", FIND_TORCH).strip()
        for role in ROLES
    }
    operator = chart.pods()[0]["metadata"]["name"]
    carriers["operator"] = kubectl.exec(operator, "python", "-c", FIND_TORCH).strip()
    assert carriers == {"prefill": "True", "decode": "True", "router": "False", "operator": "False"}


def test_deleting_the_service_leaves_nothing(running: Service, figures: Figures) -> None:
    started = time.monotonic()
    running.delete()
    running.gone()
    figures.add("delete the example", {"seconds": round(time.monotonic() - started, 1)})
