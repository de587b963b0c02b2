"""`diptych up` with the real model, as a user has it: the openai client, and faults."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import psutil
import pytest
from benchmarks.traces.recorded import Trace, TraceRequest
from benchmarks.traces.replay import Failure, figures, replay
from free_ports import free_port
from model_kit.questions import COUNTING, DEMO, WHOLE
from processes import running
from waits import PATIENCE_S, wait_until

from diptych.bench.stream import Sample

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2.yaml"
FRANCE: Any = [{"role": "user", "content": WHOLE.words}]
LONG = "Write a long story about a lighthouse keeper and the sea."


@dataclass
class Served:
    """A running service, and the processes that it is made of."""

    url: str
    process: subprocess.Popen[bytes]
    folder: Path
    http: httpx.Client

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )

    def status(self) -> dict[str, Any]:
        """What `diptych status` reads."""
        (file,) = self.folder.glob("diptych-*/state.json")
        return dict(msgspec.json.decode(file.read_bytes()))

    def core_of(self, role: str) -> psutil.Process:
        """The EngineCore process of a pool's only pod."""
        ours = psutil.Process(self.process.pid).children(recursive=True)
        for core in running(ours, "diptych_engine.serving.core_process", f"smollm2-{role}"):
            return core
        pytest.fail(f"no core of the {role} pool runs")

    def metric(self, name: str) -> dict[str, float]:
        """The values of a metric of the router, by their labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"diptych:{name}{{")
        }


def is_ready(http: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return http.get("/health").status_code == 200
    return False


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    port = free_port()
    program = Path(sys.executable).parent / "diptych"
    process = subprocess.Popen(
        [program, "up", EXAMPLE, "--port", str(port)], env=env, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            wait_until(lambda: is_ready(http))
            yield Served(url, process, folder, http)
    finally:
        tree = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        code = process.wait(PATIENCE_S)
        _, alive = psutil.wait_procs(tree, timeout=PATIENCE_S)
        left = [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert code == 0
    assert left == [], "Ctrl-C leaves no process"
    assert list(folder.glob("diptych-*")) == [], "and no files"


def ask_for_capital(served: Served) -> Any:
    return served.client.chat.completions.create(
        model="smollm2", messages=FRANCE, temperature=0, max_tokens=16
    )


def test_the_capital_of_france_through_the_official_client(served: Served) -> None:
    answer = ask_for_capital(served)
    assert answer.choices[0].message.content == WHOLE.answer
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_the_demos_question_is_answered(served: Served) -> None:
    """It is what a newcomer sees first, and what `diptych demo` shows on this processor."""
    answer = served.client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": DEMO.words}],
        temperature=0, max_tokens=16,
    )  # fmt: skip
    assert (answer.choices[0].message.content or "").startswith(DEMO.answer)


def test_the_same_answer_as_a_stream_with_usage(served: Served) -> None:
    chunks = list(
        served.client.chat.completions.create(
            model="smollm2", messages=FRANCE, temperature=0, max_tokens=16, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == WHOLE.answer
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 42


def test_what_crossed_the_hinge_shows_in_the_metrics(served: Served) -> None:
    name = "kv_transfer_blocks_received_total"
    before = sum(served.metric(name).values())
    served.client.completions.create(model="smollm2", prompt="Some new text " * 20, max_tokens=4)
    wait_until(lambda: sum(served.metric(name).values()) > before)


def test_completions_stop_n_and_logprobs(served: Served) -> None:
    answer = served.client.completions.create(
        model="smollm2", prompt=COUNTING.words, temperature=0, max_tokens=12, n=2,
        stop=[" 7"], logprobs=2,
    )  # fmt: skip
    assert [c.text for c in answer.choices] == [COUNTING.answer.removesuffix(" 7")] * 2
    assert {c.finish_reason for c in answer.choices} == {"stop"}
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert all(value <= 0 for value in logprobs.token_logprobs)


def test_the_tokens_of_both_pools_are_the_bytes_of_the_answer(served: Served) -> None:
    form = {"structured_outputs": {"choice": ["🦄 देवनागरी, 你好"]}}
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 60, "extra_body": form}
    asked |= {"stop": ["你"]}
    chat = served.client.chat.completions.create(
        **asked, messages=FRANCE, logprobs=True, top_logprobs=2
    )
    tokens = chat.choices[0].logprobs.content
    assert chat.choices[0].message.content == "🦄 देवनागरी, "
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == "🦄 देवनागरी, "
    assert tokens[0].token.startswith("\\xf0")
    plain = served.client.completions.create(**asked, prompt="A unicorn:", logprobs=2).choices[0]
    assert plain.logprobs.tokens[0].startswith("bytes:\\xf0")
    assert set(plain.logprobs.text_offset) <= set(range(len(plain.text) + 1))


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": -1}, openai.BadRequestError, "max_tokens"),
        ({"prompt": "word " * 9000}, openai.BadRequestError, "prompt"),
        ({"prompt": []}, openai.BadRequestError, "prompt"),
        ({"prompt": [10**6]}, openai.BadRequestError, "prompt"),
    ],
)
def test_bad_requests_name_their_field(
    served: Served, change: dict[str, Any], error: type[openai.APIStatusError], param: str
) -> None:
    with pytest.raises(error) as caught:
        served.client.completions.create(
            **{"model": "smollm2", "prompt": "x", "max_tokens": 1, **change}
        )
    assert caught.value.param == param


async def stream_text(served: Served, started: asyncio.Event | None = None) -> str:
    """The text of a long greedy answer."""
    client = openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    )
    text = ""
    async with client:
        stream = await client.completions.create(
            model="smollm2",
            prompt=LONG,
            temperature=0,
            max_tokens=80,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            text += chunk.choices[0].text
            if started is not None and len(text) > 40:
                started.set()
    return text


async def test_a_trace_is_replayed_and_blocks_are_found_where_their_ids_occur_again(
    served: Served,
) -> None:
    asked = [(100, (1, 2, 3, 4)), (90, (1, 2, 5)), (40, ()), (9000, (6,))]
    trace = Trace(
        [TraceRequest(0.1 * n, prompt, 2, ids) for n, (prompt, ids) in enumerate(asked)], 32
    )
    *first, refused = await replay(served.url, "smollm2", trace, seed=1)
    assert isinstance(refused, Failure)
    assert "prompt" in refused.reason
    assert all(isinstance(outcome, Sample) for outcome in first)
    again = await replay(served.url, "smollm2", trace, seed=1)
    # All of a prompt but its last token, in whole blocks of 16 tokens.
    assert [o.cached_tokens for o in again if isinstance(o, Sample)] == [96, 80, 32]
    found = figures(trace, again, ttft_ms=1e9, tpot_ms=1e9)
    assert (found["requests"], found["failed"], found["attained"]) == (4, 1, 0.75)
    assert found["hit_rate"] == pytest.approx((96 + 80 + 32) / 230)
    other, *_ = await replay(served.url, "smollm2", trace.first(1), seed=2)
    assert isinstance(other, Sample)
    assert other.cached_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_killed_engine_breaks_no_stream_and_comes_back(served: Served, role: str) -> None:
    expected = await stream_text(served)
    victim = served.core_of(role)
    started = asyncio.Event()
    stream = asyncio.create_task(stream_text(served, started))
    await asyncio.wait_for(started.wait(), PATIENCE_S)
    victim.kill()
    if role == "decode":
        # Its only engine is gone: the stream may end with an error, never with other text.
        with contextlib.suppress(openai.APIError):
            assert await stream == expected
    else:
        assert await stream == expected
    await asyncio.to_thread(wait_until, lambda: is_ready(served.http))
    await asyncio.to_thread(wait_until, lambda: all_ready(served))
    assert await stream_text(served) == expected


def all_ready(served: Served) -> bool:
    """Every pod is ready, and one of them has been restarted."""
    pods = served.status()["pods"]
    return all(p["phase"] == "ready" for p in pods) and any(p["restarts"] for p in pods)


def test_a_killed_prefill_engine_does_not_stop_new_requests(served: Served) -> None:
    served.core_of("prefill").kill()
    assert ask_for_capital(served).choices[0].message.content == WHOLE.answer
    wait_until(lambda: all_ready(served))


def test_a_client_that_hangs_up_frees_its_blocks(served: Served) -> None:
    body = {"model": "smollm2", "prompt": LONG, "max_tokens": 2000, "stream": True}
    with httpx.stream(
        "POST",
        f"{served.url}/v1/completions",
        json={**body, "ignore_eos": True},
        timeout=PATIENCE_S,
    ) as response:
        next(response.iter_lines())

    def all_free() -> bool:
        free, blocks = served.metric("kv_cache_blocks_free"), served.metric("kv_cache_blocks")
        return len(free) == 2 and list(free.values()) == list(blocks.values())

    wait_until(all_free)
