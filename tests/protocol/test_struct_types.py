"""Structs are ready before there are threads: their first use in several would end the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from waits import PATIENCE_S

ROOT = Path(__file__).parents[2]
DECODED_AT_ONCE = """
import sys, threading, types
import msgspec
from diptych_protocol.struct_types import resolve_struct_types

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


def test_several_threads_may_decode_a_struct_first() -> None:
    """Without `resolve_struct_types` the first rounds end with a segmentation fault."""
    run = subprocess.run(
        [sys.executable, "-c", DECODED_AT_ONCE],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
