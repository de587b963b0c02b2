"""Cores start without what only others' code needs of torch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from engine_kit.wire import Client, start
from free_ports import free_port
from waits import PATIENCE_S, wait_until

from diptych_engine.execution.lean_torch import WITH_CUDA
from diptych_protocol import EngineConfig

LATE = {
    *("PIL", "grpc", "httpx", "kubernetes", "numba", "opentelemetry", "scipy", "starlette"),
    *("torch._decomp", "torch._dynamo", "torch._inductor", "torch._prims", "torch._refs"),
    *("jinja2", "torch.ao.quantization", "torch.distributions.normal", "torch.export.unflatten"),
    *("transformers", "uvicorn", "xgrammar"),
}
"""What no core needs for a token."""


def test_what_a_core_has_imported_by_its_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # a start that is no fork
    path = f"ipc://{tmp_path}/core"
    process, client = start(path), Client(path)
    client.add("first", max_tokens=1)
    assert len(client.read("first")[0]) == 1
    client.socket.close()
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    lines = capfd.readouterr().err
    imported = set(re.findall(r"^import time: .*\| +(\S+)$", lines, re.MULTILINE))
    assert "torch.functional" in imported
    assert not LATE & imported


def test_a_core_imports_nothing_that_its_front_end_has_imported_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    config, log = tmp_path / "engine.json", tmp_path / "log"
    config.write_bytes(msgspec.json.encode(EngineConfig(model="dummy://?num_hidden_layers=1")))
    command = [sys.executable, "-m", "diptych_engine", "--config", str(config), "--port"]
    with log.open("wb") as output:
        pod = subprocess.Popen([*command, str(free_port())], stderr=output)
    wait_until(lambda: b"the engine core is ready" in log.read_bytes())
    pod.terminate()
    pod.wait(PATIENCE_S)
    imported = re.findall(r"^import time: .*\| +(\S+)$", log.read_text(), re.MULTILINE)
    for name in ("msgspec", "zmq", "diptych_protocol.wire", "torch.functional"):
        assert imported.count(name) == 1, name


LINKED = """
import sys
from importlib.machinery import ExtensionFileLoader as Loader
from pathlib import Path
import diptych_engine.__main__
from diptych_engine.execution.lean_torch import link_torch, start_lean
start_lean()
link_torch()
made, make = [], Loader.create_module
Loader.create_module = lambda self, spec: made.append(spec.name) or make(self, spec)
import diptych_engine.serving.core_process
assert "libtorch_cpu" in Path("/proc/self/maps").read_text()
print(*made[:made.index("torch._C")])
"""


@pytest.mark.skipif(
    any((Path(root) / "torch" / WITH_CUDA).exists() for root in sys.path),
    reason="torch for a GPU is not linked early",
)
def test_nothing_waits_for_the_linker_while_it_links_torch() -> None:
    """An import that loads a library, in front of torch's, would have to."""
    ran = subprocess.run(
        [sys.executable, "-c", LINKED], check=True, timeout=PATIENCE_S, stdout=subprocess.PIPE
    )
    assert ran.stdout.split() == []


THEN = {
    "code of others": "from diptych_engine.execution.worker_extension import named; "
    "named('torch:compile', 'x')",
    "a compiler": "import torch._dynamo",
    "an export": "torch.export.export",
    "a part of what exports": "from torch.export import unflatten",
    "what quantises": "torch.nn.quantized.Linear",
    "a part of it": "import torch.nn.intrinsic.qat",
    "a distribution": "torch.distributions.Normal(0, 1)",
}
"""What makes torch whole."""
PROGRAM = """
import os, sys
from diptych_engine.execution.lean_torch import start_lean, whole_torch
start_lean()
import torch
assert "torch._refs" not in sys.modules
assert torch.Generator().manual_seed(1).initial_seed() == 1
for then in sys.argv[1:]:
    if os.fork():
        assert os.wait()[1] == 0, then
        continue
    exec(then)
    whole_torch()  # once more: nothing is imported twice
    assert torch.linalg.matrix_exp(torch.empty(2, 2, device="meta")).shape == (2, 2)
    assert torch.Generator().manual_seed(1).initial_seed() == 1
    if "export" in then:
        assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
        exported = torch.export.export(torch.nn.Identity(), (torch.ones(1),))
        assert exported.module()(torch.ones(1)).item() == 1
    os._exit(0)
"""


QUICK = ("an export", "what quantises")
"""An attribute, and a module that is almost empty until somebody wants it."""


@pytest.mark.parametrize(
    "then", [QUICK, pytest.param([x for x in THEN if x not in QUICK], marks=pytest.mark.slow)]
)
def test_torch_is_whole_before_whoever_needs_it(then: Sequence[str]) -> None:
    """`matrix_exp` of a tensor without data is described in Python only."""
    needs = [THEN[each] for each in then]
    subprocess.run([sys.executable, "-c", PROGRAM, *needs], check=True, timeout=PATIENCE_S)
