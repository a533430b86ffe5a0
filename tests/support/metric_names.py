"""List the names of a run's metrics."""

from __future__ import annotations

import re

from commands import ROOT

PAGE = (ROOT / "docs" / "metrics.md").read_text()


def names_of(*sections: str) -> set[str]:
    """Names in sections whose headings start with these words: first cells of tables, held-out metrics."""
    names: set[str] = set()
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        if section.startswith(sections):
            names |= set(re.findall(r"^\| `([\w/.]+)` \|", section, flags=re.MULTILINE))
            for sentence in re.findall(r"^On held-out problems: (.+?)\.", section, flags=re.MULTILINE):
                names |= set(re.findall(r"`([\w/]+)`", sentence))
    return names
