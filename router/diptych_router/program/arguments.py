"""The router's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Ends the program with a message and code 2 unless they fit together."""
    parser = argparse.ArgumentParser(
        prog="python -m diptych_router",
        description="The router: an OpenAI API in front of a prefill pool and a decode pool.",
    )
    parser.add_argument("--config", type=Path, required=True, help="RouterConfig as JSON")
    parser.add_argument(
        "--prefill",
        help="engines of the prefill pool: host:port,...; left out if the runtime has no such pool",
    )
    parser.add_argument("--decode", required=True, help="engines of the decode pool: host:port,...")
    parser.add_argument("--keys", type=Path, help="directory with the service's keys")
    parser.add_argument("--serving", type=Path, help="serving.json: the revisions that may serve")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--admin-port", type=int, help="for the operator; needs --keys")
    parser.add_argument("--admin-host", help="where that port listens, if not at --host")
    parser.add_argument(
        "--api-keys",
        type=Path,
        metavar="DIR",
        help="let nobody use the API without the content of one of these files, whose names are "
        "the clients'; read again when they change",
    )
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="serve HTTPS with DIR/tls.crt and DIR/tls.key, read again when they change",
    )
    parser.add_argument(
        "--batch-directory",
        type=Path,
        metavar="DIR",
        help="keep the files and batches of clients here, which the routers of a service may share",
    )
    parser.add_argument(
        "--linger-seconds",
        type=_seconds,
        default=0.0,
        help="after SIGTERM, how long to take new requests from those who have not heard of it",
    )
    args = parser.parse_args(argv)
    if args.admin_port is not None and args.keys is None:
        parser.error("--admin-port needs --keys: the admin token is there")
    return args


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 600:
        raise argparse.ArgumentTypeError("must be between 0 and 600")
    return value
