"""Write one version and one registry wherever a release needs them: `python3 charts/stamp.py`.

    python3 charts/stamp.py                              pyproject's version, the registry as it is
    python3 charts/stamp.py --registry ghcr.io/somebody  the registry of a fork

The version is that of pyproject.toml. It goes into the chart, the CRDs, the images' labels and the
examples that name images; images are tagged with it by who builds them. Needs nothing but Python,
so that a release can call it first.
"""

# ruff: noqa: INP001 (a script; charts/ is no package)

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHART = Path("charts/diptych")
OPERATOR_IMAGES = Path("operator/diptych_operator/api/images.py")
DOCKERFILES = ("engine", "engine.cuda", "operator", "router", "vllm")
CRDS = ("crds", "charts/diptych/files/crds")
EXAMPLES = {  # the images that they name
    "full": ("diptych-engine", "diptych-router"),
    "llama-gpu": ("diptych-engine-cuda",),
}


def version() -> str:
    """The one place where the version is written by hand."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def registry() -> str:
    """As the chart has it now."""
    (found,) = re.findall(r"^  registry: (\S+)$", (ROOT / CHART / "values.yaml").read_text(), re.M)
    return str(found)


def stamps(version: str, registry: str) -> Iterator[tuple[Path, str, str]]:
    """File, pattern of the one line that is to be replaced, and that line."""
    yield CHART / "Chart.yaml", r"^version: .*$", f"version: {version}"
    yield CHART / "Chart.yaml", r"^appVersion: .*$", f"appVersion: {version}"
    yield CHART / "values.yaml", r"^  registry: .*$", f"  registry: {registry}"
    yield OPERATOR_IMAGES, r'^REGISTRY = ".*"$', f'REGISTRY = "{registry}"'
    for name in DOCKERFILES:
        dockerfile = Path("docker") / f"{name}.Dockerfile"
        yield dockerfile, r"^ARG VERSION=.*$", f"ARG VERSION={version}"
    for folder in CRDS:
        for crd in sorted((ROOT / folder).glob("*.yaml")):
            line = f"  annotations: {{diptych.dev/version: {version}}}"
            yield crd.relative_to(ROOT), r"^  annotations: \{diptych.dev/version: .*\}$", line
    for name, images in EXAMPLES.items():
        for image in images:
            named = f"    image: {registry}/{image}:{version}  #"
            yield Path(f"examples/{name}.yaml"), rf"^    image: \S+/{image}:\S+  #", named


def stamped(version: str, registry: str) -> dict[Path, str]:
    """The whole text of each file, as it should be. Raises `ValueError` where a line is missing."""
    texts: dict[Path, str] = {}
    for path, pattern, line in stamps(version, registry):
        before = texts.get(path) or (ROOT / path).read_text()
        # A function, because a backslash in a plain replacement would mean something.
        texts[path], count = re.subn(pattern, lambda _, line=line: line, before, flags=re.M)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{path} has {count} lines like {pattern!r}; it must have one")
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--registry", default=registry(), help="registry and owner; %(default)s")
    arguments = parser.parse_args()
    # Registries know lower case only, and owners of repositories need not keep to it.
    for path, text in stamped(version(), arguments.registry.lower().rstrip("/")).items():
        if (ROOT / path).read_text() != text:
            (ROOT / path).write_text(text)
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
