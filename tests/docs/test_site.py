"""The documentation site builds strictly, fetches nothing from elsewhere, and leaves no module out."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from commands import ROOT

FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
FETCHED |= {"embed": "src", "object": "data", "link": "href"}
NOT_FETCHED = {"canonical", "next", "prev", "alternate", "author", "license"}  # links that only say something


class Fetches(HTMLParser):
    """Collects what a browser loads for a page without being asked."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in FETCHED and values.get("rel") not in NOT_FETCHED:
            self.addresses.append(values.get(FETCHED[tag], ""))
        self.addresses += re.findall(r"url\(['\"]?([^'\")]+)", values.get("style", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the extra docs: make docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    pages, styles = list(site.rglob("*.html")), list(site.rglob("*.css"))
    assert len(pages) > 20
    assert styles
    fetched = {}
    for page in pages:
        parser = Fetches()
        parser.feed(page.read_text())
        fetched[page] = parser.addresses
    for style in styles:
        fetched[style] = re.findall(r"(?:url\(|@import )['\"]?([^'\")]+)", style.read_text())
    assert any(fetched.values())
    for file, addresses in fetched.items():
        outside = [a for a in addresses if re.match(r"(\w+:)?//", a)]
        assert not outside, f"{file.relative_to(site)} fetches {outside}"
    # The theme's script loads a drawing library from a network only for such blocks.
    assert not any('class="mermaid"' in page.read_text() for page in pages)


def anchors(page: Path) -> set[str]:
    """The anchors that a git host makes of the headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "research").glob("*.md")],
    ids=lambda page: page.name,
)
def test_links_work_on_a_git_host(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = unquote(link).partition("#")
        if "://" not in path:
            target = page.parent / path if path else page
            assert target.exists(), f"{link} leads nowhere"
            assert not anchor or anchor in anchors(target), f"{link}: no such heading"
