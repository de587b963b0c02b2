"""The page about operations names tests as evidence, and pages have commands: what they name has to
be there."""

from __future__ import annotations

import re
from pathlib import Path

from diptych_operator.api.names import HTTP_PORT

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/operations.md").read_text()


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`((?:tests|e2e)/[\w/]+\.py)::(test_\w+)`", PAGE)
    assert len(named) >= 20
    for file, name in named:
        text = (ROOT / file).read_text()
        assert re.search(rf"^(async )?def {name}\(", text, re.M), f"{file}::{name}"


def test_each_of_the_ten_needs_has_a_test() -> None:
    rows = PAGE.partition("## Ten needs")[2].strip().splitlines()
    needs = [row for row in rows if row.startswith("| ") and "need | shown by" not in row]
    assert len(needs) == 10
    assert all("::test_" in row for row in needs)


def test_commands_of_pages_name_what_they_find_there() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    forwarded = re.findall(r"port-forward (?:svc|service)/\S+ (?:\d+:)?(\d+)", text)
    assert {*forwarded} == {str(HTTP_PORT)}
    of_operator = re.findall(r"kubectl [^`\n]*diptych-operator", text)
    assert of_operator
    assert all(" -n diptych-system " in command for command in of_operator)
    ((made, served),) = re.findall(
        r"create namespace (\S+)\nhelm install [^`]*'namespaces=\{(\S+)\}'", text
    )
    assert made == served
