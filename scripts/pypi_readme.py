"""Build hook of hatchling: make the README's links and pictures absolute for PyPI.

A git host finds `docs/data.md` next to the README; PyPI has no such file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def absolute(markdown: str, repository: str) -> str:
    """Return Markdown whose relative links and pictures lead to a repository."""

    def link(match: re.Match[str]) -> str:
        mark, words, path = match.groups()
        return f"{mark}[{words}]({repository}/{'raw' if mark else 'blob'}/main/{path})"

    return LINK.sub(link, markdown)


class PyPIReadme(MetadataHookInterface):
    """Sets `readme` in the metadata of wheel and sdist."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the text; hatchling calls this once a build."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = metadata["urls"]["Repository"]
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, repository)}
