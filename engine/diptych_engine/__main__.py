"""An engine pod: one EngineCore, and its front-end.

`python -m diptych_engine --config FILE --port 8000
    [--api-port 8001 --core-port 5557 --kv-port 5558 --admin-port 8081 --keys DIR]`

Its HTTP port answers probes and scrapers. It has an OpenAI API only with `--api-port`, for example
for another project's router. That port has no authentication.

The first SIGTERM or SIGINT drains: readiness fails, routers are told, and the program ends with 0
as soon as neither a request nor a lease is left, or after `drain_seconds`. The second one ends it.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import msgspec

from diptych_engine.execution.lean_torch import link_torch, start_lean
from diptych_frontend.core_client.launcher import CORE, CoreProcess
from diptych_frontend.program import PROGRAMS, run_program
from diptych_protocol import EngineConfig, InvalidRequestError, KVTransferConfig
from diptych_protocol.command_line import config_in


def pod_config(args: argparse.Namespace) -> EngineConfig:
    """Return the shared configuration with this pod's own values."""
    config = config_in(args.config, EngineConfig)
    own = {"engine_id": args.engine_id, "node": args.node, "zone": args.zone}
    config = msgspec.structs.replace(config, **{name: x for name, x in own.items() if x})
    if args.kv_port is not None:
        transfer = msgspec.structs.replace(
            config.kv_transfer or KVTransferConfig(),
            listen_host=args.host,
            listen_port=args.kv_port,
            advertise_host=args.advertise_host or args.host,
        )
        config = msgspec.structs.replace(config, kv_transfer=transfer)
    return config


def run_core() -> None:
    """Be the core, in a fork of this process, which has imported a part of what it needs."""
    start_lean()
    link_torch()
    from diptych_engine.serving.core_process import main as core

    core()


async def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM. Raises `EngineDeadError` when the core dies."""
    if args.admin_port is not None and args.keys is None:
        raise InvalidRequestError("--admin-port needs --keys, which has its token", param="keys")
    config = pod_config(args)
    config.check()
    public = f"tcp://{args.host}:{args.core_port}" if args.core_port is not None else None
    alone = config.data_parallel_size == 1  # a group starts its cores itself
    core = CoreProcess(config, public, args.keys) if alone else None
    try:
        # Imported late: the core loads torch and the model meanwhile.
        from diptych_engine.pod import Standby, serve

        with contextlib.closing(Standby(config, public, args.keys)) as standby:
            while (core := await serve(args, config, public, core, standby)) is not None:
                pass
    finally:
        if core is not None:
            core.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m diptych_engine", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="EngineConfig as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="HTTP port of probes and metrics")
    parser.add_argument("--api-port", type=int, help="HTTP port of the OpenAI API, if wanted")
    parser.add_argument("--core-port", type=int, help="ZMQ port of the core, for routers")
    parser.add_argument("--kv-port", type=int, help="UCX port of the hinge")
    parser.add_argument("--admin-port", type=int, help="HTTP port for operators; needs --keys")
    parser.add_argument("--advertise-host", help="address at which other pods reach this one")
    parser.add_argument("--engine-id", help="the pod's name")
    parser.add_argument("--node", help="name of the node that it runs on; empty: not known")
    parser.add_argument("--zone", help="name of the node's zone; empty: not known")
    parser.add_argument("--keys", type=Path, help="directory with the service's keys and token")
    args = parser.parse_args()
    PROGRAMS.setdefault(CORE, run_core)
    run_program(args.engine_id or "engine", run(args))


if __name__ == "__main__":
    main()
