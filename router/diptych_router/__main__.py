"""The router: `python -m diptych_router --config FILE --prefill HOST:PORT,... --decode ...`."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from diptych_frontend.curve import read_keys
from diptych_frontend.input_processor import InputProcessor
from diptych_frontend.metrics import ServerMetrics
from diptych_frontend.model_source import resolve_model
from diptych_frontend.openai.app import build_app
from diptych_frontend.openai.server import listen, serve_on
from diptych_frontend.output_processor import OutputProcessor
from diptych_frontend.program import run_program
from diptych_frontend.renderer import TextRenderer
from diptych_protocol import RouterConfig
from diptych_router.discovery import parse_targets
from diptych_router.pool_client import PoolClient


def build_pool_client(config: RouterConfig, args: argparse.Namespace) -> PoolClient:
    """The client of both pools. Needs a running event loop."""
    source = resolve_model(config.model)
    renderer = TextRenderer(source)
    inputs = InputProcessor(
        renderer,
        max_model_len=source.config.max_position_embeddings,
        vocab_size=source.config.vocab_size,
        eos_token_ids=source.config.eos_token_ids,
    )
    return PoolClient(
        config.name,
        inputs,
        OutputProcessor(renderer.tokenizer),
        targets={"prefill": parse_targets(args.prefill), "decode": parse_targets(args.decode)},
        keys=read_keys(args.keys) if args.keys is not None else None,
    )


async def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    listener = listen(args.host, args.port)
    config = msgspec.json.decode(args.config.read_bytes(), type=RouterConfig)
    pools = build_pool_client(config, args)
    pools.start()
    app = build_app(
        pools,
        metrics=ServerMetrics(pools.model_name, pools.stats_by_engine),
        refresh_stats=pools.refresh_stats,
    )
    try:
        await serve_on(app, listener)
    finally:
        pools.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m diptych_router", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="RouterConfig as JSON")
    parser.add_argument("--prefill", required=True, help="cores of the prefill pool: host:port,...")
    parser.add_argument("--decode", required=True, help="cores of the decode pool: host:port,...")
    parser.add_argument("--keys", type=Path, help="directory with the service's CURVE keys")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    args = parser.parse_args()
    run_program("router", run(args))


if __name__ == "__main__":
    main()
