"""Where figures were taken: they mean nothing without it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TELLING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""What decides which matrix kernels a processor has."""


def machine() -> str:
    """Processor, cores, instruction sets, torch, date and commit, in a line."""
    facts = _cpu_facts()
    flags = [flag for flag in TELLING_FLAGS if flag in facts.get("flags", "").split()]
    return ", ".join([
        _processor(facts),
        f"{len(os.sched_getaffinity(0))} cores",
        f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        " ".join(flags) or "no vector extensions of note",
        f"torch {metadata.version('torch')}",
        str(date.today()),
        f"commit {_commit()}",
    ])  # fmt: skip


def by_machine(machines: Mapping[str, str]) -> str:
    """Return a line for each machine; if there are several, with the names of what ran on it."""
    names: dict[str, list[str]] = {}
    for name, where in machines.items():
        names.setdefault(where, []).append(name)
    if len(names) == 1:
        return next(iter(names))
    return "\n\n".join(f"{'; '.join(ran)}: {where}" for where, ran in names.items())


def record(name: str, results: Mapping[str, Any], page: str) -> None:
    """Write what was measured to `NAME.json` and what is said of it to `NAME.md`, and print it."""
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")
    (RESULTS / f"{name}.md").write_text(page)
    print(page)


def _processor(facts: Mapping[str, str]) -> str:
    """Its name; with the family, since a virtual machine's says "AMD EPYC" of a Zen 4 and a 5."""
    name = facts.get("model name", platform.machine())
    family = facts.get("cpu family")
    return name if family is None else f"{name} (family {family}, model {facts['model']})"


def _cpu_facts() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in reversed(lines))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _commit() -> str:
    """With a plus sign if files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--exclude", "*", "--dirty=+"],
        cwd=HERE, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return described.stdout.strip() or "unknown"
