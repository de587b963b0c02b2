"""Take out of an image's packages what its pods never read: `python docker/slim.py FOLDER ...`

Each folder is one that Python finds packages in. What is taken out builds or tests other programs,
or serves what pods of ours do not do; tests/charts/test_built_images.py starts what is left.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

NEEDLESS = (
    # Installers, and programs whose first line names another machine's Python.
    "bin", "pip", "pip-*", "setuptools", "setuptools-*", "pkg_resources", "_distutils_hack",
    "distutils-precedence.pth",
    "**/tests", "torch/test", "torch/bin/test_*", "torch/bin/*Test", "torch/bin/protoc*",
    "torch/lib/*_test.so",
    "torch/_inductor",  # behind torch.compile, which engines do not call
    # For compilers, linkers and type checkers.
    "*/include", "**/*.a", "**/*.la", "**/*.pyx", "**/*.pxd", "**/*.pyi",
    "numpy/distutils", "numpy/f2py", "numpy/_core/_simd.*",
    "libucx/bin", "libucx/share", "libucx/lib/ucx/libucx_perftest*",
    # Typed classes, each imported when it is first named: the operator renders plain data. kopf
    # names three.
    "kubernetes/aio/client/api/*_api.py", "kubernetes/aio/client/models/[!_]*.py",
    "kubernetes/client/api/*_api.py", "kubernetes/client/models/[!_]*.py",
)  # fmt: skip
NEEDED = tuple(
    f"kubernetes/client/models/v1_{name}.py"
    for name in ("managed_fields_entry", "object_meta", "owner_reference")
)
COPIED = "libucx/lib/**/*.so*"
"""Wheels hold no links, so a library with three names is there three times."""
LIBRARIES = "**/*.so"
"""Some are to a tenth and more names for debuggers."""
AS_THEY_ARE = re.compile(r"^libucx/|^[^/]+\.libs/")
"""Libraries that were changed after they had been linked. UCX's would not load without names."""


def slim(site: Path) -> None:
    for pattern in NEEDLESS:
        for path in sorted(site.glob(pattern)):
            if str(path.relative_to(site)) not in NEEDED:
                _remove(path)
    _link_copies(path for path in sorted(site.glob(COPIED)) if not path.is_symlink())
    files = [
        str(path)
        for path in site.glob(LIBRARIES)
        if not path.is_symlink() and not AS_THEY_ARE.match(str(path.relative_to(site)))
    ]
    if files and shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", *files], check=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
        return
    path.unlink(missing_ok=True)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def _link_copies(files: Iterable[Path]) -> None:
    first: dict[tuple[Path, str], Path] = {}
    for path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        kept = first.setdefault((path.parent, content), path)
        if kept is not path:
            path.unlink()
            path.symlink_to(kept.name)


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        slim(Path(folder))
