"""A router names the blocks of a prompt as the engines do, whatever these depend on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kit.core import core_request, make_core, run
from model_kit.checkpoints import random_tensors, save_adapter, save_model
from model_kit.pictures import encoded, picture
from model_kit.seeing import Published

from diptych_engine.control.core import EngineCore
from diptych_frontend.core_client.prefix_news import PrefixNews
from diptych_frontend.model_files.model_source import resolve_model
from diptych_frontend.text.renderer import TextRenderer
from diptych_protocol import EngineCoreRequest, LoRARequest
from diptych_router.engines.known_prefixes import BlockNamer, BlockNaming, KnownPrefixes
from diptych_router.requests.records import record_of
from diptych_router.requests.routed_request import RoutedRequest

PROMPT = list(range(1, 50))


class Engine:
    """A core, and what a router knows of it by its news alone."""

    def __init__(self, core: EngineCore) -> None:
        self.core, self.known = core, KnownPrefixes()
        self._news = PrefixNews(core.scheduler.pool, core.adapters.digests)
        snapshot = self._news.follow(b"router")
        assert snapshot is not None
        self.known.take("engine", snapshot)

    def compute(self, request: EngineCoreRequest) -> None:
        [outputs] = run(self.core, request).values()
        assert outputs[-1].error is None
        changes = self._news.take(0.0, at_once=True)
        assert changes is None or self.known.take("engine", changes)

    def num_cached(self, request: EngineCoreRequest) -> int:
        """Blocks of a prompt that the router takes the engine to have."""
        view = RoutedRequest(request, 4096, record_of(request, 0.0), BlockNamer()).view
        size = self.core.description.block_size
        digest = self.known.adapters("engine").get(view.adapter, "")
        assert view.keys is not None
        return self.known.num_cached("engine", view.keys(BlockNaming(size, digest)))


def asked(name: str, prompt: list[int] = PROMPT, **fields: Any) -> EngineCoreRequest:
    return core_request(name, prompt, max_tokens=1, **fields)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("named")
    core = make_core(save_model(folder / "base", random_tensors(0)), max_loras=2)
    for number, name in enumerate(("one", "two"), 1):
        save_adapter(folder / name, number)
    yield Engine(core)
    core.close()


def adapter(folder: Path, name: str) -> LoRARequest:
    return LoRARequest(name, {"one": 1, "two": 2}[name], str(folder / name))


def test_a_salt_is_part_of_the_names(engine: Engine) -> None:
    engine.compute(asked("plain"))
    assert engine.num_cached(asked("again")) == len(PROMPT) // 16
    assert engine.num_cached(asked("salted", cache_salt="pepper")) == 0
    engine.compute(asked("salted", cache_salt="pepper"))
    assert engine.num_cached(asked("again", cache_salt="pepper")) == len(PROMPT) // 16


def test_an_adapter_is_part_of_the_names(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "named0"
    prompt = PROMPT[::-1]
    engine.compute(asked("one", prompt, lora_request=adapter(folder, "one")))
    engine.compute(asked("warm", [1], lora_request=adapter(folder, "two")))
    for name, cached in (("one", len(prompt) // 16), ("two", 0)):
        again = asked("again", prompt, lora_request=adapter(folder, name))
        assert engine.num_cached(again) == cached, name
    assert engine.num_cached(asked("none", prompt)) == 0


def test_images_and_their_places_are_part_of_the_names(tmp_path: Path) -> None:
    published = Published(tmp_path)
    engine = Engine(make_core(published.uri, block_size=4))
    renderer = TextRenderer(resolve_model(published.uri, weights=False))

    def seeing(name: str, *seeds: int) -> EngineCoreRequest:
        images: Any = {"image": [encoded(picture(seed)) for seed in seeds]}
        text = {"prompt": "<image>and<image>?", "multi_modal_data": images}
        prompt: Any = renderer.render_prompt(text)  # type: ignore[arg-type]
        return asked(name, prompt["prompt_token_ids"], mm_features=prompt["mm_features"])

    first = seeing("first", 1, 2)
    engine.compute(first)
    whole = (len(first.prompt_token_ids or ()) - 1) // 4
    assert engine.num_cached(seeing("again", 1, 2)) == whole
    assert 0 < engine.num_cached(seeing("half", 1, 3)) < whole
    assert engine.num_cached(seeing("swapped", 2, 1)) < engine.num_cached(seeing("half", 1, 3))
    engine.core.close()
