"""The entry points of the console scripts.

They say which extra is missing, if one is, and in one line what is wrong with the streams or the
texts that a command was given.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys

from diptych_frontend.installation import this_installation

EXTRAS = {
    "cli": "the commands `diptych` and `kubectl diptych`",
    "engine": "prefill and decode engines, and answers without a server",
    "gpu": "the same on NVIDIA GPUs",
    "router": "the OpenAI API in front of the two pools",
    "gateway": "what a router says to gateways that ask it for endpoints",
    "operator": "the Kubernetes operator",
    "frontend": "tokenizers and the OpenAI server: engine and router bring it",
    "fetch": "models from the Hub, S3 and HTTP: engine and router bring it",
    "vllm": "the hand-off of KV inside vLLM, beside a vLLM that is there already",
    "plots": "pictures of `diptych bench --svg`",
    "tracing": "spans of requests for OpenTelemetry",
    "test": "all of these, and the tools of the tests",
}
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing, of which no command is the cause."""


def diptych() -> None:
    """The command `diptych`."""
    _run("diptych.main")


def kubectl_diptych() -> None:
    """The program that kubectl runs for `kubectl diptych`."""
    _run("diptych.kubectl.main")


def _run(module: str) -> None:
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        # The caller has closed it, and a socket would else have its place.
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdin is None:  # closed by the caller
        sys.stdin = io.StringIO()
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as arguments are
    try:
        try:
            importlib.import_module(module).main()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where its error is still an error of the command
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if not package or package.startswith("diptych"):
            raise  # ours is always there: that would be a mistake of ours
        sys.exit(advice(package))
    except RuntimeError as exc:
        if "home directory" not in str(exc):  # as pathlib has no class for it
            raise
        sys.exit(f"Error: {exc} Set HOME to a folder of yours.")
    except UnicodeEncodeError as exc:
        sys.exit(f"Error: a text that was given is no valid text, or cannot be shown here: {exc}")
    except OSError as exc:
        if exc.errno not in NO_ROOM:
            raise
        # What is left in the buffer would fail again at the end, and give another exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(f"Error: the output cannot be written: {exc.strerror}")


def advice(missing: str) -> str:
    """Say what to install when a command misses a package."""
    extras = [f"  {name:9} {what}" for name, what in EXTRAS.items()]
    return "\n".join(
        [
            f"This command needs {missing}, which comes with an extra of diptych.",
            "To serve a model on this machine:",
            f"  {this_installation().add_extras('cli', 'engine', 'router')}",
            "What each extra brings:",
            *extras,
        ]
    )
