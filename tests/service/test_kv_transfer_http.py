"""Two engine pods and a proxy that speaks only HTTP and the public `kv_transfer_params`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from served import serve_http
from service_kit import engine_config, generate, start_engine
from waits import PATIENCE_S

from diptych_frontend.app import build_app
from diptych_frontend.core_client.async_llm import AsyncLLM
from diptych_protocol import KVTransferConfig, RequestOutput

pytestmark = pytest.mark.asyncio(loop_scope="module")

Json = dict[str, Any]
COMPLETIONS, CHAT = PATHS = ("/v1/completions", "/v1/chat/completions")
MAX_BODY = 64 << 10
PROMPT = "The lighthouse keeper climbed the stairs every evening, and looked out over the sea. "
LONG_LEASE_S = 300.0
"""Nothing here is freed by expiry."""


@dataclass
class Pods:
    """The front-ends of both pods, and the proxy's connections to them."""

    prefill: AsyncLLM
    decode: AsyncLLM
    p: httpx.AsyncClient
    d: httpx.AsyncClient

    async def lend(self, path: str, body: Json) -> Json:
        """The proxy's first leg: one token, and what P says of the blocks it keeps."""
        asked = {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None, "tp_size": None,
        }  # fmt: skip
        first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": asked}
        if path == CHAT:
            first["max_completion_tokens"] = 1
        answer = await self.p.post(path, json=first)
        assert answer.status_code == 200, answer.text
        lent: Json = answer.json()["kv_transfer_params"]
        assert lent["do_remote_prefill"] is True
        async with asyncio.timeout(PATIENCE_S):  # the hinge counts it a moment later
            while await self.leases_held() != 1:
                await asyncio.sleep(0.01)
        return lent

    async def leases_held(self) -> int:
        transfer = (await self.prefill.refresh_stats()).kv_transfer
        assert transfer is not None
        return transfer.leases_held

    async def nothing_held(self) -> bool:
        """P lends nothing, and has all its blocks."""
        stats = await self.prefill.refresh_stats()
        assert stats.kv_transfer is not None
        free = stats.blocks_free == stats.blocks_total
        return free and not stats.kv_transfer.leases_held


@asynccontextmanager
async def served(engine: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    bound: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    app = build_app(engine, max_body_bytes=MAX_BODY)
    server = asyncio.create_task(
        serve_http(app, "127.0.0.1", 0, on_ready=lambda *at: bound.set_result(at))
    )
    try:
        host, port = await bound
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=PATIENCE_S) as http:
            yield http
    finally:
        server.cancel()
        await asyncio.wait((server,))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pods(smollm2: str, keys_dir: Path) -> AsyncIterator[Pods]:
    lease = KVTransferConfig(lease_seconds=LONG_LEASE_S)
    (prefill, _), (decode, _) = await asyncio.gather(
        start_engine(engine_config("pod-p", smollm2, kv_transfer=lease), keys_dir),
        start_engine(
            engine_config("pod-d", smollm2, kv_transfer=lease, max_num_seqs=1, max_num_waiting=1),
            keys_dir,
        ),
    )
    async with AsyncExitStack() as open_pods:
        for engine in (prefill, decode):
            open_pods.callback(engine.shutdown)
        p, d = [await open_pods.enter_async_context(served(e)) for e in (prefill, decode)]
        yield Pods(prefill, decode, p, d)


def body_of(path: str, **changes: Any) -> Json:
    content: Json = {"prompt": PROMPT}
    if path == CHAT:
        content = {"messages": [{"role": "user", "content": PROMPT}]}
    return {"model": "smollm2", "temperature": 0.0, "max_tokens": 12, **content, **changes}


# --- the good path --------------------------------------------------------------------------------


def text_of(choice: Json) -> str:
    message = choice.get("message") or choice.get("delta")
    return str((message.get("content") or "") if message is not None else choice["text"])


async def answer_of(http: httpx.AsyncClient, path: str, body: Json) -> tuple[str, str, Json]:
    """Text, finish reason and usage, streamed or not."""
    if not body.get("stream"):
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        [choice] = answer.json()["choices"]
        return text_of(choice), choice["finish_reason"], counted(answer.json()["usage"])
    text, reason = "", ""
    usage: Json = {}
    async with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += "".join(text_of(choice) for choice in event["choices"])
                reason += "".join(choice["finish_reason"] or "" for choice in event["choices"])
                usage = event.get("usage") or usage
    return text, reason, counted(usage)


def counted(usage: Json) -> Json:
    """But for the tokens that were found in a cache: of those, D has all, and P few."""
    return {name: count for name, count in usage.items() if name != "prompt_tokens_details"}


@pytest.mark.one_in(2, "path", "stream", "max_tokens")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("max_tokens", [1, 12])
async def test_a_proxy_gets_what_one_engine_says(
    pods: Pods, path: str, stream: bool, max_tokens: int, eventually: Any
) -> None:
    body = body_of(path, stream=stream, max_tokens=max_tokens)
    if stream:
        body["stream_options"] = {"include_usage": True}
    wanted = await answer_of(pods.p, path, body)
    assert wanted[2]["completion_tokens"] == max_tokens
    lent = await pods.lend(path, body_of(path))
    before = await pods.decode.refresh_stats()
    assert await answer_of(pods.d, path, {**body, "kv_transfer_params": lent}) == wanted
    after = await pods.decode.refresh_stats()
    assert after.prompt_tokens_computed == before.prompt_tokens_computed
    await eventually(pods.nothing_held)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "wish"), [(COMPLETIONS, {"logprobs": 1}), (CHAT, {"logprobs": True})]
)
async def test_a_proxy_may_ask_for_logprobs(
    pods: Pods, path: str, wish: Json, stream: bool, eventually: Any
) -> None:
    body = body_of(path, stream=stream, **wish)
    wanted = await logprobs_of(pods.p, path, body)
    assert len(wanted) == body["max_tokens"]
    lent = await pods.lend(path, body_of(path, **wish))
    got = await logprobs_of(pods.d, path, {**body, "kv_transfer_params": lent})
    assert [token for token, _ in got] == [token for token, _ in wanted]
    assert [value for _, value in got] == pytest.approx([v for _, v in wanted], abs=0.01)
    await eventually(pods.nothing_held)


async def logprobs_of(http: httpx.AsyncClient, path: str, body: Json) -> list[tuple[str, float]]:
    """Every token with its log-probability, the first one included, streamed or not."""
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    found = []
    for event in map(json.loads, lines or [answer.text]):
        assert "error" not in event, event
        for told in (choice.get("logprobs") for choice in event["choices"]):
            if told is not None and path == CHAT:
                found += [(entry["token"], entry["logprob"]) for entry in told["content"]]
            elif told is not None:
                found += zip(told["tokens"], told["token_logprobs"], strict=True)
    return found


# --- every refusal on every route -----------------------------------------------------------------

Refuse = Callable[[Pods, str, Json], Awaitable[int | None]]
"""Sends D a request that it does not take; its status, None if there is none."""


def changed(**changes: Any) -> Refuse:
    async def refuse(pods: Pods, path: str, lent: Json) -> int | None:
        body = {**body_of(path), "kv_transfer_params": lent, **changes}
        return (await pods.d.post(path, json=body)).status_code

    return refuse


def garbled(**changes: Any) -> Refuse:
    """The parameters themselves are wrong, but for what names the lease."""

    async def refuse(pods: Pods, path: str, lent: Json) -> int | None:
        body = {**body_of(path), "kv_transfer_params": {**lent, **changes}}
        return (await pods.d.post(path, json=body)).status_code

    return refuse


def raw(make: Callable[[Json], bytes], to: str = "", kind: str = "application/json") -> Refuse:
    """Other bytes, another path, or another content type."""

    async def refuse(pods: Pods, path: str, lent: Json) -> int | None:
        content = make({**body_of(path), "kv_transfer_params": lent})
        answer = await pods.d.post(to or path, content=content, headers={"content-type": kind})
        return answer.status_code

    return refuse


def encoded(body: Json) -> bytes:
    return json.dumps(body).encode()


async def too_long(pods: Pods, path: str, lent: Json) -> int | None:
    words = "word " * 10_000
    content = {"messages": [{"role": "user", "content": words}], "prompt": words}
    name = "messages" if path == CHAT else "prompt"
    return await changed(**{name: content[name]})(pods, path, lent)


async def undeclared(pods: Pods, path: str, lent: Json) -> int | None:
    """A body of no declared length that is too large."""

    async def pieces() -> AsyncIterator[bytes]:
        large = encoded({"user": "x" * MAX_BODY, **body_of(path), "kv_transfer_params": lent})
        for start in range(0, len(large), 10_000):
            yield large[start : start + 10_000]

    headers = {"content-type": "application/json"}
    return (await pods.d.post(path, content=pieces(), headers=headers)).status_code


async def leaves_early(pods: Pods, path: str, lent: Json) -> int | None:
    """The client goes away while it sends its body."""
    body = encoded({"kv_transfer_params": lent, **body_of(path)})
    head = (
        f"POST {path} HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection(pods.d.base_url.host, pods.d.base_url.port)
    writer.write(head.encode() + body[:-20])
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    return None


async def full(pods: Pods, path: str, lent: Json) -> int | None:
    others: list[asyncio.Task[RequestOutput]] = []
    try:
        for waiting in range(2):
            endless = generate(pods.decode, "Once upon a time", max_tokens=1500, ignore_eos=True)
            others.append(asyncio.create_task(endless))
            async with asyncio.timeout(PATIENCE_S):
                while (await pods.decode.refresh_stats()).num_waiting != waiting or not (
                    await pods.decode.refresh_stats()
                ).num_running:
                    await asyncio.sleep(0.02)
        return await changed()(pods, path, lent)
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def waits_in_vain(stop: Callable[[AsyncLLM], Awaitable[None]], go_on: Any) -> Refuse:
    """D works on nothing, and the client loses its patience."""

    async def refuse(pods: Pods, path: str, lent: Json) -> int | None:
        await stop(pods.decode)
        try:
            body = {**body_of(path), "kv_transfer_params": lent}
            with pytest.raises(httpx.ReadTimeout):
                await pods.d.post(path, json=body, timeout=httpx.Timeout(60, read=0.3))
            await until_free(pods)
            again = await pods.lend(path, body_of(path))
            # What is wrong is refused at once, whether D works or not.
            return await changed(temperature=-1)(pods, path, again)
        finally:
            await go_on(pods.decode)

    return refuse


async def until_free(pods: Pods) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await pods.nothing_held():
            await asyncio.sleep(0.02)


REFUSALS: dict[str, tuple[Refuse, int | None]] = {
    "bad value": (changed(temperature=-1), 400),
    "unknown model or adapter": (changed(model="nobody"), 404),
    "several answers": (changed(n=2), 400),
    "form that cannot be": (changed(response_format={"type": "no such type"}), 400),
    "too long": (too_long, 400),
    "blocks of words": (garbled(remote_block_ids=["x"]), 400),
    "both roles": (garbled(do_remote_decode=True), 400),
    "no number of tokens": (garbled(remote_num_tokens=None), 400),
    "cut off": (raw(lambda body: encoded(body)[:-1]), 400),
    "not JSON": (raw(lambda body: encoded(body) + b"}"), 400),
    "not UTF-8": (raw(lambda body: b'{"user": "\xff", ' + encoded(body)[1:]), 400),
    "too large": (raw(lambda body: encoded({"user": "x" * MAX_BODY, **body})), 413),
    "too large at its end": (raw(lambda body: encoded({**body, "user": "x" * MAX_BODY})), 413),
    "too large, length untold": (undeclared, 413),
    "as text": (raw(encoded, kind="text/plain"), 415),
    "embeddings": (raw(encoded, to="/v1/embeddings"), 400),
    "no such path": (raw(encoded, to="/v1/nowhere"), 404),
    "no such method": (raw(encoded, to="/v1/models"), 405),
    "the client leaves": (leaves_early, None),
    "full": (full, 503),
    "paused": (
        waits_in_vain(
            lambda d: d.pause_generation(mode="keep", clear_cache=False),
            lambda d: d.resume_generation(),
        ),
        400,
    ),
    "asleep": (waits_in_vain(lambda d: d.sleep(0), lambda d: d.wake_up()), 400),
}


@pytest.mark.one_in(4, "refusal", "path")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("refusal", REFUSALS)
async def test_a_refusal_frees_what_prefill_holds(pods: Pods, path: str, refusal: str) -> None:
    refuse, status = REFUSALS[refusal]
    lent = await pods.lend(path, body_of(path))
    assert await refuse(pods, path, lent) == status
    await until_free(pods)


@pytest.mark.parametrize("told", ["prefill", "decode"])
async def test_a_proxy_may_report_a_loss_itself(pods: Pods, told: str) -> None:
    """As when D is gone: it sends P the body that D did not get."""
    http = pods.p if told == "prefill" else pods.d
    body = body_of(COMPLETIONS)
    lost = {**body, "kv_transfer_params": await pods.lend(COMPLETIONS, body)}
    for _ in range(2):  # twice is as good as once
        answer = await http.post("/v1/kv_transfer/reject", json=lost)
        assert (answer.status_code, answer.json()) == (200, {"done": True})
    await until_free(pods)


@pytest.mark.parametrize("params", [None, [], {}, {"lease_id": 3}, {"do_remote_prefill": True}])
async def test_a_report_that_names_no_lease_is_refused(pods: Pods, params: Any) -> None:
    answer = await pods.p.post("/v1/kv_transfer/reject", json={"kv_transfer_params": params})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params"


FORGERIES: dict[str, Json] = {
    "somebody else's address": {"remote_port": 1},
    "a name": {"remote_host": "prefill.example"},
    "another lease": {"lease_id": "f" * 32},
    "another engine": {"remote_engine_id": "pod-x"},
    "more time": {"expires_at": 1 << 40},
    "other tokens": {"tokens_digest": "0" * 32},
    "other first tokens": {"first_token_ids": [1]},
    "no proof": {"proof": None},
    "an invented proof": {"proof": "0" * 64},
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("forgery", FORGERIES)
async def test_what_prefill_did_not_sign_is_the_caller_s_fault(
    pods: Pods, forgery: str, stream: bool
) -> None:
    lent = await pods.lend(COMPLETIONS, body_of(COMPLETIONS))
    forged = {**lent, **FORGERIES[forgery]}
    body = body_of(COMPLETIONS, kv_transfer_params=forged, stream=stream)
    answer = await pods.d.post(COMPLETIONS, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "kv_transfer_params"
    assert await pods.p.post("/v1/kv_transfer/reject", json=body | {"kv_transfer_params": lent})
    await until_free(pods)


@pytest.mark.parametrize("told", ["prefill", "decode"])
async def test_a_stranger_frees_nothing(pods: Pods, told: str) -> None:
    """Who has not got P's signature knows no lease, whatever its name."""
    http = pods.p if told == "prefill" else pods.d
    lent = await pods.lend(COMPLETIONS, body_of(COMPLETIONS))
    for changes in ({"proof": "0" * 64}, {"proof": None}, {"lease_id": "f" * 32}):
        answer = await http.post(
            "/v1/kv_transfer/reject", json={"kv_transfer_params": {**lent, **changes}}
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "kv_transfer_params"
    assert await pods.leases_held() == 1
    await http.post("/v1/kv_transfer/reject", json={"kv_transfer_params": lent})
    await until_free(pods)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", PATHS)
async def test_contract_M02_a_hand_off_that_fails_is_a_500_from_the_first_byte_on(
    pods: Pods, path: str, stream: bool
) -> None:
    """The proxy's router is slow, and P has ended the lease when D asks for the blocks."""
    body = body_of(path, cache_salt=f"{path} {stream}")
    lent = await pods.lend(path, body)
    released = await pods.p.post("/v1/kv_transfer/reject", json={"kv_transfer_params": lent})
    assert released.status_code == 200
    answer = await pods.d.post(path, json={**body, "kv_transfer_params": lent, "stream": stream})
    assert answer.status_code == 500, answer.text
    error = answer.json()["error"]
    assert error["code"] == "engine_error"
    assert "hand-off failed" in error["message"]
    await until_free(pods)


async def test_a_reference_is_used_once(pods: Pods) -> None:
    """By whoever came first, who is not disturbed by who comes next."""
    body = body_of(COMPLETIONS)
    lent = await pods.lend(COMPLETIONS, body)
    first, second = await asyncio.gather(
        *(pods.d.post(COMPLETIONS, json={**body, "kv_transfer_params": lent}) for _ in range(2))
    )
    # This engine lets one request wait: the other may find no room before it is found a copy.
    assert sorted((first.status_code, second.status_code)) in ([200, 400], [200, 503])
    third = await pods.d.post(COMPLETIONS, json={**body, "kv_transfer_params": lent})
    assert third.status_code == 400
    assert "used here before" in third.json()["error"]["message"]
    await until_free(pods)


async def test_a_pod_that_leaves_still_frees_what_it_refuses(pods: Pods) -> None:
    """The last test of this module: the pod does not come back."""
    body = body_of(COMPLETIONS)
    await pods.decode.drain(5.0)
    lent = await pods.lend(COMPLETIONS, body)
    assert await changed(temperature=-1)(pods, COMPLETIONS, lent) == 400
    await until_free(pods)
    lent = await pods.lend(COMPLETIONS, body)
    assert (await answer_of(pods.d, COMPLETIONS, {**body, "kv_transfer_params": lent}))[0]
    await until_free(pods)

    pods.decode.shutdown()
    lost = {**body, "kv_transfer_params": await pods.lend(COMPLETIONS, body)}
    assert (await pods.d.post(COMPLETIONS, json=lost)).status_code == 503
    assert (await pods.p.post("/v1/kv_transfer/reject", json=lost)).status_code == 200
    await until_free(pods)
