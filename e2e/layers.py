"""Layers of images: what pip installs, and folders packed into archives."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

SLIM = Path(__file__).resolve().parent.parent / "docker/slim.py"
"""Takes out of packages what pods do not need, here as in docker/*.Dockerfile."""


def pip_install(target: Path, arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
               "--no-compile", "--root-user-action=ignore", "--target", str(target)]  # fmt: skip
    subprocess.run([*command, *arguments], check=True)
    subprocess.run([sys.executable, SLIM, target], check=True)


def write_layer(rootfs: Path, layer: Path, *, keep_times: bool = False) -> None:
    """Pack `rootfs` so that equal content gives equal bytes, and a node keeps what it has.

    keep_times: files keep their times, so that byte code beside its source stays valid.
    """

    def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.mtime = int(info.mtime) if keep_times else 0
        info.uname = info.gname = "root"
        return info

    unfinished = layer.with_suffix(".part")
    with tarfile.open(unfinished, "w") as archive:
        for path in sorted(rootfs.rglob("*")):
            archive.add(path, str(path.relative_to(rootfs)), recursive=False, filter=anonymous)
    unfinished.rename(layer)
