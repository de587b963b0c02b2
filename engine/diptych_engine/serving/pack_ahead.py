"""Packs a model's weights into the node's cache before the pod's engine starts, which may only read
there: `python -m diptych_engine.serving.pack_ahead --config FILE MODEL`.

If others have done it, that is seen without torch. A failure is no harm: the engine packs for
itself, or says what is wrong with its model.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import Final

import msgspec

import diptych_engine
import diptych_kernels
from diptych_frontend.program import setup_logging
from diptych_kernels.made_once import DONE, NODE_FOLDER, stamp_of
from diptych_protocol import UNREADABLE, DiptychError, EngineConfig
from diptych_protocol.command_line import config_in

log = logging.getLogger(__name__)

TERMINATED: Final = 128 + signal.SIGTERM
THREADS: Final = 2


def pack(config: EngineConfig, model: Path, folder: Path) -> None:
    """Load the model, whose path is given, as each rank of the engine will."""
    folder.mkdir(mode=0o700, exist_ok=True)
    # These decide nothing here, and differ between pools and revisions. A draft model may not be
    # mounted here.
    config = msgspec.structs.replace(
        config, num_blocks=1, num_threads=THREADS, revision="", speculative_config=None
    )
    done = folder / f"{_name(config, model)}{DONE}"
    if _are_there(done):
        return
    # Imported late: mostly it is not needed.
    from diptych_engine.execution.runner import ModelRunner
    from diptych_engine.models.shard import Shard
    from diptych_frontend.model_files.model_source import resolve_model

    started, source = time.time(), resolve_model(config.model)
    for rank in range(config.tensor_parallel_size):
        ModelRunner(config, source, Shard(rank, config.tensor_parallel_size))
    used = {path.name: path.stat() for path in folder.glob("*.packed")}
    found = {name: _shape(each) for name, each in used.items() if each.st_mtime > started - 1}
    if found:
        done.write_bytes(msgspec.json.encode(found))


def _are_there(done: Path) -> bool:
    """Whether the files that it names are there, and neither cut off nor others."""
    try:
        named = msgspec.json.decode(done.read_bytes(), type=dict[str, tuple[int, int]])
        return all(_shape((done.parent / name).stat()) == each for name, each in named.items())
    except (OSError, *UNREADABLE):
        return False


def _shape(found: os.stat_result) -> tuple[int, int]:
    return found.st_ino, found.st_size


def _name(config: EngineConfig, model: Path) -> str:
    """What changes with the model's files, with the configuration, and with our code."""
    files = (model if model.is_dir() else model.parent).iterdir()
    digest = hashlib.sha256(msgspec.json.encode(config) + stamp_of(sorted(files)))
    for package in (diptych_engine, diptych_kernels):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def main() -> None:
    # As PID 1 it would otherwise ignore the signal. A part of a file is removed by the next one.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))
    parser = argparse.ArgumentParser(prog="python -m diptych_engine.serving.pack_ahead")
    parser.add_argument("--config", type=Path, required=True, help="EngineConfig as JSON")
    parser.add_argument("model", type=Path, metavar="MODEL", help="its file or folder")
    args = parser.parse_args()
    setup_logging("pack-ahead")
    try:
        pack(config_in(args.config, EngineConfig), args.model, Path(os.environ[NODE_FOLDER]))
    except (DiptychError, OSError) as exc:
        log.warning("the weights are not packed ahead: %s", exc)


if __name__ == "__main__":
    main()
