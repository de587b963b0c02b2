"""Clients that are not written for Diptych, unchanged, against a router and two engines.

Each is in an environment of its own (`make clients`), and is skipped by name where it is not.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from client_kit.calling_model import write_calling_model
from client_kit.environment import RUN_S, SCRIPTS, needs_client, program, surroundings
from client_kit.tokenizer_folder import write_tokenizer
from model_kit.questions import WHOLE
from service_kit import Pair, generate
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
    script = str(SCRIPTS / f"{name.replace('-', '_')}_calls.py")
    output = await output_of(program(name, "python"), script, url, WHOLE.words)
    results: dict[str, Any] = json.loads(output.splitlines()[-1])
    return results


def counts(usage: dict[str, Any]) -> dict[str, int]:
    """The tokens of a usage; how many of them were cached is another matter in each request."""
    return {name: count for name, count in usage.items() if isinstance(count, int)}


def are_calls_of_weather(calls: list[tuple[str, dict[str, Any]]]) -> bool:
    return all(name == "weather" and set(arguments) == {"city"} for name, arguments in calls)


@pytest.fixture(scope="module")
def smollm2(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Agents send their tools with each turn, and the model's own template has no place for any."""
    return write_calling_model(smollm2, tmp_path_factory.mktemp("model") / "calling.gguf")


@needs_client("langchain")
async def test_langchain_gets_what_the_model_says(base_url: str) -> None:
    results = await told("langchain", base_url)
    assert results["chat"] == results["response"] == WHOLE.answer
    assert results["batch"] == [WHOLE.answer] * 2
    assert len([piece for piece in results["stream"] if piece]) > 1
    assert "".join(results["stream"]) == WHOLE.answer
    [usage] = results["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert counts(results["sum"]) == counts(usage) == counts(results["whole usage"])
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
        whole, summed = results[f"{provider} usage"]
        assert counts(whole) == counts(summed)
    calls = [(name, json.loads(written)) for name, written in results["calls"]]
    assert len(calls) >= 2
    assert are_calls_of_weather(calls)
    assert results["anthropic chat"] == results["async chat"] == WHOLE.answer
    assert isinstance(results["schema"]["rain"], bool)
    assert results["text"]
    assert len(results["embeddings"]) == 2
    assert results["rerank"] == [1, 0]


def is_streamed(pieces: list[str]) -> bool:
    return len([piece for piece in pieces if piece]) > 1 and "".join(pieces) == WHOLE.answer


@needs_client("llama-index")
async def test_llama_index_gets_what_the_model_says(base_url: str) -> None:
    results = await told("llama-index", base_url)
    assert results["whole"] == [WHOLE.answer] * 3
    assert results["tokens"] >= len(results["stream"]) > 1
    assert is_streamed(results["stream"])
    assert is_streamed(results["streamed response"])
    assert results["text"]
    assert len(results["streamed text"]) > 1
    assert all(isinstance(rain, bool) for rain in results["forms"])
    assert len(results["calls"]) == 2
    assert are_calls_of_weather(results["calls"])
    text, [called, *_] = results["agent"]
    assert text
    assert called == "weather"
    assert results["error"] == 404


@needs_client("instructor")
async def test_instructor_gets_its_model_in_each_mode(base_url: str) -> None:
    results = await told("instructor", base_url)
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"):
        whole, partly = results[mode]
        assert isinstance(whole, bool)
        assert isinstance(partly, bool)
    usage = results["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert results["text"] == WHOLE.answer


@needs_client("pydantic-ai")
async def test_agents_of_pydantic_ai_get_what_the_model_says(base_url: str) -> None:
    for results in (await told("pydantic-ai", base_url)).values():
        assert results["whole"] == WHOLE.answer
        assert is_streamed(results["stream"])
        assert results["tokens"] == results["streamed tokens"] > 1
        for form in ("NativeOutput", "ToolOutput"):
            assert all(isinstance(rain, bool) for rain in results[form])
        assert results["after calls"]
        assert "ToolReturnPart" in results["parts"]
        assert results["free"] in (True, False, "calls")
        assert results["errors"] == [
            ["ModelNotFoundError", 404], ["ModelContextWindowExceededError", 400],
        ]  # fmt: skip


@needs_client("openai-agents")
async def test_openais_agents_get_what_the_model_says(base_url: str) -> None:
    results = await told("openai-agents", base_url)
    first, second = results["tokens"]
    assert second > first  # the earlier response is a part of the prompt
    for of_api in (results["chat"], results["responses"]):
        assert of_api["whole"] == WHOLE.answer
        assert is_streamed(of_api["stream"])
        whole, streamed = of_api["tokens"]
        assert whole == streamed > 1
        assert isinstance(of_api["form"], bool)
        for items in (of_api["calls"], of_api["streamed calls"]):
            assert items[:2] == ["tool_call_item", "tool_call_output_item"]
            assert items[-1] == "message_output_item"
        assert of_api["after calls"]
        assert of_api["call with a form"].startswith("It is sunny in")
        assert of_api["hand-off"] == "plain"
        assert of_api["error"] == 404


LM_TASK = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
LM_TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}],
    },
    "words": {
        "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip
LM_DATA = [
    {"question": "The capital of France is", "choices": ["Berlin", "Paris"], "answer": 1},
    {"question": "The capital of Japan is", "choices": ["Tokyo", "Madrid"], "answer": 0},
]


@needs_client("lm-eval")
@pytest.mark.parametrize("batch", ["1", "4"])
async def test_lm_evaluation_harness_sees_the_probabilities_of_the_engine(
    base_url: str, pair: Pair, tokenizer: str, tmp_path: Path, batch: str
) -> None:
    """Which it reads from the log-probabilities of echoes."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in LM_DATA))
    for name, task in LM_TASKS.items():
        files = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name} | LM_TASK | task | files))
    server = f"model=smollm2,base_url={base_url}/v1/completions,tokenizer={tokenizer}"
    await output_of(
        program("lm-eval", "lm_eval"), "run", "--model", "local-completions",
        "--model_args", f"{server},num_concurrent=2", "--batch_size", batch,
        "--include_path", str(tmp_path), "--tasks", ",".join(LM_TASKS),
        "--output_path", str(tmp_path / "out"), "--log_samples", folder=tmp_path,
    )  # fmt: skip
    [result] = tmp_path.glob("out/*/results_*.json")
    scores = json.loads(result.read_text())["results"]
    assert (scores["choices"]["acc,none"], scores["words"]["sample_len"]) == (1.0, len(LM_DATA))
    [samples] = tmp_path.glob("out/*/samples_choices_*.jsonl")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        for [[value, _]], said in zip(sample["resps"], sample["arguments"].values(), strict=True):
            expected = await likelihood(pair, said["arg_0"], said["arg_1"])
            assert float(value) == pytest.approx(expected, abs=0.05)


async def likelihood(pair: Pair, context: str, continuation: str) -> float:
    """The logarithm of what an engine alone gives to the continuation."""
    tokenize = pair.prefill.renderer.tokenize
    num_before, prompt = len(tokenize(context)), tokenize(context + continuation)
    output = await generate(pair.prefill, prompt, max_tokens=1, prompt_logprobs=0)
    assert output.prompt_logprobs is not None
    rows = list(zip(prompt, output.prompt_logprobs, strict=True))[num_before:]
    return sum(row[token].logprob for token, row in rows if row is not None)


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
