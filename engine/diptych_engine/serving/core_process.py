"""The EngineCore process.

`python -m diptych_engine.serving.core_process --config JSON --local ENDPOINT`, started by an
`AsyncLLM`; ends with it. Exit codes: 0 after SIGTERM, 2 for bad input, 1 otherwise.

Without `--local` it stands by: it loads the model, and takes nothing that another core has until a
line of its standard input says where it is to serve.
"""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from diptych_engine.execution.lean_torch import link_torch, start_lean

if __name__ == "__main__":
    start_lean()  # before the first import of torch
    link_torch()

from diptych_engine.control.core import EngineCore
from diptych_engine.parallel.group import LockstepGroup
from diptych_engine.serving.build_core import build_core
from diptych_engine.serving.core_server import CoreServer
from diptych_engine.serving.lockstep import LockstepServer
from diptych_frontend.core_client.curve import read_keys
from diptych_frontend.program import die_with_parent, setup_logging
from diptych_protocol import (
    UNREADABLE,
    CurveKeys,
    DiptychError,
    EngineConfig,
    FinishReason,
    InvalidRequestError,
    ReconfigureDistributedRequest,
    ReconfigureRankType,
)
from diptych_protocol.engine_settings import MAX_RANKS
from diptych_protocol.threads import resolve_struct_types

log = logging.getLogger(__name__)


class Membership:
    """The calls of a group's owner to one core in it."""

    def __init__(self, core: EngineCore, config: EngineConfig, end: Callable[[], None]) -> None:
        """`end` ends the core's process cleanly."""
        self._core = core
        self._lockstep = config.data_parallel_lockstep
        self._rank = config.data_parallel_rank
        self._end = end

    @property
    def calls(self) -> tuple[Callable[..., Any], ...]:
        """The functions that a client may name in a utility call."""
        return self.surrender, self.reinitialize_distributed

    def surrender(self) -> dict[str, list[int]]:
        """End every request without any output, so that another core can continue it.

        Returns what each has generated and sent to its client so far.
        """
        scheduler = self._core.scheduler
        requests = list(scheduler.unfinished)
        for request in requests:
            scheduler.finish(request, FinishReason.ABORT)
        return {
            request.request_id: request.token_ids[request.num_prompt_tokens :]
            for request in requests
        }

    def reinitialize_distributed(self, reconfigure: ReconfigureDistributedRequest) -> None:
        """Change the group's size. A core without a place in it ends.

        Raises `InvalidRequestError` for a change that this core cannot make.
        """
        size, rank = reconfigure.new_data_parallel_size, reconfigure.new_data_parallel_rank
        if not 1 <= size <= MAX_RANKS:
            raise InvalidRequestError(f"new_data_parallel_size must be 1 to {MAX_RANKS}")
        if rank == ReconfigureRankType.SHUTDOWN_CURRENT_RANK:
            log.info("rank %d leaves a group that shrinks to %d", self._rank, size)
            self._end()
        elif self._lockstep:
            raise InvalidRequestError("cores in lock-step keep the number that they started with")
        elif rank not in (ReconfigureRankType.KEEP_CURRENT_RANK, self._rank):
            raise InvalidRequestError(f"rank {self._rank} cannot become rank {rank}")


def stand_by() -> str:
    """Return where this core is to serve, once it is; ends with the owner's end of the pipe."""
    log.info("the engine core stands by")
    return sys.stdin.readline().strip() or sys.exit(0)


def serve(config: EngineConfig, local: str, public: str, keys: CurveKeys | None) -> None:
    """Run one engine until SIGTERM. local: for its owner; empty: it stands by. public: for routers;
    empty: none."""
    places = [local] if local else []
    # Ctrl-C reaches the whole foreground group; the owner decides when the core ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    core = build_core(config, keys, lambda: None if places else places.append(stand_by()))
    endpoints = [(places[0], None), *([(public, keys)] if public else [])]
    timeout_s = config.shutdown_timeout_s
    if config.data_parallel_lockstep and config.data_parallel_size > 1:
        group = LockstepGroup(config)
        group.join()
        server: CoreServer = LockstepServer(core, endpoints, timeout_s, group)
    else:
        server = CoreServer(core, endpoints, timeout_s, config.data_parallel_rank)
    core.offer(*Membership(core, config, server.stop).calls)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    gc.freeze()  # what exists now stays, a megabyte of garbage among it: no time to look for it
    gc.enable()
    log.info("the engine core is ready")
    server.run()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m diptych_engine.serving.core_process")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--local", default="", help="ipc:// endpoint of the owner")
    parser.add_argument("--public", default="", help="tcp:// endpoint for routers; needs --keys")
    parser.add_argument("--keys", type=Path, help="directory with the service's CURVE keys")
    parser.add_argument("--parent-pid", type=int, required=True, help="the owner's process id")
    args = parser.parse_args()
    die_with_parent(args.parent_pid)
    resolve_struct_types()
    try:
        config = msgspec.json.decode(args.config, type=EngineConfig)
        setup_logging(config.engine_id or "engine")
        keys = None if args.keys is None else read_keys(args.keys)
        if args.public and keys is None:
            raise InvalidRequestError("--public needs --keys", param="keys")
        serve(config, args.local, args.public, keys)
    except (InvalidRequestError, *UNREADABLE) as exc:
        sys.exit(fail(2, f"bad configuration: {exc}"))
    except zmq.ZMQError as exc:
        sys.exit(fail(1, f"cannot listen on {args.public or args.local}: {exc}"))
    except DiptychError as exc:
        sys.exit(fail(1, str(exc)))


def fail(code: int, message: str) -> int:
    """Print one line on stderr, and return the exit code."""
    print(f"diptych engine core: error: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
