"""The arguments of every program that replays a trace."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def add_trace(parser: argparse.ArgumentParser, speeds: Sequence[float], block_tokens: int) -> None:
    """`--trace`, `--first`, `--speed` (as `speeds`) and `--block-tokens`, with these defaults."""
    group = parser.add_argument_group("a trace")
    group.add_argument("--trace", type=existing, help="requests from a file, Mooncake's or Azure's")
    group.add_argument("--first", type=count, help="only so many requests of the trace")
    group.add_argument(
        "--speed", type=positive, nargs="+", default=speeds, dest="speeds", metavar="SPEED",
        help="multiples of the trace's rate",
    )  # fmt: skip
    group.add_argument(
        "--block-tokens", type=count, default=block_tokens,
        help=f"what 512 tokens of the trace become, {block_tokens} unless you say otherwise; all "
        "lengths in proportion",
    )  # fmt: skip


def existing(text: str) -> Path:
    """Raises `argparse.ArgumentTypeError` if there is no such file."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def count(text: str) -> int:
    """Raises `argparse.ArgumentTypeError` for anything but a whole number greater than 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number greater than 0")
    return int(text)


def positive(text: str) -> float:
    """Raises `ValueError` or `argparse.ArgumentTypeError` for anything but a number greater than
    0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number greater than 0")
    return number
