"""Every parser of what others sent ends in an error of this project, whatever the bytes.

`DIPTYCH_TEST_PARSED` says how many inputs each gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_kit.echo_engine import EchoEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_kit.table import Parser, file_parsers, parsers

from diptych_frontend.app import build_app

INPUTS = int(os.environ.get("DIPTYCH_TEST_PARSED", "80"))
MANY = 5
"""Times as many in the slow test."""

Edit = tuple[int, int, bytes]


def edited(sample: bytes, edits: list[Edit]) -> bytes:
    """Each edit replaces, at a place, so many bytes by others; the last may cut the end off."""
    data = bytearray(sample)
    for place, cut, put in edits:
        at = place % (len(data) + 1)
        data[at : at + cut] = put
    return bytes(data)


EDITS = st.lists(
    st.tuples(st.integers(0, 1 << 16), st.integers(0, 4) | st.just(1 << 16), st.binary(max_size=6)),
    min_size=1,
    max_size=4,
)


def inputs(samples: tuple[bytes, ...]) -> st.SearchStrategy[bytes]:
    mutated = st.builds(edited, st.sampled_from(samples), EDITS)
    return st.one_of(mutated, mutated, st.binary(max_size=64))


def feed(parser: Parser, count: int) -> None:
    """The samples as they are, and what comes of them."""
    for sample in parser.samples:
        with contextlib.suppress(*parser.raises):
            parser.feed(sample)

    @settings(max_examples=max(1, count // parser.costs))
    @given(inputs(parser.samples))
    def fed(data: bytes) -> None:
        with contextlib.suppress(*parser.raises):
            parser.feed(data)

    fed()


IN_MEMORY = list(parsers())
OF_FILES = (
    "GGUF", "a model's tokenizer.json", "a model's config.json",
    "a model's generation_config.json", "a model's preprocessor_config.json",
    "a model's tokenizer_config.json", "a model's chat_template.jinja",
    "a quantised model's config.json", "safetensors", "an adapter's adapter_config.json",
    "an adapter's adapter_model.safetensors", "saved chats", "bench's files",
    "which revisions serve",
)  # fmt: skip


@pytest.fixture(scope="module")
def of_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parser]:
    found = {each.name: each for each in file_parsers(tmp_path_factory.mktemp("files"))}
    assert tuple(found) == OF_FILES
    return found


COUNTS = [
    pytest.param(INPUTS, id="few"),
    pytest.param(INPUTS * MANY, id="many", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("parser", IN_MEMORY, ids=lambda parser: parser.name)
def test_whatever_is_sent_ends_in_an_error_of_ours(parser: Parser, count: int) -> None:
    feed(parser, count)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", OF_FILES)
def test_whatever_a_file_holds_ends_in_an_error_of_ours(
    of_files: dict[str, Parser], name: str, count: int
) -> None:
    feed(of_files[name], count)


ROOT = Path(__file__).parents[2]
ROOMS = (
    "protocol", "frontend", "router", "engine", "kv_transfer", "operator", "cli", "vllm_connector",
)  # fmt: skip
READS = re.compile(
    r"(?:json|msgpack)\.decode\(|Decoder\(|\.unpack_from\(|Image\.open\(|b64decode\(|yaml\.load\("
    r"|environment\.from_string\(|PushMultipartParser\(|grammar_from_|safe_open\(|torch\.load\("
    r"|text_string_to_metric_families\(|ast\.parse\("
)
"""What parsing looks like in the source."""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ]},
            {"role": "tool", "tool_call_id": "1", "content": "x"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "max_tokens": 2, "stream": False, "logprobs": True, "stop": ["a"], "seed": 1,
    },
    "/v1/completions": {
        "prompt": [1, 2], "max_tokens": 2, "logprobs": 1, "echo": True, "logit_bias": {"1": 2},
        "kv_transfer_params": {"do_remote_decode": True}, "structured_outputs": {"regex": "a"},
    },
    "/v1/embeddings": {"input": ["a", "b"], "dimensions": 2, "encoding_format": "base64"},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        "max_output_tokens": 2, "tools": [], "text": {"format": {"type": "text"}},
    },
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "max_tokens": 2, "system": [{"type": "text", "text": "b"}],
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/score": {"text_1": "a", "text_2": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1},
    "/tokenize": {"prompt": "a", "add_special_tokens": False},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/kv_transfer/reject": {"kv_transfer_params": {"do_remote_prefill": True}},
    "/v1/batches": {
        "input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h",
    },
}  # fmt: skip
"""A body for each route that takes one; the model is added."""
TOLD = {501, 503}
"""What a server may say of itself: it cannot, or not now."""


@pytest.fixture(scope="module")
def posted() -> Iterator[Callable[[str, bytes], int]]:
    """`posted(path, body)` -> the status of the answer."""
    with asyncio.Runner() as runner:

        async def started() -> Any:
            return build_app(EchoEngine())

        app = runner.run(started())

        async def post(path: str, body: bytes) -> int:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                headers = {"content-type": "application/json"}
                return (await client.post(path, content=body, headers=headers)).status_code

        yield lambda path, body: runner.run(post(path, body))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("path", BODIES)
def test_whatever_a_body_holds_is_no_failure_of_the_server(
    posted: Callable[[str, bytes], int], path: str, count: int
) -> None:
    def answered(data: bytes) -> None:
        status = posted(path, data)
        assert status < 500 or status in TOLD

    sound = json.dumps({"model": "echo", **BODIES[path]}).encode()
    feed(Parser(path, (), answered, (sound,), costs=2), count)


BY_ROUTES = (
    "frontend/diptych_frontend/admin/calls.py",
    "frontend/diptych_frontend/batches_api/routes.py",
    "frontend/diptych_frontend/openai/chat.py",
    "frontend/diptych_frontend/openai/embeddings.py",
    "frontend/diptych_frontend/openai/exchange.py",
    "frontend/diptych_frontend/openai/generation.py",
    "frontend/diptych_frontend/openai/rejection.py",
    "frontend/diptych_frontend/vllm_api/tokenization.py",
)
"""Bodies of requests: these are fed through the routes."""
ELSEWHERE = {
    "protocol/diptych_protocol/threads.py": "decodes nothing",
    "frontend/diptych_frontend/text/seams.py": "what the library says of a tokenizer it has read",
    "engine/diptych_engine/models/packed_file.py": "our own, with digests; test_packed_file.py",
    "engine/diptych_engine/handoff/kept_blocks.py": "our own, with sums; test_kept_blocks.py",
    "engine/diptych_engine/handoff/part_filled_blocks.py": "our own; test_kept_blocks.py",
    "engine/diptych_engine/handoff/kept_leases.py": "our own, with sums; test_kept_blocks.py",
    "frontend/diptych_frontend/api_docs/document.py": "our own schema",
    "frontend/diptych_frontend/batches_api/batch_store.py": "our own state on the disk",
    "frontend/diptych_frontend/batches_api/file_store.py": "our own state on the disk",
    "frontend/diptych_frontend/batches_api/journal.py": "our own journal; tests/…/test_journal.py",
    "frontend/diptych_frontend/quotas/books.py": "our own ledger; tests/frontend/test_quotas.py",
    "frontend/diptych_frontend/core_client/engine_args.py": "the command line",
    "protocol/diptych_protocol/command_line.py": "the command line",
    "frontend/diptych_frontend/model_files/fetch/cache.py": "our own record of a fetched model",
    "router/diptych_router/program/endpoint_picker.py": "our own router",
    "router/diptych_router/telling/page/control.py": "what `diptych up` wrote",
    "engine/diptych_engine/parallel/worker.py": "the configuration, from the lead",
    "engine/diptych_engine/serving/pack_ahead.py": "our own list; models/test_packed_ahead.py",
    "engine/diptych_engine/serving/core_process.py": "the configuration, from the launcher",
    "engine/diptych_engine/scheduling/number_limit.py": "a pattern of our own",
    "frontend/diptych_frontend/confined/processes.py": "two lengths, refused above a bound",
    "frontend/diptych_frontend/images/confined_decoding.py": "our own processes",
    "frontend/diptych_frontend/text/templates/confined_templates.py": "our own processes",
    "frontend/diptych_frontend/text/lark_parts.py": "tests/frontend/test_hopeless_forms.py",
    "frontend/diptych_frontend/text/structured_outputs.py": "what llguidance says of a schema",
    "operator/diptych_operator/arguments.py": "the chart's values",
    "operator/diptych_operator/render/once.py": "our own objects",
    "operator/diptych_operator/routers.py": "our own routers",
    "operator/diptych_operator/kube/client.py": "the API server",
    "cli/diptych/laptop/nursery_process.py": "our own `diptych up`",
    "cli/diptych/engine_load.py": "our own engines",
    "cli/diptych/router_admin.py": "our own routers",
    "cli/diptych/kubectl/cluster.py": "the API server",
    "cli/diptych/kubectl/plan.py": "our own objects",
    "cli/diptych/laptop/rundir.py": "what `diptych up` wrote",
    "cli/diptych/laptop/pods.py": "our own objects",
}
"""What nobody else writes, and who does; or the test of what others write."""


def test_every_parser_of_the_source_is_in_the_table(of_files: dict[str, Parser]) -> None:
    found = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if READS.search(path.read_text())
    }
    listed = {module for each in (*IN_MEMORY, *of_files.values()) for module in each.modules}
    known = {*listed, *BY_ROUTES, *ELSEWHERE}
    assert found - known == set(), "new parsers: give each a row in parser_kit/table.py"
    assert {*BY_ROUTES, *ELSEWHERE} <= found, "these parse nothing any more"
    assert not [module for module in listed if not (ROOT / module).is_file()]


def test_who_decodes_catches_all_that_decoding_raises() -> None:
    """By the one name for it, since the parts that are forgotten are found by strangers."""
    catches = re.compile(r"(?:except|suppress)\b.*msgspec\.(?:DecodeError|MsgspecError)")
    sources = {path for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert [str(path) for path in sources if catches.search(path.read_text())] == []
