"""The router: `python -m diptych_router --config FILE --prefill HOST:PORT,... --decode ...`."""

from __future__ import annotations

import argparse
import gc
import sys

if __name__ == "__main__":
    gc.disable()  # imports make no garbage; `run_program` enables it again

from diptych_frontend.openai.server import Site, listen, serve_sites
from diptych_frontend.program import run_program
from diptych_router.program.arguments import parse_arguments, read_config
from diptych_router.program.picker_process import bracketed, picking
from diptych_router.program.program import started
from diptych_router.telling.admin_port import admin_app


async def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM."""
    config = read_config(args)
    listener = listen(args.host, args.port)
    admin_listener = (
        listen(args.admin_host or args.host, args.admin_port)
        if args.admin_port is not None
        else None
    )
    async with started(config, args) as program:
        certificate = program.certificate
        tls = certificate.context if certificate is not None else None
        sites = [Site(program.leaving, listener, tls)]
        if admin_listener is not None:
            admin = admin_app(
                program.client, program.explanations, args.keys, program.api_keys, certificate
            )
            sites.append(Site(admin, admin_listener))
        own = f"{bracketed(args.advertise_host or args.host)}:{args.port}"
        async with picking(program.client, own, args.host, args.picker_port):
            await serve_sites(
                *sites,
                drain=program.leaving.drain,
                drain_timeout_s=args.linger_seconds + config.drain_seconds,
                on_lag=program.metrics.loop_lag.observe,
            )


def main() -> None:
    run_program("router", run(parse_arguments(sys.argv[1:])))


if __name__ == "__main__":
    main()
