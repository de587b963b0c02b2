"""Write one version, registry and home wherever a release needs them: `python3 charts/stamp.py`.

    python3 charts/stamp.py                              pyproject's version, the registry as it is
    python3 charts/stamp.py --registry ghcr.io/somebody --home https://github.com/somebody/diptych
                                                         those of a fork

The version is that of pyproject.toml. It goes into the chart, the CRDs, the images' labels and the
examples that name images; images are tagged with it by who builds them. The home, where the
repository is to be seen, goes into the chart and its alerts. Needs nothing but Python, so that a
release can call it first.
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


def home() -> str:
    """As the chart has it now."""
    (found,) = re.findall(r"^home: (\S+)$", (ROOT / CHART / "Chart.yaml").read_text(), re.M)
    return str(found)


def stamps(version: str, registry: str, home: str) -> Iterator[tuple[Path, str, str]]:
    """File, pattern of the lines that are to be replaced, and such a line."""
    yield CHART / "Chart.yaml", r"^home: .*$", f"home: {home}"
    yield CHART / "Chart.yaml", r"^sources: .*$", f"sources: [{home}]"
    icon = "raw/main/docs/images/icon.svg"
    yield CHART / "Chart.yaml", rf"^icon: .*/{icon}$", f"icon: {home}/{icon}"
    yield CHART / "Chart.yaml", r"maintainers, url: .*\}$", f"maintainers, url: {home}}}"
    page = "blob/main/docs/runbook.md"
    yield CHART / "files" / "alerts.yaml", rf"runbook_url: .*/{page}", f"runbook_url: {home}/{page}"
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


def stamped(version: str, registry: str, home: str) -> dict[Path, str]:
    """The whole text of each file, as it should be. Raises `ValueError` where a line is missing."""
    texts: dict[Path, str] = {}
    for path, pattern, line in stamps(version, registry, home):
        before = texts.get(path) or (ROOT / path).read_text()
        # A function, because a backslash in a plain replacement would mean something.
        texts[path], count = re.subn(pattern, lambda _, line=line: line, before, flags=re.M)  # type: ignore[misc]
        if not count:
            raise ValueError(f"{path} has no line like {pattern!r}")
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--registry", default=registry(), help="registry and owner; %(default)s")
    parser.add_argument("--home", default=home(), help="page of the repository; %(default)s")
    arguments = parser.parse_args()
    # Registries know lower case only, and owners of repositories need not keep to it.
    registry_name = arguments.registry.lower().rstrip("/")
    for path, text in stamped(version(), registry_name, arguments.home).items():
        if (ROOT / path).read_text() != text:
            (ROOT / path).write_text(text)
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
