"""An engine pod: one EngineCore behind an OpenAI API.

`python -m diptych_engine --config FILE --port 8000 [--core-port 5557 --kv-port 5558 --keys DIR]`
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import msgspec

from diptych_frontend.async_llm import AsyncLLM
from diptych_frontend.metrics import ServerMetrics
from diptych_frontend.openai.app import build_app
from diptych_frontend.openai.server import listen, serve_on
from diptych_frontend.program import run_program
from diptych_protocol import EngineConfig, KVTransferConfig


def pod_config(args: argparse.Namespace) -> EngineConfig:
    """The shared configuration, with what is this pod's own."""
    config = msgspec.json.decode(args.config.read_bytes(), type=EngineConfig)
    if args.engine_id:
        config = msgspec.structs.replace(config, engine_id=args.engine_id)
    if args.kv_port is not None:
        transfer = msgspec.structs.replace(
            config.kv_transfer or KVTransferConfig(),
            listen_host=args.host,
            listen_port=args.kv_port,
            advertise_host=args.advertise_host or args.host,
        )
        config = msgspec.structs.replace(config, kv_transfer=transfer)
    return config


async def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM. Raises `EngineDeadError` when the core dies."""
    listener = listen(args.host, args.port)
    public = f"tcp://{args.host}:{args.core_port}" if args.core_port is not None else None
    engine = await AsyncLLM.start(pod_config(args), public_endpoint=public, keys_dir=args.keys)
    app = build_app(
        engine,
        metrics=ServerMetrics(engine.model_name, engine.stats_by_engine),
        refresh_stats=engine.refresh_stats,
    )
    server = asyncio.create_task(serve_on(app, listener))
    death = asyncio.create_task(engine.died())
    try:
        await asyncio.wait((server, death), return_when=asyncio.FIRST_COMPLETED)
        if not server.done():
            raise death.result()  # the pod is restarted as a whole
        server.result()
    finally:
        for task in (server, death):
            task.cancel()
        await asyncio.gather(server, death, return_exceptions=True)
        engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m diptych_engine", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="EngineConfig as JSON")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="HTTP port")
    parser.add_argument("--core-port", type=int, help="ZMQ port of the core, for routers")
    parser.add_argument("--kv-port", type=int, help="UCX port of the hinge")
    parser.add_argument("--advertise-host", help="address at which other pods reach this one")
    parser.add_argument("--engine-id", help="the pod's name")
    parser.add_argument("--keys", type=Path, help="directory with the service's CURVE keys")
    args = parser.parse_args()
    run_program(args.engine_id or "engine", run(args))


if __name__ == "__main__":
    main()
