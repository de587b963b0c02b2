"""The structures and constants of `libucp.py` are those of the header that libucx brings."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import libucx
import pytest
from cases import each

from diptych_kv_transfer.transports.ucx import libucp

INCLUDE = Path(libucx.__file__).parent / "include"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
STRUCTURES: dict[str, type[ctypes.Structure]] = {
    (found.__doc__ or "").split("`")[1]: found
    for found in vars(libucp).values()
    if isinstance(found, type) and issubclass(found, ctypes.Structure)
}
CONSTANTS = {
    name: value
    for name, value in vars(libucp).items()
    if name.isupper() and isinstance(value, int) and name != "SOCKADDR_STORAGE_BYTES"
}
IN_C = {
    "OK": "UCS_OK",
    "IN_PROGRESS": "UCS_INPROGRESS",
    "THREAD_MODE_SERIALIZED": "UCS_THREAD_MODE_SERIALIZED",
    "ERR_BUSY": "UCS_ERR_BUSY",
    "ERR_LAST": "UCS_ERR_LAST",
}
"""Names of constants that are not ours after `UCP_`."""
PADDING = {"struct sockaddr_storage"}
"""Structures of whose fields only the size counts."""


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """What a C compiler makes of the header: sizes, offsets and constants by expression."""
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    asked = [IN_C.get(name, f"UCP_{name}") for name in CONSTANTS]
    asked += ["UCP_API_MAJOR", "UCP_API_MINOR"]
    for name, structure in STRUCTURES.items():
        asked.append(f"sizeof({name})")
        if name not in PADDING:
            asked += [f"offsetof({name}, {field[0]})" for field in structure._fields_]
    folder = tmp_path_factory.mktemp("header")
    lines = "\n".join(f'printf("%s=%ld\\n", "{one}", (long)({one}));' for one in asked)
    source = folder / "layout.c"
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include <ucp/api/ucp.h>\n"
        f"int main(void) {{\n{lines}\nreturn 0;\n}}\n"
    )
    program = folder / "layout"
    subprocess.run([COMPILER, f"-I{INCLUDE}", str(source), "-o", str(program)], check=True)
    out = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    return {
        key: int(value)
        for key, _, value in (line.rpartition("=") for line in out.split("\n") if line)
    }


@each("name", sorted(CONSTANTS))
def test_a_constant_has_the_value_of_the_header(header: dict[str, int], name: str) -> None:
    assert header[IN_C.get(name, f"UCP_{name}")] == CONSTANTS[name]


@each("name", sorted(STRUCTURES))
def test_a_structure_has_the_layout_of_the_header(header: dict[str, int], name: str) -> None:
    structure = STRUCTURES[name]
    assert ctypes.sizeof(structure) == header[f"sizeof({name})"]
    for field, *_ in structure._fields_ if name not in PADDING else ():
        assert getattr(structure, field).offset == header[f"offsetof({name}, {field})"], field


def test_the_header_is_of_the_version_that_ucx_is_asked_for(header: dict[str, int]) -> None:
    assert (header["UCP_API_MAJOR"], header["UCP_API_MINOR"]) == libucp.API_VERSION


def test_ucx_is_told_before_it_is_loaded_not_to_spin() -> None:
    """Every engine pays for loading it: with UCX's own 50 ms at each of eight functions, 0.4 s."""
    name = "UCX_MEM_BISTRO_GRACE_DURATION"
    code = f"""
import os, sys
def saw(event, arguments):
    if event == "ctypes.dlopen" and "libuc" in str(arguments[0]):
        print(os.environ.get({name!r}))
sys.addaudithook(saw)
import diptych_kv_transfer.transports.ucx.libucp
"""
    # What this process has loaded already is in its environment now.
    fresh = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=fresh, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == {"1ms"}
