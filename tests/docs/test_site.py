"""The documentation site builds strictly, fetches nothing from elsewhere, and leaves no module out."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import quote, unquote

import pytest
import yaml
from browser import chromium
from commands import ROOT

from rlt_lightning import __version__

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


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Address of a server that has the site."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_search_finds_the_right_page_first(address: str) -> None:
    right = {
        "demo": "index",
        "install": "index",
        "own data": "new_task",
        "colab": "python",
        "out of memory": "troubleshooting",
        "vllm": "rollouts",
    }
    found = {}
    with chromium() as browser:
        page = browser.new_page()
        for words in right:
            page.goto(f"{address}/index.html?q={quote(words)}")
            first = page.wait_for_selector(".md-search-result__item > a", state="attached")
            found[words] = Path(first.get_attribute("href").partition("?")[0]).stem
    assert found == right


def test_the_reference_has_every_folder_and_root_module() -> None:
    paths = [path for path in (ROOT / "rlt_lightning").iterdir() if not path.name.startswith("__")]
    names = {path.stem for path in paths if path.is_dir() or path.suffix == ".py"}
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    assert set(re.findall(r"^::: rlt_lightning\.(\w+)$", pages, re.MULTILINE)) == names


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


def test_the_citation_is_complete() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    paper = citation["preferred-citation"]
    for entry, kinds in ((citation, {"software"}), (paper, {"article", "generic", "report"})):
        assert entry["type"] in kinds
        assert isinstance(entry["title"], str)
        assert all(author.keys() & {"name", "family-names"} for author in entry["authors"])
    assert isinstance(citation["message"], str)
    assert (citation["license"], citation["version"]) == ("Apache-2.0", __version__)
    assert [author["family-names"] for author in paper["authors"]] == ["Cetin", "Zhao", "Tang"]
    assert {"type": "other", "value": "arXiv:2506.08388"} in paper["identifiers"]


def test_the_licence_is_the_whole_text() -> None:
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # of apache.org
