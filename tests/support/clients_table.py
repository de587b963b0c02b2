"""Writes the table of docs/clients.md, from tests that ran.

`PYTHONPATH=tests/support python -m clients_table` runs the tests of all clients, and
writes the row of each client whose tests passed, with the version that they met. Where a client is
not installed its tests are skipped, and its row stays. The table's own test fails when a row says
something else than is said here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final, NamedTuple

from install_clients import PACKAGES
from install_vllm import VERSION as VLLM
from told_by_tests import passed, put

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- clients -->\n", "<!-- end of clients -->\n"
OTHERS = "tests/service/test_other_clients.py::"
OFFICIAL = "tests/service/test_official_clients.py::"
SERVED = "tests/service/test_served.py::"


class Client(NamedTuple):
    """A row."""

    version: str
    works: str
    tests: tuple[str, ...]
    """They tell that it works; none: what its files are for says who reads them."""


def _installed(name: str) -> str:
    """A client of `make clients`."""
    package, _, number = PACKAGES[name].split()[0].partition("==")
    return f"`{package}` {number}"


CLIENTS: Final[Mapping[str, Client]] = {
    "OpenAI's client": Client(
        f"`openai` {version('openai')}",
        "chats, completions, embeddings and [responses](apis.md), whole and streamed; tools, "
        "schemas",
        (
            f"{SERVED}test_the_capital_of_france_through_the_official_client",
            f"{SERVED}test_the_same_answer_as_a_stream_with_usage",
            f"{SERVED}test_completions_stop_n_and_logprobs",
            "tests/service/test_embeddings.py"
            "::test_the_openai_client_gets_embeddings_of_every_form_of_input",
            f"{OFFICIAL}test_openais_client_gets_responses_whole_and_streamed",
            f"{OFFICIAL}test_openais_client_goes_on_with_a_call_in_a_stored_response",
            f"{OFFICIAL}test_openais_client_gets_a_response_of_a_schema",
        ),
    ),
    "Anthropic's client": Client(
        f"`anthropic` {version('anthropic')}",
        "[messages](apis.md#anthropics-messages-api), whole and streamed; tools, schemas, counts",
        (
            f"{OFFICIAL}test_anthropics_client_gets_the_models_answer",
            f"{OFFICIAL}test_anthropics_client_streams_the_models_answer",
            f"{OFFICIAL}test_anthropics_client_gets_a_call_that_fits_its_schema",
            f"{OFFICIAL}test_anthropics_client_gets_output_of_a_schema",
        ),
    ),
    "LangChain": Client(
        _installed("langchain"),
        "`ChatOpenAI`, also with tools, forms and `use_responses_api`; `OpenAI`; "
        "`OpenAIEmbeddings`",
        (f"{OTHERS}test_langchain_gets_what_the_model_says",),
    ),
    "LiteLLM": Client(
        _installed("litellm"),
        "chats of the providers `openai`, `hosted_vllm`, `anthropic`; with `openai` tools, "
        "schemas, completions, embeddings; `rerank` with `hosted_vllm`",
        (f"{OTHERS}test_litellm_gets_what_the_model_says",),
    ),
    "llama-index": Client(
        _installed("llama-index"),
        "`OpenAILike`: chats, completions, calls, `structured_predict`, `FunctionAgent`; "
        "`OpenAILikeResponses`",
        (f"{OTHERS}test_llama_index_gets_what_the_model_says",),
    ),
    "instructor": Client(
        _installed("instructor"),
        "the modes `TOOLS`, `TOOLS_STRICT`, `JSON_SCHEMA`, `RESPONSES_TOOLS`, whole and partial",
        (f"{OTHERS}test_instructor_gets_its_model_in_each_mode",),
    ),
    "pydantic-ai": Client(
        _installed("pydantic-ai"),
        "agents through both APIs: streams, tools, `NativeOutput`, `ToolOutput`, errors",
        (f"{OTHERS}test_agents_of_pydantic_ai_get_what_the_model_says",),
    ),
    "OpenAI's Agents SDK": Client(
        _installed("openai-agents"),
        "agents through both APIs: streams, tools, output types, hand-offs, sessions, "
        "`previous_response_id`",
        (f"{OTHERS}test_openais_agents_get_what_the_model_says",),
    ),
    "lm-evaluation-harness": Client(
        _installed("lm-eval"),
        "`local-completions`: multiple choice and generation; its likelihoods are the engine's",
        (f"{OTHERS}test_lm_evaluation_harness_sees_the_probabilities_of_the_engine",),
    ),
    "Open WebUI": Client(
        "its requests, November 2026",
        "models, chats, titles, calls in earlier turns",
        (f"{OFFICIAL}test_requests_of_open_webui_are_answered",),
    ),
    "vLLM's benchmark": Client(
        f"`vllm bench serve` of vLLM {VLLM}",
        "the backends `openai` and `openai-chat`",
        (f"{OTHERS}test_vllm_bench_serve_measures",),
    ),
    "guidellm": Client(
        _installed("guidellm"),
        "`openai_http`, synthetic prompts, concurrent streams",
        (f"{OTHERS}test_guidellm_measures",),
    ),
    "aiperf": Client(
        _installed("aiperf"), "`profile` of streamed chats", (f"{OTHERS}test_aiperf_measures",)
    ),
    "Envoy": Client(
        _installed("envoy"),
        "our [endpoint picker](gitops.md), bodies in all modes",
        (
            "tests/service/test_gateways.py"
            "::test_a_gateway_reaches_the_engines_through_the_router_that_is_picked",
        ),
    ),
    "36 chat templates": Client(
        _installed("axolotl"),
        "rendered as in transformers",
        (
            "tests/frontend/test_template_fidelity.py"
            "::test_published_templates_render_as_in_transformers",
        ),
    ),
    "JSON schemas": Client(_installed("check-jsonschema"), "compiled", ()),
    "JSON schemas ": Client(_installed("validate-pyproject-schema-store"), "compiled", ()),
}


def row(name: str) -> str:
    return f"| {name.strip()} | {CLIENTS[name].version} | {CLIENTS[name].works} |\n"


def written() -> str:
    """The table as the page has it."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip() + "\n"


def table(old: str, told: Collection[str]) -> str:
    """The table with the rows of clients that work, by the tests that passed; others' rows stay."""
    rows = ["| client | version | what works |\n", "|---|---|---|\n"]
    ran = {node_id.partition("[")[0] for node_id in told}
    for name, client in CLIENTS.items():
        before = re.search(rf"^\| {re.escape(name.strip())} \|.*\n", old, re.MULTILINE)
        if ran.issuperset(client.tests):
            rows.append(row(name))
        elif before is not None:
            rows.append(before[0])
    return "".join(rows)


def main() -> None:
    tests = {test for client in CLIENTS.values() for test in client.tests}
    put(PAGE, BEGIN, END, table(written(), passed(sorted(tests))))


if __name__ == "__main__":
    main()
