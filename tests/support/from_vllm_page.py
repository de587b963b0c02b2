"""Writes docs/from-vllm.md: what of vLLM's names is here, from the code that has them.

Run `python tests/support/from_vllm_page.py` after changing `as_vllm`, `EngineArgs` or
`SamplingParams`. The page's own test fails when the page is old.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from diptych_engine.as_vllm import MODULES
from diptych_frontend.core_client.engine_args import OUR_NAMES, EngineArgs
from diptych_frontend.core_client.foreign_options import Foreign, foreign_fields
from diptych_frontend.v0.params import SamplingParams
from diptych_protocol import EngineCoreRequest

PAGE = Path(__file__).parents[2] / "docs" / "from-vllm.md"

HEAD = """# From vLLM

A program that was written for vLLM's engine runs when its imports change from `vllm` to
`diptych_engine.as_vllm`:

```python
from diptych_engine.as_vllm import LLM, SamplingParams
from diptych_engine.as_vllm.v1.engine.async_llm import AsyncLLM
```

The other way round, an engine of your own serves under this project's HTTP server
(`diptych_frontend.app.build_app(engine)`) if it has the members of vLLM's `EngineClient`, with
vLLM's parameters. A router's `tenant` reaches only engines whose methods take it.

What differs in detail has its line in [0051](decisions/0051-differences-from-the-documents.md) (V1)
and [0053](decisions/0053-v0-names-in-one-room.md) (V0).
`python tests/support/from_vllm_page.py` writes this page from the code, and a test keeps it true.
"""

NEWER: Final[dict[str, tuple[bool, str]]] = {
    "check_admission": (True, "synchronous, with the number of requests and the request's id"),
    "get_kv_event_sources": (True, "empty: engines tell the routers that are connected to them"),
    "release_kv_cache_memory": (False, "`sleep(1)` gives KV and weights back together"),
    "compute_weight_checksums": (False, "a worker method of your own, by `collective_rpc`"),
    "handle_fault": (False, "a router does this"),
}
"""Members that vLLM 0.33 has and the documents have not: whether they are here, and what else."""
PARTS: Final = {
    "`wake_up() -> bool`": "None comes back; ask `is_sleeping()`",
    "`generate(session_id=…, kv_hints=…)`": "a `TypeError`; a router remembers prefixes by itself",
    "`FinishReason.REPETITION`": "never sent: nobody looks for repetition",
    "`EngineCoreRequestType.WAKEUP`": "refused from a socket, as every byte that is no request",
}

WIRE = """## The wire

A core answers a program that writes vLLM's messages by hand over a ZMQ DEALER, within these bounds:

- Frames are `[type byte, msgpack, arrays…]`, with the bytes of `EngineCoreRequestType`. A core's
  answers are `EngineCoreOutputs`, and `ENGINE_CORE_DEAD` alone.
- An `EngineCoreRequest` is an array. Its first {num_theirs} places are those of the first document
  of the messages (vLLM 0.14); ours follow. vLLM moves places from one version to the next, so bytes
  of 0.33 are other bytes.
- Its parameters are a map. **The parameters that vLLM's own front-end writes are refused today**:
  they have private fields (`_all_stop_token_ids`, …), and an unknown field is never guessed at.
  The fields that are read are the sampling parameters that work, listed above.
- There is no handshake (HELLO, READY): the utility call `describe` greets a core. Utility calls are
  `(client_index, call_id, method, args)`, aborts a list of ids.
"""


def page() -> str:
    """The text of the page."""
    return "\n".join([HEAD, *_imports(), *_arguments(), *_params(), *_newer(), _wire()])


def _imports() -> Iterator[str]:
    yield "## Imports\n\n| `diptych_engine.as_vllm` + | names |\n|---|---|"
    for module, names in MODULES.items():
        if names:
            where = f"`.{module}`" if module else ""
            yield f"| {where} | {', '.join(f'`{name}`' for name in sorted(names))} |"
    yield "\nAny other name is an `ImportError`.\n"


def _arguments() -> Iterator[str]:
    yield (
        "## Arguments of an engine\n\n"
        "The [arguments](arguments.md) of `EngineArgs` work, four of them also as "
        f"{', '.join(f'`{name}`' for name in OUR_NAMES)}. These are only understood. Any other is "
        "a `TypeError`.\n"
    )
    yield from _foreign(EngineArgs)
    yield "| `tokenizer` | the model itself | refused | it is the model's own |"
    yield "| `quantization` | what the model's files are | refused | the error names both |\n"


def _params() -> Iterator[str]:
    base = SamplingParams.__mro__[1]
    yield (
        f"## Sampling parameters\n\n{_listed(base)} work as in vLLM. These are only understood:\n"
    )
    yield from _foreign(SamplingParams)
    yield ""


def _foreign(kind: type[msgspec.Struct]) -> Iterator[str]:
    yield "| name | accepted, besides None | other values | why |\n|---|---|---|---|"
    for name, mark in sorted(foreign_fields(kind).items()):
        yield f"| `{name}` | {_same(mark)} | {_fate(mark)} | {mark.why} |"


def _same(mark: Foreign) -> str:
    return ", ".join(f"`{value!r}`" for value in mark.same)


def _fate(mark: Foreign) -> str:
    return "ignored, with a line of the log" if mark.ignored else "refused"


def _newer() -> Iterator[str]:
    yield "## Newer than the documents: vLLM 0.33\n\n| name | here | |\n|---|---|---|"
    for name, (here, what) in NEWER.items():
        yield f"| `{name}` | {'yes' if here else 'no'} | {what} |"
    for name, what in PARTS.items():
        yield f"| {name} | no | {what} |"
    yield ""


def _wire() -> str:
    num_theirs = 1 + EngineCoreRequest.__struct_fields__.index("external_req_id")
    return WIRE.format(num_theirs=num_theirs)


def _listed(kind: Any) -> str:
    return ", ".join(f"`{name}`" for name in kind.__struct_fields__)


if __name__ == "__main__":
    PAGE.write_text(page())
