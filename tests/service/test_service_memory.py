"""What a service of the default model has in memory after its first answers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from browser_kit import served
from engine_kit.control import Owner
from engine_kit.core import generate
from free_ports import free_port
from model_kit.questions import WHOLE
from processes import running
from waits import PATIENCE_S

from diptych.known_models import DEFAULT
from diptych_frontend.text.input_processor import InputProcessor
from diptych_kernels.packed_product import is_available
from diptych_protocol import EngineConfig, StructuredOutputsParams

ENGINE_MIB, SERVICE_MIB = 440, 1500


def mib_of(process: psutil.Process, kind: str) -> float:
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    found = re.search(rf"^{kind}:\s+(\d+) kB$", rollup, re.MULTILINE)
    assert found
    return int(found[1]) / 1024


@pytest.mark.parametrize(
    ("program", "late"),
    [
        ("diptych_engine.pod", {"numpy"}),  # 15 MiB
        ("diptych_router.__main__", {"gguf", "opentelemetry"}),
        ("diptych.up", {"numpy", "opentelemetry"}),
    ],
)
def test_what_starts_beside_a_core_imports_little(program: str, late: set[str]) -> None:
    """Torch is not even installed where only routers run."""
    late |= {"PIL", "grpc", "kubernetes", "scipy", "torch", "transformers"}
    said = f"import sys, {program}; print({late} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", said], capture_output=True, check=True, text=True)
    assert found.stdout == "set()\n"


def test_an_engine_starts_its_core_before_it_imports_what_it_needs_itself() -> None:
    late = {"diptych_engine.pod", "jinja2", "numpy", "starlette", "tokenizers", "torch", "uvicorn"}
    said = f"import sys, diptych_engine.__main__; print({late} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-c", said], capture_output=True, check=True, text=True)
    assert found.stdout == "set()\n"


def test_an_engine_that_gets_tokens_only_has_no_tokenizer_in_memory(smollm2: str) -> None:
    config = EngineConfig(smollm2)
    assert InputProcessor.of(config).renderer.tokenizer is not None
    assert InputProcessor.of(config, reads_texts=False).renderer.tokenizer is None


def test_only_an_engine_that_was_asked_for_a_form_has_its_tables_in_memory(smollm2: str) -> None:
    owner = Owner(model=smollm2, weight_packing="auto")
    grammars: Any = owner.core.grammars
    generate(owner.core, [1, 2, 3], max_tokens=2)
    assert "tokens" not in vars(grammars._vocabulary.result())
    form = StructuredOutputsParams(regex="[0-9]{3}")
    assert len(generate(owner.core, [1, 2, 3], max_tokens=8, structured_outputs=form)) > 1
    assert "tokens" in vars(grammars._vocabulary.result())


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="nothing is packed on this processor")
def test_engines_are_small_and_share_their_weights(tmp_path: Path) -> None:
    """One engine prefills and two decode. What they share counts once in the sum of all processes
    (PSS), and for each core in what it has resident (RSS). Nothing here is forked from the
    test's own process."""
    program, port = str(Path(sys.executable).parent / "diptych"), free_port()
    command = [program, "up", DEFAULT]
    with served(command, tmp_path, port) as service:
        question = {"messages": [{"role": "user", "content": WHOLE.words}], "max_tokens": 16}
        models = httpx.get(f"{service.url}/v1/models", timeout=PATIENCE_S).json()
        chat = question | {"model": models["data"][0]["id"], "temperature": 0}
        for _ in range(4):  # both decode engines answer
            url = f"{service.url}/v1/chat/completions"
            answer = httpx.post(url, json=chat, timeout=PATIENCE_S).json()
            assert answer["choices"][0]["message"]["content"] == WHOLE.answer
        processes = [
            process
            for process in psutil.Process().children(recursive=True)
            if process.environ().get("XDG_RUNTIME_DIR") == str(tmp_path)
        ]
        engines = running(processes, "core_process")
        assert len(engines) == 3
        for core in engines:
            front_end = core.parent()
            assert front_end is not None
            # It has what engines import from whom it was forked by, and writes to little of it.
            own = mib_of(front_end, "Private_Dirty")
            assert mib_of(core, "Rss") + own < ENGINE_MIB
        assert sum(mib_of(process, "Pss") for process in processes) < SERVICE_MIB
        mapped = [psutil.Process(each.pid).memory_maps() for each in engines]
        files = [{x.path for x in maps if x.path.endswith(".packed")} for maps in mapped]
        assert len(set.union(*files)) == 1
        assert all(files)
