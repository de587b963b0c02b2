"""/score and /rerank."""

from __future__ import annotations

import math
from typing import Any

import httpx
import numpy as np
import pytest
from cases import each

from diptych_frontend.openai.embeddings import MAX_INPUTS
from diptych_frontend.vllm_api.scoring import RERANK_PATHS, SCORE_PATHS, cosines
from diptych_protocol import EngineOverloadedError

SCORE, RERANK = SCORE_PATHS[0], RERANK_PATHS[0]


async def ask(http: httpx.AsyncClient, path: str, **fields: Any) -> Any:
    answer = await http.post(path, json={"model": "echo", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_cosines_of_pairs_and_of_one_with_all() -> None:
    east, north = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
    between = np.array([0.6, 0.8], np.float32)
    assert cosines([east], [east, north, between]) == pytest.approx([1, 0, 0.6])
    assert cosines([east, north], [between, between]) == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("path", SCORE_PATHS)
@pytest.mark.parametrize(
    ("first", "second"),
    [("queries", "documents"), ("text_1", "text_2"), ("data_1", "data_2"), ("queries", "items")],
)
async def test_texts_are_scored_with_one_another(
    http: httpx.AsyncClient, path: str, first: str, second: str
) -> None:
    told = await ask(http, path, **{first: "ab", second: ["ab", "a", "cc"]})
    assert (told["object"], told["model"]) == ("list", "echo")
    assert [each["index"] for each in told["data"]] == [0, 1, 2]
    scores = [each["score"] for each in told["data"]]
    assert scores == pytest.approx([1, 1 / math.sqrt(2), 0], abs=1e-6)
    assert told["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    told = await ask(http, path, **{first: ["a", "b"], second: ["b", "b"]})
    assert [each["score"] for each in told["data"]] == pytest.approx([0, 1])


@pytest.mark.parametrize("path", RERANK_PATHS)
async def test_the_nearest_documents_come_first(http: httpx.AsyncClient, path: str) -> None:
    documents = ["cc", "ab", "a"]
    told = await ask(http, path, query="ab", documents=documents)
    results = told["results"]
    assert [each["index"] for each in results] == [1, 2, 0]
    assert [each["document"]["text"] for each in results] == ["ab", "a", "cc"]
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)
    told = await ask(http, path, query="ab", documents=documents, top_n=2)
    assert [each["index"] for each in told["results"]] == [1, 2]
    told = await ask(http, path, query="ab", documents=documents, top_n=0)
    assert len(told["results"]) == 3
    told = await ask(http, path, query="ab", documents=documents, return_documents=False)
    assert [sorted(each) for each in told["results"]] == [["index", "relevance_score"]] * 3


async def test_options_reach_the_engine(http: httpx.AsyncClient, engine: Any) -> None:
    await ask(http, RERANK, query="a", documents="b", priority=3, cache_salt="s")
    assert len(engine.encoded) == 2
    for _, priority, prompt in engine.encoded:
        assert (priority, prompt["cache_salt"]) == (3, "s")
    assert len({request_id for request_id, _, _ in engine.encoded}) == 2


@each(
    ("path", "body", "status", "param"),
    [
        (SCORE, {}, 400, "queries"),
        (SCORE, {"queries": "a"}, 400, "documents"),
        (SCORE, {"queries": "a", "text_1": "a", "documents": "b"}, 400, "queries"),
        (SCORE, {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, 400, "queries"),
        (SCORE, {"queries": "a", "documents": []}, 400, "documents"),
        (SCORE, {"queries": "a", "documents": [1]}, 400, "documents"),
        (SCORE, {"queries": "a", "documents": ""}, 400, "documents"),
        (SCORE, {"queries": "a", "documents": ["b"] * (MAX_INPUTS + 1)}, 400, "documents"),
        (SCORE, {"queries": "a", "documents": "b", "model": "nobody"}, 404, "model"),
        (SCORE, {"queries": "a", "documents": "b", "instruction": "c"}, 400, "instruction"),
        (
            SCORE,
            {"queries": "a", "documents": "b", "max_tokens_per_query": 1},
            400,
            "max_tokens_per_query",
        ),
        (RERANK, {"documents": "b"}, 400, "query"),
        (RERANK, {"query": "a"}, 400, "documents"),
        (RERANK, {"query": "", "documents": "b"}, 400, "query"),
        (SCORE, {"text_1": ["a", ""], "text_2": ["b", "c"]}, 400, "text_1"),
        (SCORE, {"text_1": "a", "text_2": ["b", ""]}, 400, "text_2"),
        (RERANK, {"query": "a", "documents": "b", "top_n": -1}, 400, "top_n"),
        (
            RERANK,
            {"query": "a", "documents": "b", "max_tokens_per_doc": 9},
            400,
            "max_tokens_per_doc",
        ),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await http.post(path, json={"model": "echo", **body})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


async def test_a_full_engine_refuses(http: httpx.AsyncClient, engine: Any) -> None:
    engine.refusal = EngineOverloadedError("full")
    answer = await http.post(SCORE, json={"model": "echo", "queries": "a", "documents": "b"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
