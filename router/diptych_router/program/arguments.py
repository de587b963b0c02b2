"""The router's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_type_hints

import msgspec

from diptych_protocol import RouterConfig, RouterSettings
from diptych_protocol.command_line import config_in, option
from diptych_protocol.field_ranges import descriptions


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. Ends the program with a message and code 2 if they are invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m diptych_router",
        description="The router: an OpenAI API in front of a prefill pool and a decode pool.",
    )
    parser.add_argument("--config", type=Path, required=True, help="RouterConfig as JSON")
    _add_settings(parser)
    parser.add_argument(
        "--prefill",
        help="engines of the prefill pool: host:port,...; without them the others compute prompts",
    )
    parser.add_argument("--decode", required=True, help="engines of the decode pool: host:port,...")
    parser.add_argument("--keys", type=Path, help="directory with the service's keys")
    parser.add_argument("--serving", type=Path, help="serving.json: the revisions that may serve")
    parser.add_argument("--admin-port", type=int, help="for the operator; needs --keys")
    parser.add_argument("--admin-host", help="where that port listens, if not at --host")
    parser.add_argument(
        "--picker-port", type=int, help="for gateways: the endpoint picker, by gRPC"
    )
    parser.add_argument(
        "--advertise-host", help="where they reach this router, if not at --host: an IP address"
    )
    parser.add_argument(
        "--batch-directory",
        type=Path,
        metavar="DIR",
        help="keep the files and batches of clients here, which the routers of a service may share",
    )
    add_door(parser)
    args = parser.parse_args(argv)
    if args.admin_port is not None and args.keys is None:
        parser.error("--admin-port needs --keys: the admin token is there")
    return args


def add_door(parser: argparse.ArgumentParser) -> None:
    """The options of the public port."""
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
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
        "--linger-seconds",
        type=_seconds,
        default=0.0,
        help="after SIGTERM, how long to take new requests from those who have not heard of it",
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    types, meanings = get_type_hints(RouterSettings), descriptions(RouterSettings)
    group = parser.add_argument_group("settings, which win over those of --config")
    for field in msgspec.structs.fields(RouterSettings):
        about = option(field, types[field.name]) | {"default": argparse.SUPPRESS}
        flag = f"--{field.name.replace('_', '-')}"
        group.add_argument(flag, help=meanings[field.name].replace("%", "%%"), **about)


def read_config(args: argparse.Namespace) -> RouterConfig:
    """The file that --config names, with the settings that the command line gives besides. Raises
    `InvalidRequestError`, naming the field, for a value out of its range."""
    config = config_in(args.config, RouterConfig)
    given = {name: getattr(args, name) for name in RouterSettings.__struct_fields__ if name in args}
    config = msgspec.structs.replace(config, **given)
    config.check()
    return config


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 600:
        raise argparse.ArgumentTypeError("must be between 0 and 600")
    return value
