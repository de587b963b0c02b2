"""Layers of images for services that run vLLM: what brings our connector, and a stand-in for vLLM's
image of its CPU build, made of the environment that `make vllm` has made.

`e2e/images.py --vllm DIR` calls it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from e2e.layers import pip_install, write_layer

CONNECTOR_DIR = "opt/diptych/vllm"
"""As in docker/vllm.Dockerfile."""
DEBIANS_SITE = "usr/local/lib/python3.11/dist-packages"
"""Where Debian's Python looks by itself: PYTHONPATH is for the connector."""
PROGRAM = """\
#!/usr/bin/python3
import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":  # vLLM starts processes that read this file again
    sys.exit(main())
"""
NOT_NEEDED = ("include", "*.a")
"""Headers and archives for linkers."""


def connector_layer(layer: Path, source: Path, lock: Path) -> Path:
    """The folder that an init container copies. Made anew each time, as it holds the code."""
    layer.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=layer.parent) as scratch:
        folder = Path(scratch) / CONNECTOR_DIR
        pip_install(folder, ["--no-deps", "--constraint", str(lock), "libucx-cu13"])
        pip_install(folder, ["--no-deps", str(source)])
        write_layer(Path(scratch), layer)
    return layer


def vllm_layer(layer: Path, environment: Path) -> Path:
    """vLLM with all that it needs. Its byte code stays valid, because files keep their times."""
    if layer.exists():
        return layer
    [packages] = environment.glob("lib/python3*/site-packages")
    with tempfile.TemporaryDirectory(dir=layer.parent) as scratch:
        rootfs = Path(scratch)
        shutil.copytree(packages, rootfs / DEBIANS_SITE, ignore=shutil.ignore_patterns(*NOT_NEEDED))
        write_layer(rootfs, layer, keep_times=True)
    return layer


def program_layer(layer: Path) -> Path:
    """The program `vllm`."""
    layer.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=layer.parent) as scratch:
        program = Path(scratch) / "usr/local/bin/vllm"
        program.parent.mkdir(parents=True)
        program.write_text(PROGRAM)
        program.chmod(0o755)
        write_layer(Path(scratch), layer)
    return layer
