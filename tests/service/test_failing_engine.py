"""An engine that fails at requests loses them to others, until a canary goes well: real engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_kit.failing_executor import FAILS_WHILE
from prometheus_client import CollectorRegistry, generate_latest
from service_kit import LIGHT, all_usable, cores, engine_config, generate, link_of, routing

from diptych.status import read_health
from diptych_router.engines.health_book import State
from diptych_router.telling.admin_port import router_report
from diptych_router.telling.metrics import RouterMetrics

MOODY = "engine_kit.failing_executor:MoodyExecutor"
PROMPT = "The lighthouse keeper climbed the stairs, and"


@pytest.mark.parametrize("bad", ["prefill-0", pytest.param("decode-0", marks=pytest.mark.slow)])
async def test_an_engine_that_fails_is_left_out_and_taken_in_again(
    bad: str,
    smollm2: str,
    keys_dir: Path,
    tmp_path: Path,
    eventually: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mood = tmp_path / "bad mood"
    monkeypatch.setenv(FAILS_WHILE, str(mood))
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    configs = [
        engine_config(name, LIGHT, executor_class=MOODY if name == bad else "") for name in names
    ]
    with cores(keys_dir, *configs) as started:
        prefill, decode = ([c.address for c in pool] for pool in (started[:2], started[2:]))
        async with routing(smollm2, keys_dir, prefill, decode) as client:
            await all_usable(client, 4)
            failing = link_of(client, started[names.index(bad)])
            breaker = failing.breaker
            whole = await generate(client, PROMPT, max_tokens=8)
            mood.touch()
            for _ in range(40):
                if failing.kept_out:
                    break
                output = await generate(client, PROMPT, max_tokens=8)
                assert output.outputs[0].token_ids == whole.outputs[0].token_ids
            assert failing.kept_out
            begun = await generate(client, PROMPT, max_tokens=8)
            assert bad not in (begun.metrics["prefill"], begun.metrics["decode"])
            assert begun.metrics["attempts"] == 1
            await eventually(lambda: breaker.badness()[0] > 1)  # a canary failed
            [told] = [e for e in router_report(client).engines if e.engine_id == failing.name]
            assert (told.breaker, told.kept_out, told.failures) == ("open", True, breaker.failures)
            registry = CollectorRegistry()
            registry.register(RouterMetrics(client))
            text = generate_latest(registry).decode()
            assert read_health(text)[bad] == "failing"
            assert f'engine_failures_total{{engine="{failing.role}/{bad}",kind="error"' in text
            mood.unlink()
            await eventually(lambda: breaker.state is State.CLOSED)
            assert not failing.kept_out
