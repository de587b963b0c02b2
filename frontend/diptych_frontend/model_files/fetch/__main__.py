"""The program of the init container: fetches a model and prints the URI that engines read."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from diptych_frontend.model_files.fetch.fetch import fetch_model
from diptych_frontend.model_files.fetch.source import (
    URI,
    BadSourceError,
    Credentials,
    FetchError,
    read_credentials,
)
from diptych_frontend.program import setup_logging
from diptych_protocol import InvalidRequestError

NAME = "model-fetch"
AFTER = "DIPTYCH_AFTER_FETCH"
"""The variable with a module to run with the model there, and its arguments but the model's path. A
fetcher of an older release knows no such argument, and need not obey."""
FIELD = "DIPTYCH_MODEL_FIELD"
"""The variable with the field of a service that names the model, if that is another than usual."""
TERMINATED = 128 + signal.SIGTERM


def main() -> None:
    """Exit with 0 when the files exist, 2 for bad input and 1 for any other failure."""
    args = _parse_arguments()
    setup_logging(NAME)
    for client in ("httpx2", "httpcore2", "huggingface_hub"):
        # They log URLs, and a file server's URLs carry signatures.
        logging.getLogger(client).setLevel(logging.WARNING)
    # As PID 1 it would otherwise ignore the signal. There is nothing to tidy up: the next process
    # continues, and the lock goes with this one.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))
    try:
        path = fetch_model(
            args.uri,
            args.cache,
            revision=args.revision,
            sha256=args.sha256,
            reader=args.reader,
            shared=args.shared,
            recorded=True,
            credentials=read_credentials(args.credentials) if args.credentials else Credentials(),
        )
    except (BadSourceError, InvalidRequestError) as exc:
        sys.exit(_complain(exc, 2))
    except (FetchError, OSError) as exc:
        sys.exit(_complain(exc, 1))
    print(path.absolute().as_uri(), flush=True)
    if then := os.environ.get(AFTER, "").split():
        os.execv(sys.executable, [sys.executable, "-m", *then, str(path.absolute())])


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=__doc__)
    parser.add_argument("--uri", required=True, help="hf://, s3:// or https://")
    parser.add_argument("--revision", default="", help="commit, tag or branch of an hf:// model")
    parser.add_argument("--sha256", default="", help="checksum of a model that is one file")
    parser.add_argument("--cache", required=True, type=Path, metavar="FOLDER")
    parser.add_argument(
        "--shared",
        action="store_true",
        help="others write to the cache: believe only what the checksum or the source vouches for",
    )
    parser.add_argument("--for", dest="reader", choices=("engine", "router"), default="engine")
    parser.add_argument("--credentials", type=Path, metavar="FOLDER", help="one file for each key")
    return parser.parse_args()


def _complain(error: Exception, code: int) -> int:
    told = str(error).replace(URI, os.environ.get(FIELD, URI))
    print(f"diptych {NAME}: error: {told}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
