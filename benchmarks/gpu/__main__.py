"""`python -m benchmarks.gpu --out DIR` runs the stages; `--stage N` is one of them, in its process.

Each stage appends lines of JSON to DIR/lines.jsonl while it runs, and what it prints is in
DIR/stages.log. At the end DIR/table.md is made of the lines.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from benchmarks.gpu.stages import STAGES, TOTAL_S, chosen
from benchmarks.gpu.table import table
from benchmarks.gpu.wheels import install_wheels

ROOT = Path(__file__).parents[2]
ROOMS = (
    "protocol", "frontend", "router", "engine", "kv_transfer", "kernels", "operator", "cli",
    "tests/support",
)  # fmt: skip
"""What an installation would put on the path. Nothing is installed on a machine that is lent."""
DRY_S = 150.0
"""What a stage of a rehearsal may take on a slow machine with much else to do."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", default="", help="numbers, such as 3,6; all if left out")
    parser.add_argument("--stage", type=int, choices=STAGES)
    parser.add_argument("--dry", action="store_true", help="on a simulated device")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = arguments.out.resolve() / "lines.jsonl"
    if arguments.stage is not None:
        run_stage(lines, arguments.stage, dry=arguments.dry)
    else:
        sys.exit(run(lines, chosen(arguments.stages), dry=arguments.dry))


def run(lines: Path, numbers: list[int], *, dry: bool) -> int:
    """Run stages, and write the table. Returns 1 if one of them failed."""
    lines.touch()
    with tempfile.TemporaryDirectory(prefix="diptych-gpu-") as site:
        environment = environment_of_stages(Path(site), dry=dry)
        return run_stages(lines, numbers, environment, dry=dry)


def run_stages(lines: Path, numbers: list[int], environment: dict[str, str], *, dry: bool) -> int:
    """One after the other; each has its own deadline, and all have one."""
    failed = False
    ends = time.monotonic() + (DRY_S * len(numbers) if dry else TOTAL_S)
    with lines.with_name("stages.log").open("ab") as log:
        for number in numbers:
            limit = min(DRY_S if dry else STAGES[number].seconds, ends - time.monotonic())
            started = time.monotonic()
            error = failure_of(number, lines, environment, limit, log, dry=dry)
            seconds = round(time.monotonic() - started, 1)
            end = {"stage": number, "what": "end", "seconds": seconds}
            with lines.open("a") as file:
                file.write(json.dumps(end | ({"error": error} if error else {})) + "\n")
            print(f"{number:2} {STAGES[number].name}: {error or 'done'}, {seconds} s", flush=True)
            lines.with_name("table.md").write_text(table(lines.read_text()))
            failed = failed or bool(error)
    return int(failed)


def failure_of(
    number: int,
    lines: Path,
    environment: dict[str, str],
    limit_s: float,
    log: IO[bytes],
    *,
    dry: bool,
) -> str:
    """Run one stage with all that it starts; why it failed, or nothing."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--stage", str(number)]
    command += ["--out", str(lines.parent), *(["--dry"] if dry else [])]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        code = process.wait(max(limit_s, 1.0))
    except subprocess.TimeoutExpired:
        return f"killed after {limit_s:.0f} s"
    finally:
        kill_group(process)
    return f"exit status {code}, see stages.log" if code else ""


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Whatever the stage has started ends with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment_of_stages(site: Path, *, dry: bool) -> dict[str, str]:
    """Packages of the repository and, on a GPU machine, wheels for what that lacks."""
    paths = [str(ROOT), *(str(ROOT / room) for room in ROOMS)]
    environment = dict(os.environ)
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    else:
        paths += [str(site)] if install_wheels(site) else []
        environment.pop("TRITON_INTERPRET", None)
    inherited = os.environ.get("PYTHONPATH")
    return environment | {
        "PYTHONPATH": os.pathsep.join([*paths, *([inherited] if inherited else [])]),
        "PYTHONUNBUFFERED": "1",
        "UCX_NET_DEVICES": "lo",
    }


def run_stage(lines: Path, number: int, *, dry: bool) -> None:
    from benchmarks.gpu.place import place_of

    module, _, name = STAGES[number].function.partition(":")
    place = place_of(lines, number, dry=dry)
    getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)(place)


if __name__ == "__main__":
    main()
