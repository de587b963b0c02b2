"""A hook of mkdocs: pages may link to any file of the repository, and every such link is checked.

README.md, CONTRIBUTING.md and SECURITY.md become pages of the site, and so does the page of a
router with a recorded run. A link from a page to another
file (`../tests/...`) becomes a link to `$DOCS_SOURCE_URL/...`, or plain text where that is not set.
Links to files that do not exist, and paths in code font that begin with a folder of the repository
and lead nowhere, are warnings, which `strict` turns into errors.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.site_links")

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "router" / "diptych_router" / "telling" / "page" / "static"
LIVE: Final = "live/index.html"
"""The page of a router as a page of the site, with a recorded run. Only the site has it."""
PAGES_OF_THE_ROOT: Final = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
FOLDERS: Final = frozenset(path.name for path in ROOT.iterdir() if path.is_dir())
LINK: Final = re.compile(r"`[^`\n]*`|\[([^\]\n]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
"""A link, or a span of code, in which nothing is one."""
CODE_PATH: Final = re.compile(r"`([A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)+/?)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand in the repository's root."""
    for name in PAGES_OF_THE_ROOT:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    for file in PAGE.rglob("*.*"):
        path = f"live/ui/{file.relative_to(PAGE)}"
        files.append(File.generated(config, path, abs_src_path=str(file)))
    files.append(File.generated(config, LIVE, content=recorded_page()))
    for picture in (ROOT / "benchmarks" / "results").glob("*.svg"):
        files.append(File.generated(config, picture.name, abs_src_path=str(picture)))
    return files


def recorded_page() -> str:
    """The page of a router, which plays a recording here, where no service is."""
    index = (PAGE / "index.html").read_text()
    head, title, rest = index.partition("  <title>")
    return f'{head}  <meta name="diptych-recording" content="../casts/page.json">\n{title}{rest}'


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Resolve the page's links as they are meant in the repository."""
    name = page.file.src_uri
    # Where the page stands in the repository.
    home = "." if name in PAGES_OF_THE_ROOT else posixpath.join("docs", posixpath.dirname(name))
    for path in CODE_PATH.findall(markdown):
        if path.split("/")[0] in FOLDERS and not (ROOT / path).exists():
            log.warning("%s names %s, which does not exist", name, path)

    def resolved(link: re.Match[str]) -> str:
        if link[2] is None:
            return link[0]
        text, target, anchor = link[1], link[2], link[3] or ""
        if target == LIVE:
            return f"[{text}]({posixpath.relpath(LIVE, posixpath.dirname(name))})"
        path = posixpath.normpath(posixpath.join(home, target))
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which does not exist", name, target)
            return link[0]
        own_folder = posixpath.dirname(name) or "."
        page_path = path.removeprefix("docs/") if path not in PAGES_OF_THE_ROOT else path
        if path.endswith(".md") and (path.startswith("docs/") or path in PAGES_OF_THE_ROOT):
            return f"[{text}]({posixpath.relpath(page_path, own_folder)}{anchor})"
        if path.endswith((".png", ".svg")):
            picture = page_path if path.startswith("docs/") else posixpath.basename(path)
            return f"[{text}]({posixpath.relpath(picture, own_folder)})"
        source = os.environ.get("DOCS_SOURCE_URL")
        return f"[{text}]({source}/{path}{anchor})" if source else text

    return LINK.sub(resolved, markdown)
