"""Clients that are not written for Diptych, unchanged, against a router and two engines.

Each is in an environment of its own (`make clients`), and is skipped by name where it is not.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from client_kit.environment import RUN_S, SCRIPTS, needs_client, program, surroundings
from client_kit.tokenizer_folder import write_tokenizer
from model_kit.questions import WHOLE
from vllm_kit.environment import VENV, needs_vllm

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(2 * RUN_S)]

REQUESTS = 4
IN_TOKENS, OUT_TOKENS = 32, 8


async def output_of(*command: str, folder: Path | None = None) -> str:
    """What a client prints. A failure shows all that it said."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=surroundings(),
        cwd=folder,
    )
    try:
        async with asyncio.timeout(RUN_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    said = out.decode()
    assert process.returncode == 0, f"{said[-5000:]}\n{err.decode()[-5000:]}"
    return said


async def told(name: str, url: str) -> dict[str, Any]:
    script = str(SCRIPTS / f"{name}_calls.py")
    output = await output_of(program(name, "python"), script, url, WHOLE.words)
    results: dict[str, Any] = json.loads(output.splitlines()[-1])
    return results


def are_calls_of_weather(calls: list[tuple[str, dict[str, Any]]]) -> bool:
    return all(name == "weather" and set(arguments) == {"city"} for name, arguments in calls)


@needs_client("langchain")
async def test_langchain_gets_what_the_model_says(base_url: str) -> None:
    results = await told("langchain", base_url)
    assert results["chat"] == results["response"] == WHOLE.answer
    assert results["batch"] == [WHOLE.answer] * 2
    assert len([piece for piece in results["stream"] if piece]) > 1
    assert "".join(results["stream"]) == WHOLE.answer
    [usage] = results["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert results["text"]
    for method in ("json_schema", "function_calling"):
        assert results[method] in ({"rain": True}, {"rain": False})
    for found in (results["calls"], results["streamed calls"]):
        assert len(found) == 1
        assert are_calls_of_weather([(call["name"], call["args"]) for call in found])
    assert results["after a call"]["output_tokens"] > 0
    first, second = results["embeddings"]
    assert first == pytest.approx(results["embedding"], abs=1e-3)
    assert len(first) == len(second)


@needs_client("litellm")
async def test_litellm_gets_what_the_model_says(base_url: str) -> None:
    results = await told("litellm", base_url)
    for provider in ("openai", "hosted_vllm"):
        assert results[f"{provider} chat"] == WHOLE.answer
        assert len([piece for piece in results[f"{provider} stream"] if piece]) > 1
        assert "".join(results[f"{provider} stream"]) == WHOLE.answer
    calls = [(name, json.loads(written)) for name, written in results["calls"]]
    assert len(calls) >= 2
    assert are_calls_of_weather(calls)
    assert results["anthropic chat"] == results["async chat"] == WHOLE.answer
    assert isinstance(results["schema"]["rain"], bool)
    assert results["text"]
    assert len(results["embeddings"]) == 2
    assert results["rerank"] == [1, 0]


@pytest.fixture(scope="module")
def tokenizer(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(smollm2, folder)
    return str(folder)


@pytest.mark.parametrize(
    ("backend", "path"),
    [
        pytest.param("openai", "/v1/completions", marks=needs_vllm),
        pytest.param("openai-chat", "/v1/chat/completions", marks=needs_vllm),
    ],
)
@pytest.mark.slow
async def test_vllm_bench_serve_measures(
    base_url: str, tokenizer: str, tmp_path: Path, backend: str, path: str
) -> None:
    await output_of(
        str(VENV / "bin" / "vllm"), "bench", "serve", "--base-url", base_url,
        "--backend", backend, "--endpoint", path,
        "--model", "smollm2", "--tokenizer", tokenizer, "--dataset-name", "random",
        "--random-input-len", str(IN_TOKENS), "--random-output-len", str(OUT_TOKENS),
        "--ignore-eos", "--num-prompts", str(REQUESTS), "--max-concurrency", "2",
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json",
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == REQUESTS
    assert result["total_output_tokens"] == REQUESTS * OUT_TOKENS


@needs_client("guidellm")
@pytest.mark.slow
async def test_guidellm_measures(base_url: str, tokenizer: str, tmp_path: Path) -> None:
    report = tmp_path / "result.json"
    await output_of(
        program("guidellm", "guidellm"), "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={base_url},model=smollm2",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens={IN_TOKENS},output_tokens={OUT_TOKENS}",
        "--output", f"kind=json,path={report}",
    )  # fmt: skip
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0)


@needs_client("aiperf")
@pytest.mark.slow
async def test_aiperf_measures(base_url: str, tokenizer: str, tmp_path: Path) -> None:
    await output_of(
        program("aiperf", "aiperf"), "profile", "--model", "smollm2", "--url", base_url,
        "--endpoint-type", "chat", "--streaming", "--tokenizer", tokenizer,
        "--isl", str(IN_TOKENS), "--osl", str(OUT_TOKENS), "--extra-inputs", "ignore_eos:true",
        "--concurrency", "2", "--request-count", str(REQUESTS),
        "--ui", "none", "--artifact-dir", str(tmp_path), folder=tmp_path,
    )  # fmt: skip
    result = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert result["request_count"]["avg"] == REQUESTS
    assert not result.get("error_summary")
