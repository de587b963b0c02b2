"""The files of the page and their headers: what a browser gets, and what it may do with it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from diptych_router.telling.page.assets import FOLDER, TYPES, Assets, content_policy


def client(assets: Assets) -> httpx.AsyncClient:
    app = Starlette(routes=[Route(path, assets.answer) for path in assets.by_path])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.fixture
def assets() -> Assets:
    return Assets()


async def test_every_file_has_its_type_and_the_same_strict_headers(assets: Assets) -> None:
    async with client(assets) as http:
        for path in assets.by_path:
            answer = await http.get(path)
            assert answer.status_code == 200
            suffix = ".html" if path == "/" else f".{path.rpartition('.')[2]}"
            assert answer.headers["content-type"] == TYPES[suffix]
            assert answer.headers["content-security-policy"] == content_policy()
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"


def test_the_policy_allows_nothing_inline_and_no_other_server() -> None:
    policy = dict(part.split(" ", 1) for part in content_policy().split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "unsafe" not in content_policy("http://127.0.0.1:9")


def test_one_further_server_may_be_called_where_there_is_one() -> None:
    assert "connect-src 'self' http://127.0.0.1:9;" in content_policy("http://127.0.0.1:9")


async def test_a_browser_that_has_a_file_is_sent_nothing(assets: Assets) -> None:
    async with client(assets) as http:
        first = await http.get("/ui/page.js")
        again = await http.get("/ui/page.js", headers={"if-none-match": first.headers["etag"]})
        other = await http.get("/ui/page.js", headers={"if-none-match": '"another"'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"] == content_policy()
    assert other.content == first.content


LOADS = r"""(?:src|href)="([^"]+)"|(?:from |import\()"([^"]+)"|url\(([^)]+)\)|URL\("([^"]+)\""""
VENDOR = FOLDER / "vendor"


def test_the_files_load_each_other_and_nothing_else(assets: Assets) -> None:
    for file in filter(Path.is_file, FOLDER.iterdir()):
        for found in re.findall(LOADS, file.read_text()):
            (target,) = filter(None, found)
            path = urljoin("/" if file.suffix == ".html" else "/ui/", target)
            assert path in assets.by_path, f"{file.name} loads {target}"


@pytest.mark.parametrize("inline", [r"<script(?![^>]*\bsrc=)", r"<style", r'\son\w+="', r'style="'])
def test_the_page_has_no_script_and_no_style_in_it(inline: str) -> None:
    assert not re.search(inline, (FOLDER / "index.html").read_text())


def test_text_is_never_taken_for_html() -> None:
    words = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(")
    found: list[Any] = [
        (file.name, word) for file in FOLDER.glob("*.js") for word in words
        if word in file.read_text()
    ]  # fmt: skip
    assert found == []


def test_what_others_wrote_is_unchanged_and_licensed() -> None:
    """Each file is one of a package whose version and licence are told beside it."""
    packages = json.loads((VENDOR / "versions.json").read_text())
    told = {
        name: file["sha256"] for package in packages.values()
        for name, file in package["files"].items()
    }  # fmt: skip
    files = {
        path.relative_to(VENDOR).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in VENDOR.rglob("*.js")
    }
    assert files == told
    notice = (VENDOR / "NOTICE.txt").read_text()
    for name, package in packages.items():
        assert f"======== {name}\n" in notice
        assert package["version"]
        assert package["license"] in {"MIT", "BSD-3-Clause"}


def test_every_language_has_its_file(assets: Assets) -> None:
    source = (FOLDER / "code.js").read_text()
    (listed,) = re.findall(r"Object.entries\(\{\n(.*?)\}\)", source, re.DOTALL)
    names = set(re.findall(r"^  (\w+):", listed, re.MULTILINE))
    assert names == {path.name.split(".")[0] for path in (VENDOR / "languages").iterdir()}
    assert all(f"/ui/vendor/languages/{name}.min.js" in assets.by_path for name in names)
