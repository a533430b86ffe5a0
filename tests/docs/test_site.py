"""Links of the pages work on a git host; `make docs` builds the site strictly."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from commands import ROOT


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
