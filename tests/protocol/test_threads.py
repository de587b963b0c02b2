"""The model's share of the processors, and structs that several threads decode first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cases import each
from waits import PATIENCE_S

from diptych_protocol.threads import model_threads

ROOT = Path(__file__).parents[2]
DECODED_AT_ONCE = """
import sys, threading, types
import msgspec
from diptych_protocol.threads import resolve_struct_types

sys.setswitchinterval(1e-6)
HEAD = "from __future__ import annotations\\nimport msgspec\\nfrom typing import Annotated\\n"
FIELDS = "".join(
    f"    field{j}: Annotated[int, msgspec.Meta(ge=0)] | None = None\\n" for j in range(8)
)

def new_structs(number):
    module = sys.modules[f"round{number}"] = types.ModuleType(f"round{number}")
    code = HEAD + f"class Leaf(msgspec.Struct):\\n{FIELDS}"
    code += f"class Root(msgspec.Struct):\\n{FIELDS}    leaf: Leaf | None = None\\n"
    exec(code, module.__dict__)
    return module.Root

def decode(struct, together):
    together.wait()
    msgspec.json.decode(b'{"field0": 1, "leaf": {"field1": 2}}', type=struct)

for number in range(30):
    struct, together = new_structs(number), threading.Barrier(4)
    resolve_struct_types()
    threads = [threading.Thread(target=decode, args=(struct, together)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@each(
    ("processors", "threads"),
    [(0.2, 1), (1, 1), (1.9, 1), (2, 2), (2.9, 2), (3, 2), (4, 3), (4.5, 3), (64, 63)],
)
def test_from_three_processors_on_one_is_spare(processors: float, threads: int) -> None:
    assert model_threads(processors) == threads


@pytest.mark.parametrize(
    ("processors", "engines", "threads"), [(2, 2, 1), (1, 4, 1), (9, 2, 4), (64, 4, 15)]
)
def test_engines_share_what_is_there(processors: float, engines: int, threads: int) -> None:
    assert model_threads(processors, engines) == threads


def test_several_threads_may_decode_a_struct_first() -> None:
    """Without `resolve_struct_types` the first rounds end with a segmentation fault."""
    run = subprocess.run(
        [sys.executable, "-c", DECODED_AT_ONCE],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
