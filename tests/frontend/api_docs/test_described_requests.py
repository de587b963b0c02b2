"""Requests that schemathesis makes up from /openapi.json, and a real engine that answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from waits import PATIENCE_S

from diptych_engine import AsyncLLM, EngineArgs
from diptych_frontend.api_docs.document import openapi_document
from diptych_frontend.app import build_app
from diptych_frontend.batches_api.batch_run import Manners
from diptych_frontend.batches_api.service import BatchService
from diptych_frontend.observability.metrics import ServerMetrics
from diptych_protocol.config import Batches

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CONTEXT = 64
"""Tokens of a prompt and its answer: requests that say nothing of their length end soon."""
REQUESTS = 20
TOLD = {501, 503}
"""What a server may say of itself: it cannot, or not now."""
FORM = "POST /v1/files"
"""Takes no JSON; tests/parsers has it."""
MADE_UP = [
    (label, mode)
    for path, methods in openapi_document()["paths"].items()
    for method, operation in methods.items()
    for mode in ("positive", "negative")
    if (label := f"{method.upper()} {path}") != FORM
    and (mode == "positive" or "requestBody" in operation)
]
"""As described, or nearly so. A request without a body is hardly ever wrong."""
PARTS = ("method", "url", "headers", "params", "json", "data")
URL = "http://localhost"

Send = Callable[[Any], httpx.Response]


@pytest.fixture(scope="module")
def send(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Send]:
    """Sends a case of schemathesis to the app of an engine, straight."""
    with asyncio.Runner() as runner:

        async def started() -> tuple[AsyncLLM, BatchService, Any]:
            engine = AsyncLLM.from_engine_args(
                EngineArgs(smollm2, max_model_len=CONTEXT, num_gpu_blocks_override=256)
            )
            metrics = ServerMetrics(engine.model_name, engine.stats_by_engine)
            folder = tmp_path_factory.mktemp("batches")
            manners = Manners(is_client=lambda name: True)
            batches = BatchService(folder, Batches(), metrics, manners)
            return engine, batches, build_app(engine, metrics=metrics, batches=batches)

        engine, batches, app = runner.run(started())

        async def sent(case: Any) -> httpx.Response:
            # It knows no name that is served here.
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = engine.model_name
            request = httpx.Request(**_parts(case))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, timeout=PATIENCE_S) as client:
                return await client.send(request)

        async def ended() -> None:
            await batches.close()
            engine.shutdown()

        try:
            yield lambda case: runner.run(sent(case))
        finally:
            runner.run(ended())


@pytest.fixture(scope="module")
def made_up() -> Callable[[str, str], Any]:
    """`made_up(label, mode)`: a strategy for cases of an operation."""
    import schemathesis  # takes two seconds, in every process that looks at this file

    schema = schemathesis.openapi.from_dict(openapi_document())
    found: dict[str, Any] = {}
    for each in schema.get_all_operations():
        operation: Any = each.ok()  # type: ignore[union-attr]
        found[operation.label] = operation
    return lambda label, mode: found[label].as_strategy(
        generation_mode=schemathesis.GenerationMode(mode)
    )


def _parts(case: Any) -> dict[str, Any]:
    """A request in the terms of httpx."""
    parts = case.as_transport_kwargs(base_url=URL)
    found = {name: parts[name] for name in PARTS if name in parts}
    if "data" in found:
        found["content"] = found.pop("data")
    return found


@pytest.mark.parametrize(("label", "mode"), MADE_UP)
def test_no_described_request_and_nothing_like_one_is_a_failure_of_the_server(
    send: Send, made_up: Callable[[str, str], Any], label: str, mode: str
) -> None:
    @settings(max_examples=REQUESTS)
    @given(case=made_up(label, mode))
    def answered(case: Any) -> None:
        answer = send(case)
        assert answer.status_code < 500 or answer.status_code in TOLD, answer.text
        if answer.status_code < 400:
            case.operation.validate_response(answer)

    answered()
