"""The entry points of the console scripts, which say which extra is missing, if one is."""

from __future__ import annotations

import importlib
import sys

from diptych_frontend.installation import this_installation

EXTRAS = {
    "cli": "the commands `diptych` and `kubectl diptych`",
    "engine": "prefill and decode engines, and answers without a server",
    "gpu": "the same on NVIDIA GPUs",
    "router": "the OpenAI API in front of the two pools",
    "operator": "the Kubernetes operator",
    "frontend": "tokenizers and the OpenAI server: engine and router bring it",
    "fetch": "models from the Hub, S3 and HTTP: engine and router bring it",
    "vllm": "the hand-off of KV inside vLLM, beside a vLLM that is there already",
    "plots": "pictures of `diptych bench --svg`",
    "tracing": "spans of requests for OpenTelemetry",
    "test": "all of these, and the tools of the tests",
}


def diptych() -> None:
    """The command `diptych`."""
    _run("diptych.main")


def kubectl_diptych() -> None:
    """The program that kubectl runs for `kubectl diptych`."""
    _run("diptych.kubectl.main")


def _run(module: str) -> None:
    try:
        importlib.import_module(module).main()
    except ModuleNotFoundError as exc:
        package = (exc.name or "").partition(".")[0]
        if not package or package.startswith("diptych"):
            raise  # ours is always there: that would be a mistake of ours
        sys.exit(advice(package))


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
