"""How clients that Diptych is tried with are installed."""

from __future__ import annotations

from pathlib import Path

import install_clients
from cases import each

PYTHON = Path("/v/bin/python")


@each("name", install_clients.PACKAGES)
def test_a_client_has_one_version_and_no_cuda(name: str) -> None:
    *before, install = install_clients.commands(name, PYTHON, "https://cpu.example")
    assert install[0] == str(PYTHON)
    assert "==" in install[-1]
    needs_torch = name in install_clients.NEED_TORCH
    assert [command[-3:] for command in before] == (
        [["--index-url", "https://cpu.example", "torch"]] if needs_torch else []
    )
    assert install_clients.commands(name, PYTHON, "") == [install]


def test_the_page_names_the_versions_that_are_installed() -> None:
    page = (Path(install_clients.__file__).parent / "docs" / "clients.md").read_text()
    for packages in install_clients.PACKAGES.values():
        name, _, version = packages.split()[0].partition("==")
        assert f"| `{name}` {version} |" in page
