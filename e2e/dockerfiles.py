"""Build what docker/*.Dockerfile say, with Debian's buildah: without a daemon, as root.

The base that they name is made anew here, of Debian's packages, for where no registry answers: it
has Python's major and minor version, and not its digest. pip asks what this machine's pip asks.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
MISSING = [name for name in ("buildah", "mmdebstrap") if shutil.which(name) is None]
"""Programs that this module needs and this machine lacks."""
FROM = re.compile(r"^FROM (python:\S+?)@\S+", re.MULTILINE)
BASE_PACKAGES = "python3-venv,python3-pip,ca-certificates,netbase,tzdata"
TIMEOUT_S = 3600.0


class Buildah:
    """Images and their files, all in one folder; delete it to be rid of them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def build(self, name: str, reference: str, *arguments: str) -> None:
        """Build docker/NAME.Dockerfile."""
        text = (REPOSITORY / "docker" / f"{name}.Dockerfile").read_text()
        for base in set(FROM.findall(text)):
            self._make_base(base)
        file = self._folder / f"{name}.Dockerfile"
        file.write_text(FROM.sub(r"FROM \1", text))
        self._ask(
            "build", "--isolation", "chroot", "--format", "docker", *self._pip(), *arguments,
            "--file", str(file), "--tag", reference, str(REPOSITORY), shown=True,
        )  # fmt: skip

    def save(self, reference: str, archive: Path) -> None:
        """Write the image as `docker save` does, under the name that Docker's hub would give it."""
        archive.unlink(missing_ok=True)  # an archive is not added to
        self._ask("push", reference, f"docker-archive:{archive}:docker.io/library/{reference}")

    def config(self, reference: str) -> dict[str, Any]:
        """What the image says of its user, environment and program."""
        said = json.loads(self._ask("inspect", "--type", "image", reference))
        config: dict[str, Any] = said["Docker"]["config"]
        return config

    def files(self, reference: str) -> Path:
        """A folder with the image's files, and what a container of it would write."""
        container = self._ask("from", "--pull-never", reference)
        return Path(self._ask("mount", container))

    def remove_containers(self) -> None:
        self._ask("rm", "--all")

    def _make_base(self, reference: str) -> None:
        if self._ask("images", "--quiet", "--filter", f"reference={reference}"):
            return
        archive = self._folder / "base.tar"
        program = 'ln -s /usr/bin/python3 "$1/usr/local/bin/python"'  # Debian calls it python3
        subprocess.run(
            ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={BASE_PACKAGES}",
             f"--customize-hook={program}", reference.rpartition("-")[2], str(archive)],
            check=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        container = self._ask("from", "scratch")
        self._ask("add", container, str(archive), "/")
        self._ask("config", "--env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", container)
        self._ask("commit", "--rm", container, f"docker.io/library/{reference}")
        archive.unlink()

    def _pip(self) -> list[str]:
        """Options that show builds this machine's configuration of pip and the files it names."""
        command = [sys.executable, "-m", "pip", "config", "list"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = re.findall(r"^(?:global|:env:)\.([\w-]+)=(.*)$", listed, re.MULTILINE)
        settings = {name: " ".join(ast.literal_eval(text).split()) for name, text in found}
        file = self._folder / "pip.conf"
        lines = [f"{name} = {text}\n" for name, text in settings.items()]
        file.write_text("[global]\n" + "".join(lines))
        words = " ".join(settings.values()).split()
        # A folder of pages, beside that of the files that its links lead to.
        pages = [Path(word.removeprefix("file://")).parent for word in words if "file://" in word]
        named = {*pages, *(Path(word) for word in words if word.startswith("/"))}
        volumes = [f"{file}:/etc/pip.conf:ro"]
        volumes += sorted(f"{path}:{path}:ro" for path in named if path.exists())
        return [word for volume in volumes for word in ("--volume", volume)]

    def _ask(self, command: str, *arguments: str, shown: bool = False) -> str:
        where = ["--root", str(self._folder / "root"), "--runroot", str(self._folder / "run")]
        done = subprocess.run(
            ["buildah", *where, "--storage-driver", "vfs", command, *arguments],
            check=True, text=True, timeout=TIMEOUT_S,
            stdout=sys.stderr if shown else subprocess.PIPE,
        )  # fmt: skip
        return (done.stdout or "").strip()


def enter(root: Path, environment: Sequence[str], *, shared: Path | None = None) -> list[str]:
    """What to put before a command so that it runs as in a pod: in an image's files, which it
    cannot write to, as user 10001, with a /tmp of its own. It sees the folder `shared`, which
    becomes the user's."""
    script = 'root=$1; shift; mount --bind "$root" "$root"; mount -o remount,bind,ro "$root"; '
    script += 'mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"; mount -t proc proc "$root/proc"; '
    script += 'mount --rbind /dev "$root/dev"; mount --bind /sys "$root/sys"; '
    if shared is not None:
        script += f'mkdir -p "$root{shared}"; mount --bind {shared} "$root{shared}"; '
        script += f"chown -R 10001:10001 {shared}; "
    script += 'exec chroot --userspec=10001:10001 "$root" "$@"'
    return [
        *("unshare", "--mount", "--propagation", "private", "sh", "-euc", script, "sh", str(root)),
        *("/usr/bin/env", "--chdir=/tmp", *environment),
    ]
